"""Scores of given texts: who rates their tokens, and what clients are told of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from neuronpipe.protocol.messages.client import Likely, Rated, Refused, Scored
from neuronpipe.protocol.messages.outcome import Rating
from neuronpipe.protocol.messages.request import Score
from neuronpipe.protocol.messages.worker import Prefill
from neuronpipe.services.coordinator.sampling import as_logprobs
from neuronpipe.services.coordinator.scheduling.events import Action, ScoreTokens, StepLeft, TokensScored
from neuronpipe.services.coordinator.scheduling.scheduler import Scheduler

from tests.unit.test_coordinator_core import Letters, make_scheduler, receive, sent, told


class Spelled(Letters):
    """Letters whose pieces are asked for."""

    def piece(self, token: int) -> bytes:
        return chr(token).encode()


TEXT = Score(request="s", text="abcdef", logprobs=1)


def scorer(**changes: int) -> Scheduler:
    return make_scheduler(Spelled(), **changes)


def rated(scheduler: Scheduler, prefill: Prefill, logprobs: Sequence[float]) -> list[Action]:
    """The prefill worker rates its targets like this, each with the letter z as the likeliest."""
    ratings = tuple(Rating(logprob=one, likely=(122,), logprobs=(-0.25,)) for one in logprobs)
    (ask,) = scheduler.handle(StepLeft(("prefill", 0), prefill.step, prefill.epoch, True, {}, ratings), 1.0)
    assert isinstance(ask, ScoreTokens)
    return scheduler.handle(TokensScored(as_logprobs(ask.ratings)), 1.0)


def test_a_prompt_is_scored_a_chunk_at_a_time_and_its_client_sees_every_token() -> None:
    scheduler = scorer()
    (first,) = sent(receive(scheduler, TEXT, 0.0))
    assert isinstance(first, Prefill)
    assert (first.tokens, first.logits) == (tuple(b"abcd"), "none")
    assert (first.targets, first.likely) == (tuple(b"bcde"), 1)
    actions = rated(scheduler, first, [-1.0, -2.0, -3.0, -4.0])
    (scored,) = told(actions)
    assert isinstance(scored, Scored)
    assert (scored.position, scored.rows, scored.nll) == (0, 4, (1.0, 2.0, 3.0, 4.0))
    likeliest = (Likely(token=122, piece=b"z", logprob=-0.25),)
    assert scored.rated[:2] == (
        Rated(token=ord("a"), piece=b"a"),
        Rated(token=ord("b"), piece=b"b", logprob=-1.0, top=likeliest),
    )
    (second,) = sent(actions)
    assert isinstance(second, Prefill)
    assert (second.tokens, second.targets) == (tuple(b"ef"), tuple(b"f"))
    last = told(rated(scheduler, second, [-5.0]))[0]
    assert isinstance(last, Scored)
    assert (last.position, last.rows) == (4, 2)
    assert [one.piece for one in last.rated] == [b"f"]


def test_a_client_that_reads_logits_gets_them() -> None:
    (first,) = sent(receive(scorer(), Score(request="s", text="abcdef", logits=True), 0.0))
    assert isinstance(first, Prefill)
    assert (first.logits, first.targets) == ("all", ())


@pytest.mark.parametrize("logprobs", [[], [-1.0, float("nan"), -1.0, -1.0]])
def test_a_score_without_numbers_is_refused_and_not_made_up(logprobs: list[float]) -> None:
    scheduler = scorer()
    (first,) = sent(receive(scheduler, TEXT, 0.0))
    assert isinstance(first, Prefill)
    (refused,) = told(rated(scheduler, first, logprobs))
    assert isinstance(refused, Refused)
    assert refused.code == "failed"


def test_more_likely_tokens_than_may_be_asked_for_are_refused() -> None:
    (refused,) = told(receive(scorer(), Score(request="s", tokens=(1, 2), logprobs=21), 0.0))
    assert isinstance(refused, Refused)
    assert refused.code == "bad_request"
