"""What a step's logits make of the sequences in it: how tokens are to be sampled, and what a token leads to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Set

from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.client import FinishReason, Likely, Rated, RefusalCode, Scored, Token
from neuronpipe.protocol.messages.outcome import Rating
from neuronpipe.protocol.messages.request import MAX_BIAS
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.coordinator.scheduling.admission import Limits
from neuronpipe.services.coordinator.scheduling.events import (
    Logprobs,
    SampleRow,
    SampleTokens,
    ScoreTokens,
    TokensSampled,
    TokensScored,
)
from neuronpipe.services.coordinator.scheduling.sequences import Generation, Sampled, Scoring, Sequence
from neuronpipe.services.coordinator.text.tokenizer import Tokenizer

DAMAGED = "the model's output is no number; the package is damaged, convert the model again"

Outcome = tuple[Sequence, Message]
"""What a sequence's client is to be told."""


class SamplingFailed(Exception):
    """A request that cannot go on: no token may follow its text."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code: RefusalCode = code


class Results:
    """Takes sequences on by what a step gave them, and says what their clients are told."""

    def __init__(self, limits: Limits, tokenizer: Tokenizer) -> None:
        self._limits = limits
        self._tokenizer = tokenizer

    def wanted(
        self, message: Step | Prefill, rows: Mapping[int, Sequence], ratings: tuple[Rating, ...] = ()
    ) -> SampleTokens | ScoreTokens:
        """What to read from the logits of a step that is done; its sequences have advanced. rows: the sequences by
        their rows of logits. ratings: what its prefill worker has read of them."""
        first = rows.get(0)
        if isinstance(first, Scoring):
            computed, count = first.computed_tokens, len(message.tokens)
            without_logits = isinstance(message, Prefill) and bool(message.targets) and not ratings
            targets = () if without_logits else tuple(first.tokens[computed - count + 1 : computed + 1])
            return ScoreTokens(targets, first.likely, ratings)
        without_logits = isinstance(message, Prefill) and message.logits == "none"
        texts = [] if without_logits else [(row, one) for row, one in rows.items() if isinstance(one, Generation)]
        return SampleTokens(tuple(sample_row(row, text, self._limits.end_tokens) for row, text in texts))

    def sampled(self, sequences: Iterable[Sequence], event: TokensSampled, now: float) -> list[Outcome]:
        """A token for each sequence; for none after a chunk of a prompt that is not its last."""
        outcomes: list[Outcome] = []
        for number, (text, token) in enumerate(zip(sequences, event.tokens, strict=False)):
            assert isinstance(text, Generation)
            sampled = Sampled(token, now, event.logprobs.get(number))
            try:
                if is_followed(text, token, self._limits.end_tokens):
                    assert text.answer is not None
                    text.answer.take(token)
                    text.sampled = sampled
                    outcomes += self.known([text])
                else:
                    outcomes += self._told(text, sampled, complete=False)
            except SamplingFailed as failure:
                outcomes.append((text, text.refused(failure.code, str(failure))))
        return outcomes

    def known(self, sequences: Iterable[Sequence]) -> list[Outcome]:
        """The tokens of which it is known now what they lead to."""
        outcomes: list[Outcome] = []
        for text in sequences:
            if not isinstance(text, Generation) or text.sampled is None:
                continue
            assert text.answer is not None
            if text.answer.pending:
                continue
            sampled, text.sampled, text.missed_step = text.sampled, None, False
            if (failure := text.answer.failure) is not None:
                outcomes.append((text, text.refused(failure.code, failure.message)))
            else:
                outcomes += self._told(text, sampled, complete=text.answer.complete)
        return outcomes

    def _told(self, text: Generation, sampled: Sampled, *, complete: bool) -> list[Outcome]:
        """What the client is told of a token. complete: nothing can follow."""
        message, reason = self._add(text, sampled.token, complete, sampled.now)
        if sampled.logprobs is not None:
            message = with_logprobs(message, sampled.logprobs, self._tokenizer.piece)
        ended = [] if reason is None else [(text, text.finished(reason, self._limits))]
        return [(text, message), *ended]

    def scored(self, sequence: Sequence, event: TokensScored, now: float) -> list[Outcome]:
        """Likelihoods of the tokens of one step."""
        assert isinstance(sequence, Scoring)
        last = sequence.computed_tokens >= len(sequence.tokens)
        position, nll = sequence.told_tokens, tuple(-one.logprob for one in event.ratings)
        rows = len(nll) + last  # the text's last token has logits and no target
        if position + rows != sequence.computed_tokens:
            return [
                (sequence, sequence.refused("failed", "the prefill worker has not rated the tokens that it was given"))
            ]
        if any(map(math.isnan, nll)):
            return [(sequence, sequence.refused("failed", DAMAGED))]
        sequence.total_nll += sum(nll)
        sequence.told_tokens = sequence.computed_tokens
        sequence.client_reads, sequence.reads_since = sequence.ask.logits, now
        said = Scored(
            request=sequence.request,
            position=position,
            row=0,
            rows=rows,
            nll=nll,
            rated=self._rated(sequence, position, event.ratings),
        )
        outcomes: list[Outcome] = [(sequence, said)]
        if last and not sequence.client_reads:
            outcomes.append((sequence, sequence.finished(now)))
        return outcomes

    def _rated(self, text: Scoring, position: int, ratings: tuple[Logprobs, ...]) -> tuple[Rated, ...]:
        """Those after this position, where the client wants to see them; and before them the first of the text, which
        nothing predicts."""
        if text.ask.logprobs is None:
            return ()
        piece = self._tokenizer.piece
        rated = [] if position else [Rated(token=text.tokens[0], piece=piece(text.tokens[0]))]
        for token, one in zip(text.tokens[position + 1 :], ratings, strict=False):
            rated.append(Rated(token=token, piece=piece(token), logprob=one.logprob, top=_top(one, piece)))
        return tuple(rated)

    def _add(self, text: Generation, token: int, complete: bool, now: float) -> tuple[Token, FinishReason | None]:
        """Add a token to a text; returns what its client is told, and why the text ends with it."""
        text.token_times.append(now)
        text.tokens.append(token)
        ended = token in self._limits.end_tokens or token in text.ask.stop_tokens
        shown = "" if ended else text.stream.push(token)
        reason: FinishReason | None = "end" if ended else _reason_to_end(text, complete)
        if reason is not None:
            shown += text.stream.finish()
        ms = 1000 * (now - (text.token_times[-2] if len(text.token_times) > 1 else text.arrived_at))
        index = text.generated_tokens - 1
        return Token(request=text.request, index=index, token=token, text=shown, ms=round(ms, 3)), reason


def _reason_to_end(text: Generation, complete: bool) -> FinishReason | None:
    """Why a text ends with its last token, which is no end token. complete: its grammar lets nothing follow."""
    if text.stream.stopped:
        return "stop"
    if complete:
        return "end"
    if len(text.tokens) >= text.max_total_tokens:
        return "length" if text.generated_tokens >= text.ask.max_tokens else "context"
    return None


# ---- one token -----------------------------------------------------------------------------------------------
def sample_row(row: int, text: Generation, end_tokens: Set[int]) -> SampleRow:
    """How the next token of a text is to be sampled from this row; the same each time, until it is known."""
    ask, out = text.ask, SampleRow(row, text.ask, len(text.tokens))
    if text.is_read:
        out = dataclasses.replace(out, text=tuple(text.tokens), prompt_tokens=text.prompt_tokens)
    if ask.logit_bias or ask.ignore_end:
        biases = {entry.token: entry.bias if entry.bias > -MAX_BIAS else -math.inf for entry in ask.logit_bias}
        if ask.ignore_end:
            biases |= dict.fromkeys(end_tokens, -math.inf)
        out = dataclasses.replace(out, biases=tuple(sorted(biases.items())))
    return out if text.answer is None else dataclasses.replace(out, allowed=text.answer.allowed)


def is_followed(text: Generation, token: int, end_tokens: Set[int]) -> bool:
    """Whether what the answer must follow decides what this token leads to. Raises SamplingFailed."""
    if token == TokensSampled.ALL_BANNED:
        raise SamplingFailed("bad_request", "logit_bias and ignore_end leave no token that may come next")
    if token < 0:
        raise SamplingFailed("failed", DAMAGED)
    return text.answer is not None and token not in end_tokens and token not in text.ask.stop_tokens


def with_logprobs(said: Token, logprobs: Logprobs, piece: Callable[[int], bytes]) -> Token:
    """The message with its logarithms of probabilities. piece: the bytes of a token."""
    return dataclasses.replace(said, logprob=logprobs.logprob, piece=piece(said.token), top=_top(logprobs, piece))


def _top(logprobs: Logprobs, piece: Callable[[int], bytes]) -> tuple[Likely, ...]:
    return tuple(Likely(token=token, piece=piece(token), logprob=logprob) for token, logprob in logprobs.top)
