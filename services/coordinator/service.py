"""The coordinator: clients and services on one socket, the core's decisions between them.

It reads messages, hands events to the core, and carries out its actions: send, sample, measure. The epoch word tells
it that a process was lost; the board tells it which.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.protocol.channel import Listener, Poller, Publisher, open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import Full, Lost
from neuronpipe.protocol.layouts import BOARD_FLASH, BOARD_MEMORY, LINE_WORDS
from neuronpipe.protocol.links import CONTROL, EVENTS
from neuronpipe.protocol.messages.client import Finished, ProcessStatus, Refused, Status
from neuronpipe.protocol.messages.event import Life, StepEvent
from neuronpipe.protocol.messages.lifecycle import Beat, Drain, Drained, Failed, Hello, Ready, Reject, Welcome
from neuronpipe.protocol.messages.outcome import Prefilled, StepAbandoned, StepDone, StepFailed
from neuronpipe.protocol.messages.request import AskStatus, Cancel, Generate, Next, Score
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.protocol.version import VERSION
from neuronpipe.services import trace
from neuronpipe.services.coordinator.admission import Limits
from neuronpipe.services.coordinator.core import Core
from neuronpipe.services.coordinator.events import (
    Abandon,
    Action,
    Asked,
    Broken,
    EpochChanged,
    Event,
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
from neuronpipe.services.coordinator.seats import Seats, SeatState
from neuronpipe.services.coordinator.sequences import Cost, add_cost
from neuronpipe.services.coordinator.text import FileTokenizer
from neuronpipe.services.job import Job
from neuronpipe.services.memory import Epoch, RunMemory
from neuronpipe.services.trace import Trace

IDLE_MS = 250
GREET_AGAIN_S = 1.0
BUSY_MS = 20  # how soon a lost process is noticed when nobody is left to tell
log = logging.getLogger(__name__)


class CoordinatorService:
    """The shell around the core."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._memory = RunMemory.open("coordinator", job.segments)
        self._epoch = Epoch(self._memory)
        manifest, compute = job.package.manifest, job.plan.compute
        self._vocabulary = manifest.shape.vocabulary
        self._neurons = manifest.shape.layers * manifest.shape.experts * manifest.shape.neurons
        limits = Limits(
            mode=compute.mode,
            sequences=compute.sequences,
            context_tokens=compute.context_tokens,
            prefill_chunk_tokens=compute.prefill_chunk_tokens,
            logit_rows=compute.logit_rows,
            vocabulary=self._vocabulary,
            end_tokens=frozenset(manifest.end_tokens),
            plan_id=job.plan.id,
        )
        places = [(seat.role, seat.index, seat.core) for seat in compute.seats]
        self._lines = {(role, index): number for number, (role, index, _) in enumerate(places)}
        services = [place for place in places if place[0] != "coordinator"]
        self._seats = Seats(services)
        self._core = Core(
            limits, [(role, index) for role, index, _ in services], FileTokenizer(job.package.tokenizer_path)
        )
        self._core.epoch = self._epoch.load()
        self._logits = ffi.from_buffer("float[]", self._memory.view("exchange", "logits"))
        self._scratch = ffi.new("int32_t[]", 2 * self._vocabulary)
        self._board = self._memory.view("board", "processes")
        self._board_memory = self._memory.view("board", "memory")
        self._board_flash = self._memory.view("board", "flash")
        self._flash_at_start: dict[str, tuple[int, int]] = {}
        self._sent: Step | Prefill | None = None
        self._sent_ns = 0
        self._sent_flash = (0, 0)
        self._misses = 0.0
        self._trace = Trace.of(job, self._memory)
        self._sampled_ns = 0  # when the tokens of the last step were drawn, until what follows from it is done
        self._told = 0
        self._started_at = time.monotonic()
        self._tokens = 0
        self._draining = False
        self._wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_end)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_draining", True))
        self._context = open_context()
        self._control = Listener(self._context, CONTROL, job.endpoints["control"])
        self._events = Publisher(self._context, EVENTS, job.endpoints["events"])

    def serve(self) -> None:
        """Serve until drained."""
        poller = Poller()
        poller.add(self._control)
        poller.add(self._wake)
        while not self._draining:
            poller.wait(BUSY_MS if self._core.busy else IDLE_MS)
            self._notice_epoch()
            while (received := self._control.receive()) is not None:
                self._notice_epoch()
                self._take(*received)
            if self._core.works and not self._core.busy:
                self._handle(Tick())
        for seat in self._seats:
            self._send(seat.peer, Drain())
        self._context.close()

    # ---- messages --------------------------------------------------------------------------------------------
    def _take(self, peer: str, message: Message) -> None:
        match message:
            case Generate() | Cancel() | Score() | Next():
                if isinstance(message, Generate):
                    self._flash_at_start.setdefault(f"{peer}/{message.request}", self._flash_now())
                self._handle(Asked(peer.encode(), message))
            case AskStatus():
                self._send(peer, self._status())
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
            case Hello():
                self._greet(seat, message)
            case Ready():
                if seat.state == "starting" and seat.incarnation >= 0:
                    seat.state = "ready"
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
                self._misses += message.counters.get("gate_missed", 0.0) + message.counters.get("rest_missed", 0.0)
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

    # ---- actions ---------------------------------------------------------------------------------------------
    def _handle(self, event: Event) -> None:
        pending: list[Event] = [event]
        while pending:
            for action in self._core.handle(pending.pop(0), time.monotonic()):
                answer = self._do(action)
                if answer is not None:
                    pending.append(answer)
        self._end_of_telling()

    def _do(self, action: Action) -> Event | None:
        match action:
            case Tell(client, message):
                self._tell(client.decode(), message)
                self._told += 1
            case SendStep(seats, message):
                self._end_of_telling()
                began_ns = trace.now()
                self._sent, self._sent_flash, self._misses = message, self._flash_now(), 0.0
                self._epoch.reset_meeting()
                assigned = [self._assign(f"{role}-{index}", message) for role, index in seats]
                self._sent_ns = self._trace.put(lib.NP_SPAN_SEND, began_ns, value=len(seats), step=message.step)
                if not all(assigned):
                    return self._epoch_event(self._epoch.advance())  # the others must not wait for it
            case Sample(draws):
                cost = self._step_cost()
                self._publish_step(cost)
                self._tokens += len(draws)
                began_ns = trace.now()
                tokens = tuple(self._draw(draw) for draw in draws)
                self._sampled_ns = self._trace.put(lib.NP_SPAN_SAMPLE, began_ns, value=len(draws), step=self._sent_step)
                return Sampled(tokens, cost)
            case Likelihoods(targets):
                self._publish_step(self._step_cost())
                return Measured(
                    tuple(
                        -lib.np_log_probability(self._row(row), self._vocabulary, target)
                        for row, target in enumerate(targets)
                    )
                )
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

    def _row(self, row: int) -> Any:
        return self._logits + row * self._vocabulary

    def _draw(self, draw: Any) -> int:
        uniform = lib.np_uniform(draw.seed & (2**64 - 1), draw.counter)
        token = lib.np_sample(
            self._row(draw.row), self._vocabulary, draw.temperature, draw.top_k, draw.top_p, uniform, self._scratch
        )
        return int(token)

    def _tell(self, client: str, message: Message) -> None:
        """Send to a client; one that is gone or does not read loses its request."""
        if isinstance(message, Finished):
            message = self._completed(client, message)
        elif isinstance(message, Refused):
            self._flash_at_start.pop(f"{client}/{message.request}", None)
        try:
            self._control.send(client, message)
        except (Lost, Full):
            request = getattr(message, "request", None)
            if request is not None and not isinstance(message, Finished | Refused):
                self._handle(Asked(client.encode(), Cancel(request=request)))

    def _completed(self, client: str, finished: Finished) -> Finished:
        """Add what the core cannot know: memory and flash."""
        bytes_now, reads_now = self._flash_now()
        bytes_before, reads_before = self._flash_at_start.pop(f"{client}/{finished.request}", (0, 0))
        total: Cost = {}
        add_cost(total, finished.prefill)
        add_cost(total, finished.decode)
        looked_up = total.get("gate_clusters", 0.0) + total.get("rest_clusters", 0.0)
        missed = total.get("gate_missed", 0.0) + total.get("rest_missed", 0.0)
        flash = {
            "bytes": float(bytes_now - bytes_before),
            "reads": float(reads_now - reads_before),
            "miss_rate": missed / looked_up if looked_up else 0.0,
            "wait_ms": total.get("flash_ms", 0.0) * total.get("steps", 0.0) / max(1.0, total.get("answers", 0.0)),
            "active_share": total.get("active", 0.0) / max(1.0, total.get("tokens", 0.0) * self._neurons),
        }
        memory = {f"{name}": int(self._board_memory[n]) for n, name in enumerate(BOARD_MEMORY)}
        values = {name: getattr(finished, name) for name in Finished.__dataclass_fields__}
        return Finished(**{**values, "flash": flash, "memory": memory})

    def _flash_now(self) -> tuple[int, int]:
        """(bytes, reads) of the loader so far."""
        return int(self._board_flash[BOARD_FLASH.index("bytes")]), int(self._board_flash[BOARD_FLASH.index("reads")])

    @property
    def _sent_step(self) -> int:
        return self._sent.step if self._sent else 0

    def _step_cost(self) -> Cost:
        """What the step that was just answered took since it was sent: milliseconds, and the loader's work."""
        assert self._sent is not None
        self._trace.put(lib.NP_SPAN_AWAIT, self._sent_ns, value=len(self._sent.tokens), step=self._sent_step)
        (bytes_now, reads_now), (bytes_then, reads_then) = self._flash_now(), self._sent_flash
        return {
            "ms": (trace.now() - self._sent_ns) / 1e6,
            "read_bytes": bytes_now - bytes_then,
            "reads": reads_now - reads_then,
        }

    def _end_of_telling(self) -> None:
        """Whatever a step's tokens led to is done: text and messages to clients."""
        if self._sampled_ns:
            self._trace.put(lib.NP_SPAN_TELL, self._sampled_ns, value=self._told, step=self._sent_step)
        self._sampled_ns = self._told = 0

    def _publish_step(self, cost: Cost) -> None:
        """Tell monitors of the step that was just done."""
        if self._sent is None or not self._events.watched:
            return
        self._events.send(
            StepEvent(
                step=self._sent.step,
                batch=len(self._sent.tokens),
                prefill=isinstance(self._sent, Prefill),
                ms=round(cost["ms"], 3),
                misses=int(self._misses),
                read_bytes=int(cost["read_bytes"]),
            )
        )

    def _send(self, peer: str, message: Message) -> None:
        """Send to a service. One that has vanished is the supervisor's business: it advances the epoch."""
        try:
            self._control.send(peer, message)
        except (Lost, Full) as error:
            log.warning("%s", error)

    def _status(self) -> Status:
        now = time.monotonic()
        current, peak, limit = (int(self._board_memory[n]) for n in range(3))
        me = ProcessStatus(
            role="coordinator",
            index=0,
            pid=os.getpid(),
            state="ready",
            core=self._job.seat.core,
            step=self._core.steps,
            restarts=self._job.incarnation,
        )
        processes = (me, *(self._process_status(seat, now) for seat in self._seats))
        return Status(
            run=self._job.run,
            ready=self._core.all_ready,
            plan=self._job.plan.id,
            mode=self._job.plan.compute.mode,
            processes=tuple(sorted(processes, key=lambda process: self._lines[process.role, process.index])),
            memory_bytes=current,
            memory_peak_bytes=peak,
            memory_limit_bytes=limit,
            sequences_active=len(self._core.works),
            sequences_most=self._job.plan.compute.sequences,
            sequences_waiting=len(self._core.waiting),
            steps=self._core.steps,
            tokens=self._tokens,
            uptime_s=round(now - self._started_at, 3),
            flash_bytes=self._flash_now()[0],
        )

    def _process_status(self, seat: SeatState, now: float) -> ProcessStatus:
        outstanding = self._seats.credits.outstanding(seat.peer)
        return ProcessStatus(
            role=seat.role,
            index=seat.index,
            pid=seat.pid,
            state=seat.verdict(now, outstanding),
            core=seat.core,
            step=seat.step,
            outstanding=outstanding,
            restarts=self._board[self._line(seat) + 1],
        )


def main(job: Job) -> None:
    """Serve until drained."""
    CoordinatorService(job).serve()
