"""Random direct reads of one file by fio and by the native reader, at the same sizes and depths."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
from neuronpipe.native import ffi, lib
from neuronpipe.plans.measure.flash_reads import read_buffers

KIB = 1 << 10
SIZES_BYTES = (4 * KIB, 8 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB)
DEPTHS = (1, 8, 32, 128)
COMPLETION = np.dtype([("tag", "u8"), ("result", "i4"), ("unused", "u4")])


def measure(path: Path, *, rounds: int, point_s: int) -> list[dict[str, Any]]:
    """Return medians over rounds. Both take turns at every point, so that a drift of the machine affects both."""
    rows = []
    for size_bytes in SIZES_BYTES:
        for depth in DEPTHS:
            pairs = [
                (
                    _fio_bytes_per_s(path, size_bytes, depth, point_s),
                    reader_bytes_per_s(path, size_bytes, depth, point_s),
                )
                for _ in range(rounds)
            ]
            rows.append(
                {
                    "request_bytes": size_bytes,
                    "depth": depth,
                    "fio_bytes_per_s": statistics.median(fio for fio, _ in pairs),
                    "reader_bytes_per_s": statistics.median(reader for _, reader in pairs),
                    "ratio": statistics.median(reader / fio for fio, reader in pairs),
                }
            )
    return rows


def _fio_bytes_per_s(path: Path, size_bytes: int, depth: int, seconds: int) -> float:
    command = [
        *(
            "fio",
            "--name=read",
            f"--filename={path}",
            "--readonly",
            "--rw=randread",
            "--direct=1",
            "--ioengine=io_uring",
        ),
        *("--norandommap", "--randrepeat=0", "--time_based", f"--runtime={seconds}", "--output-format=json"),
        *(f"--bs={size_bytes}", f"--iodepth={depth}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def reader_bytes_per_s(path: Path, size_bytes: int, depth: int, seconds: int) -> float:
    """Measure the reader through cffi, with one refill per reap. Offsets are drawn beforehand, to keep Python short."""
    error = ffi.new("int *")
    reader = lib.np_reader_open(os.fsencode(path), b"io_uring", depth, error)
    if reader == ffi.NULL:
        raise OSError(error[0], os.strerror(error[0]), str(path))
    try:
        if not lib.np_reader_direct(reader):
            raise SystemExit(f"{path}: the file system refuses direct I/O, so this would measure the page cache")
        return _fill_and_reap(reader, path, size_bytes, depth, seconds)
    finally:
        lib.np_reader_close(reader)


def _fill_and_reap(reader: Any, path: Path, size_bytes: int, depth: int, seconds: int) -> float:
    memory = read_buffers(reader, size_bytes * depth)
    slots = np.arange(depth, dtype=np.uint64)
    addresses = slots * np.uint64(size_bytes) + np.uint64(int(ffi.cast("uintptr_t", memory)))
    places = np.random.default_rng().integers(path.stat().st_size // size_bytes, size=1 << 20, dtype=np.uint64)
    offsets = places * np.uint64(size_bytes)
    offset_words = ffi.from_buffer("uint64_t[]", offsets)
    target_words, tag_words = ffi.new("void *[]", depth), ffi.new("uint64_t[]", depth)
    targets = np.frombuffer(ffi.buffer(target_words), dtype=np.uint64)
    tags = np.frombuffer(ffi.buffer(tag_words), dtype=np.uint64)
    lengths = ffi.new("uint32_t[]", [size_bytes] * depth)
    done = ffi.new("np_completion[]", depth)
    completions = np.frombuffer(ffi.buffer(done), dtype=COMPLETION)

    targets[:], tags[:] = addresses, slots
    next_offset, reads, under_way = depth, 0, depth
    started = now = time.perf_counter()
    submitted = lib.np_reader_submit(reader, offset_words, lengths, target_words, tag_words, depth)
    while under_way:
        if submitted < 0:
            raise SystemExit(f"{path}: the reader refused a read: {submitted}")
        count = lib.np_reader_reap(reader, done, 1, depth, -1)
        if (completions["result"][:count] != size_bytes).any():
            raise SystemExit(f"{path}: a read failed: {completions['result'][:count].min()}")
        now = time.perf_counter()
        reads, under_way = reads + count, under_way - count
        if now - started < seconds:
            tags[:count] = completions["tag"][:count]
            targets[:count] = addresses[tags[:count]]
            next_offset = next_offset if next_offset + count <= len(offsets) else 0
            submitted = lib.np_reader_submit(
                reader, offset_words + next_offset, lengths, target_words, tag_words, count
            )
            next_offset, under_way = next_offset + count, under_way + count
    return reads * size_bytes / (now - started)
