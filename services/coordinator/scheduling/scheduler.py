"""The coordinator's decisions, without sockets and without a clock: `handle(event, now) -> actions`.

One step is outstanding at a time, a prefill chunk or a decode step with every generating sequence:

    state   event                           next
    idle    a sequence can continue         step sent; its participants are busy
    busy    StepLeft of every participant   SampleTokens or ScoreTokens, if no mask is awaited; the result leads to idle
    busy    EpochChanged                    void: wait until every participant has left the step
    void    every participant has left      the same step in the new epoch, for the participants that are ready now
    idle    Leaving                         Dismiss: no step before the process has ended

A constrained sequence is in the step after its token although the grammar's answer to the token may be pending. The
logits of that step wait for pending answers until `AnswersKnown`.

Once all processes have been ready, a step needs the loader, the cache, and the prefill worker or any decode workers; it
does not wait for decode workers that restart or are replaced. `Workers` chooses participants, `StepBuilder` the next
step; `OutstandingStep` is the state of the current step, and `Throttle` inserts pauses.
"""

from __future__ import annotations

from collections.abc import Iterable

from neuronpipe.protocol.messages.outcome import Rating
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
    PrefixRestored,
    PrefixSaved,
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
from neuronpipe.services.coordinator.scheduling.prompt_cache import LOADER
from neuronpipe.services.coordinator.scheduling.recurrent_states import States
from neuronpipe.services.coordinator.scheduling.requests import LAST_WORDS, Requests
from neuronpipe.services.coordinator.scheduling.sequences import Sequence, answers_to_sampled
from neuronpipe.services.coordinator.scheduling.step_results import Outcome, Results
from neuronpipe.services.coordinator.scheduling.steps import OutstandingStep, StepBuilder
from neuronpipe.services.coordinator.text.constrained_answers import Answer, Constraints
from neuronpipe.services.coordinator.text.tokenizer import Tokenizer
from neuronpipe.services.runtime.quarantine import CERTAIN, ENDED, Quarantine


class Scheduler:
    """The coordinator's decisions, without sockets and clock: it admits requests, builds steps and collects their
    results.

    It has the known processes, the requests, the epoch, and the outstanding step: at most one at a time.

    processes: the processes of the run, which are not ready yet
    reservation: the reserved memory; None: weight slots borrow no memory
    quarantine: the suspected and refused requests of earlier coordinators; None: none
    """

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
        states = States(limits.sequences, limits.state_slots, limits.draft_tokens)
        self.requests = Requests(limits, tokenizer, constraints, quarantine or Quarantine(), states)
        self._results = Results(limits, tokenizer)
        self._builder = StepBuilder(limits, self.workers, self.requests.prefix_source, states)
        self.throttle = Throttle()
        self._reservation = reservation or Reservation(None, ())
        self.epoch = 0
        self._leaving: frozenset[ProcessKey] = frozenset()
        self._dismissed: frozenset[ProcessKey] = frozenset()  # drained, and have not ended yet
        self._restore_waits = False  # for memory
        self._last_decode = (-1, 0.0)  # the last decode step of one sequence: its number, and the time of its tokens
        self._step: OutstandingStep | None = None
        self.awaited: list[Answer] = []  # grammar answers; the step's logits are not sampled before AnswersKnown

    @property
    def busy(self) -> bool:
        """True if a step is outstanding."""
        return self._step is not None

    @property
    def awaited_processes(self) -> dict[ProcessKey, str]:
        """The processes that owe an answer about memory or the prompt cache, with the message that they have not
        answered."""
        awaited = {}
        if self._reservation.awaits_cache:
            awaited[CACHE] = "Reserve"
        if self._reservation.awaits_prefill:
            awaited[PREFILL] = "Release"
        if (message := self.requests.prompt_cache.awaited) is not None:
            awaited[LOADER] = message
        return awaited

    @property
    def steps(self) -> int:
        """Number of steps so far. A step that is sent again counts once."""
        return self._builder.steps

    def wants_tick(self, now: float) -> bool:
        """Return True if a `Tick` may cause actions: a sequence can continue, or memory can be released."""
        if self._reservation.holds_grammars and not self.requests.constraints.needs_memory:
            return True
        return not self.busy and (bool(self.requests.active) or self._reservation.may_release(now))

    def handle(self, event: Event, now: float) -> list[Action]:
        """Process an event at the time `now`, in seconds. Returns actions in order: messages to clients are last, so
        that workers compute while they are sent."""
        actions = self._take(event, now) + self._hold_grammars() + self._proceed(now)
        actions += self.requests.prompt_cache.take_actions()
        return sorted(actions, key=lambda action: isinstance(action, Tell))

    def ahead(self, now: float) -> Ahead | None:
        """Return the step after the outstanding one, if it is certain apart from its tokens; else None."""
        step, sequences = self._step, self.requests.going_on()
        if step is None or sequences is None or step.sequences != sequences or not step.undisturbed:
            return None
        if self._leaving or self._dismissed or not self.workers.memory_served or self.throttle.share(now):
            return None
        if self.workers.decoders() != step.action.processes or not self._has_memory(step.action.message, 1):
            return None
        if len(sequences) == 1 and (step.drafted or self._builder.may_draft(sequences[0])):
            return None  # the next step may have drafted tokens, which depend on this one's token
        rows = self._results.reading_of(step.action.message, step.rows)
        assert isinstance(rows, SampleTokens)
        self._builder.undrafted_step = self.steps + 1
        positions = tuple(len(sequence.tokens) for sequence in sequences)
        message = step.action.message
        assert isinstance(message, Step)
        slots = (sequence.slot for sequence in sequences)
        states = self._builder.states(list(zip(slots, message.states_to, strict=False)))
        return Ahead(rows.rows, self.steps + 1, positions, tuple(self._limits.end_tokens), **states)

    def _take(self, event: Event, now: float) -> list[Action]:
        match event:
            case RequestReceived():
                return [*self.requests.received(event, now)]
            case ProcessReady(process, numerics, prompt_cache, drafts):
                self.workers.is_ready(process, numerics, drafts=drafts)
                if process == LOADER:
                    self.requests.prompt_cache.serves = prompt_cache
                self._dismissed -= {process}  # it has a successor, so it has ended
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
                self._note_time(step, now)
                outcomes = self._results.sampled(step.rows.values(), event, now, step.accept)
                ended = [
                    (sequence, sequence.last_message)
                    for sequence in step.sequences
                    if sequence.last_message is not None
                ]
                self._builder.ended(step)
                messages = self._tell([*outcomes, *ended], now)
                self.requests.save_prompt(step)
                return messages
            case AnswersKnown():
                self.awaited = []
                messages = self._tell(self._results.process_answers(self.requests.active), now)
                return [*self._read_step(), *self.requests.accept_compiled(), *messages]
            case TokensScored():
                (sequence,) = self._end_step(now).sequences
                return self._tell(self._results.scored(sequence, event, now), now)
            case MemoryReserved(number):
                self._reservation.reserved(number)
            case MemoryReleased():
                return [*self._reservation.released()]
            case PrefixSaved(number):
                self.requests.prompt_cache.saved(number)
            case PrefixRestored(number, tokens):
                self.requests.prompt_cache.restored(number, tokens)
            case ThrottleChanged(share, until):
                self.throttle.set(share, until)
            case Ending():
                self._step, self.awaited = None, []
                return [*self.requests.end_all(now)]
            case Tick():
                pass
        return []

    def _tell(self, outcomes: list[Outcome], now: float) -> list[Action]:
        """Return the messages to clients. The final message of a sequence in the outstanding step is postponed until
        that step has ended, since participants may still write to its KV slot."""
        actions: list[Action] = []
        for sequence, message in outcomes:
            if isinstance(message, LAST_WORDS) and self._step is not None and sequence in self._step.sequences:
                sequence.last_message = message
            else:
                actions.append(self.requests.tell(sequence, message, now))
        return actions

    # ---- the outstanding step --------------------------------------------------------------------------------
    def _epoch_changed(self, event: EpochChanged) -> None:
        self.epoch = event.epoch
        self.workers.lost(event.lost)
        if PREFILL in event.lost:
            self._reservation.prefill_lost()
        if LOADER in event.lost:
            self.requests.prompt_cache.lost()
        self._leaving -= set(event.lost)
        self._dismissed -= set(event.lost)
        if self._step is not None:
            self._step.epoch_changed(event.lost, event.killed)

    def _step_left(self, event: StepLeft) -> list[Action]:
        """Note that a participant has left a step. The step is computed once all its participants have answered the
        attempt that was sent last."""
        step = self._step
        if step is None or not step.is_meant(event):
            return []
        step.left(event)
        if not event.done and event.epoch == self.epoch:
            return [Abandon()]  # it gave up alone: the others would wait for it at the barrier
        if not step.computed:
            return []
        self.awaited = answers_to_sampled(step.sequences)
        return [] if self.awaited else self._read_step(event.ratings)

    def _read_step(self, ratings: tuple[Rating, ...] = ()) -> list[Action]:
        """Return the action that reads the step's logits, if every participant is done."""
        step = self._step
        if step is None or not step.is_unread:
            return []
        step.read()
        return [self._results.reading_of(step.action.message, step.rows, ratings, step.drafted)]

    def _step_failed(self, event: StepFailed, now: float) -> list[Action]:
        step = self._step
        if step is None or not step.is_meant(event):
            return []
        if step.drop_drafts(event):
            return [Abandon()] if event.epoch == self.epoch else []
        sequences = step.sequences
        step.failed(event.process)
        refused = [
            (sequence, sequence.last_message or sequence.refused("failed", event.message)) for sequence in sequences
        ]
        return [Abandon(), *self._tell(refused, now)]

    def _end_step(self, now: float) -> OutstandingStep:
        """End the outstanding step, whose logits have been read."""
        step, self._step = self._step, None
        assert step is not None
        self.throttle.step_ends(now)
        return step

    def _note_time(self, step: OutstandingStep, now: float) -> None:
        """Measure a decode step of one sequence, if its previous step was the last one."""
        message, drafted = step.action.message, len(step.drafted)
        if isinstance(message, Step) and len(step.sequences) == 1 and not self.throttle.share(now):
            number, at = self._last_decode
            if number == message.step - 1 and message.epoch == self.epoch:
                by_layer = message.is_drafted
                self._builder.step_times.measured(drafted, 1000 * (now - at), by_layer=by_layer)
            self._last_decode = message.step, now

    def _hold_grammars(self) -> list[Action]:
        """Reserve memory for grammars while they need it, and have them compiled once it is reserved."""
        constraints = self.requests.constraints
        if not constraints.needs_memory:
            constraints.set_memory(False)
            return [*self._reservation.release_grammars()]
        if self._reservation.covers_grammars:
            constraints.set_memory(True)
            return []
        return [*self._reservation.ask_grammars()]

    # ---- the next step ---------------------------------------------------------------------------------------
    def _proceed(self, now: float) -> list[Action]:
        """Send the next step, or the abandoned step again, if possible."""
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
            actions += self._restore(numerics)
        if self.requests.client_reads or now < self.throttle.resume_at:
            return actions
        read_states = [
            *(sequence.state for sequence in self.requests.active),
            *self.requests.prompt_cache.held_states(),
        ]
        step = self._builder.next_step(self._unhindered_sequences(), self.epoch, read_states)
        if step is None:
            return actions
        self.throttle.step_begins(now)
        return [*self._send(step, now), *actions]

    def _restore(self, numerics: str) -> list[Action]:
        """Ask the prompt cache for the prompt that would be computed next, once the memory of its slot is reserved."""
        self._restore_waits = False
        if (restorable := self.requests.next_restore(numerics)) is None:
            return []
        sequence, available = restorable
        if self._reservation.covers_restore(sequence.slot, sequence.prompt_tokens):
            return [self.requests.prompt_cache.restore(sequence, numerics, available)]
        self._restore_waits = True
        return [*self._reservation.ask_restore(sequence.slot, sequence.prompt_tokens)]

    def _unhindered_sequences(self) -> list[Sequence]:
        """Return the active sequences that may be in the next step: no prompt is computed while one is restored."""
        if not self._restore_waits and self.requests.prompt_cache.restoring is None:
            return self.requests.active
        return [sequence for sequence in self.requests.active if not sequence.prefilling]

    def _dismiss(self) -> list[Action]:
        dismissed = self._leaving & self.workers.ready.keys()
        self.workers.lost(dismissed)
        self._leaving -= dismissed
        self._dismissed |= dismissed
        return [Dismiss(process) for process in sorted(dismissed)]

    def _isolate(self, step: OutstandingStep, now: float) -> list[Action]:
        """Drop a step that has ended processes.

        A single sequence is refused; of several, each is computed alone.
        """
        self._step = None
        refused: list[Action] = []
        if len(step.sequences) == 1:
            messages = [
                (sequence, sequence.last_message or sequence.refused("ended_a_process", ENDED))
                for sequence in step.sequences
            ]
            refused = self._tell(messages, now)
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
        self._step = None  # no sequence is left, or the numerics have changed: choose a new step
        return self._proceed(now)

    def _send(self, step: OutstandingStep, now: float) -> list[Action]:
        """Send a step if it has its memory; otherwise reserve the memory and keep the step to be sent later."""
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

    A pause lasts as long as the step before it times share / (1 - share), so that fast and slow models pause alike. The
    share expires: the thermal watcher renews it in time, and one that died slows the run only for a while.
    """

    def __init__(self) -> None:
        self._share = 0.0
        self._until = 0.0
        self._began_at = 0.0
        self.resume_at = 0.0

    def share(self, now: float) -> float:
        """Return the share of the time to spend in pauses, 0 to 1; 0 once it has expired."""
        return self._share if now < self._until else 0.0

    def set(self, share: float, until: float) -> None:
        """Set the share of the time to spend in pauses, 0 to 1, until the given time."""
        self._share, self._until = share, until
        self.resume_at = self.resume_at if share else 0.0

    def step_begins(self, now: float) -> None:
        self._began_at = now

    def step_ends(self, now: float) -> None:
        """Set `resume_at`, before which no step may start, from the time that the step took."""
        share = self.share(now)
        self.resume_at = now + (now - self._began_at) * share / (1 - share) if share else 0.0
