"""What a text says about its next token: how it is to be sampled, and what a token leads to. No model, no library."""

from __future__ import annotations

import math
from typing import Any

import pytest
from neuronpipe.protocol.messages.client import Finished, Likely, Refused, Token
from neuronpipe.protocol.messages.request import Bias, Generate
from neuronpipe.services.coordinator.scheduling.admission import Limits
from neuronpipe.services.coordinator.scheduling.events import Logprobs, TokensSampled
from neuronpipe.services.coordinator.scheduling.sequences import Generation
from neuronpipe.services.coordinator.scheduling.step_results import Results, sample_row, with_logprobs
from neuronpipe.services.coordinator.text.constrained_answers import Failure
from neuronpipe.services.coordinator.text.tokenizer import TextStream

END = frozenset({0, 9})


class Countdown:
    """An answer that is complete with its third token, and cannot go on with token 77."""

    allowed = b"\x0f"
    pending = False
    failure: Failure | None = None

    def __init__(self) -> None:
        self.left = 3
        self.closed = False

    @property
    def complete(self) -> bool:
        return self.left == 0

    def take(self, token: int) -> None:
        self.pending = True
        if token == 77:
            self.failure = Failure("bad_request", "grammar: too large")
        self.left -= 1

    def close(self) -> None:
        self.closed = True


class Pieces:
    """A tokenizer whose tokens are letters."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(97 + token) for token in tokens)

    def piece(self, token: int) -> bytes:
        return bytes([97 + token])


def text_of(tokens: list[int], answer: Any = None, **options: Any) -> Generation:
    ask = Generate(request="r", tokens=(1, 2), **options)
    return Generation(
        client=b"c",
        request="r",
        slot=0,
        arrived_at=0.0,
        tokens=tokens,
        ask=ask,
        answer=answer,
        stream=TextStream(Pieces(), tokens, ()),  # type: ignore[arg-type]
        prompt_tokens=2,
        max_total_tokens=9,
    )


def test_plain_sampling_carries_nothing_that_costs() -> None:
    row = sample_row(3, text_of([1, 2, 5]), END)
    assert (row.row, row.counter, row.text, row.biases, row.allowed) == (3, 3, (), (), None)


@pytest.mark.parametrize("option", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_a_penalty_is_told_the_text_and_where_the_answer_begins(option: str) -> None:
    row = sample_row(0, text_of([1, 2, 5], **{option: 1.5}), END)
    assert (row.text, row.prompt_tokens) == ((1, 2, 5), 2)


def test_a_bias_of_minus_100_bans_and_ignored_end_tokens_are_banned_whatever_their_bias() -> None:
    biases = (Bias(token=7, bias=-100), Bias(token=4, bias=-99.5), Bias(token=0, bias=100))
    row = sample_row(0, text_of([1, 2], logit_bias=biases), END)
    assert row.biases == ((0, 100), (4, -99.5), (7, -math.inf))
    row = sample_row(0, text_of([1, 2], logit_bias=biases, ignore_end=True), END)
    assert row.biases == ((0, -math.inf), (4, -99.5), (7, -math.inf), (9, -math.inf))


def results() -> Results:
    limits = Limits(
        mode="exact",
        sequences=1,
        context_tokens=16,
        prefill_chunk_tokens=4,
        logit_rows=1,
        vocabulary=100,
        end_tokens=END,
        plan_id="p",
    )
    return Results(limits, Pieces())  # type: ignore[arg-type]


def test_a_token_is_told_when_it_is_known_what_it_leads_to_and_the_last_one_ends_the_text() -> None:
    answer, told = Countdown(), results()
    text = text_of([1, 2], answer)
    assert sample_row(0, text, END).allowed == b"\x0f"
    for token in (5, 6, 7):
        assert told.sampled([text], TokensSampled((token,), {}), 1.0) == []
        text.computed_tokens = len(text.tokens)
        assert text.next_token == token, "the next step may compute it before it is told"
        assert not text.is_blocked
        assert told.process_answers([text]) == []
        answer.pending = False
        outcomes = [message for _, message in told.process_answers([text])]
        assert isinstance(outcomes[0], Token)
        assert (outcomes[0].token, outcomes[0].index) == (token, token - 5)
    assert isinstance(outcomes[1], Finished)
    assert (outcomes[1].reason, outcomes[1].text) == ("end", "fgh")


def test_no_step_computes_a_token_that_ends_the_text_whatever_its_grammar_says() -> None:
    text = text_of([1, 2, 3, 4, 5, 6, 7, 8], Countdown())
    assert results().sampled([text], TokensSampled((5,), {}), 1.0) == []
    assert text.is_blocked


@pytest.mark.parametrize(("token", "reason"), [(9, "end"), (77, "end")])
def test_a_token_that_ends_the_text_is_not_shown_to_what_it_follows(token: int, reason: str) -> None:
    answer = Countdown()
    text = text_of([1, 2], answer, stop_tokens=(77,))
    _, (_, finished) = results().sampled([text], TokensSampled((token,), {}), 1.0)
    assert isinstance(finished, Finished)
    assert finished.reason == reason
    assert answer.left == 3


def test_a_text_with_tokens_that_stop_it_does_not_go_on_unseen() -> None:
    assert text_of([1, 2]).goes_on
    assert not text_of([1, 2], stop_tokens=(77,)).goes_on
    assert not text_of([1, 2], Countdown()).goes_on


@pytest.mark.parametrize(
    ("token", "code", "reason"),
    [
        (TokensSampled.ALL_BANNED, "bad_request", "leave no token"),
        (TokensSampled.NOT_A_NUMBER, "failed", "no number"),
        (77, "bad_request", "too large"),
    ],
)
def test_a_text_that_cannot_go_on_says_whose_fault_it_is(token: int, code: str, reason: str) -> None:
    answer, told = Countdown(), results()
    text = text_of([1, 2], answer)
    outcomes = told.sampled([text], TokensSampled((token,), {}), 1.0)
    answer.pending = False
    ((_, refused),) = outcomes or told.process_answers([text])
    assert isinstance(refused, Refused)
    assert refused.code == code
    assert reason in refused.message


def test_a_token_with_logprobs_carries_its_bytes_and_those_of_the_likeliest() -> None:
    said = Token(request="r", index=0, token=65, text="A", ms=1.0)
    said = with_logprobs(said, Logprobs(-2.0, ((66, -0.5), (65, -2.0))), lambda token: bytes([token]))
    assert (said.logprob, said.piece, said.text) == (-2.0, b"A", "A")
    assert said.top == (Likely(token=66, piece=b"B", logprob=-0.5), Likely(token=65, piece=b"A", logprob=-2.0))
