"""What a client that asks for it is told of the run: its processes, its memory, and how busy it is."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from neuronpipe.plans.plan.plan import GATEWAY, Seat
from neuronpipe.protocol.layout import LINE_WORDS
from neuronpipe.protocol.layouts.run import BOARD_WORDS
from neuronpipe.protocol.messages.client import ProcessStatus, Status
from neuronpipe.protocol.messages.lifecycle import State
from neuronpipe.services.coordinator.core import Core
from neuronpipe.services.coordinator.meter import Meter
from neuronpipe.services.coordinator.seats import Seats, SeatState
from neuronpipe.services.job import Job

RESTARTS = BOARD_WORDS.index("restarts")


class Report:
    """Looks at what others keep. board: the lines of the seats' processes; lines: which of its lines a seat
    has."""

    def __init__(
        self,
        job: Job,
        core: Core,
        seats: Seats,
        meter: Meter,
        board: Sequence[int],
        lines: Mapping[tuple[str, int], int],
    ) -> None:
        self._job, self._core, self._seats, self._meter = job, core, seats, meter
        self._board, self._lines = board, lines
        self._started_at = time.monotonic()

    def status(self, tokens: int, *, ending: bool) -> Status:
        """tokens: drawn so far. ending: the run comes to its end."""
        now = time.monotonic()
        memory = self._meter.memory_now()
        compute = self._job.plan.compute
        gateways = [self._gateway(seat) for seat in compute.seats if seat.role == GATEWAY]
        processes = (self._coordinator(ending), *(self._process(seat, now) for seat in self._seats), *gateways)
        return Status(
            run=self._job.run,
            ready=self._core.all_ready and not ending,
            plan=self._job.plan.id,
            mode=compute.mode,
            processes=tuple(sorted(processes, key=lambda process: self._lines[process.role, process.index])),
            memory_bytes=memory["current_bytes"],
            memory_peak_bytes=memory["peak_bytes"],
            memory_limit_bytes=memory["limit_bytes"],
            sequences_active=len(self._core.requests.works),
            sequences_most=compute.sequences,
            sequences_waiting=len(self._core.requests.waiting),
            steps=self._core.schedule.steps,
            tokens=tokens,
            uptime_s=round(now - self._started_at, 3),
            flash_bytes=self._meter.flash_now()[0],
            throttle_share=self._core.throttle.share(now),
            cached_tokens=self._core.requests.cached_tokens,
            warm_up=self._meter.warm_up_now(),
        )

    def _coordinator(self, ending: bool) -> ProcessStatus:
        return ProcessStatus(
            role="coordinator",
            index=0,
            pid=os.getpid(),
            state="draining" if ending else "ready",
            core=self._job.seat.core,
            step=self._core.schedule.steps,
            restarts=self._on_board(self._job.seat)[1],
        )

    def _process(self, seat: SeatState, now: float) -> ProcessStatus:
        outstanding = self._seats.credits.outstanding(seat.peer)
        return ProcessStatus(
            role=seat.role,
            index=seat.index,
            pid=seat.pid,
            state=seat.verdict(now, outstanding),
            core=seat.core,
            step=seat.step,
            outstanding=outstanding,
            restarts=self._on_board(seat)[1],
        )

    def _gateway(self, seat: Seat) -> ProcessStatus:
        """A gateway is a client: it takes no seat here, and what is known of it is what the supervisor writes down."""
        pid, restarts = self._on_board(seat)
        state: State = "ready" if pid else "starting"
        return ProcessStatus(role=seat.role, index=seat.index, pid=pid, state=state, core=seat.core, restarts=restarts)

    def _on_board(self, seat: Seat | SeatState) -> tuple[int, int]:
        """Its process, and how often one was lost."""
        line = self._lines[seat.role, seat.index] * LINE_WORDS
        return self._board[line], self._board[line + RESTARTS]
