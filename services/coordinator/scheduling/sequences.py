"""The state of a sequence on a KV slot, generated or scored; and an estimate when a busy run can take a request."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from functools import cached_property
from typing import Literal, NamedTuple

from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.client import Finished, FinishReason, RefusalCode, Refused, ScoreFinished
from neuronpipe.protocol.messages.request import SAMPLING_OPTIONS, Generate, Score
from neuronpipe.services.coordinator.scheduling.admission import Limits
from neuronpipe.services.coordinator.scheduling.drafts import Drafter
from neuronpipe.services.coordinator.scheduling.events import Logprobs
from neuronpipe.services.coordinator.scheduling.prefix_reuse import Provenance, SlotContent
from neuronpipe.services.coordinator.scheduling.recurrent_states import NO_STATE
from neuronpipe.services.coordinator.text.constrained_answers import Answer
from neuronpipe.services.coordinator.text.tokenizer import TextStream

RECENT_TOKENS = 16
QUANTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
MIN_RETRY_S, MAX_RETRY_S = 1, 60
_READING_TEXT = [option for option in SAMPLING_OPTIONS if option.reads_text]

Cost = dict[str, float]
"""Figures of steps by name, as in `Finished`."""


def add_cost(total: Cost, more: Cost) -> None:
    for name, value in more.items():
        total[name] = total.get(name, 0.0) + value


# ---- a sequence ----------------------------------------------------------------------------------------------
@dataclasses.dataclass(kw_only=True)
class Sequence:
    """A sequence on a KV slot. `tokens` are all known tokens; the first `computed_tokens` have keys and values,
    computed in the numerics of `provenance`."""

    client: bytes
    request: str
    slot: int
    arrived_at: float
    tokens: list[int]
    owner: str = ""
    fingerprint: int = 0  # of the request, for the quarantine
    computed_tokens: int = 0
    provenance: Provenance = dataclasses.field(default_factory=Provenance)
    cancelled: bool = False
    last_message: Message | None = None  # ends it as soon as it is in no outstanding step
    isolated: bool = False  # its next step has no other sequence, since its last step has ended processes
    state: int = NO_STATE  # the slot of the recurrent state after the computed tokens

    def advance(self, position: int, tokens: int, numerics: str, state: int = NO_STATE) -> None:
        """Note that a step in this numerics has computed this many tokens from the position on.

        state: the slot of the recurrent state after them
        """
        self.isolated = False
        self.state = state
        self.provenance.computed(min(position, self.computed_tokens), position + tokens, numerics)
        self.computed_tokens = position + tokens

    @property
    def own_tokens(self) -> int:
        """Number of tokens that were computed for this sequence."""
        return self.computed_tokens

    @property
    def prefilling(self) -> bool:
        """True if a prefill worker computes the next step."""
        return False

    @property
    def is_blocked(self) -> bool:
        """True if no step may include the sequence until the answer to its last token has arrived."""
        return False

    @property
    def next_token(self) -> int:
        """Token that the next decode step computes."""
        return self.tokens[self.computed_tokens]

    @property
    def memory_tokens(self) -> int:
        """Number of tokens that need memory for keys and values."""
        return len(self.tokens)

    @property
    def likely(self) -> int:
        """Number of most likely tokens that a score names for each token."""
        return 0

    def content(self) -> SlotContent:
        return SlotContent(self.tokens[: self.computed_tokens], self.provenance, self.state)

    def refused(self, code: RefusalCode, message: str) -> Refused:
        return Refused(request=self.request, code=code, message=message)


class Sampled(NamedTuple):
    """A sampled token, the time of sampling in seconds, and its log-probabilities if requested."""

    token: int
    now: float
    logprobs: Logprobs | None


@dataclasses.dataclass(kw_only=True)
class Generation(Sequence):
    """A sequence that is generated: the prompt, then a token per step."""

    ask: Generate
    answer: Answer | None  # follows the grammar of `ask`
    sampled: Sampled | None = None  # the last token while the grammar's answer to it is pending; not in `tokens`
    missed_step: bool = False  # the answer came too late for the step that computed `sampled`
    stream: TextStream
    prompt_tokens: int
    max_total_tokens: int  # prompt included: what the context and the request allow
    cached_tokens: int = 0  # of the prompt, reused from other sequences or restored from the prompt cache
    drafter: Drafter | None = None  # None: no tokens are drafted for it
    drafted_tokens: int = 0  # that were computed
    accepted_tokens: int = 0  # drafted ones that are part of the completion
    may_restore: bool = True  # the prompt cache was not asked for this prompt yet
    token_times: list[float] = dataclasses.field(default_factory=list)
    prefill_cost: Cost = dataclasses.field(default_factory=dict)  # of the steps it took part in
    decode_cost: Cost = dataclasses.field(default_factory=dict)

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def is_blocked(self) -> bool:
        """See `Sequence`.

        While the answer is pending, a step may compute the sampled token, unless the sequence certainly ends with it or
        the answer came too late for a step before.
        """
        return self.sampled is not None and (self.missed_step or len(self.tokens) + 1 >= self.max_total_tokens)

    @property
    def next_token(self) -> int:
        if self.sampled is not None and self.computed_tokens == len(self.tokens):
            return self.sampled.token
        return super().next_token

    @property
    def memory_tokens(self) -> int:
        return len(self.tokens) + (self.sampled is not None)

    @property
    def own_tokens(self) -> int:
        """See `Sequence`. Tokens that were reused or restored do not count."""
        return self.computed_tokens - self.cached_tokens

    @property
    def prefilling(self) -> bool:
        """True if prompt tokens are left to compute. Decode steps compute completion tokens."""
        return self.computed_tokens < self.prompt_tokens

    def advance(self, position: int, tokens: int, numerics: str, state: int = NO_STATE) -> None:
        """See `Sequence`. Positions between `computed_tokens` and `position` were copied from another slot."""
        self.cached_tokens += position - self.computed_tokens
        super().advance(position, tokens, numerics, state)

    def restored(self, tokens: int, numerics: str, state: int = NO_STATE) -> None:
        """Note that the prompt cache has restored the first `tokens` tokens, and the recurrent state after them in slot
        `state`. The prompt's last token must be computed for its logits."""
        first, end = self.computed_tokens, min(tokens, self.prompt_tokens - 1)
        if end > first:
            self.cached_tokens += end - first
            self.provenance.computed(first, end, numerics)
            self.computed_tokens, self.state = end, state

    @cached_property
    def is_read(self) -> bool:
        """True if a penalty makes sampling depend on the tokens so far."""
        return any(getattr(self.ask, option.name) != option.default for option in _READING_TEXT)

    @property
    def goes_on(self) -> bool:
        """True if the next step can be scheduled before the next token is known, unless that is an end token.

        There are no stop strings or tokens, no grammar and no log-probabilities, and at least two tokens are left.
        """
        open_ended = self.answer is None and not self.ask.stop and not self.ask.stop_tokens
        open_ended = open_ended and self.ask.logprobs is None
        return open_ended and not self.cancelled and len(self.tokens) + 1 < self.max_total_tokens

    def finished(self, reason: FinishReason, limits: Limits) -> Finished:
        """Return the final message, to which the service adds memory and flash figures."""
        times = self.token_times
        span_s = times[-1] - times[0] if len(times) > 1 else 0.0
        return Finished(
            request=self.request,
            reason=reason,
            text=self.stream.shown,
            tokens=self.generated_tokens,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            stop=self.stream.matched_stop,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            ttft_ms=round(1000 * (times[0] - self.arrived_at), 3) if times else 0.0,
            tokens_per_s=round((len(times) - 1) / span_s, 2) if span_s > 0 else 0.0,
            tbt_ms=gap_quantiles_ms(times),
            memory={},
            flash={},
            prefill=dict(self.prefill_cost),
            decode=dict(self.decode_cost),
            plan=limits.plan_id,
            mode=limits.mode,
        )


@dataclasses.dataclass(kw_only=True)
class Scoring(Sequence):
    """A sequence whose tokens are rated."""

    ask: Score
    reported_tokens: int = 0  # number of tokens whose rows the client has received
    total_nll: float = 0.0  # sum of the negative log-probabilities of all rated tokens
    client_reads: bool = False  # the client copies the logits of the last step
    reads_since: float = 0.0  # time in seconds

    @property
    def prefilling(self) -> bool:
        return self.ask.path == "prefill"

    @property
    def likely(self) -> int:
        return self.ask.logprobs or 0

    def next_chunk(self, rated: int, rows: int) -> tuple[list[int], tuple[int, ...], Literal["none", "all"]]:
        """Return the tokens of the next prefill step, the targets that the worker rates, and which logits it writes.

        rated: maximum number of tokens if the worker rates them
        rows: maximum number of tokens if the client reads logits
        """
        first = self.computed_tokens
        if self.ask.logits:
            return self.tokens[first : first + rows], (), "all"
        chunk = self.tokens[first : first + rated]
        return chunk, tuple(self.tokens[first + 1 : first + 1 + len(chunk)]), "none"

    def finished(self, now: float) -> ScoreFinished:
        """Return the final message with the mean negative log-probability of all targets."""
        targets = len(self.tokens) - 1
        mean = self.total_nll / targets if targets else 0.0
        seconds = round(now - self.arrived_at, 3)
        return ScoreFinished(request=self.request, tokens=targets, nll_mean=mean, seconds=seconds)


def answers_to_sampled(sequences: Iterable[Sequence]) -> list[Answer]:
    """Return the grammars' answers to sampled tokens of these sequences that have not been processed."""
    sampled = [sequence for sequence in sequences if isinstance(sequence, Generation) and sequence.sampled is not None]
    return [sequence.answer for sequence in sampled if sequence.answer is not None]


def gap_quantiles_ms(times: list[float]) -> dict[str, float]:
    """Return p50, p90 and p99 of the gaps between consecutive times (seconds), in milliseconds; zeros without a gap."""
    gaps = sorted(1000 * (b - a) for a, b in itertools.pairwise(times))
    if not gaps:
        return dict.fromkeys(QUANTILES, 0.0)
    places = {name: min(len(gaps) - 1, int(share * len(gaps))) for name, share in QUANTILES.items()}
    return {name: round(gaps[place], 3) for name, place in places.items()}


# ---- busy ----------------------------------------------------------------------------------------------------
def retry_after_s(sequences: Iterable[Sequence]) -> int:
    """Return the seconds after which a client that was refused as busy may try again.

    It is the time until the first sequence ends: its remaining tokens at its recent pace, which includes pauses and the
    steps of other sequences.
    """
    generations = [sequence for sequence in sequences if isinstance(sequence, Generation)]
    ends_s = [end_s for generation in generations if (end_s := _ends_in_s(generation)) is not None]
    return max(MIN_RETRY_S, min(MAX_RETRY_S, math.ceil(min(ends_s, default=MIN_RETRY_S))))


def _ends_in_s(sequence: Generation) -> float | None:
    """Return the seconds until the sequence ends at the latest; None before it has two tokens."""
    times = sequence.token_times[-RECENT_TOKENS:]
    if len(times) < 2:
        return None
    pace_s = (times[-1] - times[0]) / (len(times) - 1)
    return (sequence.max_total_tokens - len(sequence.tokens)) * pace_s
