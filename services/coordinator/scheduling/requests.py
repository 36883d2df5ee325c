"""The requests of a run, from arrival to end: those that wait for a KV slot, and the sequences that have one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import NamedTuple

from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.client import Accepted, Finished, RefusalCode, Refused, ScoreFinished
from neuronpipe.protocol.messages.request import Cancel, Generate, Next, Score, Tokenize
from neuronpipe.protocol.messages.worker import Prefill
from neuronpipe.services.coordinator.scheduling.admission import Admission, Limits
from neuronpipe.services.coordinator.scheduling.events import RequestReceived, Tell
from neuronpipe.services.coordinator.scheduling.prefix_reuse import (
    FreeSlots,
    Match,
    Owner,
    Provenance,
    Shares,
    longest_match,
)
from neuronpipe.services.coordinator.scheduling.sequences import Generation, Scoring, Sequence, retry_after_s
from neuronpipe.services.coordinator.scheduling.steps import OutstandingStep
from neuronpipe.services.coordinator.text.constrained_answers import Answer, Constraints
from neuronpipe.services.coordinator.text.tokenizer import TextStream, Tokenizer
from neuronpipe.services.runtime.quarantine import ENDED, Quarantine, fingerprint, request_fingerprint

MAX_READING_S = 10.0
ENDING = "the run is ending"
LAST_WORDS = Finished | ScoreFinished | Refused


class Queued(NamedTuple):
    """A request that was accepted and has no slot yet; or whose grammar is being compiled."""

    client: bytes
    ask: Generate | Score
    tokens: list[int]
    arrived_at: float
    fingerprint: int
    answer: Answer | None

    @property
    def owner(self) -> Owner:
        """For whom it is asked."""
        return self.client, self.ask.owner

    def refused(self, code: RefusalCode, message: str) -> Tell:
        """It is not started."""
        if self.answer is not None:
            self.answer.close()
        return Tell(self.client, Refused(request=self.ask.request, code=code, message=message))


class Requests:
    """Who waits, who has which slot, and what clients are told of it.

    compiling: not accepted before it is known what their answers must follow
    queued: accepted, and without a slot, in order of arrival
    active: the sequences that have a slot
    """

    def __init__(self, limits: Limits, tokenizer: Tokenizer, constraints: Constraints, quarantine: Quarantine) -> None:
        self._limits = limits
        self._quarantine = quarantine
        self._tokenizer = tokenizer
        self._constraints = constraints
        self._admission = Admission(limits, tokenizer)
        self._free = FreeSlots(limits.sequences)
        self._shares = Shares()
        self.compiling: list[Queued] = []
        self.queued: list[Queued] = []
        self.active: list[Sequence] = []
        self._ended_cached_tokens = 0
        self._ending = False

    @property
    def waiting(self) -> bool:
        """Whether any request has no slot yet."""
        return bool(self.queued or self.compiling)

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
        used = {sequence.slot: sequence.memory_tokens for sequence in self.active} | self._free.tokens()
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
            case Generate() | Score() | Tokenize():
                return self._examine(event.client, message, now)
            case Next():
                return self._go_on(event.client, message.request, now)
            case Cancel():
                return self._cancel(event.client, message.request)
        return []

    def _examine(self, client: bytes, ask: Generate | Score | Tokenize, now: float) -> list[Tell]:
        """Answer a request, unless it ended processes. Should it end this one, the next coordinator knows of it."""
        name = fingerprint(ask)
        if self._ended_processes(ask, name, now):
            return [Tell(client, Refused(request=ask.request, code="ended_a_process", message=ENDED))]
        self._quarantine.admits(name)
        if isinstance(ask, Tokenize):
            answers = [Tell(client, self._admission.tokenized(ask))]
        else:
            answers = self._admit(client, ask, name, now)
        self._quarantine.admits(0)
        return answers

    def _ended_processes(self, ask: Generate | Score | Tokenize, name: int, now: float) -> bool:
        """Whether this sequence ended processes, or another one of its request."""
        request = request_fingerprint(ask)
        if self._quarantine.is_refused(request, now):
            return True
        if not self._quarantine.is_refused(name, now):
            return False
        self._quarantine.convict(request, now)
        return True

    def _admit(self, client: bytes, ask: Generate | Score, name: int, now: float) -> list[Tell]:
        """Check a request and queue it; one that is known is asked for again by a client that was not sure."""
        known = [(sequence.client, sequence.request) for sequence in self.active]
        known += [(one.client, one.ask.request) for one in (*self.queued, *self.compiling)]
        if (client, ask.request) in known:
            return []
        if self._ending:
            return [Tell(client, Refused(request=ask.request, code="draining", message=ENDING))]
        admitted = self._admission.check(ask, len(self.queued) + len(self.compiling))
        if isinstance(admitted, Refused):
            if admitted.code == "busy":
                admitted = dataclasses.replace(admitted, retry_after_s=retry_after_s(self.active))
            return [Tell(client, admitted)]
        follows = isinstance(ask, Generate) and (ask.grammar is not None or ask.calls is not None)
        answer = self._constraints.start(ask) if isinstance(ask, Generate) and follows else None
        self.compiling.append(Queued(client, ask, admitted, now, name, answer))
        return self.accept_compiled()

    def accept_compiled(self) -> list[Tell]:
        """Queue the requests of which it is known now what their answers must follow, or refuse them."""
        compiled = [one for one in self.compiling if one.answer is None or not one.answer.pending]
        self.compiling = [one for one in self.compiling if one not in compiled]
        return [self._accept(one) for one in compiled]

    def _accept(self, one: Queued) -> Tell:
        if one.answer is not None and one.answer.failure is not None:
            return one.refused(one.answer.failure.code, one.answer.failure.message)
        self._shares.came(one.owner, self._present())
        self.queued.append(one)
        return Tell(one.client, Accepted(request=one.ask.request, prompt_tokens=len(one.tokens)))

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
        waiting = (*self.queued, *self.compiling)
        gone = [one for one in waiting if (one.client, one.ask.request) == (client, request)]
        self.queued = [one for one in self.queued if one not in gone]
        self.compiling = [one for one in self.compiling if one not in gone]
        return [one.refused("cancelled", "cancelled before it was started") for one in gone]

    def _active_of(self, client: bytes, request: str) -> list[Sequence]:
        return [one for one in self.active if (one.client, one.request) == (client, request)]

    # ---- slots -----------------------------------------------------------------------------------------------
    def give_slots(self, numerics: str) -> None:
        """Give free KV slots to queued requests, an equal share to everybody who waits. What a slot still holds of a
        text stays, as far as prompts are computed in the same numerics now."""
        while len(self._free) and (startable := self._startable()):
            slots = Counter((sequence.client, sequence.owner) for sequence in self.active)
            owners, count = (one.owner for one in startable), self._limits.sequences
            one = startable[self._shares.next(owners, slots, self._present(), count)]
            self.queued.remove(one)
            shares = isinstance(one.ask, Generate) and one.ask.share_prefix
            taken = self._free.take(one.tokens, numerics, shares=shares)
            assert taken is not None
            if isinstance(one.ask, Generate):
                self.active.append(self._generation(one, one.ask, taken.slot, taken.kept_tokens, numerics))
            else:
                self.active.append(_scoring(one, one.ask, taken.slot))

    def _startable(self) -> list[Queued]:
        """The queued requests that may get a slot now. Of those that may have ended a process one runs at a time."""
        if not any(self._quarantine.runs_apart(sequence.fingerprint) for sequence in self.active):
            return self.queued
        return [one for one in self.queued if not self._quarantine.runs_apart(one.fingerprint)]

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
            fingerprint=one.fingerprint,
            computed_tokens=kept_tokens,
            provenance=Provenance([(kept_tokens, numerics)] if kept_tokens else []),
            cached_tokens=kept_tokens,
            ask=ask,
            answer=one.answer,
            stream=TextStream(self._tokenizer, one.tokens, ask.stop, self._marks(ask)),
            prompt_tokens=prompt_tokens,
            max_total_tokens=min(room_tokens, prompt_tokens + ask.max_tokens),
        )

    def _marks(self, ask: Generate) -> dict[int, str]:
        return {} if ask.calls is None else self._constraints.marks(ask.calls)

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

    def computes(self, step: OutstandingStep) -> None:
        """A step is sent: its sequences are at these places, should a process die of it."""
        message = step.action.message
        positions = (message.position,) if isinstance(message, Prefill) else message.positions
        for sequence, position in zip(step.sequences, positions, strict=True):
            self._quarantine.computes(sequence.fingerprint, sequence.slot, 1 + position)

    # ---- end -------------------------------------------------------------------------------------------------
    def tell(self, sequence: Sequence, message: Message, now: float) -> Tell:
        """Tell a sequence's client. With its last words a sequence ends, and its slot is free."""
        if isinstance(message, LAST_WORDS):
            self.active.remove(sequence)
            self._free.give_back(sequence.slot, sequence.content(), now)
            self._shares.ended((sequence.client, sequence.owner), sequence.own_tokens)
            if isinstance(message, Refused) and message.code == "ended_a_process":
                assert isinstance(sequence, Generation | Scoring)
                self._quarantine.convict(sequence.fingerprint, now)
                self._quarantine.convict(request_fingerprint(sequence.ask), now)
            self._quarantine.ends(sequence.fingerprint, sequence.slot)
            if isinstance(sequence, Generation):
                self._ended_cached_tokens += sequence.cached_tokens
                if sequence.answer is not None:
                    sequence.answer.close()
        return Tell(sequence.client, message)

    def end_cancelled(self, now: float) -> list[Tell]:
        """End what nobody wants any more, scores among it whose client is gone, or stands still while all wait."""
        for sequence in self.active:
            if isinstance(sequence, Scoring) and sequence.client_reads and now - sequence.reads_since > MAX_READING_S:
                sequence.cancelled = True
        ended = [one for one in self.active if one.cancelled or one.last_message is not None]
        return [self.tell(one, self._last_message(one), now) for one in ended]

    def _last_message(self, sequence: Sequence) -> Message:
        if sequence.last_message is not None:
            return sequence.last_message
        if isinstance(sequence, Generation):
            return sequence.finished("cancelled", self._limits)
        return sequence.refused("cancelled", "cancelled")

    def end_all(self, now: float) -> list[Tell]:
        """The run ends: who has a slot, who waits, and who asks from now on is told so."""
        self._ending = True
        queued, self.queued, self.compiling = [*self.queued, *self.compiling], [], []
        told = [self.tell(one, one.last_message or one.refused("draining", ENDING), now) for one in [*self.active]]
        return told + [one.refused("draining", ENDING) for one in queued]


def _scoring(one: Queued, ask: Score, slot: int) -> Scoring:
    return Scoring(
        client=one.client,
        request=ask.request,
        slot=slot,
        arrived_at=one.arrived_at,
        tokens=one.tokens,
        owner=ask.owner,
        fingerprint=one.fingerprint,
        ask=ask,
    )
