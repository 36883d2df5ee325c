"""What a text says about its next token, before it is drawn and after."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Set

from neuronpipe.protocol.messages.client import Likely, RefusalCode, Token
from neuronpipe.services.coordinator.admission import MAX_BIAS
from neuronpipe.services.coordinator.events import Draw, Rating, Sampled
from neuronpipe.services.coordinator.grammar import GrammarError
from neuronpipe.services.coordinator.sequences import Generation, Work


class Undrawable(Exception):
    """A request that cannot go on: no token may follow its text."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code: RefusalCode = code


def draw_of(row: int, work: Work, end_tokens: Set[int]) -> Draw:
    """How the next token of a text is to be drawn from this row; the same each time, until it is known."""
    assert isinstance(work, Generation)
    ask, draw = work.ask, Draw(row, work.ask, len(work.tokens))
    if ask.repetition_penalty != 1 or ask.frequency_penalty or ask.presence_penalty:
        draw = dataclasses.replace(draw, text=tuple(work.tokens), prompt_tokens=work.prompt_tokens)
    if ask.logit_bias or ask.ignore_end:
        biases = {entry.token: entry.bias if entry.bias > -MAX_BIAS else -math.inf for entry in ask.logit_bias}
        if ask.ignore_end:
            biases |= dict.fromkeys(end_tokens, -math.inf)
        draw = dataclasses.replace(draw, biases=tuple(sorted(biases.items())))
    return draw if work.grammar is None else dataclasses.replace(draw, allowed=work.grammar.allowed)


def follow(work: Generation, token: int, end_tokens: Set[int]) -> bool:
    """Whether the text is complete with this token, because its grammar lets nothing follow. Raises Undrawable."""
    if token == Sampled.BANNED:
        raise Undrawable("bad_request", "logit_bias and ignore_end leave no token that may come next")
    if token < 0:
        raise Undrawable("failed", "the model's output is no number; the package is damaged, convert the model again")
    if work.grammar is None or token in end_tokens:
        return False
    try:
        return work.grammar.take(token)
    except GrammarError as error:
        raise Undrawable("bad_request", f"grammar: {error}") from None


def rated(said: Token, rating: Rating, piece: Callable[[int], bytes]) -> Token:
    """The message with its logarithms of probabilities. piece: the bytes of a token."""
    top = tuple(Likely(token=token, piece=piece(token), logprob=logprob) for token, logprob in rating.top)
    return dataclasses.replace(said, logprob=rating.logprob, piece=piece(said.token), top=top)
