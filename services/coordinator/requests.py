"""The requests of a run, from arrival to end: those that wait for a KV slot, and the sequences that have one."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import Literal, NamedTuple

from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.client import Accepted, Finished, FinishReason, RefusalCode, Refused, ScoreFinished
from neuronpipe.protocol.messages.request import SAMPLING_OPTIONS, Cancel, Generate, Next, Score, Tokenize
from neuronpipe.services.coordinator.admission import Admission, Limits
from neuronpipe.services.coordinator.detokenizer import TextStream, Tokenizer
from neuronpipe.services.coordinator.events import RequestReceived, Tell
from neuronpipe.services.coordinator.grammar import Grammar, Grammars
from neuronpipe.services.coordinator.prefixes import (
    FreeSlots,
    Match,
    Owner,
    Provenance,
    Shares,
    SlotContent,
    longest_match,
)

MAX_READING_S = 10.0
RECENT_TOKENS = 16
QUANTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
MIN_RETRY_S, MAX_RETRY_S = 1, 60
ENDING = "the run is ending"
_READING_TEXT = [option for option in SAMPLING_OPTIONS if option.reads_text]
LAST_WORDS = Finished | ScoreFinished | Refused

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
    computed_tokens: int = 0
    provenance: Provenance = dataclasses.field(default_factory=Provenance)
    cancelled: bool = False

    def advance(self, position: int, tokens: int, numerics: str) -> None:
        """A step in this numerics has computed so many tokens from this position on."""
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
    def likely(self) -> int:
        """How many of the most likely tokens a score names for each token."""
        return 0

    def content(self) -> SlotContent:
        """What its slot holds."""
        return SlotContent(self.tokens[: self.computed_tokens], self.provenance)

    def refused(self, code: RefusalCode, message: str) -> Refused:
        """What its client is told when it cannot go on."""
        return Refused(request=self.request, code=code, message=message)


@dataclasses.dataclass(kw_only=True)
class Generation(Sequence):
    """A text being generated: the prompt, then a token per step."""

    ask: Generate
    grammar: Grammar | None  # how far the answer has come in what `ask` wants it to be
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
        open_ended = self.grammar is None and not self.ask.stop and not self.ask.stop_tokens
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
        """The tokens of the next step of prefill, and which after them the worker rates. At most `rated`; where it
        rates none, and where the client reads logits, at most one for each of so many rows of logits."""
        first = self.computed_tokens
        if self.ask.logits or not rated:
            return self.tokens[first : first + rows], (), "all"
        chunk = self.tokens[first : first + rated]
        return chunk, tuple(self.tokens[first + 1 : first + 1 + len(chunk)]), "none"

    def finished(self, now: float) -> ScoreFinished:
        """The account of the score."""
        targets = len(self.tokens) - 1
        mean = self.total_nll / targets if targets else 0.0
        seconds = round(now - self.arrived_at, 3)
        return ScoreFinished(request=self.request, tokens=targets, nll_mean=mean, seconds=seconds)


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


# ---- all requests --------------------------------------------------------------------------------------------
class Queued(NamedTuple):
    """A request that was accepted and has no slot yet."""

    client: bytes
    ask: Generate | Score
    tokens: list[int]
    arrived_at: float

    @property
    def owner(self) -> Owner:
        """For whom it is asked."""
        return self.client, self.ask.owner

    def refused(self, code: RefusalCode, message: str) -> Tell:
        """It is not started."""
        return Tell(self.client, Refused(request=self.ask.request, code=code, message=message))


class Requests:
    """Who waits, who has which slot, and what clients are told of it.

    queued: accepted, and without a slot, in order of arrival
    active: the sequences that have a slot
    """

    def __init__(self, limits: Limits, tokenizer: Tokenizer, grammars: Grammars) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._admission = Admission(limits, tokenizer, grammars)
        self._free = FreeSlots(limits.sequences)
        self._shares = Shares()
        self.queued: list[Queued] = []
        self.active: list[Sequence] = []
        self._ended_cached_tokens = 0
        self._ending = False

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens of the whole run that were not computed."""
        texts = [sequence for sequence in self.active if isinstance(sequence, Generation)]
        return self._ended_cached_tokens + sum(text.cached_tokens for text in texts)

    @property
    def client_reads(self) -> bool:
        """Whether a client is copying logits out of the exchange segment: no step may overwrite them."""
        return any(isinstance(sequence, Scoring) and sequence.client_reads for sequence in self.active)

    def used_tokens(self, now: float) -> list[int]:
        """Of every KV slot, the tokens it holds or soon will, those of texts that ended long ago forgotten."""
        self._free.forget_unused(now)
        used = {sequence.slot: len(sequence.tokens) for sequence in self.active} | self._free.tokens()
        return [used[slot] for slot in sorted(used)]

    def going_on(self) -> list[Sequence] | None:
        """The sequences that have slots, where all are texts that go on, and nobody else can get a slot; else None."""
        if self.queued and len(self._free):
            return None
        texts = [one for one in self.active if isinstance(one, Generation) and not one.prefilling and one.goes_on]
        return [*texts] if len(texts) == len(self.active) else None

    # ---- arrival ---------------------------------------------------------------------------------------------
    def received(self, event: RequestReceived, now: float) -> list[Tell]:
        """A new request, or a word about one that is known."""
        message = event.message
        match message:
            case Generate() | Score():
                return self._admit(event.client, message, now)
            case Next():
                return self._go_on(event.client, message.request, now)
            case Tokenize():
                return [Tell(event.client, self._admission.tokenized(message))]
            case Cancel():
                return self._cancel(event.client, message.request)
        return []

    def _admit(self, client: bytes, ask: Generate | Score, now: float) -> list[Tell]:
        """Check a request and queue it; one that is known is asked for again by a client that was not sure."""
        known = [(sequence.client, sequence.request) for sequence in self.active]
        known += [(one.client, one.ask.request) for one in self.queued]
        if (client, ask.request) in known:
            return []
        if self._ending:
            return [Tell(client, Refused(request=ask.request, code="draining", message=ENDING))]
        admitted = self._admission.check(ask, len(self.queued))
        if isinstance(admitted, Refused):
            if admitted.code == "busy":
                admitted = dataclasses.replace(admitted, retry_after_s=retry_after_s(self.active))
            return [Tell(client, admitted)]
        self._shares.came((client, ask.owner), self._present())
        self.queued.append(Queued(client, ask, admitted, now))
        return [Tell(client, Accepted(request=ask.request, prompt_tokens=len(admitted)))]

    def _go_on(self, client: bytes, request: str, now: float) -> list[Tell]:
        """A client has copied the logits of its score's last step."""
        for sequence in self._active_of(client, request):
            if isinstance(sequence, Scoring):
                sequence.client_reads = False
                if sequence.computed_tokens == len(sequence.tokens):
                    return [self.tell(sequence, sequence.finished(now), now)]
        return []

    def _cancel(self, client: bytes, request: str) -> list[Tell]:
        """A client does not want its request any more. An active one ends when no step is under way."""
        for sequence in self._active_of(client, request):
            sequence.cancelled = True
        gone = [one for one in self.queued if (one.client, one.ask.request) == (client, request)]
        self.queued = [one for one in self.queued if one not in gone]
        return [one.refused("cancelled", "cancelled before it was started") for one in gone]

    def _active_of(self, client: bytes, request: str) -> list[Sequence]:
        return [one for one in self.active if (one.client, one.request) == (client, request)]

    # ---- slots -----------------------------------------------------------------------------------------------
    def give_slots(self, numerics: str) -> None:
        """Give free KV slots to queued requests, an equal share to everybody who waits. What a slot still holds of a
        text stays, as far as prompts are computed in the same numerics now."""
        while self.queued and len(self._free):
            slots = Counter((sequence.client, sequence.owner) for sequence in self.active)
            waiting, count = (one.owner for one in self.queued), self._limits.sequences
            one = self.queued.pop(self._shares.next(waiting, slots, self._present(), count))
            shares = isinstance(one.ask, Generate) and one.ask.share_prefix
            taken = self._free.take(one.tokens, numerics, shares=shares)
            assert taken is not None
            if isinstance(one.ask, Generate):
                self.active.append(self._generation(one, one.ask, taken.slot, taken.kept_tokens, numerics))
            else:
                self.active.append(_scoring(one, one.ask, taken.slot))

    def _present(self) -> dict[Owner, int]:
        """Of everybody who waits or has slots, the tokens that were computed of texts that have slots."""
        present = dict.fromkeys((one.owner for one in self.queued), 0)
        for sequence in self.active:
            owner = sequence.client, sequence.owner
            present[owner] = present.get(owner, 0) + sequence.own_tokens
        return present

    def _generation(self, one: Queued, ask: Generate, slot: int, kept_tokens: int, numerics: str) -> Generation:
        prompt_tokens = len(one.tokens)
        # A prompt that fills the context still has its one token, which needs no position.
        room_tokens = max(self._limits.context_tokens, prompt_tokens + 1)
        return Generation(
            client=one.client,
            request=ask.request,
            slot=slot,
            arrived_at=one.arrived_at,
            tokens=one.tokens,
            owner=ask.owner,
            computed_tokens=kept_tokens,
            provenance=Provenance([(kept_tokens, numerics)] if kept_tokens else []),
            cached_tokens=kept_tokens,
            ask=ask,
            grammar=self._grammar(ask),
            stream=TextStream(self._tokenizer, one.tokens, ask.stop, self._marks(ask)),
            prompt_tokens=prompt_tokens,
            max_total_tokens=min(room_tokens, prompt_tokens + ask.max_tokens),
        )

    def _grammar(self, ask: Generate) -> Grammar | None:
        if ask.calls is not None:
            return self._grammars.start_calls(ask.calls, ask.grammar, ask.grammar_syntax)
        return None if ask.grammar is None else self._grammars.start(ask.grammar, ask.grammar_syntax)

    def _marks(self, ask: Generate) -> dict[int, str]:
        return {} if ask.calls is None else self._grammars.marks(ask.calls)

    def prefix_source(self, text: Generation, numerics: str) -> Match | None:
        """The slot, of a sequence or free, that holds more of the prompt than was computed, in the numerics of prompts.
        Asked before every chunk: the texts that came together with this one have got on since it was admitted."""
        if not text.ask.share_prefix or text.provenance.tokens_of(numerics) < text.computed_tokens:
            return None
        live = {other.slot: other.content().shared_in(numerics) for other in self.active if other is not text}
        match = longest_match(text.tokens[: text.prompt_tokens], {**self._free.shared_in(numerics), **live})
        if match is None or match.tokens <= text.computed_tokens:
            return None
        self._free.touch(match.slot, text.arrived_at)
        return match

    # ---- end -------------------------------------------------------------------------------------------------
    def tell(self, sequence: Sequence, message: Message, now: float) -> Tell:
        """Tell a sequence's client. With its last words a sequence ends, and its slot is free."""
        if isinstance(message, LAST_WORDS):
            self.active.remove(sequence)
            self._free.give_back(sequence.slot, sequence.content(), now)
            self._shares.ended((sequence.client, sequence.owner), sequence.own_tokens)
            if isinstance(sequence, Generation):
                self._ended_cached_tokens += sequence.cached_tokens
        return Tell(sequence.client, message)

    def end_cancelled(self, now: float) -> list[Tell]:
        """End what nobody wants any more, scores among it whose client is gone, or stands still while all wait."""
        for sequence in self.active:
            if isinstance(sequence, Scoring) and sequence.client_reads and now - sequence.reads_since > MAX_READING_S:
                sequence.cancelled = True
        return [self.tell(one, self._cancelled(one), now) for one in [*self.active] if one.cancelled]

    def _cancelled(self, sequence: Sequence) -> Message:
        if isinstance(sequence, Generation):
            return sequence.finished("cancelled", self._limits)
        return sequence.refused("cancelled", "cancelled")

    def end_all(self, now: float) -> list[Tell]:
        """The run ends: who has a slot, who waits, and who asks from now on is told so."""
        self._ending = True
        queued, self.queued = self.queued, []
        told = [self.tell(one, one.refused("draining", ENDING), now) for one in [*self.active]]
        return told + [one.refused("draining", ENDING) for one in queued]


def _scoring(one: Queued, ask: Score, slot: int) -> Scoring:
    return Scoring(
        client=one.client,
        request=ask.request,
        slot=slot,
        arrived_at=one.arrived_at,
        tokens=one.tokens,
        owner=ask.owner,
        ask=ask,
    )
