"""The coordinator's decisions, without sockets and without a clock: `handle(event, now) -> actions`.

One step is outstanding at a time, a prefill chunk or a decode step over every generating sequence:

    state       event                       next
    idle        work is ready               step sent, every participant of the step busy
    busy        StepDone of every participant    logits read: Sample or Likelihoods; its answer makes the core idle
    busy        EpochChanged                void: wait until every participant left the step and every seat is ready
    void        all settled                 the same step again, under the new epoch
    idle        Leaving                     Dismiss: no step before the seats have other processes that are ready

`requests.py` knows who wants what, `schedule.py` whose turn it is, `outstanding.py` how the step stands, `results.py`
what came of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from neuronpipe.services.coordinator.admission import Limits
from neuronpipe.services.coordinator.events import (
    Abandon,
    Action,
    Asked,
    Broken,
    Dismiss,
    Eased,
    Ending,
    EpochChanged,
    Event,
    Leaving,
    Left,
    Measured,
    Sampled,
    Seat,
    SeatReady,
    Tick,
)
from neuronpipe.services.coordinator.grammar import Grammars
from neuronpipe.services.coordinator.outstanding import Outstanding
from neuronpipe.services.coordinator.requests import Requests
from neuronpipe.services.coordinator.results import Results
from neuronpipe.services.coordinator.schedule import Schedule
from neuronpipe.services.coordinator.text import Tokenizer
from neuronpipe.services.coordinator.throttle import Throttle


class Core:
    """The seats, the epoch and the one outstanding step."""

    def __init__(self, limits: Limits, seats: Iterable[Seat], tokenizer: Tokenizer, grammars: Grammars) -> None:
        self._seats = frozenset(seats)
        decoders = tuple(sorted(seat for seat in self._seats if seat[0] == "decode"))
        self.requests = Requests(limits, tokenizer, grammars)
        self.schedule = Schedule(limits, decoders, self.requests)
        self._results = Results(limits, tokenizer, self.requests)
        self.throttle = Throttle()
        self.epoch = 0
        self.ready: set[Seat] = set()
        self._leaving: frozenset[Seat] = frozenset()
        self._step: Outstanding | None = None

    @property
    def all_ready(self) -> bool:
        """Whether every seat of the plan is taken by a process that is ready."""
        return self.ready >= self._seats

    @property
    def busy(self) -> bool:
        """Whether a step is outstanding."""
        return self._step is not None

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event; returns what the shell is to do, in order."""
        actions: list[Action] = []
        match event:
            case Asked():
                actions += self.requests.asked(event, now)
            case SeatReady(seat):
                self.ready.add(seat)
            case EpochChanged(epoch, lost):
                self.epoch = epoch
                self.ready -= set(lost)
                self._leaving -= set(lost)
                if self._step is not None:
                    self._step.epoch_changed(lost)
            case Leaving(seats):
                self._leaving = seats
            case Left():
                actions += self._left(event)
            case Broken():
                actions += self._broken(event)
            case Sampled():
                step = self._end_step(now)
                step.account(event.cost)
                actions += self._results.sampled(step.works, event, now)
            case Measured():
                (work,) = self._end_step(now).works
                actions += self._results.measured(work, event, now)
            case Eased(share, until):
                self.throttle.set(share, until)
            case Ending():
                self._step = None
                actions += self.requests.end_all()
            case Tick():
                pass
        return actions + self._proceed(now)

    def _proceed(self, now: float) -> list[Action]:
        """Send the next step, or the voided one again, when nothing stands against it."""
        if self._leaving and self._step is None:
            gone = self._leaving & self.ready
            self.ready -= gone
            self._leaving -= gone
            return [Dismiss(seat) for seat in sorted(gone)]
        if not self.all_ready:
            return []
        if self._step is not None:
            if not self._step.abandoned:
                return []
            if self._step.works:
                return self._send(self._step.again(self.epoch))
            self._step = None  # everybody in it was refused or went away
            return self._proceed(now)
        actions: list[Action] = [*self.requests.end_cancelled(now)]
        self.requests.seat_waiting()
        if self.requests.logits_are_read or now < self.throttle.resume_at:
            return actions
        step = self.schedule.next_step(self.epoch)
        if step is None:
            return actions
        self.throttle.step_begins(now)
        return actions + self._send(step)

    def _send(self, step: Outstanding) -> list[Action]:
        self._step = step
        return [step.action]

    def _left(self, event: Left) -> list[Action]:
        """A participant left a step. Only the outstanding step under its own epoch counts as done."""
        step = self._step
        if step is None or not step.is_meant(event):
            return []
        step.left(event)
        if not event.done and event.epoch == self.epoch:
            return [Abandon()]  # it gave up by itself: the others would wait for it at the barrier
        return [self._results.read_logits(step)] if step.computed else []

    def _broken(self, event: Broken) -> list[Action]:
        """The step cannot be computed: its requests are refused, everybody else goes on."""
        step = self._step
        if step is None or not step.is_meant(event):
            return []
        told = [self.requests.refuse(work, "failed", event.message) for work in step.works]
        step.refused(event.seat)
        return [*told, Abandon()]

    def _end_step(self, now: float) -> Outstanding:
        """The shell has read the logits."""
        assert self._step is not None
        self.throttle.step_ends(now)
        step, self._step = self._step, None
        return step
