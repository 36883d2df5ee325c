"""The coordinator: clients and services on one socket, the core's decisions between them.

It reads messages, hands events to the core, and carries out its actions: send, sample, measure. The epoch word tells
it that a process was lost; the board tells it which.
"""

from __future__ import annotations

import logging
import os
import signal
import time

from neuronpipe.plans.plan.plan import GATEWAY
from neuronpipe.protocol.channel import Listener, Poller, Publisher, open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import Full, Lost
from neuronpipe.protocol.layout import LINE_WORDS
from neuronpipe.protocol.links import CONTROL, EVENTS
from neuronpipe.protocol.messages.client import Finished, Refused
from neuronpipe.protocol.messages.event import Life
from neuronpipe.protocol.messages.lifecycle import Beat, Drain, Drained, Failed, Hello, Ready, Reject, Welcome
from neuronpipe.protocol.messages.outcome import Prefilled, StepAbandoned, StepDone, StepFailed
from neuronpipe.protocol.messages.request import AskStatus, Cancel, Generate, Next, Score, Throttle
from neuronpipe.protocol.version import VERSION
from neuronpipe.services import trace
from neuronpipe.services.coordinator.admission import Limits
from neuronpipe.services.coordinator.core import Core
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
    Likelihoods,
    Measured,
    Sample,
    Sampled,
    SeatReady,
    SendStep,
    Tell,
    Tick,
)
from neuronpipe.services.coordinator.grammar import Grammars
from neuronpipe.services.coordinator.meter import Meter
from neuronpipe.services.coordinator.report import Report
from neuronpipe.services.coordinator.sampling import Sampler
from neuronpipe.services.coordinator.seats import Seats, SeatState
from neuronpipe.services.coordinator.step_events import EVERY_MS, StepEvents
from neuronpipe.services.coordinator.text import FileTokenizer
from neuronpipe.services.job import Job
from neuronpipe.services.memory import Epoch, RunMemory
from neuronpipe.services.trace import Trace

IDLE_MS = 250
GREET_AGAIN_S = 1.0
BUSY_MS = 20  # how soon a lost process is noticed when nobody is left to tell
ENDING_MS = 5
log = logging.getLogger(__name__)


class CoordinatorService:
    """The shell around the core."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._memory = RunMemory.open("coordinator", job.segments)
        self._epoch = Epoch(self._memory)
        manifest, compute = job.package.manifest, job.plan.compute
        model = manifest.model
        limits = Limits(
            mode=compute.mode,
            sequences=compute.sequences,
            context_tokens=compute.context_tokens,
            prefill_chunk_tokens=compute.prefill_chunk_tokens,
            logit_rows=compute.logit_rows,
            vocabulary=model.vocabulary,
            end_tokens=frozenset(manifest.end_tokens),
            plan_id=job.plan.id,
        )
        places = [(seat.role, seat.index, seat.core) for seat in compute.seats]
        self._lines = {(role, index): number for number, (role, index, _) in enumerate(places)}
        services = [place for place in places if place[0] not in ("coordinator", GATEWAY)]
        self._seats = Seats(services)
        tokenizer = FileTokenizer(job.package.tokenizer())
        grammars = Grammars(tokenizer, model.vocabulary, limits.end_tokens)
        self._core = Core(limits, [(role, index) for role, index, _ in services], tokenizer, grammars)
        self._core.epoch = self._epoch.load()
        self._sampler = Sampler(self._memory.view("exchange", "logits"), model.vocabulary)
        self._board = self._memory.view("board", "processes")
        self._leaving = self._memory.view("board", "leaving")
        self._leaving_seen = b""
        self._seated = self._memory.view("board", "seated")
        self._tokens = 0
        self._draining = self._ending = False  # told to stop; and this is the run's end
        self._wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_end)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_draining", True))
        self._context = open_context()
        self._control = Listener(self._context, CONTROL, job.endpoints["control"])
        self._events = Publisher(self._context, EVENTS, job.endpoints["events"])
        self._step_events = StepEvents(self._events)
        neurons = model.layers * model.experts * model.neurons
        self._meter = Meter(self._memory, neurons, Trace.of(job, self._memory), self._step_events)
        self._report = Report(job, self._core, self._seats, self._meter, self._board, self._lines)

    def serve(self) -> None:
        """Serve until drained."""
        poller = Poller()
        poller.add(self._control)
        poller.add(self._wake)
        while not self._draining:
            poller.wait(self._patience_ms())
            self._notice_epoch()
            self._notice_leaving()
            while (received := self._control.receive()) is not None:
                self._notice_epoch()
                self._take(*received)
            if self._core.requests.works and not self._core.busy:
                self._handle(Tick())
            self._step_events.publish(trace.now())
        if self._leaving[self._lines["coordinator", 0]]:  # without it the signal is not the run's end
            poller.remove(self._wake)
            self._end(poller)
        self._context.close()

    def _end(self, poller: Poller) -> None:
        """Tell clients and services that the run ends, and whoever comes meanwhile, until no service is left."""
        self._ending = True
        self._handle(Ending())
        self._epoch.advance()  # the step under way is nobody's any more
        for seat in self._seats:
            self._send(seat.peer, Drain())
        left = True
        while left:
            left = any(self._board[self._line(seat)] for seat in self._seats)  # first: then all their words are there
            poller.wait(ENDING_MS)
            while (received := self._control.receive()) is not None:
                self._take(*received)

    def _patience_ms(self) -> int:
        """For how long nothing but a message can give it something to do."""
        if self._core.busy:
            return BUSY_MS
        pause_ms = 1000 * (self._core.throttle.resume_at - time.monotonic())
        limit_ms = EVERY_MS if self._step_events.waiting else IDLE_MS
        return limit_ms if pause_ms <= 0 else min(limit_ms, 1 + int(pause_ms))

    # ---- messages --------------------------------------------------------------------------------------------
    def _take(self, peer: str, message: Message) -> None:
        match message:
            case Generate() | Cancel() | Score() | Next():
                if isinstance(message, Generate):
                    self._meter.request_came(peer, message.request)
                self._handle(Asked(peer.encode(), message))
            case Throttle(share=share, for_s=for_s):
                self._handle(Eased(share, time.monotonic() + for_s))
            case AskStatus():
                self._send(peer, self._report.status(self._tokens, ending=self._ending))
            case _ if peer in self._seats:
                self._take_from_seat(peer, message)
            case Hello():
                self._send(peer, Reject(reason=f"this run's plan has no seat {peer}"))
            case _:
                log.warning("%s sent %s and has no seat here", peer, type(message).__name__)

    def _take_from_seat(self, peer: str, message: Message) -> None:
        seat = self._seats.heard(peer, time.monotonic())
        name = (seat.role, seat.index)
        match message:
            case Hello() if self._ending:  # it was starting when the others were told
                self._send(peer, Drain())
            case Hello():
                self._greet(seat, message)
            case Ready():
                if seat.state == "starting" and seat.incarnation >= 0:
                    seat.state = "ready"
                    self._seated[self._lines[name]] = seat.incarnation + 1
                    self._events.send(Life(role=seat.role, index=seat.index, state="ready"))
                    self._handle(SeatReady(name))
            case Beat():
                if seat.incarnation < 0 and time.monotonic() - seat.greeted_at > GREET_AGAIN_S:
                    seat.greeted_at = time.monotonic()  # it knows an earlier coordinator: a Welcome makes it say Hello
                    self._welcome(peer)
                seat.step = max(seat.step, message.step)
                self._events.send(message)
            case StepDone() | Prefilled():
                self._seats.credits.give_back(peer)
                seat.step = message.step
                self._meter.answered(message.counters)
                self._handle(Left(name, message.step, message.epoch, True, message.counters))
            case StepAbandoned():
                self._seats.credits.give_back(peer)
                self._handle(Left(name, message.step, message.epoch, False))
            case StepFailed():
                self._seats.credits.give_back(peer)
                self._handle(Broken(name, message.step, message.epoch, message.message))
            case Drained():
                seat.state = "stopped"
            case Failed():
                seat.state = "failed"
                log.error("%s: %s: %s\n%s", peer, message.code, message.message, message.detail)

    def _greet(self, seat: SeatState, hello: Hello) -> None:
        """A process takes its seat. One that is not the seat's present process is a dead one's late word."""
        if hello.incarnation != self._board[self._line(seat) + 1]:
            return
        if seat.incarnation not in (-1, hello.incarnation):  # its predecessor's end was not noticed yet
            self._handle(EpochChanged(self._epoch.load(), (self._leave(seat),)))
        seat.pid, seat.core, seat.incarnation, seat.state = hello.pid, hello.core, hello.incarnation, "starting"
        self._seats.credits.announce(seat.peer, hello.slots)
        self._welcome(seat.peer)

    def _welcome(self, peer: str) -> None:
        self._send(peer, Welcome(run=self._job.run, coordinator_pid=os.getpid(), protocol=VERSION))

    def _line(self, seat: SeatState) -> int:
        """Where the seat's line on the board starts: pid, incarnation."""
        return self._lines[(seat.role, seat.index)] * LINE_WORDS

    def _leave(self, seat: SeatState) -> tuple[str, int]:
        """The seat's process is gone."""
        seat.pid, seat.incarnation, seat.state = 0, -1, "starting"
        self._seats.credits.forget(seat.peer)
        self._events.send(Life(role=seat.role, index=seat.index, state="starting", detail="restarted"))
        return seat.role, seat.index

    def _notice_epoch(self) -> None:
        """When the epoch has changed somebody was lost; the board says who. The epoch is read first: a loss between the
        two looks changes it again."""
        epoch = self._epoch.load()
        if epoch != self._core.epoch:
            self._handle(self._epoch_event(epoch))

    def _epoch_event(self, epoch: int) -> EpochChanged:
        gone = [seat for seat in self._seats if seat.incarnation not in (-1, self._board[self._line(seat) + 1])]
        return EpochChanged(epoch, tuple(self._leave(seat) for seat in gone))

    def _notice_leaving(self) -> None:
        """The supervisor says on the board which processes have successors."""
        leaving = self._leaving.tobytes()
        if leaving != self._leaving_seen:
            self._leaving_seen = leaving
            self._handle(Leaving(frozenset(name for name, line in self._lines.items() if self._leaving[line])))

    # ---- actions ---------------------------------------------------------------------------------------------
    def _handle(self, event: Event) -> None:
        pending: list[Event] = [event]
        while pending:
            actions = self._core.handle(pending.pop(0), time.monotonic())
            actions.sort(key=lambda action: isinstance(action, Tell))  # participants compute while clients are told
            for action in actions:
                answer = self._do(action)
                if answer is not None:
                    pending.append(answer)
        self._meter.end_of_telling()

    def _do(self, action: Action) -> Event | None:
        match action:
            case Tell(client, message):
                self._tell(client.decode(), message)
                self._meter.told(message)
            case SendStep(seats, message):
                began_ns = trace.now()
                self._meter.sending(message)
                self._epoch.reset_barrier()
                assigned = [self._assign(f"{role}-{index}", message) for role, index in seats]
                self._meter.sent(began_ns, len(seats))
                if not all(assigned):
                    return self._epoch_event(self._epoch.advance())  # the others must not wait for it
            case Sample(draws):
                cost = self._meter.step_done()
                self._tokens += len(draws)
                began_ns = trace.now()
                tokens = tuple(map(self._sampler.draw, draws))
                ratings = {
                    number: self._sampler.rate(draw, token)
                    for number, (draw, token) in enumerate(zip(draws, tokens, strict=True))
                    if draw.ask.logprobs is not None and token >= 0
                }
                self._meter.drawn(began_ns, len(draws))
                return Sampled(tokens, cost, ratings)
            case Likelihoods(targets):
                self._meter.step_done()
                return Measured(self._sampler.negative_log_likelihoods(targets))
            case Dismiss((role, index)):
                self._events.send(Life(role=role, index=index, state="draining", detail="another takes its place"))
                self._send(f"{role}-{index}", Drain())
            case Abandon():
                return self._epoch_event(self._epoch.advance())
        return None

    def _assign(self, peer: str, message: Message) -> bool:
        """Send work to a service that has a credit for it; one that has none is gone, or owes an answer."""
        if not self._seats.credits.take(peer):
            log.warning("%s has no credit for step %s", peer, getattr(message, "step", "?"))
            return False
        self._send(peer, message)
        return True

    def _tell(self, client: str, message: Message) -> None:
        """Send to a client; one that is gone or does not read loses its request."""
        if isinstance(message, Finished):
            message = self._meter.request_finished(client, message)
        elif isinstance(message, Refused):
            self._meter.request_refused(client, message.request)
        try:
            self._control.send(client, message)
        except (Lost, Full):
            request = getattr(message, "request", None)
            if request is not None and not isinstance(message, Finished | Refused):
                self._handle(Asked(client.encode(), Cancel(request=request)))

    def _send(self, peer: str, message: Message) -> None:
        """Send to a service. One that has vanished is the supervisor's business: it advances the epoch."""
        try:
            self._control.send(peer, message)
        except (Lost, Full) as error:
            log.warning("%s", error)
