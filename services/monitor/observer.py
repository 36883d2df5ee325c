"""An observer of a live run: it reads the status, published events, and shared memory that is mapped read-only.

It cannot delay the run. The coordinator answers a status request when it has time, events that are not read are dropped
on its side, and shared memory is read without a lock.
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
from neuronpipe.protocol.layouts.run import BOARD_FLASH, BOARD_MEMORY, BOARD_WORDS, TRACE_SPANS
from neuronpipe.protocol.links import CONTROL, EVENTS
from neuronpipe.protocol.memory.layout import LINE_WORDS
from neuronpipe.protocol.memory.segments import Closing, Mapping
from neuronpipe.protocol.messages.client import ProcessStatus, Status, WarmUp
from neuronpipe.protocol.messages.request import AskStatus
from neuronpipe.protocol.messages.snapshot import ProcessView, Snapshot
from neuronpipe.protocol.run_directory import RunDirectory, RunFile, RunSummary
from neuronpipe.services.monitor.process_usage import Processes
from neuronpipe.services.monitor.resident_regions import Regions
from neuronpipe.services.monitor.snapshots import Monitor
from neuronpipe.services.monitor.span_activity import Activity
from neuronpipe.services.monitor.span_rings import RunTrace

RESIDENCY_EVERY_S = 1.0
FIRST_STATUS_S = 1.0
TOUCHED_SEGMENTS = ("fixed", "kv")  # segments whose pages become resident as they are written
RESTARTS = BOARD_WORDS.index("restarts")
ASK_AGAIN_S = 2.0  # a request to a coordinator that has died is never answered


class Observer(Closing):
    """An observer of one live run. Call `poll` often, so that no events are dropped, and before each `snapshot`.

    The constructor and `poll` raise NotRunning when there is no run or it has ended.

    path: the run directory; None: the only live run
    """

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
        self._open = ExitStack()
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
        """Return the events since the last call, oldest first."""
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
        """Return a snapshot of the run with the last status, and request the next status.

        The first snapshot waits up to FIRST_STATUS_S for a status: without one the run would seem not to be ready.
        """
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
            held_bytes = {name: segment.resident_bytes for name, segment in self._held.items()}
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
                return  # the coordinator does not read: `silent_s` of the snapshots grows

    def _see(self, now_s: float) -> tuple[ProcessView, ...]:
        """Return the processes, with process ids and restarts from the board and other fields from the last status."""
        pids = [self._pids[line * LINE_WORDS] for line in range(len(self._planned))]
        self._processes.sample(pids, now_s)
        statuses = self._monitor.processes or self._planned
        views: list[ProcessView] = []
        for status, pid, doing in zip(statuses, pids, self._activity.doing(lib.np_trace_now()), strict=True):
            views.append(
                ProcessView(
                    role=status.role,
                    index=status.index,
                    pid=pid,
                    state=status.state if pid == status.pid else "starting",
                    core=status.core,
                    step=status.step,
                    restarts=self._pids[len(views) * LINE_WORDS + RESTARTS],
                    cpu=_rounded(self._processes.cpu(pid)),
                    memory_bytes=self._processes.memory_bytes(pid),
                    numerics=status.numerics,
                    backend=status.backend,
                    work=status.work,
                    doing=doing,
                )
            )
        return tuple(views)

    def close(self) -> None:
        self._open.close()


def _planned(name: str) -> ProcessStatus:
    role, _, index = name.partition(".")
    return ProcessStatus(role=role, index=int(index), pid=0, state="starting")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
