"""The requests of a run, from arrival to end: those that wait for a KV slot, and the works that have one."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from neuronpipe.protocol.messages.client import Accepted, FinishReason, RefusalCode, Refused
from neuronpipe.protocol.messages.request import Cancel, Generate, Next, Score
from neuronpipe.services.coordinator import endings
from neuronpipe.services.coordinator.admission import Admission, Limits
from neuronpipe.services.coordinator.busy import retry_after_s
from neuronpipe.services.coordinator.events import Asked, Tell
from neuronpipe.services.coordinator.grammar import Grammars
from neuronpipe.services.coordinator.prefixes import FreeSlots, Match, longest_match
from neuronpipe.services.coordinator.sequences import Generation, Scoring, Work
from neuronpipe.services.coordinator.text import TextStream, Tokenizer

READING_MOST_S = 10.0
ENDING = "the run is ending"


class Waiting(NamedTuple):
    """A request that was accepted and has no slot yet."""

    client: bytes
    ask: Generate | Score
    tokens: list[int]
    arrived_at: float


class Requests:
    """Who waits, who has which slot, and what clients are told of it."""

    def __init__(self, limits: Limits, tokenizer: Tokenizer, grammars: Grammars) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._admission = Admission(limits, tokenizer, grammars)
        self._free = FreeSlots(limits.sequences)
        self.waiting: list[Waiting] = []
        self.works: list[Work] = []
        self.cached_tokens = 0  # prompt tokens that were not computed
        self._ending = False

    @property
    def logits_are_read(self) -> bool:
        """Whether a client is copying logits out of the exchange segment: no step may overwrite them."""
        return any(isinstance(work, Scoring) and work.waiting for work in self.works)

    # ---- arrival ---------------------------------------------------------------------------------------------
    def asked(self, event: Asked, now: float) -> list[Tell]:
        """A client asks for something, or says more about what it asked for."""
        message = event.message
        if isinstance(message, Generate | Score):
            return self._admit(event.client, message, now)
        request = getattr(message, "request", None)
        for work in self.works:
            if work.client == event.client and work.request == request:
                work.cancelled |= isinstance(message, Cancel)
                if isinstance(work, Scoring) and isinstance(message, Next):
                    work.waiting = False
                    if work.computed_tokens == len(work.tokens):
                        return [self.end_score(work, now)]
        if not isinstance(message, Cancel):
            return []
        gone = [one for one in self.waiting if one.client == event.client and one.ask.request == request]
        self.waiting = [one for one in self.waiting if one not in gone]
        refused = Refused(request=message.request, code="cancelled", message="cancelled before it was started")
        return [Tell(event.client, refused) for _ in gone]

    def _admit(self, client: bytes, ask: Generate | Score, now: float) -> list[Tell]:
        """Check a request and queue it; one that is known is asked for again by a client that was not sure."""
        known = [(work.client, work.request) for work in self.works]
        known += [(one.client, one.ask.request) for one in self.waiting]
        if (client, ask.request) in known:
            return []
        if self._ending:
            return [Tell(client, Refused(request=ask.request, code="draining", message=ENDING))]
        admitted = self._admission.check(ask, len(self.waiting))
        if isinstance(admitted, Refused):
            if admitted.code == "busy":
                admitted = dataclasses.replace(admitted, retry_after_s=retry_after_s(self.works))
            return [Tell(client, admitted)]
        self.waiting.append(Waiting(client, ask, admitted, now))
        return [Tell(client, Accepted(request=ask.request, prompt_tokens=len(admitted)))]

    # ---- slots -----------------------------------------------------------------------------------------------
    def seat_waiting(self) -> None:
        """Give free KV slots to waiting requests, in order of arrival. What a slot still holds of a text stays."""
        while self.waiting and self._free.contents:
            one = self.waiting.pop(0)
            shares = isinstance(one.ask, Generate) and one.ask.share_prefix
            place = self._free.take(one.tokens, shares=shares)
            assert place is not None
            if isinstance(one.ask, Generate):
                self.works.append(generation := self._generation(one, one.ask, place.slot))
                self.reuse(generation, place.kept_tokens)
            else:
                self.works.append(
                    Scoring(
                        client=one.client,
                        request=one.ask.request,
                        slot=place.slot,
                        arrived_at=one.arrived_at,
                        tokens=one.tokens,
                        ask=one.ask,
                    )
                )

    def _generation(self, one: Waiting, ask: Generate, slot: int) -> Generation:
        return Generation(
            client=one.client,
            request=ask.request,
            slot=slot,
            arrived_at=one.arrived_at,
            tokens=one.tokens,
            ask=ask,
            grammar=self._grammars.start(ask.grammar) if ask.grammar is not None else None,
            stream=TextStream(self._tokenizer, one.tokens, ask.stop),
            prompt_tokens=len(one.tokens),
            # A prompt that fills the context still has its one token, which needs no position.
            most_tokens=min(max(self._limits.context_tokens, len(one.tokens) + 1), len(one.tokens) + ask.max_tokens),
        )

    def reuse(self, work: Generation, tokens: int) -> None:
        """So many more tokens of a text have keys and values that another text computed."""
        work.computed_tokens += tokens
        work.cached_tokens += tokens
        self.cached_tokens += tokens

    def lender(self, work: Generation) -> Match | None:
        """The slot, of a text or free, that holds more of the prompt than was computed. Asked before every chunk: the
        texts that came together with this one have got on since it was admitted."""
        if not work.ask.share_prefix:
            return None
        live = {other.slot: other.tokens[: other.computed_tokens] for other in self.works if other is not work}
        match = longest_match(work.tokens[: work.prompt_tokens], {**self._free.contents, **live})
        if match is None or match.tokens <= work.computed_tokens:
            return None
        self._free.touch(match.slot)
        return match

    # ---- end -------------------------------------------------------------------------------------------------
    def end_cancelled(self, now: float) -> list[Tell]:
        """End what nobody wants any more, scores among it whose client is gone, or stands still while all wait."""
        for work in self.works:
            if isinstance(work, Scoring) and work.waiting and now - work.waiting_since > READING_MOST_S:
                work.cancelled = True
        told: list[Tell] = []
        for work in [work for work in self.works if work.cancelled]:
            if isinstance(work, Generation):
                told.append(self.end_text(work, "cancelled"))
            else:
                told.append(self.refuse(work, "cancelled", "cancelled"))
        return told

    def end_text(self, work: Generation, reason: FinishReason) -> Tell:
        """A text is complete, or not wanted any more."""
        self._drop(work)
        return Tell(work.client, endings.finished(work, reason, self._limits))

    def end_score(self, work: Scoring, now: float) -> Tell:
        """All of a score was read."""
        self._drop(work)
        return Tell(work.client, endings.score_finished(work, now))

    def end_all(self) -> list[Tell]:
        """The run ends: who has a slot, who waits, and who asks from now on is told so."""
        self._ending = True
        waiting, self.waiting = self.waiting, []
        told = [self.refuse(work, "draining", ENDING) for work in [*self.works]]
        return told + [
            Tell(one.client, Refused(request=one.ask.request, code="draining", message=ENDING)) for one in waiting
        ]

    def refuse(self, work: Work, code: RefusalCode, message: str) -> Tell:
        """A work cannot go on."""
        self._drop(work)
        return Tell(work.client, Refused(request=work.request, code=code, message=message))

    def _drop(self, work: Work) -> None:
        self.works.remove(work)
        self._free.give_back(work.slot, work.tokens[: work.computed_tokens])
