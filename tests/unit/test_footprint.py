"""The footprint of a run: shared pages once, and growth of the segments seen between two scans of the page tables."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest
from neuronpipe.launch import footprint as footprint_module
from neuronpipe.launch.footprint import Footprint, proportional_bytes

MIB = 1 << 20


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
    monkeypatch.setattr(footprint_module, "EARLY_FACTOR", 1e9)  # the next scan is far away
    descriptor, mapping = segment
    mapping[: 8 * MIB] = bytes(8 * MIB)
    footprint = Footprint([descriptor])
    footprint.sample([os.getpid()])
    first = footprint.current_bytes
    assert first == pytest.approx(proportional_bytes(os.getpid())[0], abs=4 * MIB)
    mapping[8 * MIB : 48 * MIB] = bytes(40 * MIB)
    footprint.sample([os.getpid()])
    assert footprint.current_bytes == first + 40 * MIB
    assert footprint.peak_bytes == footprint.current_bytes


def test_the_peak_stays(segment: tuple[int, mmap.mmap]) -> None:
    descriptor, mapping = segment
    footprint = Footprint([descriptor])
    mapping[: 16 * MIB] = bytes(16 * MIB)
    footprint.sample([os.getpid()])
    peak = footprint.current_bytes
    os.truncate(descriptor, 0)
    footprint.sample([os.getpid()])
    assert footprint.current_bytes == peak - 16 * MIB
    assert footprint.peak_bytes == peak


def test_a_process_that_is_gone_counts_nothing() -> None:
    assert proportional_bytes(1 << 30) == (0, 0)


def test_pages_that_a_second_process_begins_to_use_during_a_scan_count_once(
    segment: tuple[int, mmap.mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor, mapping = segment
    mapping[: 40 * MIB] = bytes(40 * MIB)
    scanned = {1: (50 * MIB, 40 * MIB), 2: (30 * MIB, 20 * MIB)}  # the second one came to the segment in between
    monkeypatch.setattr(footprint_module, "proportional_bytes", scanned.__getitem__)
    footprint = Footprint([descriptor])
    footprint.sample([1, 2])
    assert footprint.current_bytes == (10 + 10 + 40) * MIB
