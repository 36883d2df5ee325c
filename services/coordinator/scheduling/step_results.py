"""The results of a step: how to sample its rows, and how tokens and ratings change its sequences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Set

from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.client import (
    Finished,
    FinishReason,
    Likely,
    Rated,
    RefusalCode,
    Refused,
    Scored,
    Token,
)
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
"""A message for the client of a sequence."""


class SamplingFailed(Exception):
    """No token can come next; the request is refused with `code` and the message."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code: RefusalCode = code


class Results:
    """Changes of sequences by the results of a step, and the messages for their clients."""

    def __init__(self, limits: Limits, tokenizer: Tokenizer) -> None:
        self._limits = limits
        self._tokenizer = tokenizer

    def reading_of(
        self,
        message: Step | Prefill,
        rows: Mapping[int, Sequence],
        ratings: tuple[Rating, ...] = (),
        drafted: tuple[int, ...] = (),
    ) -> SampleTokens | ScoreTokens:
        """Return what to read from the logits of a finished step, whose sequences have advanced.

        rows: sequence of each row of logits
        drafted: the drafted tokens; row n is sampled as if the first n of them were accepted
        ratings: the prefill worker's ratings, if it has rated the targets
        """
        first = rows.get(0)
        if isinstance(first, Scoring):
            computed, count = first.computed_tokens, len(message.tokens)
            without_logits = isinstance(message, Prefill) and bool(message.targets) and not ratings
            targets = () if without_logits else tuple(first.tokens[computed - count + 1 : computed + 1])
            return ScoreTokens(targets, first.likely, ratings)
        if isinstance(message, Prefill) and message.logits == "none":
            return SampleTokens(())
        generations = [(row, sequence) for row, sequence in rows.items() if isinstance(sequence, Generation)]
        end_tokens = self._limits.end_tokens
        return SampleTokens(
            tuple(sample_row(row, sequence, end_tokens, drafted[:row]) for row, sequence in generations)
        )

    def sampled(
        self,
        sequences: Iterable[Sequence],
        event: TokensSampled,
        now: float,
        counts: Callable[[int], bool] = lambda row: True,
    ) -> list[Outcome]:
        """Process the sampled token of each row; return the messages. There are no tokens after a chunk that is not the
        last of its prompt.

        sequences: the sequence of each row
        counts: returns True if the token of a row is the next one of its sequence, once those of rows before it were
            processed
        """
        outcomes: list[Outcome] = []
        for number, (sequence, token) in enumerate(zip(sequences, event.tokens, strict=False)):
            assert isinstance(sequence, Generation)
            has_ended = (
                bool(outcomes) and outcomes[-1][0] is sequence and isinstance(outcomes[-1][1], Finished | Refused)
            )
            if has_ended or not counts(number):
                break
            sampled = Sampled(token, now, event.logprobs.get(number))
            try:
                if is_followed(sequence, token, self._limits.end_tokens):
                    assert sequence.answer is not None
                    sequence.answer.take(token)
                    sequence.sampled = sampled
                    outcomes += self.process_answers([sequence])
                else:
                    outcomes += self._token_messages(sequence, sampled, complete=False)
            except SamplingFailed as failure:
                outcomes.append((sequence, sequence.refused(failure.code, str(failure))))
        return outcomes

    def process_answers(self, sequences: Iterable[Sequence]) -> list[Outcome]:
        """Process the sampled tokens whose answers have arrived; return the messages."""
        outcomes: list[Outcome] = []
        for sequence in sequences:
            if not isinstance(sequence, Generation) or sequence.sampled is None:
                continue
            assert sequence.answer is not None
            if sequence.answer.pending:
                continue
            sampled, sequence.sampled, sequence.missed_step = sequence.sampled, None, False
            if (failure := sequence.answer.failure) is not None:
                outcomes.append((sequence, sequence.refused(failure.code, failure.message)))
            else:
                outcomes += self._token_messages(sequence, sampled, complete=sequence.answer.complete)
        return outcomes

    def _token_messages(self, sequence: Generation, sampled: Sampled, *, complete: bool) -> list[Outcome]:
        """Add a token to its sequence and return the messages.

        complete: the grammar allows nothing after the token
        """
        message, reason = self._add(sequence, sampled.token, complete, sampled.now)
        if sampled.logprobs is not None:
            message = with_logprobs(message, sampled.logprobs, self._tokenizer.piece)
        ended = [] if reason is None else [(sequence, sequence.finished(reason, self._limits))]
        return [(sequence, message), *ended]

    def scored(self, sequence: Sequence, event: TokensScored, now: float) -> list[Outcome]:
        """Process the ratings of a score's step; return the messages."""
        assert isinstance(sequence, Scoring)
        last = sequence.computed_tokens >= len(sequence.tokens)
        position, nll = sequence.reported_tokens, tuple(-rating.logprob for rating in event.ratings)
        rows = len(nll) + last  # the last token has logits and no target
        if position + rows != sequence.computed_tokens:
            return [
                (sequence, sequence.refused("failed", "the prefill worker has not rated the tokens that it was given"))
            ]
        if any(map(math.isnan, nll)):
            return [(sequence, sequence.refused("failed", DAMAGED))]
        sequence.total_nll += sum(nll)
        sequence.reported_tokens = sequence.computed_tokens
        sequence.client_reads, sequence.reads_since = sequence.ask.logits, now
        message = Scored(
            request=sequence.request,
            position=position,
            row=0,
            rows=rows,
            nll=nll,
            rated=self._rated(sequence, position, event.ratings),
        )
        outcomes: list[Outcome] = [(sequence, message)]
        if last and not sequence.client_reads:
            outcomes.append((sequence, sequence.finished(now)))
        return outcomes

    def _rated(self, sequence: Scoring, position: int, ratings: tuple[Logprobs, ...]) -> tuple[Rated, ...]:
        """Return the ratings after this position if requested; at position 0 preceded by the first token, which
        nothing predicts."""
        if sequence.ask.logprobs is None:
            return ()
        piece = self._tokenizer.piece
        rated = [] if position else [Rated(token=sequence.tokens[0], piece=piece(sequence.tokens[0]))]
        for token, rating in zip(sequence.tokens[position + 1 :], ratings, strict=False):
            rated.append(Rated(token=token, piece=piece(token), logprob=rating.logprob, top=_top(rating, piece)))
        return tuple(rated)

    def _add(self, sequence: Generation, token: int, complete: bool, now: float) -> tuple[Token, FinishReason | None]:
        """Add a token to a sequence; return its message, and the reason if the sequence ends with it."""
        sequence.token_times.append(now)
        sequence.tokens.append(token)
        if sequence.drafter is not None:
            sequence.drafter.append(token)
        ended = token in self._limits.end_tokens or token in sequence.ask.stop_tokens
        visible_text = "" if ended else sequence.stream.push(token)
        reason: FinishReason | None = "end" if ended else _reason_to_end(sequence, complete)
        if reason is not None:
            visible_text += sequence.stream.finish()
        ms = 1000 * (now - (sequence.token_times[-2] if len(sequence.token_times) > 1 else sequence.arrived_at))
        index = sequence.generated_tokens - 1
        return Token(request=sequence.request, index=index, token=token, text=visible_text, ms=round(ms, 3)), reason


def _reason_to_end(sequence: Generation, complete: bool) -> FinishReason | None:
    """Return why a sequence ends with its last token, which is not an end token.

    complete: its grammar allows no continuation
    """
    if sequence.stream.stopped:
        return "stop"
    if complete:
        return "end"
    if len(sequence.tokens) >= sequence.max_total_tokens:
        return "length" if sequence.generated_tokens >= sequence.ask.max_tokens else "context"
    return None


# ---- one token -----------------------------------------------------------------------------------------------
def sample_row(row: int, sequence: Generation, end_tokens: Set[int], drafted: tuple[int, ...] = ()) -> SampleRow:
    """Return how to sample the token after a sequence's tokens and these drafted ones from this row; the result is the
    same until the token is known."""
    ask, sample = sequence.ask, SampleRow(row, sequence.ask, len(sequence.tokens) + len(drafted))
    if sequence.is_read:
        text = (*sequence.tokens, *drafted)
        sample = dataclasses.replace(sample, text=text, prompt_tokens=sequence.prompt_tokens)
    if ask.logit_bias or ask.ignore_end:
        biases = {entry.token: entry.bias if entry.bias > -MAX_BIAS else -math.inf for entry in ask.logit_bias}
        if ask.ignore_end:
            biases |= dict.fromkeys(end_tokens, -math.inf)
        sample = dataclasses.replace(sample, biases=tuple(sorted(biases.items())))
    return sample if sequence.answer is None else dataclasses.replace(sample, allowed=sequence.answer.allowed)


def is_followed(sequence: Generation, token: int, end_tokens: Set[int]) -> bool:
    """Return True if the sequence's grammar decides how it continues after this token. Raises SamplingFailed."""
    if token == TokensSampled.ALL_BANNED:
        raise SamplingFailed("bad_request", "logit_bias and ignore_end leave no token that may come next")
    if token < 0:
        raise SamplingFailed("failed", DAMAGED)
    return sequence.answer is not None and token not in end_tokens and token not in sequence.ask.stop_tokens


def with_logprobs(message: Token, logprobs: Logprobs, piece: Callable[[int], bytes]) -> Token:
    """Return the message with log-probabilities.

    piece: returns the bytes of a token
    """
    return dataclasses.replace(message, logprob=logprobs.logprob, piece=piece(message.token), top=_top(logprobs, piece))


def _top(logprobs: Logprobs, piece: Callable[[int], bytes]) -> tuple[Likely, ...]:
    return tuple(Likely(token=token, piece=piece(token), logprob=logprob) for token, logprob in logprobs.top)
