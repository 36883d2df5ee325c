"""The coordinator's decisions, without sockets and without a clock: `handle(event, now) -> actions`.

One step is outstanding at a time, a prefill chunk or a decode step over every generating sequence:

    state   event                           next
    idle    a sequence can go on            step sent, every participant of the step busy
    busy    StepLeft of every participant   SampleTokens or ScoreTokens; its answer makes the scheduler idle
    busy    EpochChanged                    void: wait until every participant left the step
    void    all settled                     the same step again, under the new epoch, to who is ready now
    idle    Leaving                         Dismiss: no step before they are gone

Once all processes were ready, loader and cache belong to every step, the prefill worker to prompts, and of the decode
workers those that are ready: who is started again or replaced is not waited for. `Workers` says who can take part,
`StepBuilder` what the next step is, `OutstandingStep` how the one under way stands, `Throttle` when there is a pause.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal

from neuronpipe.plans.plan.plan import ACCELERATOR
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.coordinator.admission import Limits
from neuronpipe.services.coordinator.detokenizer import Tokenizer
from neuronpipe.services.coordinator.events import (
    Abandon,
    Action,
    Ahead,
    Dismiss,
    Ending,
    EpochChanged,
    Event,
    Leaving,
    MemoryReleased,
    MemoryReserved,
    ProcessKey,
    ProcessReady,
    RequestReceived,
    SampleTokens,
    SendStep,
    StepFailed,
    StepLeft,
    Tell,
    ThrottleChanged,
    Tick,
    TokensSampled,
    TokensScored,
)
from neuronpipe.services.coordinator.grammar import Grammars
from neuronpipe.services.coordinator.prefixes import Match
from neuronpipe.services.coordinator.processes import CACHE, PREFILL, Participants, Workers
from neuronpipe.services.coordinator.requests import Cost, Generation, Requests, Scoring, Sequence, add_cost
from neuronpipe.services.coordinator.results import Outcome, Results
from neuronpipe.services.lending.reservation import Reservation

BESIDE_DECODE_TOKENS = 64  # of a prompt, at a time, while other texts wait for their next token


class Scheduler:
    """The processes, the epoch and the one outstanding step."""

    def __init__(
        self,
        limits: Limits,
        processes: Iterable[ProcessKey],
        tokenizer: Tokenizer,
        grammars: Grammars,
        reservation: Reservation | None = None,
    ) -> None:
        self._limits, self.workers = limits, Workers(frozenset(processes))
        self.requests = Requests(limits, tokenizer, grammars)
        self._results = Results(limits, tokenizer)
        self._builder = StepBuilder(limits, self.workers, self.requests.prefix_source)
        self.throttle = Throttle()
        self._reservation = reservation or Reservation(None, ())
        self.epoch = 0
        self._leaving: frozenset[ProcessKey] = frozenset()
        self._dismissed: frozenset[ProcessKey] = frozenset()  # and not gone yet
        self._step: OutstandingStep | None = None

    @property
    def busy(self) -> bool:
        """Whether a step is outstanding."""
        return self._step is not None

    @property
    def steps(self) -> int:
        """How many steps there were; one that is sent again is the same step."""
        return self._builder.steps

    def wants_tick(self, now: float) -> bool:
        """Whether something may be due though nothing happened: a text to go on with, or memory to give back."""
        return not self.busy and (bool(self.requests.active) or self._reservation.may_release(now))

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event; returns what is to be done, in order: workers first, who compute while clients are told."""
        actions = self._take(event, now) + self._proceed(now)
        return sorted(actions, key=lambda action: isinstance(action, Tell))

    def ahead(self, now: float) -> Ahead | None:
        """What follows the step under way if nothing happens before it is done; None where that is not known yet."""
        step, texts = self._step, self.requests.going_on()
        if step is None or texts is None or step.sequences != texts or not step.undisturbed:
            return None
        if self._leaving or self._dismissed or not self.workers.memory_served or self.throttle.share(now):
            return None
        if self.workers.decoders() != step.action.processes or not self._has_memory(step.action.message, 1):
            return None
        rows = self._results.wanted(step.action.message, step.sequences)
        assert isinstance(rows, SampleTokens)
        positions = tuple(len(text.tokens) for text in texts)
        return Ahead(rows.rows, self.steps + 1, positions, tuple(self._limits.end_tokens))

    def _take(self, event: Event, now: float) -> list[Action]:
        match event:
            case RequestReceived():
                return [*self.requests.received(event, now)]
            case ProcessReady(process, numerics, minor):
                self.workers.is_ready(process, numerics, minor)
                self._dismissed -= {process}  # this is its successor
                return [*self._reservation.ask_again()] if process == CACHE else []
            case EpochChanged():
                self._epoch_changed(event)
            case Leaving(processes):
                self._leaving = processes
            case StepLeft():
                return self._step_left(event)
            case StepFailed():
                return self._step_failed(event, now)
            case TokensSampled():
                step = self._end_step(now)
                step.account(event.cost)
                return self._tell(self._results.sampled(step.sequences, event, now), now)
            case TokensScored():
                (sequence,) = self._end_step(now).sequences
                return self._tell(self._results.scored(sequence, event, now), now)
            case MemoryReserved(number):
                self._reservation.reserved(number)
            case MemoryReleased():
                return [*self._reservation.released()]
            case ThrottleChanged(share, until):
                self.throttle.set(share, until)
            case Ending():
                self._step = None
                return [*self.requests.end_all(now)]
            case Tick():
                pass
        return []

    def _tell(self, outcomes: list[Outcome], now: float) -> list[Action]:
        return [self.requests.tell(sequence, message, now) for sequence, message in outcomes]

    # ---- the outstanding step --------------------------------------------------------------------------------
    def _epoch_changed(self, event: EpochChanged) -> None:
        self.epoch = event.epoch
        self.workers.lost(event.lost)
        if PREFILL in event.lost:
            self._reservation.prefill_lost()
        self._leaving -= set(event.lost)
        self._dismissed -= set(event.lost)
        if self._step is not None:
            self._step.epoch_changed(event.lost)

    def _step_left(self, event: StepLeft) -> list[Action]:
        """A participant left a step. Only the outstanding step under its own epoch counts as done."""
        step = self._step
        if step is None or not step.is_meant(event):
            return []
        step.left(event)
        if not event.done and event.epoch == self.epoch:
            return [Abandon()]  # it gave up by itself: the others would wait for it at the barrier
        if not step.computed:
            return []
        step.read()
        return [self._results.wanted(step.action.message, step.sequences, event.ratings)]

    def _step_failed(self, event: StepFailed, now: float) -> list[Action]:
        """The step cannot be computed: its requests are refused, everybody else goes on."""
        step = self._step
        if step is None or not step.is_meant(event):
            return []
        told = self._tell([(one, one.refused("failed", event.message)) for one in step.sequences], now)
        step.failed(event.process)
        return [Abandon(), *told]

    def _end_step(self, now: float) -> OutstandingStep:
        """The logits have been read."""
        step, self._step = self._step, None
        assert step is not None
        self.throttle.step_ends(now)
        return step

    # ---- the next step ---------------------------------------------------------------------------------------
    def _proceed(self, now: float) -> list[Action]:
        """Send the next step, or the voided one again, when nothing stands against it."""
        if self._step is not None and not self._step.abandoned:
            return []
        if self._leaving and self._step is None:
            return self._dismiss()
        if self._dismissed or not self.workers.memory_served:
            return []
        if self._step is not None:
            return self._send_again(self._step, now)
        actions: list[Action] = [*self.requests.end_cancelled(now)]
        if self._reservation.may_release(now) and self.workers.releases:
            actions.append(self._reservation.release(self.requests.used_tokens(now)))
        if (numerics := self.workers.prefill_numerics) is not None:
            self.requests.give_slots(numerics)
        if self.requests.client_reads or now < self.throttle.resume_at:
            return actions
        step = self._builder.next_step(self.requests.active, self.epoch)
        if step is None:
            return actions
        self.throttle.step_begins(now)
        return [*self._send(step, now), *actions]

    def _dismiss(self) -> list[Action]:
        gone = self._leaving & self.workers.ready.keys()
        self.workers.lost(gone)
        self._leaving -= gone
        self._dismissed |= gone
        return [Dismiss(process) for process in sorted(gone)]

    def _send_again(self, step: OutstandingStep, now: float) -> list[Action]:
        participants = self.workers.participants(step.action.message)
        if step.sequences and not participants:
            return []
        if step.sequences and self.workers.numerics_of(participants) == step.numerics:
            return self._send(step.again(self.epoch, self._builder, participants), now)
        self._step = None  # everybody in it was refused or went away; or it would be computed otherwise: begin it anew
        return self._proceed(now)

    def _send(self, step: OutstandingStep, now: float) -> list[Action]:
        """Once it has its memory; until then it is one to be sent again."""
        self._step = step
        if not self._has_memory(message := step.action.message, 0):
            step.put_off()
            return [*self._reservation.ask(message)]
        self._reservation.sent(message, now)
        return [step.action]

    def _has_memory(self, message: Step | Prefill, later: int) -> bool:
        return not self.workers.lends or self._reservation.covers(message, later)


class OutstandingStep:
    """A step from when it is sent until its logits were read. Tokens and positions stay, however often it is sent.

    sequences: in the order of the logit rows; none where all were refused
    numerics: of its participants
    """

    def __init__(self, action: SendStep, sequences: list[Sequence], numerics: str) -> None:
        self.action = action
        self.numerics = numerics
        self.sequences = sequences
        self._reading = False  # every participant is done, and the service looks at the logits
        self._void = False
        self._busy: set[ProcessKey] = set(action.processes)
        self._cost: Cost = {}  # this time it was sent

    @property
    def abandoned(self) -> bool:
        """Whether it does not count, and every participant has left it: it may be sent again."""
        return self._void and not self._busy and not self._reading

    @property
    def computed(self) -> bool:
        """Whether it counts, and every participant is done."""
        return not self._void and not self._busy

    @property
    def undisturbed(self) -> bool:
        """Whether it is a decode step that counts so far."""
        return isinstance(self.action.message, Step) and not self._void and not self._reading

    def again(self, epoch: int, builder: StepBuilder, participants: Participants) -> OutstandingStep:
        """The same step under the present epoch, computed by these."""
        message = dataclasses.replace(self.action.message, epoch=epoch)
        if isinstance(message, Step):
            message = dataclasses.replace(message, **builder.shares(participants, texts=len(message.tokens)))
        return OutstandingStep(SendStep(participants, message), self.sequences, self.numerics)

    def put_off(self) -> None:
        """It is not sent yet."""
        self._busy, self._void = set(), True

    def is_meant(self, event: StepLeft | StepFailed) -> bool:
        """Whether a participant that has not left yet speaks of this step, as it was last sent."""
        attempt = self.action.message.step, self.action.message.epoch
        return (event.step, event.epoch) == attempt and event.process in self._busy

    def epoch_changed(self, lost: Iterable[ProcessKey]) -> None:
        """Everybody leaves. Where all were done before that, it counts nevertheless."""
        self._busy -= set(lost)
        self._void = not self._reading

    def left(self, event: StepLeft) -> None:
        """A participant is through with it."""
        self._busy.discard(event.process)
        self._void |= not event.done
        add_cost(self._cost, {**event.counters, "answers": 1.0})

    def failed(self, process: ProcessKey) -> None:
        """A participant cannot compute it; its clients have been told."""
        self.sequences = []
        self._busy.discard(process)

    def read(self) -> None:
        """Every participant is done: the sequences have more keys and values now, and the logits are to be read."""
        self._reading = True
        message = self.action.message
        if isinstance(message, Prefill):
            self.sequences[0].advance(message.position, len(message.tokens), self.numerics)
        else:
            for sequence, position in zip(self.sequences, message.positions, strict=True):
                sequence.advance(position, 1, self.numerics)

    def account(self, measured: Cost) -> None:
        """Add what it took to the account of every text in it. measured: by the service."""
        message = self.action.message
        add_cost(self._cost, {**measured, "steps": 1.0, "tokens": float(len(message.tokens))})
        for sequence in self.sequences:
            if isinstance(sequence, Generation):
                add_cost(sequence.prefill_cost if isinstance(message, Prefill) else sequence.decode_cost, self._cost)


class StepBuilder:
    """What the next step is: prompts and texts in turn, a score's step to itself.

    workers: who can take part
    prefix_source: the slot from which the next chunk of a prompt may copy keys and values of these numerics
    """

    def __init__(
        self, limits: Limits, workers: Workers, prefix_source: Callable[[Generation, str], Match | None]
    ) -> None:
        self._limits = limits
        self._workers = workers
        self._prefix_source = prefix_source
        self._prefill_turn = True
        self._score_turn = False
        self.steps = 0

    def next_step(self, sequences: list[Sequence], epoch: int) -> OutstandingStep | None:
        """The next step for these sequences, under that epoch; None when there is nothing that can be done."""
        decoders, numerics = self._workers.decoders(), self._workers.prefill_numerics
        prefills = [one for one in sequences if one.prefilling]
        decodes = [one for one in sequences if not one.prefilling] if decoders else []
        if numerics is not None and prefills and (self._prefill_turn or not decodes):
            self._prefill_turn = False
            return self._prefill(prefills[0], epoch, numerics, beside_decode=bool(decodes))
        self._prefill_turn = True
        batch = self._decode_batch(decodes)
        return self._decode(batch, epoch, decoders) if batch else None

    def shares(self, participants: Participants, *, texts: int) -> dict[str, Any]:
        """The fields of `Step` that say what is whose, with so many texts."""
        holds = [role == ACCELERATOR for role, _ in participants]
        names = tuple(f"{role}.{index}" for role, index in participants)
        return {"participants": names, **self._limits.shares(holds, texts)}

    def _decode_batch(self, decodes: list[Sequence]) -> list[Sequence]:
        """All texts, or one score: logits of a score are read row by row, so it has a step to itself."""
        scores = [one for one in decodes if isinstance(one, Scoring)]
        texts = [one for one in decodes if not isinstance(one, Scoring)]
        score_turn = bool(scores) and (self._score_turn or not texts)
        self._score_turn = not score_turn
        return [*scores[:1]] if score_turn else texts[: self._limits.logit_rows]

    def _prefill(self, sequence: Sequence, epoch: int, numerics: str, *, beside_decode: bool) -> OutstandingStep:
        first, copy_from, targets = sequence.computed_tokens, None, tuple[int, ...]()
        limit_tokens = self._limits.prefill_chunk_tokens
        max_tokens = min(limit_tokens, BESIDE_DECODE_TOKENS) if beside_decode else limit_tokens
        logits: Literal["none", "last", "all"]
        if isinstance(sequence, Scoring):
            rated_tokens = max_tokens if self._workers.rates else 0
            chunk, targets, logits = sequence.next_chunk(rated_tokens, self._limits.logit_rows)
        else:
            assert isinstance(sequence, Generation)
            if (match := self._prefix_source(sequence, numerics)) is not None:
                copy_from, first = match
            chunk = sequence.tokens[first : min(sequence.prompt_tokens, first + max_tokens)]
            logits = "last" if first + len(chunk) == sequence.prompt_tokens else "none"
        self.steps += 1
        message = Prefill(
            step=self.steps,
            epoch=epoch,
            sequence=sequence.slot,
            position=first,
            tokens=tuple(chunk),
            logits=logits,
            copy_from=copy_from,
            targets=targets,
            likely=sequence.likely if targets else 0,
        )
        return OutstandingStep(SendStep((PREFILL,), message), [sequence], numerics)

    def _decode(self, batch: list[Sequence], epoch: int, participants: Participants) -> OutstandingStep:
        self.steps += 1
        message = Step(
            step=self.steps,
            epoch=epoch,
            **self.shares(participants, texts=len(batch)),
            sequences=tuple(one.slot for one in batch),
            positions=tuple(one.computed_tokens for one in batch),
            tokens=tuple(one.tokens[one.computed_tokens] for one in batch),
        )
        return OutstandingStep(SendStep(participants, message), batch, self._workers.numerics_of(participants))


class Throttle:
    """Pauses between steps, for a device that is too hot.

    A pause is as long as the step before it times share / (1 - share), so that fast and slow models pause alike. What
    was asked for ends by itself: whoever watches the temperature asks again in time, and one that died slows nobody
    for long.
    """

    def __init__(self) -> None:
        self._share = 0.0
        self._until = 0.0
        self._began_at = 0.0
        self.resume_at = 0.0

    def share(self, now: float) -> float:
        """The share of the time that is spent in pauses, 0..1."""
        return self._share if now < self._until else 0.0

    def set(self, share: float, until: float) -> None:
        """From now on, and until then, pause for that share of the time."""
        self._share, self._until = share, until
        self.resume_at = self.resume_at if share else 0.0

    def step_begins(self, now: float) -> None:
        """A step is sent."""
        self._began_at = now

    def step_ends(self, now: float) -> None:
        """It is done: the pause begins."""
        share = self.share(now)
        self.resume_at = now + (now - self._began_at) * share / (1 - share) if share else 0.0
