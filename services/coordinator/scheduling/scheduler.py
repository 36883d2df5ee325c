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

from collections.abc import Iterable

from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.coordinator.scheduling.admission import Limits
from neuronpipe.services.coordinator.scheduling.events import (
    Abandon,
    Action,
    Ahead,
    AnswersKnown,
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
    StepFailed,
    StepLeft,
    Tell,
    ThrottleChanged,
    Tick,
    TokensSampled,
    TokensScored,
)
from neuronpipe.services.coordinator.scheduling.kv_reservation import Reservation
from neuronpipe.services.coordinator.scheduling.processes import CACHE, PREFILL, Workers
from neuronpipe.services.coordinator.scheduling.requests import Requests
from neuronpipe.services.coordinator.scheduling.sequences import pending_answers
from neuronpipe.services.coordinator.scheduling.step_results import Outcome, Results
from neuronpipe.services.coordinator.scheduling.steps import OutstandingStep, StepBuilder
from neuronpipe.services.coordinator.text.constrained_answers import Answer, Constraints
from neuronpipe.services.coordinator.text.tokenizer import Tokenizer
from neuronpipe.services.runtime.quarantine import CERTAIN, ENDED, Quarantine


class Scheduler:
    """The processes, the epoch and the one outstanding step."""

    def __init__(
        self,
        limits: Limits,
        processes: Iterable[ProcessKey],
        tokenizer: Tokenizer,
        constraints: Constraints,
        reservation: Reservation | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        self._limits, self.workers = limits, Workers(frozenset(processes))
        self.requests = Requests(limits, tokenizer, constraints, quarantine or Quarantine())
        self._results = Results(limits, tokenizer)
        self._builder = StepBuilder(limits, self.workers, self.requests.prefix_source)
        self.throttle = Throttle()
        self._reservation = reservation or Reservation(None, ())
        self.epoch = 0
        self._leaving: frozenset[ProcessKey] = frozenset()
        self._dismissed: frozenset[ProcessKey] = frozenset()  # and not gone yet
        self._step: OutstandingStep | None = None
        self.awaited: list[Answer] = []  # of tokens just sampled, that the next step waits for until AnswersKnown

    @property
    def busy(self) -> bool:
        """Whether a step is outstanding."""
        return self._step is not None

    @property
    def awaited_processes(self) -> dict[ProcessKey, str]:
        """Who owes an answer about memory, and to what."""
        awaited = {}
        if self._reservation.awaits_cache:
            awaited[CACHE] = "Reserve"
        if self._reservation.awaits_prefill:
            awaited[PREFILL] = "Release"
        return awaited

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
            case ProcessReady(process, numerics):
                self.workers.is_ready(process, numerics)
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
                outcomes = self._results.sampled(step.sequences, event, now)
                self.awaited = pending_answers(step.sequences)
                return self._tell(outcomes, now)
            case AnswersKnown():
                self.awaited = []
                known = self._tell(self._results.known(self.requests.active), now)
                return [*self.requests.accept_compiled(), *known]
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
            self._step.epoch_changed(event.lost, event.killed)

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
        if self._dismissed or not self.workers.memory_served or self.awaited:
            return []
        if self._step is not None:
            return self._send_again(self._step, now)
        actions: list[Action] = [*self.requests.end_cancelled(now)]
        if self._reservation.may_release(now) and self.workers.has_prefill:
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

    def _isolate(self, step: OutstandingStep, now: float) -> list[Action]:
        """Processes died while they computed this step. Its sequence is refused; of several, each is computed alone."""
        self._step = None
        refused: list[Action] = []
        if len(step.sequences) == 1:
            refused = self._tell([(one, one.refused("ended_a_process", ENDED)) for one in step.sequences], now)
        for sequence in step.sequences:
            sequence.isolated = True
        return [*self._proceed(now), *refused]

    def _send_again(self, step: OutstandingStep, now: float) -> list[Action]:
        if step.sequences and step.death_weight >= CERTAIN:
            return self._isolate(step, now)
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
        self.requests.computes(step)
        return [step.action]

    def _has_memory(self, message: Step | Prefill, later: int) -> bool:
        return self._reservation.covers(message, later)


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
