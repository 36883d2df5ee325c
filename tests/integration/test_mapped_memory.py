"""What a run has read into memory stays there, mapped and locked, for the processes that use it."""

from __future__ import annotations

import re
import time
from pathlib import Path

from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.plan.document import read_plan

from tests.pipeline import Shell, eventually


def _bytes(pid: int, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return 1024 * int(found[1])


def test_the_loader_maps_its_slots_while_nobody_asks_and_workers_lock_what_they_use(shell: Shell) -> None:
    """Warming up writes slots as a file: without this, each of their pages costs a fault in the middle of a read."""
    with shell.up(DEMO, "--ffn-resident", "60%", "--warm") as run:
        slots_bytes = read_plan(run.path / "plan.json").memory.slots_bytes
        assert eventually(lambda: _bytes(run.pid("loader"), "RssShmem") >= slots_bytes)
        assert _bytes(run.pid("decode"), "VmLck") >= slots_bytes


def test_slots_that_nobody_writes_again_are_not_mapped(shell: Shell) -> None:
    """Mapping them all took a core from the texts that were asked of memory that had just become warm."""
    with shell.up(DEMO, "--warm") as run:
        slots_bytes = read_plan(run.path / "plan.json").memory.slots_bytes
        time.sleep(0.5)
        assert _bytes(run.pid("loader"), "RssShmem") < slots_bytes / 2
