"""A memory control group of our own, for runs whose memory the kernel limits, counts or swaps."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest

from tests.pipeline import Run, eventually

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_numbers = itertools.count()


class Group:
    """A memory control group, version 1 or 2."""

    def __init__(self) -> None:
        self._second = not V1.is_dir()
        self._folder = (V2 if self._second else V1) / f"neuronpipe-test-{os.getpid()}-{next(_numbers)}"
        try:
            self._folder.mkdir()
            _ = self.held_bytes()
        except OSError as error:
            pytest.skip(f"no memory control group of our own here: {error}")

    def limit(self, limit_bytes: int) -> None:
        """From now on the kernel keeps it below."""
        name = "memory.max" if self._second else "memory.limit_in_bytes"
        (self._folder / name).write_text(str(limit_bytes))

    def join(self) -> None:
        """Put the calling process into it."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def held_bytes(self) -> int:
        """What the kernel cannot take back: private and shared memory, and its own for these processes."""
        stat = self._table("memory.stat")
        if self._second:
            return stat["anon"] + stat["shmem"] + stat.get("kernel", 0)
        kernel = int((self._folder / "memory.kmem.usage_in_bytes").read_text())
        return stat["rss"] + stat["shmem"] + kernel

    def swapped_bytes(self) -> int:
        """What of it lies in swap."""
        if self._second:
            return int((self._folder / "memory.swap.current").read_text())
        return self._table("memory.stat")["swap"]

    def used_file(self) -> Path:
        """What says how much all in it use, page cache too."""
        return self._folder / ("memory.current" if self._second else "memory.usage_in_bytes")

    def killed(self) -> int:
        """Processes that the kernel killed for memory."""
        return self._table("memory.events" if self._second else "memory.oom_control")["oom_kill"]

    def remove(self) -> None:
        """When its processes have ended."""
        assert eventually(lambda: not (self._folder / "cgroup.procs").read_text())
        self._folder.rmdir()

    def _table(self, name: str) -> dict[str, int]:
        return {key: int(value) for key, value in map(str.split, (self._folder / name).read_text().splitlines())}


def swap_bytes() -> int:
    """What the system has for swapping."""
    found = re.search(r"^SwapTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    return 1024 * int(found[1]) if found else 0


def swapped_slots_bytes(run: Run) -> int:
    """Of the slots, what lies in swap, as their loader's map shows it."""
    maps = Path(f"/proc/{run.pid('loader')}/smaps").read_text()
    (slots,) = re.findall(r"/memfd:neuronpipe-slots.*?^Swap:\s+(\d+) kB", maps, re.M | re.S)
    return 1024 * int(slots)
