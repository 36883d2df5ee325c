"""The coordinator's decisions, without sockets and without a clock: `handle(event, now) -> actions`.

One step is outstanding at a time, a prefill chunk or a decode step over every generating sequence:

    state       event                       next
    idle        work is ready               step sent, every member of the step busy
    busy        StepDone of every member    logits read: Sample or Likelihoods; its answer makes the core idle
    busy        EpochChanged                void: wait until every member left the step and every seat is ready
    void        all settled                 the same step again, under the new epoch
    idle        Leaving                     Dismiss: no step before the seats have other processes that are ready

A step is the same every time it is sent: tokens and positions are kept until it is done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from neuronpipe.protocol.messages.client import (
    Accepted,
    Finished,
    Refused,
    Scored,
    ScoreFinished,
    Token,
)
from neuronpipe.protocol.messages.request import Cancel, Generate, Next, Score
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.coordinator import drawing
from neuronpipe.services.coordinator.admission import Admission, Limits
from neuronpipe.services.coordinator.events import (
    Abandon,
    Action,
    Asked,
    Broken,
    Dismiss,
    Eased,
    EpochChanged,
    Event,
    Leaving,
    Left,
    Likelihoods,
    Measured,
    Sample,
    Sampled,
    Seat,
    SeatReady,
    SendStep,
    Tell,
    Tick,
)
from neuronpipe.services.coordinator.grammar import Grammars
from neuronpipe.services.coordinator.prefixes import FreeSlots, Match, longest_match
from neuronpipe.services.coordinator.rest import Rest
from neuronpipe.services.coordinator.sequences import Cost, Generation, Scoring, Work, add_cost, quantiles_ms
from neuronpipe.services.coordinator.text import TextStream, Tokenizer

READING_MOST_S = 10.0
BESIDE_DECODE_TOKENS = 64  # of a prompt, at a time, while other texts wait for their next token


class Core:
    """Requests, sequences and the one outstanding step."""

    def __init__(self, limits: Limits, seats: Iterable[Seat], tokenizer: Tokenizer, grammars: Grammars) -> None:
        self._limits = limits
        self._seats = frozenset(seats)
        self._decoders = tuple(sorted(seat for seat in self._seats if seat[0] == "decode"))
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._admission = Admission(limits, tokenizer, grammars)
        self.ready: set[Seat] = set()
        self.waiting: list[tuple[bytes, Generate | Score, list[int], float]] = []
        self.works: list[Work] = []
        self._free = FreeSlots(limits.sequences)
        self.cached_tokens = 0  # prompt tokens that were not computed
        self._texts: dict[int, TextStream] = {}
        self.epoch = 0
        self.steps = 0
        self.rest = Rest()
        self._outstanding: SendStep | None = None
        self._outstanding_works: list[Work] = []
        self._cost: Cost = {}  # of the outstanding step, this time it was sent
        self._busy: set[Seat] = set()
        self._leaving: frozenset[Seat] = frozenset()
        self._void = False
        self._reading = False
        self._prefill_turn = True
        self._score_turn = False

    @property
    def all_ready(self) -> bool:
        """Whether every seat of the plan is taken by a process that is ready."""
        return self.ready >= self._seats

    @property
    def busy(self) -> bool:
        """Whether a step is outstanding."""
        return self._outstanding is not None

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event; returns what the shell is to do, in order."""
        actions: list[Action] = []
        match event:
            case Asked():
                actions += self._asked(event, now)
            case SeatReady(seat):
                self.ready.add(seat)
            case EpochChanged(epoch, lost):
                self.epoch = epoch
                self.ready -= set(lost)
                self._leaving -= set(lost)
                self._busy -= set(lost)
                self._void = self._outstanding is not None and not self._reading
            case Leaving(seats):
                self._leaving = seats
            case Left():
                actions += self._left(event)
            case Broken():
                actions += self._broken(event)
            case Sampled():
                self._account(event.cost)
                actions += self._sampled(event, now)
            case Measured(nll):
                actions += self._measured(nll, now)
            case Eased(share, until):
                self.rest.ask(share, until)
            case Tick():
                pass
        return actions + self._proceed(now)

    # ---- requests --------------------------------------------------------------------------------------------
    def _asked(self, event: Asked, now: float) -> list[Action]:
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
                        return self._score_finished(work, now)
        if not isinstance(message, Cancel):
            return []
        gone = [w for w in self.waiting if w[0] == event.client and w[1].request == request]
        self.waiting = [w for w in self.waiting if w not in gone]
        refused = Refused(request=message.request, code="cancelled", message="cancelled before it was started")
        return [Tell(event.client, refused) for _ in gone]

    def _admit(self, client: bytes, ask: Generate | Score, now: float) -> list[Action]:
        """Check a request and queue it; one that is known is asked for again by a client that was not sure."""
        known = [(work.client, work.request) for work in self.works] + [(w[0], w[1].request) for w in self.waiting]
        if (client, ask.request) in known:
            return []
        admitted = self._admission.check(ask, len(self.waiting))
        if isinstance(admitted, Refused):
            return [Tell(client, admitted)]
        self.waiting.append((client, ask, admitted, now))
        return [Tell(client, Accepted(request=ask.request, prompt_tokens=len(admitted)))]

    def _seat_waiting(self) -> None:
        """Give free KV slots to waiting requests, in order of arrival. What a slot still holds of a text stays."""
        while self.waiting and self._free.contents:
            client, ask, tokens, arrived_at = self.waiting.pop(0)
            place = self._free.take(tokens, shares=isinstance(ask, Generate) and ask.share_prefix)
            assert place is not None
            slot, kept = place
            work: Work
            if isinstance(ask, Generate):
                most = min(self._limits.context_tokens + 1, len(tokens) + ask.max_tokens)
                work = Generation(
                    client=client,
                    request=ask.request,
                    slot=slot,
                    arrived_at=arrived_at,
                    tokens=tokens,
                    ask=ask,
                    grammar=self._grammars.start(ask.grammar) if ask.grammar is not None else None,
                    computed_tokens=kept,
                    prompt_tokens=len(tokens),
                    most_tokens=most,
                    cached_tokens=kept,
                )
                self.cached_tokens += kept
                self._texts[slot] = TextStream(self._tokenizer, tokens, ask.stop)
            else:
                work = Scoring(
                    client=client, request=ask.request, slot=slot, arrived_at=arrived_at, tokens=tokens, ask=ask
                )
            self.works.append(work)

    # ---- steps -----------------------------------------------------------------------------------------------
    def _proceed(self, now: float) -> list[Action]:
        """Send the next step, or the voided one again, when nothing stands against it."""
        if self._leaving and self._outstanding is None and not self._reading:
            gone = self._leaving & self.ready
            self.ready -= gone
            self._leaving -= gone
            return [Dismiss(seat) for seat in sorted(gone)]
        if self._reading or not self.all_ready:
            return []
        if self._outstanding is not None:
            if not self._void or self._busy:
                return []
            self._void = False
            if not self._outstanding_works:  # everybody in it was refused or went away
                self._outstanding = None
                return self._proceed(now)
            message = dataclasses.replace(self._outstanding.message, epoch=self.epoch)
            return self._send(SendStep(self._outstanding.seats, message), self._outstanding_works)
        actions: list[Action] = []
        for work in self.works:
            if isinstance(work, Scoring) and work.waiting and now - work.waiting_since > READING_MOST_S:
                work.cancelled = True  # its client is gone, or stands still while everybody waits
        for work in [w for w in self.works if w.cancelled]:
            actions += self._finish(work, "cancelled", now)
        self._seat_waiting()
        if any(isinstance(w, Scoring) and w.waiting for w in self.works):
            return actions  # a client is copying logits out of the exchange segment: no step may overwrite them
        if now < self.rest.resume_at:
            return actions
        self.rest.step_begins(now)
        prefills = [w for w in self.works if self._wants_prefill(w)]
        decodes = [w for w in self.works if self._wants_decode(w)]
        if prefills and (self._prefill_turn or not decodes):
            self._prefill_turn = False
            return actions + self._send_prefill(prefills[0], beside_decode=bool(decodes))
        self._prefill_turn = True
        scorings = [w for w in decodes if isinstance(w, Scoring)]
        texts = [w for w in decodes if not isinstance(w, Scoring)]
        self._score_turn = bool(scorings) and (self._score_turn or not texts)
        # Logits of a score are read row by row, so it has a step to itself.
        batch: list[Work] = [*scorings[:1]] if self._score_turn else texts
        self._score_turn = not self._score_turn
        return actions + (self._send_decode(batch) if batch else [])

    @staticmethod
    def _wants_prefill(work: Work) -> bool:
        if isinstance(work, Scoring):
            return work.ask.path == "prefill"
        return isinstance(work, Generation) and work.prefilling

    @staticmethod
    def _wants_decode(work: Work) -> bool:
        if isinstance(work, Scoring):
            return work.ask.path == "decode"
        return isinstance(work, Generation) and not work.prefilling

    def _send_prefill(self, work: Work, *, beside_decode: bool) -> list[Action]:
        first = work.computed_tokens
        copy_from: int | None = None
        if isinstance(work, Scoring):
            chunk = list(work.next_chunk(self._limits.logit_rows))
            logits: Literal["none", "last", "all"] = "all"
        else:
            assert isinstance(work, Generation)
            match = self._match(work)
            if match is not None:
                copy_from, first = match
                self._free.touch(copy_from)
            most = self._limits.prefill_chunk_tokens
            most = min(most, BESIDE_DECODE_TOKENS) if beside_decode else most
            chunk = work.tokens[first : min(work.prompt_tokens, first + most)]
            logits = "last" if first + len(chunk) == work.prompt_tokens else "none"
        self.steps += 1
        message = Prefill(
            step=self.steps,
            epoch=self.epoch,
            sequence=work.slot,
            position=first,
            tokens=tuple(chunk),
            logits=logits,
            copy_from=copy_from,
        )
        return self._send(SendStep((("prefill", 0),), message), [work])

    def _match(self, work: Generation) -> Match | None:
        """The slot, of a text or free, that holds more of the prompt than was computed. Asked before every chunk: the
        texts that came together with this one have got on since it was admitted."""
        if not work.ask.share_prefix:
            return None
        live = {other.slot: other.tokens[: other.computed_tokens] for other in self.works if other is not work}
        match = longest_match(work.tokens[: work.prompt_tokens], {**self._free.contents, **live})
        return match if match is not None and match.tokens > work.computed_tokens else None

    def _send_decode(self, works: list[Work]) -> list[Action]:
        works = works[: self._limits.logit_rows]
        self.steps += 1
        message = Step(
            step=self.steps,
            epoch=self.epoch,
            sequences=tuple(w.slot for w in works),
            positions=tuple(w.computed_tokens for w in works),
            tokens=tuple(w.tokens[w.computed_tokens] for w in works),
        )
        return self._send(SendStep(self._decoders, message), works)

    def _send(self, action: SendStep, works: list[Work]) -> list[Action]:
        self._outstanding, self._outstanding_works = action, works
        self._busy = set(action.seats)
        self._cost = {}
        return [action]

    def _left(self, event: Left) -> list[Action]:
        """A member left a step. Only the outstanding step under its own epoch counts as done."""
        sent = self._outstanding
        if sent is None or event.step != sent.message.step or event.epoch != sent.message.epoch:
            return []
        self._busy.discard(event.seat)
        if not event.done:
            self._void = True
        add_cost(self._cost, {**event.counters, "answers": 1.0})
        if not event.done and event.epoch == self.epoch:
            return [Abandon()]  # it gave up by itself: the others would wait for it at the barrier
        if self._busy or self._void:
            return []
        return self._read_logits(sent.message)

    def _read_logits(self, message: Step | Prefill) -> list[Action]:
        """Every member is done: advance the works, and ask for what their logits say."""
        self._reading = True
        count = len(message.tokens) if isinstance(message, Prefill) else 1
        for work in self._outstanding_works:
            if isinstance(message, Prefill) and isinstance(work, Generation):
                copied = message.position - work.computed_tokens
                work.cached_tokens += copied
                self.cached_tokens += copied
                work.computed_tokens = message.position
            work.computed_tokens += count
        first = self._outstanding_works[0]
        if isinstance(first, Scoring):
            targets = first.tokens[first.computed_tokens - count + 1 : first.computed_tokens + 1]
            return [Likelihoods(tuple(targets))]
        rows = range(len(self._outstanding_works))
        if isinstance(message, Prefill) and message.logits == "none":
            rows = range(0)
        return [
            Sample(tuple(drawing.draw_of(row, self._outstanding_works[row], self._limits.end_tokens) for row in rows))
        ]

    def _account(self, measured: dict[str, float]) -> None:
        """The step is done: it goes to the account of everyone in it."""
        assert self._outstanding is not None
        message = self._outstanding.message
        add_cost(self._cost, {**measured, "steps": 1.0, "tokens": float(len(message.tokens))})
        for work in self._outstanding_works:
            if isinstance(work, Generation):
                add_cost(work.prefill_cost if isinstance(message, Prefill) else work.decode_cost, self._cost)

    def _take_step(self, now: float) -> list[Work]:
        self.rest.step_ends(now)
        works, self._outstanding_works, self._outstanding, self._reading = self._outstanding_works, [], None, False
        return works

    # ---- results ---------------------------------------------------------------------------------------------
    def _sampled(self, event: Sampled, now: float) -> list[Action]:
        works = self._take_step(now)
        actions: list[Action] = []
        for number, (work, token) in enumerate(zip(works, event.tokens, strict=False)):
            assert isinstance(work, Generation)
            try:
                complete = drawing.follow(work, token, self._limits.end_tokens)
            except drawing.Undrawable as trouble:
                self._drop(work)
                actions.append(
                    Tell(work.client, Refused(request=work.request, code=trouble.code, message=str(trouble)))
                )
                continue
            work.token_times.append(now)
            ended = token in self._limits.end_tokens
            work.tokens.append(token)
            stream = self._texts[work.slot]
            text = "" if ended else stream.push(token)
            reason = None
            if ended:
                reason = "end"
            elif stream.stopped:
                reason = "stop"
            elif complete:
                reason = "end"
            elif len(work.tokens) >= work.most_tokens:
                reason = "context" if len(work.tokens) > self._limits.context_tokens else "length"
            if reason:
                text += stream.finish()
            ms = 1000 * (now - (work.token_times[-2] if len(work.token_times) > 1 else work.arrived_at))
            said = Token(request=work.request, index=work.generated_tokens - 1, token=token, text=text, ms=round(ms, 3))
            if number in event.ratings:
                said = drawing.rated(said, event.ratings[number], self._tokenizer.piece)
            actions.append(Tell(work.client, said))
            if reason:
                actions += self._finish(work, reason, now)
        return actions

    def _measured(self, nll: tuple[float, ...], now: float) -> list[Action]:
        (work,) = self._take_step(now)
        assert isinstance(work, Scoring)
        work.total_nll += sum(nll)
        last = work.computed_tokens >= len(work.tokens)
        rows = len(nll) + last  # the text's last token has logits and no target
        work.waiting, work.waiting_since = work.ask.logits, now
        scored = Scored(request=work.request, position=work.computed_tokens - rows, row=0, rows=rows, nll=nll)
        actions: list[Action] = [Tell(work.client, scored)]
        if last and not work.waiting:
            actions += self._score_finished(work, now)
        return actions

    def _score_finished(self, work: Scoring, now: float) -> list[Action]:
        self._drop(work)
        targets = len(work.tokens) - 1
        mean = work.total_nll / targets if targets else 0.0
        seconds = round(now - work.arrived_at, 3)
        return [Tell(work.client, ScoreFinished(request=work.request, tokens=targets, nll_mean=mean, seconds=seconds))]

    def _broken(self, event: Broken) -> list[Action]:
        """The step cannot be computed: its requests are refused, everybody else goes on."""
        sent = self._outstanding
        if sent is None or event.step != sent.message.step or event.epoch != sent.message.epoch:
            return []
        actions: list[Action] = []
        for work in self._outstanding_works:
            self._drop(work)
            actions.append(Tell(work.client, Refused(request=work.request, code="failed", message=event.message)))
        self._outstanding_works = []
        self._busy.discard(event.seat)
        return [*actions, Abandon()]

    def _drop(self, work: Work) -> None:
        self.works.remove(work)
        self._texts.pop(work.slot, None)
        self._free.give_back(work.slot, work.tokens[: work.computed_tokens])

    def _finish(self, work: Work, reason: str, now: float) -> list[Action]:
        text = self._texts[work.slot].shown if work.slot in self._texts else ""
        self._drop(work)
        if not isinstance(work, Generation):
            return [Tell(work.client, Refused(request=work.request, code="cancelled", message="cancelled"))]
        times = work.token_times
        span_s = times[-1] - times[0] if len(times) > 1 else 0.0
        finished = Finished(
            request=work.request,
            reason=reason,  # type: ignore[arg-type]
            text=text,
            tokens=work.generated_tokens,
            prompt_tokens=work.prompt_tokens,
            cached_tokens=work.cached_tokens,
            ttft_ms=round(1000 * (times[0] - work.arrived_at), 3) if times else 0.0,
            tokens_per_s=round((len(times) - 1) / span_s, 2) if span_s > 0 else 0.0,
            tbt_ms=quantiles_ms(times),
            memory={},
            flash={},
            prefill=dict(work.prefill_cost),
            decode=dict(work.decode_cost),
            plan=self._limits.plan_id,
            mode=self._limits.mode,
        )
        return [Tell(work.client, finished)]
