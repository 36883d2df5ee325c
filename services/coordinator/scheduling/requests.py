"""The requests of a run, from arrival to end: those that wait for a KV slot, and the sequences that have a slot."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import NamedTuple

from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.client import Accepted, Finished, RefusalCode, Refused, ScoreFinished
from neuronpipe.protocol.messages.request import Cancel, Generate, Next, Score, Tokenize
from neuronpipe.protocol.messages.worker import Prefill
from neuronpipe.services.coordinator.scheduling.admission import Admission, Limits
from neuronpipe.services.coordinator.scheduling.drafts import Drafter
from neuronpipe.services.coordinator.scheduling.events import RequestReceived, Tell
from neuronpipe.services.coordinator.scheduling.prefix_reuse import (
    FreeSlots,
    Match,
    Owner,
    Provenance,
    Shares,
    TakenSlot,
    longest_match,
    usable_prefix,
)
from neuronpipe.services.coordinator.scheduling.prompt_cache import MIN_TOKENS, PromptCache
from neuronpipe.services.coordinator.scheduling.recurrent_states import States
from neuronpipe.services.coordinator.scheduling.sequences import Generation, Scoring, Sequence, retry_after_s
from neuronpipe.services.coordinator.scheduling.steps import OutstandingStep
from neuronpipe.services.coordinator.text.constrained_answers import Answer, Constraints
from neuronpipe.services.coordinator.text.tokenizer import TextStream, Tokenizer
from neuronpipe.services.runtime.quarantine import ENDED, Quarantine, fingerprint, request_fingerprint

MAX_READING_S = 10.0
ENDING = "the run is ending"
LAST_WORDS = Finished | ScoreFinished | Refused


class Queued(NamedTuple):
    """A request without a KV slot: it is accepted, or its grammar is being compiled.

    answer: follows the grammar or the calls; None without either
    """

    client: bytes
    ask: Generate | Score
    tokens: list[int]
    arrived_at: float
    fingerprint: int
    answer: Answer | None

    @property
    def owner(self) -> Owner:
        return self.client, self.ask.owner

    def refused(self, code: RefusalCode, message: str) -> Tell:
        """Stop following the answer, and return the refusal."""
        if self.answer is not None:
            self.answer.close()
        return Tell(self.client, Refused(request=self.ask.request, code=code, message=message))


class Requests:
    """The waiting requests, the KV slots, and the messages to clients.

    compiling: requests whose grammars are being compiled; not accepted yet
    queued: accepted requests without a slot, in order of arrival
    active: the sequences that have a slot
    """

    def __init__(
        self, limits: Limits, tokenizer: Tokenizer, constraints: Constraints, quarantine: Quarantine, states: States
    ) -> None:
        self._limits = limits
        self._quarantine = quarantine
        self._tokenizer = tokenizer
        self.constraints = constraints
        self._admission = Admission(limits, tokenizer)
        self._states = states
        self._free = FreeSlots(limits.sequences, states)
        self._shares = Shares()
        self.prompt_cache = PromptCache(states)
        self.compiling: list[Queued] = []
        self.queued: list[Queued] = []
        self.active: list[Sequence] = []
        self._ended_cached_tokens = 0
        self._ending = False

    @property
    def waiting(self) -> bool:
        """True if any request has no slot yet."""
        return bool(self.queued or self.compiling)

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that were reused or restored instead of computed since this coordinator started."""
        generations = [sequence for sequence in self.active if isinstance(sequence, Generation)]
        return self._ended_cached_tokens + sum(sequence.cached_tokens for sequence in generations)

    @property
    def client_reads(self) -> bool:
        """True if a client is copying logits from the exchange segment, so that no step may overwrite them."""
        return any(isinstance(sequence, Scoring) and sequence.client_reads for sequence in self.active)

    def used_tokens(self, now: float) -> list[int]:
        """Return for each KV slot the number of tokens that need memory. Content that was unused for long is
        forgotten first."""
        self._free.forget_unused(now, self.prompt_cache.held_tokens())
        used = {sequence.slot: sequence.memory_tokens for sequence in self.active} | self._free.tokens()
        return [used[slot] for slot in sorted(used)]

    def going_on(self) -> list[Sequence] | None:
        """Return the active sequences if all of them certainly have a next decode step, end tokens aside, and no
        queued request can get a slot; else None."""
        if self.queued and len(self._free):
            return None
        generations = [
            sequence
            for sequence in self.active
            if isinstance(sequence, Generation) and not sequence.prefilling and sequence.goes_on
        ]
        return [*generations] if len(generations) == len(self.active) else None

    # ---- arrival ---------------------------------------------------------------------------------------------
    def received(self, event: RequestReceived, now: float) -> list[Tell]:
        """Process a message of a client; return the answers."""
        message = event.message
        match message:
            case Generate() | Score() | Tokenize():
                return self._examine(event.client, message, now)
            case Next():
                return self._continue_score(event.client, message.request, now)
            case Cancel():
                return self._cancel(event.client, message.request)
        return []

    def _examine(self, client: bytes, ask: Generate | Score | Tokenize, now: float) -> list[Tell]:
        """Answer a request, or refuse it if it has ended processes.

        The ledger names the request meanwhile, so that the next coordinator knows it if the request ends this one.
        """
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
        request = request_fingerprint(ask)
        if self._quarantine.is_refused(request, now):
            return True
        if not self._quarantine.is_refused(name, now):
            return False
        self._quarantine.convict(request, now)
        return True

    def _admit(self, client: bytes, ask: Generate | Score, name: int, now: float) -> list[Tell]:
        """Check a request and queue it. A repetition of a known request is ignored."""
        known_requests = [(sequence.client, sequence.request) for sequence in self.active]
        known_requests += [(queued.client, queued.ask.request) for queued in (*self.queued, *self.compiling)]
        if (client, ask.request) in known_requests:
            return []
        if self._ending:
            return [Tell(client, Refused(request=ask.request, code="draining", message=ENDING))]
        admitted = self._admission.check(ask, len(self.queued) + len(self.compiling))
        if isinstance(admitted, Refused):
            if admitted.code == "busy":
                admitted = dataclasses.replace(admitted, retry_after_s=retry_after_s(self.active))
            return [Tell(client, admitted)]
        follows = isinstance(ask, Generate) and (ask.grammar is not None or ask.calls is not None)
        answer = self.constraints.start(ask) if isinstance(ask, Generate) and follows else None
        self.compiling.append(Queued(client, ask, admitted, now, name, answer))
        return self.accept_compiled()

    def accept_compiled(self) -> list[Tell]:
        """Accept or refuse the requests whose grammars are compiled."""
        compiled = [queued for queued in self.compiling if queued.answer is None or not queued.answer.pending]
        self.compiling = [queued for queued in self.compiling if queued not in compiled]
        return [self._accept(queued) for queued in compiled]

    def _accept(self, queued: Queued) -> Tell:
        if queued.answer is not None and queued.answer.failure is not None:
            return queued.refused(queued.answer.failure.code, queued.answer.failure.message)
        self._shares.add_request(queued.owner, self._present())
        self.queued.append(queued)
        return Tell(queued.client, Accepted(request=queued.ask.request, prompt_tokens=len(queued.tokens)))

    def _continue_score(self, client: bytes, request: str, now: float) -> list[Tell]:
        """Note that the client has copied the logits of its score's last step; the score ends if all are copied."""
        for sequence in self._active_of(client, request):
            if isinstance(sequence, Scoring):
                sequence.client_reads = False
                if sequence.computed_tokens == len(sequence.tokens):
                    return [self.tell(sequence, sequence.finished(now), now)]
        return []

    def _cancel(self, client: bytes, request: str) -> list[Tell]:
        """Cancel a request. An active sequence ends when no step is outstanding."""
        for sequence in self._active_of(client, request):
            sequence.cancelled = True
        waiting = (*self.queued, *self.compiling)
        cancelled = [queued for queued in waiting if (queued.client, queued.ask.request) == (client, request)]
        self.queued = [queued for queued in self.queued if queued not in cancelled]
        self.compiling = [queued for queued in self.compiling if queued not in cancelled]
        return [queued.refused("cancelled", "cancelled before it was started") for queued in cancelled]

    def _active_of(self, client: bytes, request: str) -> list[Sequence]:
        return [sequence for sequence in self.active if (sequence.client, sequence.request) == (client, request)]

    # ---- slots -----------------------------------------------------------------------------------------------
    def give_slots(self, numerics: str) -> None:
        """Give free KV slots to queued requests, with equal shares for all owners.

        numerics: numerics in which prompts are computed now; content of slots in other numerics is not reused
        """
        while len(self._free) and (startable := self._startable()):
            slots = Counter((sequence.client, sequence.owner) for sequence in self.active)
            owners, count = (queued.owner for queued in startable), self._limits.sequences
            queued = startable[self._shares.next(owners, slots, self._present(), count)]
            shares = isinstance(queued.ask, Generate) and queued.ask.share_prefix
            claimed = self._free.take(queued.tokens, numerics, shares=shares, held=self.prompt_cache.held_tokens())
            if claimed is None:  # all free slots are being saved
                self.prompt_cache.hasten()
                return
            self.queued.remove(queued)
            if isinstance(queued.ask, Generate):
                self.active.append(self._generation(queued, queued.ask, claimed, numerics))
            else:
                self.active.append(_scoring(queued, queued.ask, claimed.slot))

    def _startable(self) -> list[Queued]:
        """Return the queued requests that may get a slot now. Suspects of the quarantine run one at a time."""
        if not any(self._quarantine.runs_apart(sequence.fingerprint) for sequence in self.active):
            return self.queued
        return [queued for queued in self.queued if not self._quarantine.runs_apart(queued.fingerprint)]

    def _present(self) -> dict[Owner, int]:
        """Return for each owner that waits or has slots the number of tokens computed for its active sequences."""
        present = dict.fromkeys((queued.owner for queued in self.queued), 0)
        for sequence in self.active:
            owner = sequence.client, sequence.owner
            present[owner] = present.get(owner, 0) + sequence.own_tokens
        return present

    def _generation(self, queued: Queued, ask: Generate, taken: TakenSlot, numerics: str) -> Generation:
        prompt_tokens, kept_tokens = len(queued.tokens), taken.kept_tokens
        # A prompt that fills the context still gets one token, which needs no position.
        room_tokens = max(self._limits.context_tokens, prompt_tokens + 1)
        return Generation(
            client=queued.client,
            request=ask.request,
            slot=taken.slot,
            arrived_at=queued.arrived_at,
            tokens=queued.tokens,
            owner=ask.owner,
            fingerprint=queued.fingerprint,
            state=taken.state,
            computed_tokens=kept_tokens,
            provenance=Provenance([(kept_tokens, numerics)] if kept_tokens else []),
            cached_tokens=kept_tokens,
            ask=ask,
            answer=queued.answer,
            stream=TextStream(self._tokenizer, queued.tokens, ask.stop, self._marks(ask)),
            prompt_tokens=prompt_tokens,
            max_total_tokens=min(room_tokens, prompt_tokens + ask.max_tokens),
            drafter=Drafter(queued.tokens) if self._drafts(queued, ask) else None,
        )

    def _drafts(self, queued: Queued, ask: Generate) -> bool:
        """Return True if tokens may be drafted for a request. A grammar decides on a token after the one before it."""
        return ask.draft and bool(self._limits.draft_tokens) and queued.answer is None

    def _marks(self, ask: Generate) -> dict[int, str]:
        return self.constraints.marks(ask) if ask.calls is not None or ask.shown_tokens else {}

    def prefix_source(self, sequence: Generation, numerics: str) -> Match | None:
        """Return the slot that has more of the prompt, in these numerics, than the sequence has computed; None if there
        is none or the request shares no prefix.

        It is called before every chunk, since sequences that arrived together may have progressed since admission.
        """
        if not sequence.ask.share_prefix or sequence.provenance.tokens_of(numerics) < sequence.computed_tokens:
            return None
        live = {
            other_sequence.slot: other_sequence.content().shared_in(numerics)
            for other_sequence in self.active
            if other_sequence is not sequence
        }
        prompt = sequence.tokens[: sequence.prompt_tokens]
        match = longest_match(prompt, {**self._free.shared_in(numerics), **live})
        if match is None or match.tokens <= sequence.computed_tokens:
            return None
        content = self._free.content(match.slot) or next(
            active.content() for active in self.active if active.slot == match.slot
        )
        tokens, state = usable_prefix(self._states, prompt, match.tokens, content, numerics)
        if tokens <= sequence.computed_tokens:
            return None
        self._free.touch(match.slot, sequence.arrived_at)
        return Match(match.slot, tokens, state)

    def next_restore(self, numerics: str) -> tuple[Generation, int] | None:
        """Return the sequence whose prompt the prompt cache is to be asked for next, and how many tokens of the prompt
        are in memory; None if there is none. It is the sequence whose prompt would be computed next."""
        sequence = next((sequence for sequence in self.active if sequence.prefilling), None)
        if not isinstance(sequence, Generation) or not self.prompt_cache.may_restore(sequence):
            return None
        match = self.prefix_source(sequence, numerics)
        available = sequence.computed_tokens if match is None else match.tokens
        is_pure = sequence.provenance.tokens_of(numerics) == sequence.computed_tokens
        if not is_pure or sequence.prompt_tokens - 1 - available < MIN_TOKENS:
            sequence.may_restore = False
            return None
        return sequence, available

    def save_prompt(self, step: OutstandingStep) -> None:
        """Have the prompt saved whose last chunk this step has computed, while its completion is generated."""
        for sequence in step.sequences:
            if isinstance(step.action.message, Prefill) and not sequence.prefilling and sequence in self.active:
                self._save(sequence)

    def _save(self, sequence: Sequence) -> None:
        if isinstance(sequence, Generation) and sequence.ask.share_prefix:
            self.prompt_cache.save(sequence.slot, sequence.content())

    def computes(self, step: OutstandingStep) -> None:
        """Record in the quarantine's ledger how far each sequence of a step, which is being sent, has come."""
        message = step.action.message
        positions = (message.position,) if isinstance(message, Prefill) else message.positions
        for sequence, position in zip(step.sequences, positions[: len(step.sequences)], strict=True):
            self._quarantine.computes(sequence.fingerprint, sequence.slot, 1 + position)

    # ---- end -------------------------------------------------------------------------------------------------
    def tell(self, sequence: Sequence, message: Message, now: float) -> Tell:
        """Return the message for a sequence's client. A final message ends the sequence and frees its slot."""
        if isinstance(message, LAST_WORDS):
            self.active.remove(sequence)
            self._free.give_back(sequence.slot, sequence.content(), now)
            if not isinstance(message, Refused) or message.code == "draining":
                self._save(sequence)
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
        """End the sequences that are cancelled or have their final message, and the scores whose client has not copied
        the logits within MAX_READING_S. No step may be outstanding. A sequence whose slot is being restored stays."""
        for sequence in self.active:
            if isinstance(sequence, Scoring) and sequence.client_reads and now - sequence.reads_since > MAX_READING_S:
                sequence.cancelled = True
        ended = [sequence for sequence in self.active if sequence.cancelled or sequence.last_message is not None]
        ended = [sequence for sequence in ended if sequence is not self.prompt_cache.restoring]
        return [self.tell(sequence, self._last_message(sequence), now) for sequence in ended]

    def _last_message(self, sequence: Sequence) -> Message:
        if sequence.last_message is not None:
            return sequence.last_message
        if isinstance(sequence, Generation):
            return sequence.finished("cancelled", self._limits)
        return sequence.refused("cancelled", "cancelled")

    def end_all(self, now: float) -> list[Tell]:
        """Refuse every request, also later ones, since the run ends."""
        self._ending = True
        queued, self.queued, self.compiling = [*self.queued, *self.compiling], [], []
        actions = [
            self.tell(sequence, sequence.last_message or sequence.refused("draining", ENDING), now)
            for sequence in [*self.active]
        ]
        return actions + [request.refused("draining", ENDING) for request in queued]


def _scoring(queued: Queued, ask: Score, slot: int) -> Scoring:
    return Scoring(
        client=queued.client,
        request=ask.request,
        slot=slot,
        arrived_at=queued.arrived_at,
        tokens=queued.tokens,
        owner=ask.owner,
        fingerprint=queued.fingerprint,
        ask=ask,
    )
