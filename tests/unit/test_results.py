"""What a text says about its next token: how it is to be sampled, and what a token leads to. No model, no library."""

from __future__ import annotations

import math
from typing import Any

import pytest
from neuronpipe.protocol.messages.client import Likely, Token
from neuronpipe.protocol.messages.request import Bias, Generate
from neuronpipe.services.coordinator.constraints.grammar import GrammarError
from neuronpipe.services.coordinator.events import Logprobs, TokensSampled
from neuronpipe.services.coordinator.requests import Generation
from neuronpipe.services.coordinator.results import SamplingFailed, accept, sample_row, with_logprobs

END = frozenset({0, 9})


class Countdown:
    """A grammar that is complete with its third token, and too large with token 77."""

    allowed = b"\x0f"

    def __init__(self) -> None:
        self.left = 3

    def take(self, token: int) -> bool:
        if token == 77:
            raise GrammarError("too large")
        self.left -= 1
        return self.left == 0


def text_of(tokens: list[int], grammar: Any = None, **options: Any) -> Generation:
    ask = Generate(request="r", tokens=(1, 2), **options)
    return Generation(
        client=b"c",
        request="r",
        slot=0,
        arrived_at=0.0,
        tokens=tokens,
        ask=ask,
        grammar=grammar,
        stream=None,  # type: ignore[arg-type]  # no text is shown here
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


def test_a_text_is_complete_when_its_grammar_is_and_an_end_token_is_not_shown_to_it() -> None:
    text = text_of([1, 2], Countdown())
    assert sample_row(0, text, END).allowed == b"\x0f"
    assert [accept(text, token, END) for token in (5, 9, 6, 7)] == [False, False, False, True]
    assert not accept(text_of([1, 2]), 5, END)


def test_a_token_that_ends_the_text_is_not_shown_to_its_grammar_and_is_waited_for() -> None:
    text = text_of([1, 2], Countdown(), stop_tokens=(77,))
    assert not accept(text, 77, END)
    assert text_of([1, 2]).goes_on
    assert not text_of([1, 2], stop_tokens=(77,)).goes_on


@pytest.mark.parametrize(
    ("token", "code", "reason"),
    [
        (TokensSampled.ALL_BANNED, "bad_request", "leave no token"),
        (TokensSampled.NOT_A_NUMBER, "failed", "no number"),
        (77, "bad_request", "too large"),
    ],
)
def test_a_text_that_cannot_go_on_says_whose_fault_it_is(token: int, code: str, reason: str) -> None:
    with pytest.raises(SamplingFailed, match=reason) as caught:
        accept(text_of([1, 2], Countdown()), token, END)
    assert caught.value.code == code


def test_a_token_with_logprobs_carries_its_bytes_and_those_of_the_likeliest() -> None:
    said = Token(request="r", index=0, token=65, text="A", ms=1.0)
    said = with_logprobs(said, Logprobs(-2.0, ((66, -0.5), (65, -2.0))), lambda token: bytes([token]))
    assert (said.logprob, said.piece, said.text) == (-2.0, b"A", "A")
    assert said.top == (Likely(token=66, piece=b"B", logprob=-0.5), Likely(token=65, piece=b"A", logprob=-2.0))
