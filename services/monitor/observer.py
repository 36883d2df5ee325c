"""Attached to a live run as any monitor may be: a client's status, the published events, and read-only descriptors.

Nothing here can hold the run up. The coordinator answers a status when it comes to it, events that are not read are
dropped at its end, and shared memory is read without a lock.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

from neuronpipe.native import lib
from neuronpipe.protocol.channel import Connection, Subscriber, open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import Full, UserError
from neuronpipe.protocol.layout import LINE_WORDS
from neuronpipe.protocol.layouts.run import BOARD_FLASH, BOARD_MEMORY, BOARD_WORDS, TRACE_SPANS
from neuronpipe.protocol.links import CONTROL, EVENTS
from neuronpipe.protocol.messages.client import ProcessStatus, Status, WarmUp
from neuronpipe.protocol.messages.request import AskStatus
from neuronpipe.protocol.messages.snapshot import ProcessView, Snapshot
from neuronpipe.protocol.run_directory import RunDirectory, RunFile, RunSummary
from neuronpipe.protocol.segments import Closing, Mapping
from neuronpipe.services.monitor.process_usage import Processes
from neuronpipe.services.monitor.resident_regions import Regions
from neuronpipe.services.monitor.snapshots import Monitor
from neuronpipe.services.monitor.span_activity import Activity
from neuronpipe.services.monitor.span_rings import RunTrace

RESIDENCY_EVERY_S = 1.0
FIRST_STATUS_S = 1.0
TOUCHED_SEGMENTS = ("fixed", "kv")  # segments whose pages are taken as they are written
RESTARTS = BOARD_WORDS.index("restarts")
ASK_AGAIN_S = 2.0  # a coordinator that is being restarted has lost the question


class Observer(Closing):
    """One live run. `poll` often, so that events are not dropped; `snapshot` as often as somebody looks. Both raise
    NotRunning when the run has ended."""

    def __init__(self, path: Path | None) -> None:
        self.directory, run_file = RunDirectory.find(path)
        summary = run_file.summary
        if summary is None:
            raise UserError(f"{self.directory.path}: an older neuronpipe started this run; watch it with that one")
        self.run_file, self.summary = run_file, summary
        self._monitor = Monitor(run_file.run, run_file.plan, summary)
        self._processes = Processes()
        self._context = open_context()
        self._control = Connection(
            self._context, CONTROL, run_file.endpoints[CONTROL.name], f"client-{os.urandom(6).hex()}"
        )
        self._events = Subscriber(self._context, EVENTS, run_file.endpoints[EVENTS.name])
        self._asked_at: float | None = None
        self._waits_for_first = True
        self._counted_at = float("-inf")
        self._open = ExitStack()  # what is open, closed in reverse
        self._open.callback(self._context.close)
        try:
            self._map(run_file, summary)
        except BaseException:
            self.close()
            raise

    def _map(self, run_file: RunFile, summary: RunSummary) -> None:
        self._planned = tuple(_planned(name) for name in summary.processes.split())
        self._trace = RunTrace.open(run_file, self._planned)
        self._open.callback(self._trace.close)
        self._activity = Activity(summary.processes.split(), TRACE_SPANS)
        self._regions = Regions(run_file, summary)
        self._open.callback(self._regions.close)
        with run_file.open_segment("board") as segment:
            self._board: Mapping = segment.map()
        self._open.callback(self._board.close)
        self._pids, self._flash = self._board.view("processes"), self._board.view("flash")
        self._memory, self._withheld = self._board.view("memory"), self._board.view("withheld")
        self._held = {name: self._open.enter_context(run_file.open_segment(name)) for name in TOUCHED_SEGMENTS}

    def poll(self) -> list[Message]:
        """Events since the last call, oldest first; and the next question to the coordinator, if it is due."""
        self.directory.read()  # raises when the run is over
        now_s = time.monotonic()
        events = []
        while (event := self._events.receive()) is not None:
            self._monitor.take_event(event, now_s)
            events.append(event)
        while (answer := self._control.receive()) is not None:
            if isinstance(answer, Status):
                self._monitor.take_status(answer, now_s)
                self._asked_at = None
        return events

    def snapshot(self) -> Snapshot:
        """The run now, after a `poll`. Status is that of the last answer; the next one is asked for. The first snapshot
        waits for an answer, up to FIRST_STATUS_S: without one it would show a run that is not ready."""
        self._ask()
        if self._waits_for_first:
            self._waits_for_first = False
            answer = self._control.receive(int(1000 * FIRST_STATUS_S))
            if isinstance(answer, Status):
                self._monitor.take_status(answer, time.monotonic())
                self._asked_at = None
        now_s = time.monotonic()
        self._monitor.take_memory(dict(zip(BOARD_MEMORY, self._memory, strict=False)))
        self._activity.add(self._trace.take_arrays())
        flash = dict(zip(BOARD_FLASH, self._flash, strict=False))
        self._monitor.take_flash(int(flash["bytes"]), int(flash["reads"]), now_s)
        self._monitor.take_warm_up(WarmUp.on_board(self._flash))
        if now_s - self._counted_at >= RESIDENCY_EVERY_S:
            held_bytes = {name: segment.held_bytes for name, segment in self._held.items()}
            self._monitor.take_residency(self._regions.count(), held_bytes, self._withheld[0])
            self._counted_at = now_s
        processes = self._see(now_s)
        window, steps, rows = self._activity.strip()
        fired = self._activity.fired(self.summary.layers, self.summary.neurons)
        return self._monitor.snapshot(now_s, time.time(), processes, fired, (window.ns / 1e6, steps, rows))

    def _ask(self) -> None:
        now_s = time.monotonic()
        if self._asked_at is None or now_s - self._asked_at > ASK_AGAIN_S:
            self._asked_at = now_s
            try:
                self._control.send(AskStatus())
            except Full:
                return  # no answer: the snapshots say for how long

    def _see(self, now_s: float) -> tuple[ProcessView, ...]:
        """The processes: pids from the board, which is right at any moment; the rest as the coordinator last said."""
        pids = [self._pids[line * LINE_WORDS] for line in range(len(self._planned))]
        self._processes.sample(pids, now_s)
        said = self._monitor.processes or self._planned
        views: list[ProcessView] = []
        for one, pid, doing in zip(said, pids, self._activity.doing(lib.np_trace_now()), strict=True):
            views.append(
                ProcessView(
                    role=one.role,
                    index=one.index,
                    pid=pid,
                    state=one.state if pid == one.pid else "starting",
                    core=one.core,
                    step=one.step,
                    restarts=self._pids[len(views) * LINE_WORDS + RESTARTS],
                    cpu=_rounded(self._processes.cpu(pid)),
                    memory_bytes=self._processes.memory_bytes(pid),
                    numerics=one.numerics,
                    backend=one.backend,
                    work=one.work,
                    doing=doing,
                )
            )
        return tuple(views)

    def close(self) -> None:
        """Let go of the run."""
        self._open.close()


def _planned(name: str) -> ProcessStatus:
    role, _, index = name.partition(".")
    return ProcessStatus(role=role, index=int(index), pid=0, state="starting")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
