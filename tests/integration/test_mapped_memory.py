"""What a run has read into memory stays there, mapped and locked, in huge pages where the system makes them."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.native.huge_mapping import HugeMapping, collapse
from neuronpipe.plans.plan.document import read_plan
from neuronpipe.protocol.memory.segments import create_memory_file

from tests.integration.large_package import write_large_package
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


def test_slots_that_nobody_writes_again_are_not_mapped_page_by_page(shell: Shell) -> None:
    """Mapping them all took a core from the texts that were asked of memory that had just become warm."""
    with shell.up(DEMO, "--warm") as run:
        slots_bytes = read_plan(run.path / "plan.json").memory.slots_bytes
        time.sleep(0.5)
        in_pages_bytes = _bytes(run.pid("loader"), "RssShmem") - _huge_bytes(run.pid("loader"))
        assert in_pages_bytes < slots_bytes / 2


def test_workers_read_weights_from_huge_pages(shell: Shell, tmp_path: Path) -> None:
    if not _makes_huge_pages():
        pytest.skip("this system makes no huge pages of memory files")
    package = write_large_package(tmp_path / "package", neurons=1376).path
    with shell.up(package, "--workers", "2") as run:
        run.ask("x", 8, ignore_end=True)
        memory = read_plan(run.path / "plan.json").memory
        weights_bytes = memory.slots_bytes + memory.fixed_bytes
        for worker in range(2):
            assert _huge_bytes(run.pid("decode", worker)) >= 0.9 * weights_bytes, "all of them, but for edges"


def _huge_bytes(pid: int | str) -> int:
    """Bytes of memory files that a process has mapped as huge pages."""
    found = re.findall(r"^ShmemPmdMapped:\s+(\d+) kB", Path(f"/proc/{pid}/smaps").read_text(), re.M)
    return 1024 * sum(map(int, found))


def _makes_huge_pages() -> bool:
    file, size_bytes = create_memory_file("trial"), 4 << 20
    os.ftruncate(file, size_bytes)
    mapping = HugeMapping(file, size_bytes, writable=True)
    os.close(file)
    collapse(mapping.content)
    made_bytes = _huge_bytes("self")
    mapping.close()
    return made_bytes > 0
