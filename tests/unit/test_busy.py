"""When a client that found the run busy may come again."""

from __future__ import annotations

import pytest
from neuronpipe.protocol.messages.client import Refused
from neuronpipe.protocol.messages.request import Generate, Score
from neuronpipe.services.coordinator.scheduling.sequences import (
    MAX_RETRY_S,
    MIN_RETRY_S,
    RECENT_TOKENS,
    Generation,
    Scoring,
    Sequence,
    retry_after_s,
)
from neuronpipe.services.coordinator.text.tokenizer import TextStream
from neuronpipe.services.gateway.http.api_errors import from_refusal

from tests.unit.test_coordinator_core import Letters


def text(remaining: int, times: list[float]) -> Generation:
    """A text of which so many tokens may still come, after those that came at these times."""
    tokens = [0] * (1 + len(times))
    return Generation(
        client=b"c",
        request="r",
        slot=0,
        arrived_at=0.0,
        tokens=tokens,
        ask=Generate(request="r", prompt="x"),
        answer=None,
        stream=TextStream(Letters(), tokens, ()),
        prompt_tokens=1,
        max_total_tokens=len(tokens) + remaining,
        token_times=times,
    )


def every(gap_s: float, count: int = 8) -> list[float]:
    return [gap_s * n for n in range(count)]


def test_there_is_room_when_the_first_text_must_have_ended() -> None:
    assert retry_after_s([text(80, every(0.125))]) == 10
    assert retry_after_s([text(100, every(0.125)), text(24, every(0.125)), text(90, every(0.125))]) == 3


def test_part_of_a_second_is_a_second() -> None:
    assert retry_after_s([text(17, every(0.125))]) == 3


def test_the_pace_is_that_of_the_last_tokens() -> None:
    slow_once = [0.0, *(1000 + gap for gap in every(0.125, RECENT_TOKENS))]
    assert retry_after_s([text(40, slow_once)]) == 5


@pytest.mark.parametrize(
    ("remaining", "gap_s", "expected"), [(1, 0.001, MIN_RETRY_S), (10_000, 1.0, MAX_RETRY_S), (0, 1.0, 1)]
)
def test_nobody_is_sent_away_for_less_than_a_second_or_for_long(remaining: int, gap_s: float, expected: int) -> None:
    assert retry_after_s([text(remaining, every(gap_s))]) == expected


def test_what_has_no_pace_yet_says_nothing() -> None:
    score = Scoring(client=b"c", request="s", slot=1, arrived_at=0.0, tokens=[1, 2], ask=Score(request="s", text="x"))
    sequences: list[Sequence] = [text(1000, []), text(1000, [1.0]), score]
    assert retry_after_s(sequences) == MIN_RETRY_S
    assert retry_after_s([*sequences, text(16, every(0.25))]) == 4


@pytest.mark.parametrize(("told_s", "header"), [(12, "12"), (0, "1")])
def test_over_http_it_is_the_time_of_retry_after(told_s: int, header: str) -> None:
    problem = from_refusal(Refused(request="r", code="busy", message="busy", retry_after_s=told_s))
    assert (problem.status, dict(problem.headers)) == (429, {"retry-after": header})
