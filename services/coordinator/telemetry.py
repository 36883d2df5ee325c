"""Telemetry: the cost of steps and requests, events for monitors, and the status of the run.

`Meter` measures what only the service sees: time, flash, memory. `StepEvents` reports several steps in one event: a
small model makes a thousand steps a second, and an event for each would take a good part of the monitors' time.
`Report` answers `AskStatus`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from array import array
from collections.abc import Sequence
from typing import Final

from neuronpipe.native import lib
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import ACCELERATOR, DEFAULT_BACKEND, GATEWAY, Plan, reads_whole
from neuronpipe.protocol.channel import Publisher
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.layouts.run import BOARD_FLASH, BOARD_MEMORY, BOARD_MISSES, PROFILE_STATES
from neuronpipe.protocol.layouts.weights import PIN_STATE
from neuronpipe.protocol.messages.client import Finished, Pins, ProcessStatus, ProfileState, Status, Token, WarmUp
from neuronpipe.protocol.messages.event import StepEvent
from neuronpipe.protocol.messages.lifecycle import State
from neuronpipe.protocol.messages.request import Cancel, Generate, Next, Score, Tokenize
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.coordinator.plan_check import PlanCheck
from neuronpipe.services.coordinator.scheduling.events import ProcessKey
from neuronpipe.services.coordinator.scheduling.processes import WorkerProcess, WorkerProcesses
from neuronpipe.services.coordinator.scheduling.scheduler import Scheduler
from neuronpipe.services.coordinator.scheduling.sequences import Cost, add_cost
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.runtime.miss_counts import Misses, MissesOfRun, misses_of
from neuronpipe.services.runtime.run_memory import RunMemory
from neuronpipe.services.runtime.trace import Trace

EVERY_MS = 25
WARM_UP_LEFT: Final = BOARD_FLASH.index("warm_up_left_bytes")
log = logging.getLogger(__name__)
PINS: Final[tuple[Pins, ...]] = ("held", "tried", "let_go", "held")
"""State of the pins for each value of the word that the cache writes."""


class Meter:
    """Measurements of steps and requests, from the clock and the board.

    plan_check: the comparison of decode steps with the plan
    tokens: number of tokens sent to clients so far
    """

    def __init__(self, memory: RunMemory, manifest: Manifest, spans: Trace, events: StepEvents, plan: Plan) -> None:
        self._board_memory = memory.view("board", "memory")
        self._board_flash = memory.view("board", "flash")
        self._slots = memory.view("residency", "slots")
        self._texts, self._profile_state = memory.view("board", "texts"), memory.view("board", "device_profile")
        self._board_misses = memory.view("board", "misses")
        self._board_misses[: len(BOARD_MISSES)] = array("Q", bytes(8 * len(BOARD_MISSES)))
        self._misses, self._whole = MissesOfRun(), reads_whole(plan.compute, plan.flash)
        self.plan_check = PlanCheck(plan, manifest, memory.view("board", "terms"))
        self._neurons = manifest.model.ffns * manifest.model.neurons
        self._spans = spans
        self._events = events
        self._flash_at_start: dict[str, tuple[int, int]] = {}
        self._sent: Step | Prefill | None = None
        self._sent_ns = 0
        self._sent_flash = (0, 0)
        self._counters: Cost = {}  # of the participants of the outstanding step
        self._done: tuple[Step | Prefill, int, Cost, Cost] | None = None  # the last step, its start, cost and counters
        self._sent_tokens = 0  # to clients, since the last step was noted
        self.tokens = 0
        self._gap_ms = 0.0
        self._sampled_ns = 0  # time at which sampling ended or, if the next step is sent already, at which it was sent
        self._messages = 0

    def flash_now(self) -> tuple[int, int]:
        """Return the bytes and reads of the loader so far."""
        return int(self._board_flash[BOARD_FLASH.index("bytes")]), int(self._board_flash[BOARD_FLASH.index("reads")])

    def warm_up_now(self) -> WarmUp | None:
        """Return the progress of the warm-up; None if none was requested."""
        return WarmUp.on_board(self._board_flash)

    def misses_now(self) -> Misses:
        """Return the misses of recent decode steps; empty before there were enough."""
        return self._misses.recent

    def pin_state_now(self) -> int:
        return int(self._slots[PIN_STATE])

    def device_profile_now(self) -> ProfileState:
        return PROFILE_STATES[min(int(self._profile_state[0]), len(PROFILE_STATES) - 1)]

    def memory_now(self) -> dict[str, int]:
        """Return the memory figures of the whole run in bytes, by the names in BOARD_MEMORY."""
        return {name: int(self._board_memory[n]) for n, name in enumerate(BOARD_MEMORY)}

    # ---- a step ----------------------------------------------------------------------------------------------
    def sending(self, message: Step | Prefill) -> None:
        self._sent, self._sent_flash, self._counters = message, self.flash_now(), {}

    def sent(self, began_ns: int, processes: int, end_ns: int | None = None) -> None:
        """Note that a step was sent.

        began_ns: time at which sending began
        processes: number of participants
        end_ns: time at which the step was sent; None: now. It is likewise an end in `step_done` and `sampled`
        """
        self._sent_ns = self._spans.put(lib.NP_SPAN_SEND, began_ns, value=processes, step=self._step, end_ns=end_ns)
        if self._sampled_ns:
            self._sampled_ns = self._sent_ns  # messages to clients follow the next step

    def answered(self, counters: Cost) -> None:
        add_cost(self._counters, {**counters, "answers": 1.0})

    def step_done(self, end_ns: int | None = None) -> Cost:
        """Note that every participant is done. Returns `ms`, `read_bytes` and `reads` since the step was sent."""
        assert self._sent is not None
        tokens = len(self._sent.tokens)
        done_ns = self._spans.put(lib.NP_SPAN_AWAIT, self._sent_ns, value=tokens, step=self._step, end_ns=end_ns)
        (bytes_now, reads_now), (bytes_then, reads_then) = self.flash_now(), self._sent_flash
        cost: Cost = {
            "ms": (done_ns - self._sent_ns) / 1e6,
            "read_bytes": bytes_now - bytes_then,
            "reads": reads_now - reads_then,
        }
        self._done = self._sent, self._sent_ns, cost, self._counters
        if isinstance(self._sent, Step):
            misses = misses_of(self._counters, whole=self._whole)
            total = self._misses.add(misses)
            if tokens == 1 and not self._board_flash[WARM_UP_LEFT]:
                self.plan_check.add(
                    self._counters,
                    position=self._sent.positions[0],
                    ms=cost["ms"],
                    read_bytes=cost["read_bytes"],
                    lookups=misses.wanted,
                    missed=misses.missed,
                )
            for n, name in enumerate(BOARD_MISSES):
                self._board_misses[n] = int(getattr(total, name))
        return cost

    def sampled(self, began_ns: int, tokens: int, end_ns: int | None = None) -> None:
        self._sampled_ns = self._spans.put(lib.NP_SPAN_SAMPLE, began_ns, value=tokens, step=self._step, end_ns=end_ns)

    def message_sent(self, message: Message) -> None:
        self._messages += 1
        if isinstance(message, Token):
            self.tokens += 1
            self._sent_tokens += 1
            self._gap_ms = max(self._gap_ms, message.ms if message.index else 0.0)

    def messages_sent(self) -> None:
        """Note that all messages that follow from a step have been sent."""
        if self._done is not None:
            step, sent_ns, cost, counters = self._done
            if self._sampled_ns:
                self._spans.put(lib.NP_SPAN_TELL, self._sampled_ns, value=self._messages, step=step.step)
            self._events.add(DoneStep(step, sent_ns, cost, counters, self._sent_tokens, self._gap_ms))
        self._done = None
        self._sampled_ns = self._messages = self._sent_tokens = 0
        self._gap_ms = 0.0

    @property
    def _step(self) -> int:
        return self._sent.step if self._sent else 0

    # ---- a request -------------------------------------------------------------------------------------------
    def request_came(self, client: str, message: Generate | Cancel | Score | Next | Tokenize) -> bool:
        """Count a request. Return True if the supervisor must hear of it at once."""
        if isinstance(message, Cancel):
            return False
        if isinstance(message, Generate):
            self._flash_at_start.setdefault(f"{client}/{message.request}", self.flash_now())
        self._texts[1] = (self._texts[1] + 1) & 0xFFFFFFFF
        return self.device_profile_now() == "measuring"

    def request_refused(self, client: str, request: str) -> None:
        self._flash_at_start.pop(f"{client}/{request}", None)

    def request_finished(self, client: str, finished: Finished) -> Finished:
        """Return the final message with the run's memory and the flash figures of the request.

        Bytes and reads are those of the whole run since the request arrived, also for other requests.
        """
        bytes_now, reads_now = self.flash_now()
        bytes_before, reads_before = self._flash_at_start.pop(f"{client}/{finished.request}", (0, 0))
        total: Cost = {}
        add_cost(total, finished.prefill)
        add_cost(total, finished.decode)
        looked_up = total.get("trigger_clusters", 0.0) + total.get("value_clusters", 0.0)
        missed = total.get("trigger_missed", 0.0) + total.get("value_missed", 0.0)
        flash = {
            "bytes": float(bytes_now - bytes_before),
            "reads": float(reads_now - reads_before),
            "miss_rate": missed / looked_up if looked_up else 0.0,
            "wait_ms": total.get("flash_ms", 0.0) * total.get("steps", 0.0) / max(1.0, total.get("answers", 0.0)),
            "active_share": total.get("active", 0.0) / max(1.0, total.get("tokens", 0.0) * self._neurons),
        }
        return dataclasses.replace(finished, flash=flash, memory=self.memory_now())


# ---- events for monitors -------------------------------------------------------------------------------------
@frozen(slots=True)
class DoneStep:
    """A finished step.

    sent_ns: time at which it was sent
    took: the result of `Meter.step_done`
    counters: sums over the participants; "answers" is the number of answers
    tokens: number of sampled tokens
    gap_ms: the longest time since the previous token of a sequence; 0 if every token was its sequence's first
    """

    message: Step | Prefill
    sent_ns: int
    took: Cost
    counters: Cost
    tokens: int
    gap_ms: float


class StepEvents:
    """The steps that have not been reported to monitors yet."""

    def __init__(self, events: Publisher) -> None:
        self._events = events
        self._steps: list[DoneStep] = []

    @property
    def waiting(self) -> bool:
        return bool(self._steps)

    def add(self, step: DoneStep) -> None:
        self._steps.append(step)

    def publish(self, now_ns: int) -> None:
        """Report the steps if the first was sent at least EVERY_MS ago. Without monitors they are dropped."""
        if not self._steps or now_ns - self._steps[0].sent_ns < EVERY_MS * 1_000_000:
            return
        if self._events.watched:
            for prefill in (True, False):
                if steps := [step for step in self._steps if isinstance(step.message, Prefill) is prefill]:
                    self._events.send(step_event(steps))
        self._steps = []


def step_event(steps: Sequence[DoneStep]) -> StepEvent:
    """Return the event for steps, which are all prefill or all decode steps, in their order."""

    def count(*names: str) -> int:
        return int(sum(step.counters.get(name, 0.0) for step in steps for name in names))

    def mean_ms(name: str) -> float:
        return round(
            sum(step.counters.get(name, 0.0) / max(1.0, step.counters.get("answers", 0.0)) for step in steps), 3
        )

    gaps_ms = tuple(round(step.gap_ms, 3) for step in steps if step.gap_ms)
    return StepEvent(
        step=steps[-1].message.step,
        batch=sum(len(step.message.tokens) for step in steps),
        prefill=isinstance(steps[-1].message, Prefill),
        ms=round(sum(step.took["ms"] for step in steps), 3),
        misses=count("trigger_missed", "value_missed"),
        read_bytes=int(sum(step.took["read_bytes"] for step in steps)),
        tokens=sum(step.tokens for step in steps),
        tbt_ms=round(sum(gaps_ms), 3),
        reads=int(sum(step.took["reads"] for step in steps)),
        looked_up=count("trigger_clusters", "value_clusters"),
        rows=count("gate_rows", "up_rows", "down_rows"),
        positions=sum(_positions(step.message) for step in steps),
        flash_ms=mean_ms("flash_ms"),
        barrier_ms=mean_ms("barrier_ms"),
        steps=len(steps),
        gaps_ms=gaps_ms,
    )


def _positions(sent: Step | Prefill) -> int:
    """Return how many positions of the KV cache the step read. Prefill reads the earlier ones once for all its
    tokens."""
    if isinstance(sent, Prefill):
        return sent.position + len(sent.tokens)
    return sum(position + 1 for position in sent.positions)


# ---- status --------------------------------------------------------------------------------------------------
class Report:
    """The answer to `AskStatus`, from the state of scheduler, processes and meter."""

    def __init__(self, job: Job, scheduler: Scheduler, processes: WorkerProcesses, meter: Meter) -> None:
        self._job, self._scheduler, self._processes, self._meter = job, scheduler, processes, meter
        self._started_at = time.monotonic()
        self.notes: dict[ProcessKey, str] = {}  # why a process keeps the run waiting
        self._specs = {(spec.role, spec.index): spec for spec in job.plan.compute.processes}

    def status(self, tokens: int, *, ending: bool) -> Status:
        """Return the status.

        tokens: number of tokens sampled so far
        ending: True if the run ends
        """
        now = time.monotonic()
        memory = self._meter.memory_now()
        compute = self._job.plan.compute
        scheduler, requests = self._scheduler, self._scheduler.requests
        return Status(
            run=self._job.run,
            ready=scheduler.workers.all_ready(self._processes.retired()) and not ending,
            plan=self._job.plan.id,
            mode=compute.mode,
            processes=self._statuses(now, ending),
            memory_bytes=memory["current_bytes"],
            memory_peak_bytes=memory["peak_bytes"],
            memory_limit_bytes=memory["limit_bytes"],
            sequences_active=len(requests.active),
            max_sequences=compute.sequences,
            sequences_waiting=len(requests.queued),
            steps=scheduler.steps,
            tokens=tokens,
            uptime_s=round(now - self._started_at, 3),
            flash_bytes=self._meter.flash_now()[0],
            throttle_share=scheduler.throttle.share(now),
            cached_tokens=requests.cached_tokens,
            warm_up=self._meter.warm_up_now(),
            miss_rate=round(self._meter.misses_now().rate, 4),
            planned_miss_rate=self._job.plan.expected.miss_rate,
            pins=PINS[self._meter.pin_state_now()],
            device_profile=self._meter.device_profile_now(),
            deviations=self._meter.plan_check.sentence,
        )

    def _statuses(self, now: float, ending: bool) -> tuple[ProcessStatus, ...]:
        gateways = [spec for spec in self._job.plan.compute.processes if spec.role == GATEWAY]
        statuses = [
            self._coordinator(ending),
            *(self._service(process, now) for process in self._processes),
            *(self._gateway(spec.index, spec.core) for spec in gateways),
        ]
        return tuple(sorted(statuses, key=lambda status: self._processes.line(status.role, status.index)))

    def _coordinator(self, ending: bool) -> ProcessStatus:
        return ProcessStatus(
            role="coordinator",
            index=0,
            pid=os.getpid(),
            state="draining" if ending else "ready",
            core=self._job.process.core,
            step=self._scheduler.steps,
            restarts=self._processes.on_board(self._job.process.role, self._job.process.index).restarts,
        )

    def _service(self, process: WorkerProcess, now: float) -> ProcessStatus:
        outstanding = self._processes.credits.outstanding(process.peer)
        line = self._processes.on_board(*process.name)
        is_retired = bool(line.gone) and not process.pid
        spec = self._specs[process.name]
        return ProcessStatus(
            role=process.role,
            index=process.index,
            pid=process.pid,
            state="gone" if is_retired else process.verdict(now, outstanding),
            core=process.core,
            step=process.step,
            outstanding=outstanding,
            restarts=line.restarts,
            numerics="" if is_retired else process.numerics,
            backend="" if spec.backend == DEFAULT_BACKEND else spec.backend,
            work=self._work(process, is_retired),
            note=self.notes.get(process.name, ""),
        )

    def _work(self, process: WorkerProcess, is_retired: bool) -> str:
        """Return which blocks and matrices a process computes, in words; empty unless the plan offloads blocks and the
        process is a decode worker or an accelerator."""
        compute, blocks = self._job.plan.compute, self._job.package.manifest.layout.blocks
        role = process.role
        if not compute.held_blocks or role not in ("decode", ACCELERATOR):
            return ""
        decoders = self._scheduler.workers.decoders()
        has_accelerator = any(role_name == ACCELERATOR for role_name, _ in decoders)
        offloaded = compute.offloaded_blocks(len(self._scheduler.requests.active)) if has_accelerator else 0
        if role == "decode":
            return _blocks(offloaded + 1, blocks, blocks)
        if has_accelerator:
            return _blocks(1, offloaded, blocks) + "".join(f", {name}" for name in compute.held_matrices)
        numerics = self._scheduler.workers.numerics_of(decoders) if decoders else process.numerics
        otherwise = f" in {numerics}, not in {process.numerics}" if process.numerics not in ("", numerics) else ""
        return f"decode workers compute its blocks{otherwise}{'' if is_retired else ' until it is there'}"

    def _gateway(self, index: int, core: int | None) -> ProcessStatus:
        """Return the status of a gateway from the board, since a gateway is a client and sends no beats."""
        line = self._processes.on_board(GATEWAY, index)
        state: State = "ready" if line.pid else "starting"
        return ProcessStatus(role=GATEWAY, index=index, pid=line.pid, state=state, core=core, restarts=line.restarts)


def _blocks(first: int, last: int, of: int) -> str:
    if first > last:
        return f"none of {of} blocks"
    return f"all {of} blocks" if (first, last) == (1, of) else f"blocks {first} to {last} of {of}"
