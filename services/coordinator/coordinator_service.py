"""The coordinator service: sockets and clock around the scheduler.

It receives messages of clients and services on one socket, passes events to the scheduler, and carries out its actions.
The epoch word shows that a process was lost; the board shows which.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from array import array

from neuronpipe.protocol.channel import Listener, Poller, Publisher, open_context
from neuronpipe.protocol.codec import VERSION, Message
from neuronpipe.protocol.errors import Full, Lost
from neuronpipe.protocol.links import CONTROL, EVENTS
from neuronpipe.protocol.messages import outcome
from neuronpipe.protocol.messages.cache import Reserve
from neuronpipe.protocol.messages.client import Finished, Refused
from neuronpipe.protocol.messages.event import Life
from neuronpipe.protocol.messages.lifecycle import Beat, Drain, Drained, Failed, Hello, Ready, Reject, Welcome
from neuronpipe.protocol.messages.request import AskStatus, Cancel, Generate, Next, Score, Throttle, Tokenize
from neuronpipe.protocol.messages.worker import Release, Step
from neuronpipe.services.coordinator.sampling import Sampler, as_logprobs
from neuronpipe.services.coordinator.scheduling import processes
from neuronpipe.services.coordinator.scheduling.admission import Limits
from neuronpipe.services.coordinator.scheduling.events import (
    Abandon,
    Action,
    AnswersKnown,
    Dismiss,
    Ending,
    EpochChanged,
    Event,
    Leaving,
    ProcessKey,
    ProcessReady,
    ReleaseMemory,
    RequestReceived,
    ReserveMemory,
    SampleTokens,
    ScoreTokens,
    SendStep,
    StepFailed,
    StepLeft,
    Tell,
    ThrottleChanged,
    Tick,
    TokensSampled,
    TokensScored,
    UsePromptCache,
    event_of,
)
from neuronpipe.services.coordinator.scheduling.kv_reservation import Reservation
from neuronpipe.services.coordinator.scheduling.scheduler import Scheduler
from neuronpipe.services.coordinator.sleep import BOARD_CHANGED, STATUS_LINGER_S, Wakefulness
from neuronpipe.services.coordinator.step_pipeline import StepPipeline
from neuronpipe.services.coordinator.telemetry import EVERY_MS, Meter, Report, StepEvents
from neuronpipe.services.coordinator.text.constrained_answers import ConstrainedAnswers
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer
from neuronpipe.services.runtime import trace
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.runtime.quarantine import Quarantine
from neuronpipe.services.runtime.run_memory import Epoch, RunMemory
from neuronpipe.services.runtime.trace import Trace

GREET_AGAIN_S = 1.0
BUSY_MS = 20  # how soon a lost process is noticed without a message
ENDING_MS = 5
MAX_MESSAGES_PER_TURN = 64  # so that no client's flood keeps the loop from its other work
log = logging.getLogger(__name__)


class CoordinatorService:
    """Sockets and clock around the scheduler."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._memory = RunMemory.open("coordinator", job.segments)
        self._epoch = Epoch(self._memory)
        self._processes = processes.WorkerProcesses(job.plan.compute, self._memory)
        model, limits = job.package.manifest.model, Limits.of(job)
        tokenizer = FileTokenizer(job.package.tokenizer(), must_be_compact=job.package.manifest.compact_tokenizer)
        grammars_bytes = job.plan.memory.grammars_bytes
        self._answers = ConstrainedAnswers.of(job.package.manifest, tokenizer, limits.end_tokens, grammars_bytes)
        self._reserved, self._kv_tokens = (self._memory.view("board", name) for name in ("reserved", "kv_tokens"))
        names = [process.name for process in self._processes]
        killed = self._processes.on_board("coordinator", 0).signal == signal.SIGKILL
        self._quarantine = Quarantine.after(self._memory.view("board", "ledger"), killed=killed, now=time.monotonic())
        self._quarantined = self._memory.view("board", "quarantined")
        self._quarantined[0] += self._quarantine.take_refused()
        reservation = Reservation.of(job.package.manifest, job.plan, self._kv_tokens.tolist())
        self._scheduler = Scheduler(limits, names, tokenizer, self._answers, reservation, self._quarantine)
        self._scheduler.epoch = self._epoch.load()
        self._sampler = Sampler(self._memory.view("exchange", "logits"), model.vocabulary)
        self._texts = self._memory.view("board", "texts")
        self._draining = self._ending = False  # the process is to stop; the run ends
        self._wakefulness, self._watched = Wakefulness(), False
        self._wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(BOARD_CHANGED, lambda *_: None)  # only to wake
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_draining", True))
        self._context = open_context()
        self._control = Listener(self._context, CONTROL, job.endpoints["control"])
        self._events = Publisher(self._context, EVENTS, job.endpoints["events"])
        self._step_events = StepEvents(self._events)
        self._pipeline = StepPipeline(self._memory, model, self._sampler)
        self._deferred: list[Event] = []  # noticed while actions were carried out
        spans = Trace.of(job, self._memory)
        self._meter = Meter(self._memory, job.package.manifest, spans, self._step_events, job.plan)
        self._report = Report(job, self._scheduler, self._processes, self._meter)
        self._delays = processes.DelayWatch(self._processes, job.directory.path, self._report.notes)

    def serve(self) -> None:
        """Serve clients and services until the process is drained."""
        poller = Poller()
        for source in (self._control, self._wake, self._pipeline.wake, self._events, self._answers.descriptor):
            poller.add(source)
        has_messages = False
        while not self._draining:
            self._job.pulse.waits()
            readable = poller.wait(0 if has_messages else self._patience_ms())
            self._job.pulse.works()
            if self._wake in readable:
                os.read(self._wake, 4096)
                self._wakefulness.used(time.monotonic())  # the cache looks at the board when it is asked for a beat
            if self._events in readable:
                self._watched = self._events.watched
            if (woken := self._pipeline.wake in readable) or not self._pipeline.is_armed:
                if woken:
                    self._pipeline.clear_wake()
                self._collect_answers()
            self._notice_epoch()
            if (leaving := self._processes.new_leaving()) is not None:
                self._handle(Leaving(leaving))
            if (self._answers.descriptor in readable or self._answers.due_s == 0) and self._answers.receive():
                self._handle(AnswersKnown())
            has_messages = has_messages or self._control in readable
            for _ in range(MAX_MESSAGES_PER_TURN if has_messages else 0):
                if (received := self._control.receive()) is None:
                    has_messages = False
                    break
                self._notice_epoch()
                self._take(*received)
            while self._deferred:
                self._handle(self._deferred.pop(0))
            if self._scheduler.wants_tick(time.monotonic()):
                self._handle(Tick())
            self._arm()
            self._step_events.publish(trace.now())
            self._look_around(time.monotonic())
        for source in (self._events, self._answers.descriptor):
            poller.remove(source)
        if self._processes.is_leaving("coordinator", 0):  # otherwise only this process ends
            poller.remove(self._wake)
            self._end(poller)
        self._answers.close()
        self._pipeline.close()
        self._context.close()

    def _end(self, poller: Poller) -> None:
        """End the run: refuse all requests and drain the services, until no service is left. Services that connect
        meanwhile are drained too."""
        self._ending = True
        self._handle(Ending())
        self._epoch.advance()  # the step under way is abandoned
        for process in self._processes:
            self._send(process.peer, Drain())
        alive = True
        while alive:
            # The board is read first, so that the loop below receives all messages of processes that have ended.
            alive = any(self._processes.on_board(*process.name).pid for process in self._processes)
            self._job.pulse.waits()
            poller.wait(ENDING_MS)
            while (received := self._control.receive()) is not None:
                self._take(*received)

    def _patience_ms(self) -> int:
        if self._scheduler.busy:
            return BUSY_MS
        now = time.monotonic()
        pause_ms = 1000 * (self._scheduler.throttle.resume_at - now)
        limit_ms = EVERY_MS if self._step_events.waiting else int(1000 * self._wakefulness.patience_s(now))
        return int(min(limit_ms, 1 + 1000 * self._answers.due_s, 1 + pause_ms if pause_ms > 0 else limit_ms))

    def _look_around(self, now: float) -> None:
        """While the run is in use, request beats and have memory measured. Look for overdue processes."""
        requests, all_ready = self._scheduler.requests, self._scheduler.workers.all_ready(self._processes.retired())
        if requests.active or requests.waiting or self._watched or not all_ready:
            self._wakefulness.used(now)
        if self._wakefulness.asks_for_beats(now):
            self._processes.ask_for_beats(self._control.send, now)
        if self._wakefulness.tells_supervisor(now):
            os.kill(os.getppid(), BOARD_CHANGED)
        if self._delays.is_due(now, awaits=self._scheduler.busy or not all_ready):
            owed = self._scheduler.awaited_processes | self._processes.owing_steps(self._scheduler.steps)
            self._delays.look(owed, self._control.last_dropped, self._meter.flash_now()[1], now)

    # ---- messages --------------------------------------------------------------------------------------------
    def _take(self, peer: str, message: Message) -> None:
        match message:
            case Generate() | Cancel() | Score() | Next() | Tokenize():
                if self._meter.request_came(peer, message):
                    os.kill(os.getppid(), BOARD_CHANGED)  # now: the supervisor stops measuring the device
                self._handle(RequestReceived(peer.encode(), message))
            case Throttle(share=share, for_s=for_s):
                self._handle(ThrottleChanged(share, time.monotonic() + for_s))
            case AskStatus():
                self._wakefulness.used(time.monotonic(), STATUS_LINGER_S)
                self._send(peer, self._report.status(self._meter.tokens, ending=self._ending))
            case _ if peer in self._processes:
                self._take_over(peer, message)
            case Hello():
                self._send(peer, Reject(reason=f"this run's plan has no process {peer}"))
            case _:
                log.warning("%s sent %s and has no process here", peer, type(message).__name__)

    def _take_over(self, peer: str, message: Message) -> None:
        process = self._processes.heard(peer)
        match message:
            case Hello() if self._ending:  # it was starting when the others were drained
                self._send(peer, Drain())
            case Hello():
                self._greet(process, message)
            case Ready():
                self._ready(process)
            case Beat():
                self._beat(process, message)
            case outcome.StepDone() | outcome.Prefilled():
                self._processes.credits.give_back(peer)
                process.step = message.step
                self._meter.answered(message.counters)
                ratings = message.ratings if isinstance(message, outcome.Prefilled) else ()
                facts = message.counters, ratings, self._pipeline.drafted
                self._handle(StepLeft(process.name, message.step, message.epoch, True, *facts))
            case outcome.StepAbandoned() | outcome.StepFailed():
                self._pipeline.answered_by_message(process.name)
                self._processes.credits.give_back(peer)
                if isinstance(message, outcome.StepFailed):
                    log.warning("%s cannot compute step %s: %s", peer, message.step, message.message)
                    self._handle(StepFailed(process.name, message.step, message.epoch, message.message))
                else:
                    self._handle(StepLeft(process.name, message.step, message.epoch, False))
            case outcome.Reserved() | outcome.Released() | outcome.Saved() | outcome.Restored():
                self._handle(event_of(message))
            case Drained():
                process.state = "stopped"
            case Failed():
                process.state = "failed"
                log.error("%s: %s: %s\n%s", peer, message.code, message.message, message.detail)

    def _greet(self, process: processes.WorkerProcess, hello: Hello) -> None:
        """Take on a process that sends Hello. A late Hello of an earlier incarnation is ignored."""
        if hello.incarnation != self._processes.on_board(*process.name).incarnation:
            return
        if (why := processes.why_rejected(process, hello)) is not None:
            self._send(process.peer, Reject(reason=why))
            return
        if process.incarnation not in (-1, hello.incarnation):  # its predecessor's end has not been noticed yet
            self._settle()
            self._handle(EpochChanged(self._epoch.load(), (self._leave(process),)))
        self._processes.take(process, hello)
        self._pipeline.lost(process.name)  # the earlier incarnation may have left an answer in the channel
        self._welcome(process.peer)

    def _ready(self, process: processes.WorkerProcess) -> None:
        if process.state == "starting" and process.incarnation >= 0:
            self._processes.ready(process)
            self._events.send(Life(role=process.role, index=process.index, state="ready"))
            self._handle(ProcessReady(process.name, process.numerics, process.prompt_cache, process.drafts))

    def _beat(self, process: processes.WorkerProcess, beat: Beat) -> None:
        if process.incarnation < 0 and time.monotonic() - process.greeted_at > GREET_AGAIN_S:
            process.greeted_at = time.monotonic()  # it knows an earlier coordinator; Welcome makes it send Hello
            self._welcome(process.peer)
        process.step = max(process.step, beat.step)
        process.counters = beat.counters
        self._events.send(beat)

    def _welcome(self, peer: str) -> None:
        self._send(peer, Welcome(run=self._job.run, coordinator_pid=os.getpid(), protocol=VERSION))

    def _leave(self, process: processes.WorkerProcess) -> ProcessKey:
        """Reset the state of a lost process, publish the loss, and return the process's key."""
        self._processes.leave(process)
        self._pipeline.lost(process.name)
        self._events.send(Life(role=process.role, index=process.index, state="starting", detail="restarted"))
        return process.name

    def _notice_epoch(self) -> None:
        """Notice lost processes: a new epoch means a loss, and the board shows which process."""
        epoch = self._epoch.load()  # before the board: a loss between the two reads changes it again
        if epoch != self._scheduler.epoch:
            self._settle()
            self._handle(self._epoch_event(epoch))

    def _epoch_event(self, epoch: int) -> EpochChanged:
        lost = self._processes.lost()
        killed = all(self._processes.on_board(*process.name).signal == signal.SIGKILL for process in lost)
        return EpochChanged(epoch, tuple(self._leave(process) for process in lost), killed)

    # ---- the step pipeline ------------------------------------------------------------------------------------
    def _collect_answers(self) -> bool:
        """Process the answers from the step channels, which disarms the pipeline. Returns True if there were any.

        If the pipeline has sent a step, the scheduler now decides on the same step, since no event came between.
        """
        answers = self._pipeline.collect()
        for answer in answers:
            process = self._processes.heard("-".join(map(str, answer.process)))
            self._processes.credits.give_back(process.peer)
            process.step = answer.step
            self._meter.answered(answer.counters)
            facts = answer.counters, (), self._pipeline.drafted
            self._carry_out(StepLeft(answer.process, answer.step, answer.epoch, True, *facts))
        if self._pipeline.take_unexpected():
            self._carry_out(self._epoch_event(self._epoch.advance()))
        return bool(answers)

    def _settle(self) -> None:
        """Process everything that came through the step channels, and leave the pipeline disarmed."""
        while self._collect_answers():
            pass

    def _arm(self) -> None:
        if self._pipeline.is_waiting and not self._pipeline.is_armed:
            self._pipeline.arm(self._scheduler.ahead(time.monotonic()))

    # ---- actions ---------------------------------------------------------------------------------------------
    def _handle(self, event: Event) -> None:
        """Process an event, after the results of the pipeline."""
        self._settle()
        self._carry_out(event)

    def _carry_out(self, event: Event) -> None:
        pending, messages = [event], list[tuple[str, Message]]()
        while pending:
            for action in self._scheduler.handle(pending.pop(0), time.monotonic()):
                if isinstance(action, Tell):
                    messages.append((action.client.decode(), action.message))  # sent after the next step
                elif (answer := self._do(action)) is not None:
                    pending.append(answer)
            if not pending and self._scheduler.awaited:
                self._answers.wait(self._scheduler.awaited)
                pending.append(AnswersKnown())
        self._answers.submit()
        for client, message in messages:
            self._tell(client, message)
        self._meter.messages_sent()

    def _do(self, action: Action) -> Event | None:
        match action:
            case SendStep():
                return self._send_step(action)
            case SampleTokens():
                return self._sample(action)
            case ScoreTokens(targets, likely, ratings):
                self._meter.step_done()
                return TokensScored(as_logprobs(ratings) if ratings else self._sampler.rate_all(targets, likely))
            case Dismiss((role, index)):
                self._events.send(Life(role=role, index=index, state="draining", detail="another takes its place"))
                self._send(f"{role}-{index}", Drain())
            case Abandon():
                return self._epoch_event(self._epoch.advance())
            case ReserveMemory(number, reserved_bytes, kv_tokens):
                self._kv_tokens[: len(kv_tokens)] = array("I", kv_tokens)
                self._reserved[0] = reserved_bytes
                self._send("cache-0", Reserve(number=number, reserved_bytes=reserved_bytes))
            case ReleaseMemory(keep_tokens):
                self._send("prefill-0", Release(keep_tokens=keep_tokens))
            case UsePromptCache(message):
                self._send("loader-0", message)
        return None

    def _send_step(self, action: SendStep) -> Event | None:
        began_ns = trace.now()
        self._meter.sending(action.message)
        if (already_sent := self._pipeline.sent_already(action)) is not None or self._pipeline.take_unexpected():
            for role, index in action.processes:
                self._processes.credits.take(f"{role}-{index}")
            if already_sent is None:  # the participants leave another step, in a new epoch
                return self._epoch_event(self._epoch.advance())
            self._meter.sent(already_sent.sampled_ns, len(action.processes), already_sent.passed_ns)
            self._arm()
            return None
        self._epoch.reset_barrier()
        if isinstance(action.message, Step):
            self._texts[0] = len(set(action.message.sequences))
        was_sent = self._send_by_channels(action)
        assigned = [was_sent or self._assign(f"{role}-{index}", action.message) for role, index in action.processes]
        self._meter.sent(began_ns, len(action.processes))
        if not all(assigned):
            return self._epoch_event(self._epoch.advance())  # the other participants must not wait
        self._arm()
        return None

    def _send_by_channels(self, action: SendStep) -> bool:
        """Send a step through the step channels, if all participants listen. Returns True if it was sent."""
        peers = [f"{role}-{index}" for role, index in action.processes]
        if not all(self._processes.credits.free(peer) for peer in peers) or not self._pipeline.send(action):
            return False
        for peer in peers:
            self._processes.credits.take(peer)
        return True

    def _sample(self, action: SampleTokens) -> TokensSampled:
        step = self._pipeline.done
        if step is not None and step.tokens is not None:
            cost = self._meter.step_done(step.done_ns)
            self._meter.sampled(step.done_ns, len(action.rows), step.sampled_ns)
            return TokensSampled(step.tokens, cost)
        cost = self._meter.step_done()
        began_ns = trace.now()
        tokens, logprobs = self._sampler.sample_all(action.rows)
        self._meter.sampled(began_ns, len(action.rows))
        return TokensSampled(tokens, cost, logprobs)

    def _assign(self, peer: str, message: Message) -> bool:
        """Send work to a service if it has a credit. Returns False if it has none: it is gone or owes an answer."""
        if not self._processes.credits.take(peer):
            log.warning("%s has no credit for step %s", peer, getattr(message, "step", "?"))
            return False
        self._send(peer, message)
        return True

    def _tell(self, client: str, message: Message) -> None:
        """Send a message to a client. If the client is gone or does not read, its request is cancelled."""
        self._meter.message_sent(message)
        if isinstance(message, Finished):
            message = self._meter.request_finished(client, message)
        elif isinstance(message, Refused):
            self._meter.request_refused(client, message.request)
            if message.code == "ended_a_process":
                self._quarantined[0] += self._quarantine.take_refused()
        try:
            self._control.send(client, message)
        except (Lost, Full):
            request = getattr(message, "request", None)
            if request is not None and not isinstance(message, Finished | Refused):
                self._deferred.append(RequestReceived(client.encode(), Cancel(request=request)))

    def _send(self, peer: str, message: Message) -> None:
        """Send a message to a service. If it is gone, the supervisor notices and advances the epoch."""
        self._pipeline.release(peer)
        try:
            self._control.send(peer, message)
        except (Lost, Full) as error:
            log.warning("%s", error)
