"""The memory that a run uses: shared pages once, and growth of segments seen between two scans of the page tables."""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest
from neuronpipe.launch.supervisor import memory_usage as module
from neuronpipe.launch.supervisor.memory_usage import MemoryUsage, ProcessMemory, process_memory
from neuronpipe.protocol.memory.layout import Layout
from neuronpipe.services.monitor.process_usage import helpers_of
from neuronpipe.services.worker.cpu import PrivateStage

MIB = 1 << 20
LIMIT_BYTES = 1 << 40  # far away


@pytest.fixture
def segment() -> Iterator[tuple[int, mmap.mmap]]:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 64 * MIB)
    with mmap.mmap(descriptor, 64 * MIB) as mapping:
        yield descriptor, mapping
    os.close(descriptor)


def test_what_a_segment_grows_by_is_seen_at_once(
    segment: tuple[int, mmap.mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EARLY_FACTOR", 1e9)  # the next scan is far away
    descriptor, mapping = segment
    mapping[: 8 * MIB] = bytes(8 * MIB)
    usage = MemoryUsage([descriptor], LIMIT_BYTES)
    usage.sample([os.getpid()])
    first = usage.current_bytes
    assert first == pytest.approx(process_memory(os.getpid()).proportional_bytes, abs=4 * MIB)
    mapping[8 * MIB : 48 * MIB] = bytes(40 * MIB)
    usage.sample([os.getpid()])
    assert usage.current_bytes == first + 40 * MIB
    assert usage.peak_bytes == usage.current_bytes


def test_the_peak_stays(segment: tuple[int, mmap.mmap]) -> None:
    descriptor, mapping = segment
    usage = MemoryUsage([descriptor], LIMIT_BYTES)
    mapping[: 16 * MIB] = bytes(16 * MIB)
    usage.sample([os.getpid()])
    peak = usage.current_bytes
    os.truncate(descriptor, 0)
    usage.sample([os.getpid()])
    assert usage.current_bytes == peak - 16 * MIB
    assert usage.peak_bytes == peak


@pytest.mark.alone  # what it shares with others counts less, the more of them there are
def test_the_stage_of_prompts_counts_as_memory_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EARLY_FACTOR", 0)
    layout = Layout.parse("stage", 1, f"residual u8 {32 * MIB} 4096", 4096 + 32 * MIB)
    usage = MemoryUsage([], LIMIT_BYTES)
    usage.sample([os.getpid()])
    before = usage.current_bytes
    buffer = PrivateStage(layout).buffer("residual")
    np.frombuffer(buffer, np.uint8)[:] = 1  # in place: bytes as large, even freed, may stay with the allocator
    usage.sample([os.getpid()])
    assert usage.current_bytes - before == pytest.approx(32 * MIB, abs=4 * MIB)


def test_a_process_that_is_gone_counts_nothing() -> None:
    assert process_memory(1 << 30) == (0, 0, 0)


def test_pages_that_a_second_process_begins_to_use_during_a_scan_count_once(
    segment: tuple[int, mmap.mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor, mapping = segment
    mapping[: 40 * MIB] = bytes(40 * MIB)
    scanned = {
        1: ProcessMemory(50 * MIB, 40 * MIB, 0),
        2: ProcessMemory(30 * MIB, 20 * MIB, 3),
    }  # the second one came to the segment in between
    monkeypatch.setattr(module, "process_memory", scanned.__getitem__)
    usage = MemoryUsage([descriptor], LIMIT_BYTES)
    usage.sample([1, 2])
    assert usage.current_bytes == (10 + 10 + 40) * MIB
    assert usage.swapped_bytes == 3


def test_what_a_process_gave_back_before_the_segments_grew_is_no_step_over_the_limit(
    segment: tuple[int, mmap.mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer takes 20 MiB while it is read. Runs said that they had 214 MiB of 210, which no moment had seen."""
    descriptor, mapping = segment
    reading, read = ProcessMemory(50 * MIB, 0, 0), ProcessMemory(30 * MIB, 0, 0)
    scans = iter([reading, read])
    monkeypatch.setattr(module, "EARLY_FACTOR", 1e9)  # the next scan is far away
    monkeypatch.setattr(module, "process_memory", lambda _: next(scans))
    usage = MemoryUsage([descriptor], 70 * MIB)
    usage.sample([1])
    assert usage.current_bytes == 50 * MIB
    mapping[: 32 * MIB] = bytes(32 * MIB)
    usage.sample([1])
    assert usage.current_bytes == 62 * MIB
    assert usage.peak_bytes == 62 * MIB


def test_helper_processes_are_the_children_of_a_runs_processes() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        helpers = helpers_of([os.getpid(), 2**31 - 1])
        child.kill()
    assert child.pid in helpers
