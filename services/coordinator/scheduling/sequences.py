"""One sequence on a KV slot: a text that is generated, or one that is scored; and when the first of several ends."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from functools import cached_property
from typing import Literal, NamedTuple

from neuronpipe.protocol.messages.client import Finished, FinishReason, RefusalCode, Refused, ScoreFinished
from neuronpipe.protocol.messages.request import SAMPLING_OPTIONS, Generate, Score
from neuronpipe.services.coordinator.scheduling.admission import Limits
from neuronpipe.services.coordinator.scheduling.events import Logprobs
from neuronpipe.services.coordinator.scheduling.prefix_reuse import Provenance, SlotContent
from neuronpipe.services.coordinator.text.constrained_answers import Answer
from neuronpipe.services.coordinator.text.tokenizer import TextStream

RECENT_TOKENS = 16
QUANTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
MIN_RETRY_S, MAX_RETRY_S = 1, 60
_READING_TEXT = [option for option in SAMPLING_OPTIONS if option.reads_text]

Cost = dict[str, float]
"""What steps took: figures by name, as in `Finished`."""


def add_cost(total: Cost, more: Cost) -> None:
    """Add `more` to `total`, name by name."""
    for name, value in more.items():
        total[name] = total.get(name, 0.0) + value


# ---- a sequence ----------------------------------------------------------------------------------------------
@dataclasses.dataclass(kw_only=True)
class Sequence:
    """A text on one KV slot. `tokens` are all known tokens; the first `computed_tokens` have keys and values, computed
    in the numerics that `provenance` says."""

    client: bytes
    request: str
    slot: int
    arrived_at: float
    tokens: list[int]
    owner: str = ""
    fingerprint: int = 0  # by which the quarantine knows it
    computed_tokens: int = 0
    provenance: Provenance = dataclasses.field(default_factory=Provenance)
    cancelled: bool = False
    isolated: bool = False  # its next step has no other sequence: one of those that shared the last one ends processes

    def advance(self, position: int, tokens: int, numerics: str) -> None:
        """A step in this numerics has computed so many tokens from this position on."""
        self.isolated = False
        self.provenance.computed(min(position, self.computed_tokens), position + tokens, numerics)
        self.computed_tokens = position + tokens

    @property
    def own_tokens(self) -> int:
        """How many tokens were computed for it."""
        return self.computed_tokens

    @property
    def prefilling(self) -> bool:
        """Whether a prefill worker computes its next step."""
        return False

    @property
    def awaiting(self) -> bool:
        """Whether it takes part in no step before it is known what its last token leads to."""
        return False

    @property
    def likely(self) -> int:
        """How many of the most likely tokens a score names for each token."""
        return 0

    def content(self) -> SlotContent:
        """What its slot holds."""
        return SlotContent(self.tokens[: self.computed_tokens], self.provenance)

    def refused(self, code: RefusalCode, message: str) -> Refused:
        """What its client is told when it cannot go on."""
        return Refused(request=self.request, code=code, message=message)


class Sampled(NamedTuple):
    """A token that was sampled at a time in seconds, and its logarithms of probabilities if they are asked for."""

    token: int
    now: float
    logprobs: Logprobs | None


@dataclasses.dataclass(kw_only=True)
class Generation(Sequence):
    """A text being generated: the prompt, then a token per step."""

    ask: Generate
    answer: Answer | None  # how far it has come in what `ask` wants it to be
    sampled: Sampled | None = None  # and not told: what it leads to is not known yet
    stream: TextStream
    prompt_tokens: int
    max_total_tokens: int  # prompt included: what the context and the request allow
    cached_tokens: int = 0  # of the prompt: their keys and values were there already
    token_times: list[float] = dataclasses.field(default_factory=list)
    prefill_cost: Cost = dataclasses.field(default_factory=dict)  # of the steps it took part in
    decode_cost: Cost = dataclasses.field(default_factory=dict)

    @property
    def generated_tokens(self) -> int:
        """How many tokens were sampled so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def awaiting(self) -> bool:
        """As in `Sequence`."""
        return self.sampled is not None

    @property
    def own_tokens(self) -> int:
        """How many tokens were computed for it: not those that another text has left."""
        return self.computed_tokens - self.cached_tokens

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens are left to compute (a decode step computes the last one it sampled)."""
        return self.computed_tokens < self.prompt_tokens

    def advance(self, position: int, tokens: int, numerics: str) -> None:
        """As in `Sequence`; what lies before the position was copied from another slot, in the same numerics."""
        self.cached_tokens += position - self.computed_tokens
        super().advance(position, tokens, numerics)

    @cached_property
    def is_read(self) -> bool:
        """Whether the text decides how the next token is sampled: a penalty asks for it."""
        return any(getattr(self.ask, option.name) != option.default for option in _READING_TEXT)

    @property
    def goes_on(self) -> bool:
        """Whether another token follows the next one whatever that is, an end token excepted. What must be looked at
        before it is known does not count: text, a grammar, logits that are asked for."""
        open_ended = self.answer is None and not self.ask.stop and not self.ask.stop_tokens
        open_ended = open_ended and self.ask.logprobs is None
        return open_ended and not self.cancelled and len(self.tokens) + 1 < self.max_total_tokens

    def finished(self, reason: FinishReason, limits: Limits) -> Finished:
        """The account of the text; the service adds memory and flash, which only it knows."""
        times = self.token_times
        span_s = times[-1] - times[0] if len(times) > 1 else 0.0
        return Finished(
            request=self.request,
            reason=reason,
            text=self.stream.shown,
            tokens=self.generated_tokens,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
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
    """A text whose tokens' likelihoods are asked for."""

    ask: Score
    told_tokens: int = 0  # those that the client knows the rows of
    total_nll: float = 0.0
    client_reads: bool = False  # the client copies the last step's logits
    reads_since: float = 0.0

    @property
    def prefilling(self) -> bool:
        """As the client asks."""
        return self.ask.path == "prefill"

    @property
    def likely(self) -> int:
        """How many of the most likely tokens are named for each."""
        return self.ask.logprobs or 0

    def next_chunk(self, rated: int, rows: int) -> tuple[list[int], tuple[int, ...], Literal["none", "all"]]:
        """The tokens of the next step of prefill, and which after them the worker rates. At most `rated`; where the
        client reads logits, at most one for each of so many rows of logits."""
        first = self.computed_tokens
        if self.ask.logits:
            return self.tokens[first : first + rows], (), "all"
        chunk = self.tokens[first : first + rated]
        return chunk, tuple(self.tokens[first + 1 : first + 1 + len(chunk)]), "none"

    def finished(self, now: float) -> ScoreFinished:
        """The account of the score."""
        targets = len(self.tokens) - 1
        mean = self.total_nll / targets if targets else 0.0
        seconds = round(now - self.arrived_at, 3)
        return ScoreFinished(request=self.request, tokens=targets, nll_mean=mean, seconds=seconds)


def pending_answers(sequences: Iterable[Sequence]) -> list[Answer]:
    """Of those that take part in no step before it is known what their last token leads to."""
    texts = [one for one in sequences if isinstance(one, Generation) and one.awaiting]
    return [text.answer for text in texts if text.answer is not None and text.answer.pending]


def gap_quantiles_ms(times: list[float]) -> dict[str, float]:
    """p50, p90 and p99 of the gaps between consecutive times (seconds), in milliseconds; zeros without a gap."""
    gaps = sorted(1000 * (b - a) for a, b in itertools.pairwise(times))
    if not gaps:
        return dict.fromkeys(QUANTILES, 0.0)
    places = {name: min(len(gaps) - 1, int(share * len(gaps))) for name, share in QUANTILES.items()}
    return {name: round(gaps[place], 3) for name, place in places.items()}


# ---- busy ----------------------------------------------------------------------------------------------------
def retry_after_s(sequences: Iterable[Sequence]) -> int:
    """When a client that found the run busy may come again: seconds until the first of these texts must have ended.

    A text ends after its remaining tokens at the latest, at the pace of its last ones: pauses, other texts and prompts
    between its steps are in that pace.
    """
    texts = [sequence for sequence in sequences if isinstance(sequence, Generation)]
    ends_s = [end_s for text in texts if (end_s := _ends_in_s(text)) is not None]
    return max(MIN_RETRY_S, min(MAX_RETRY_S, math.ceil(min(ends_s, default=MIN_RETRY_S))))


def _ends_in_s(text: Generation) -> float | None:
    """None for a text that has no pace yet."""
    times = text.token_times[-RECENT_TOKENS:]
    if len(times) < 2:
        return None
    pace_s = (times[-1] - times[0]) / (len(times) - 1)
    return (text.max_total_tokens - len(text.tokens)) * pace_s
