"""Watches the memory of a run: often while the run is in use, rarely while it sleeps.

the run is in use, fills up or warms up    memory is measured whenever MemoryUsage.due_at has come
slots give memory back or take it again    the same, until nothing changes any more
neither                                    every IDLE_LOOK_S, and at once when the kernel reports that tasks wait for
                                           memory (PSI)
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from neuronpipe.launch.supervisor.memory_usage import MemoryUsage
from neuronpipe.plans.device.process_limits import pressure_files, read_memory, read_stalled_share
from neuronpipe.plans.plan.document import Plan
from neuronpipe.protocol.layouts.run import BOARD_FLASH
from neuronpipe.protocol.memory.segments import Segment
from neuronpipe.services.cache.memory_pressure import Pressure
from neuronpipe.services.runtime.run_memory import RunMemory

USED_S = 2.5  # the coordinator reports every second that the run is in use
IDLE_LOOK_S = 5.0
WARM_UP_LEFT = BOARD_FLASH.index("warm_up_left_bytes")
ROOT = Path("/")
# Some task waited for 0.2 of 2 s; without privileges the window must be a multiple of 2 s.
TRIGGER = b"some 200000 2000000\0"


class MemoryWatch:
    """Writes to the board the memory that it measures, and how much the weight slots must give back.

    due_at: when to call `look` again (monotonic clock)
    stall_trigger: descriptor on which poll reports POLLPRI when tasks wait for memory; None if the kernel has none
    """

    def __init__(self, plan: Plan, segments: Mapping[str, Segment], memory: RunMemory) -> None:
        self.due_at = 0.0
        self.stall_trigger = open_stall_trigger(pressure_files(ROOT))
        self._used_until = 0.0
        self._board = memory.view("board", "memory")
        self._board[2] = plan.memory.limit_bytes
        self._withheld = memory.view("board", "withheld")
        self._flash = memory.view("board", "flash")
        self._usage = MemoryUsage([segment.fd for segment in segments.values()], plan.memory.limit_bytes)
        self._pressure = Pressure(plan.memory.slots_bytes + plan.memory.max_borrowed_bytes, follows=plan.memory.follows)
        machine = read_memory(ROOT)
        self._pressure.begin(machine.total_bytes, machine.available_bytes, plan.memory.total_bytes())
        self._withheld[0] = self._pressure.withheld_bytes

    def note_use(self) -> None:
        """Note that the run is in use, as the coordinator reports."""
        self._used_until = time.monotonic() + USED_S
        self.due_at = min(self.due_at, self._usage.due_at)

    def note_stall(self) -> None:
        """Look at once, because the kernel reports that tasks wait for memory."""
        self.due_at = 0.0

    def look(self, pids: Sequence[int], *, always_used: bool = False) -> bool:
        """Measure these processes if that is due. Return True if the amount that slots must give back has changed.

        always_used: treat the run as in use, for a coordinator that does not report it
        """
        if time.monotonic() < self.due_at:
            return False
        used = always_used or self._is_used()
        self._usage.sample([os.getpid(), *pids], scans=used)
        self._board[0], self._board[1] = self._usage.current_bytes, self._usage.peak_bytes
        self._pressure.swapped(self._usage.swapped_bytes)
        machine, now = read_memory(ROOT), time.monotonic()
        withheld_bytes = self._pressure.look(
            machine.total_bytes, machine.available_bytes, read_stalled_share(ROOT), now
        )
        changed = withheld_bytes != self._withheld[0]
        self._withheld[0] = withheld_bytes
        self.due_at = self._usage.due_at if used or self._pressure.is_changing else now + IDLE_LOOK_S
        return changed

    @property
    def warms_up(self) -> bool:
        """True while the loader reads clusters that the cache wants before they are needed."""
        return bool(self._flash[WARM_UP_LEFT])

    def _is_used(self) -> bool:
        return self.warms_up or self._usage.is_early or time.monotonic() < self._used_until


def open_stall_trigger(files: Iterable[Path]) -> int | None:
    """Return a descriptor of the first pressure file that accepts a trigger; poll reports POLLPRI on it.

    None if there is no such file: on old kernels, and on phones, where only the system may set one.
    """
    for path in files:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            os.write(descriptor, TRIGGER)
        except OSError:
            os.close(descriptor)
            continue
        return descriptor
    return None
