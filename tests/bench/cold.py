"""A cold start: with an empty page cache, the time until requests are served and until memory is warm.

    python tests/bench/cold.py PACKAGE [--against CHECKOUT] [--rounds N] [--backed GIB] [--json] [-- PLAN OPTIONS]

There are two kinds of rounds, in turns with another checkout (set up, with tests/) if one is named:

  alone   from `up` until requests are served, and until the warm-up has ended, compared with the disk's sequential
          speed (direct reads of 1 MiB, eight at a time, by fio)
  asked   requests one after the other as soon as they are served: tokens/s of each; then the same requests in warm
          memory; the time until ten tokens in a row had 80 % of that speed, compared with reading the file once

A virtual machine's memory may take its host longer to provide than the disk takes to fill it. `--backed` takes memory
beforehand and releases it as the run grows, so that only the run's own time remains. `memory` in the output is the cost
of touching fresh memory. Needs root (the page cache). Without fio our own reader measures the disk. It asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last: a round of another checkout imports that one's

from neuronpipe.launch.bench.cases import Prompts  # noqa: E402
from neuronpipe.native import ffi, lib  # noqa: E402
from neuronpipe.plans.package.reader import Package  # noqa: E402

from tests.pipeline import Run, Shell, scratch_shell  # noqa: E402

REQUESTS, PROMPT_TOKENS, MAX_TOKENS = 8, 16, 24
STEADY_S = 1.0  # memory is warm when nothing is read for so long
NEAR_WARM, STRETCH = 0.8, 10
GB, GIB = 1e9, 1 << 30
AHEAD_BYTES = 800 << 20  # released before the run needs it
MADV_DONTNEED, MADV_POPULATE_WRITE = 4, 23


def sequential_bytes_per_s(path: Path) -> float:
    """Return the disk's sequential speed by fio, or by our reader if fio is not installed."""
    if shutil.which("fio") is None:
        return read_alone_bytes_per_s(path)
    command = ["fio", "--name=read", f"--filename={path}", "--readonly", "--rw=read", "--direct=1", "--bs=1M"]
    command += ["--iodepth=8", "--ioengine=io_uring", "--output-format=json", "--runtime=4"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def read_alone_bytes_per_s(path: Path, runtime_s: float = 4.0) -> float:
    """Return the speed of direct sequential reads of 1 MiB, eight at a time, repeated over the file."""
    size, depth, error = 1 << 20, 8, ffi.new("int *")
    reader = lib.np_reader_open(str(path).encode(), b"io_uring", depth, error)
    if reader == ffi.NULL:
        raise SystemExit(f"{path}: cannot be read with io_uring (errno {error[0]})")
    memory = mmap.mmap(-1, size * depth)
    base, done = ffi.from_buffer(memory), ffi.new("np_completion[]", depth)
    blocks, next_block, came = path.stat().st_size // size, 0, 0
    free, began = list(range(depth)), time.monotonic()
    while time.monotonic() - began < runtime_s:
        offsets = [(next_block + n) % blocks * size for n in range(len(free))]
        next_block += len(free)
        lib.np_reader_submit(reader, offsets, [size] * len(free), [base + n * size for n in free], free, len(free))
        count = lib.np_reader_reap(reader, done, 1, depth, -1)
        free = [int(done[n].tag) for n in range(count)]
        came += count
    speed = came * size / (time.monotonic() - began)
    lib.np_reader_close(reader)
    return speed


class ProvidedMemory:
    """Memory that the host has provided already. `follow` releases it as shared memory grows."""

    def __init__(self, size_bytes: int) -> None:
        self._left, self._bytes = 0, size_bytes // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        self._memory = mmap.mmap(-1, max(self._bytes, 4096), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._libc = ctypes.CDLL(None, use_errno=True)
        began = time.monotonic()
        self._advise(0, self._bytes, MADV_POPULATE_WRITE)
        self.touch_s_per_gb = (time.monotonic() - began) / (self._bytes / GB) if self._bytes else 0.0

    def _advise(self, first: int, end: int, advice: int) -> None:
        if end > first:
            place = ctypes.c_void_p(self._address + first)
            if self._libc.madvise(place, ctypes.c_size_t(end - first), advice):
                raise OSError(ctypes.get_errno(), "madvise")

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Release memory as the run takes it, until the context ends."""
        over, before = threading.Event(), shared_bytes()

        def give_back() -> None:
            while not over.wait(0.01):
                used_bytes = shared_bytes() - before
                end = min(self._bytes, (used_bytes + used_bytes // 50 + AHEAD_BYTES) >> 21 << 21)
                self._advise(self._left, end, MADV_DONTNEED)
                self._left = max(self._left, end)

        thread = threading.Thread(target=give_back)
        if self._bytes:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if self._bytes:
                thread.join()


def shared_bytes() -> int:
    """Return the shared memory of the whole machine."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(facts["Shmem"].split()[0])


def cold_run(shell: Shell, package: Path, options: list[str]) -> tuple[Run, float]:
    """Start a run. Return it and the seconds until requests were served."""
    began = time.monotonic()
    run = Run(shell, Path(shell.json("up", package, *options)["run"]))
    return run, time.monotonic() - began


def until_warm(run: Run) -> tuple[float, int]:
    """Wait until nothing is read any more. Return the seconds until the last read, and the bytes read in all."""
    began = last = time.monotonic()
    read = run.status().flash_bytes
    while time.monotonic() - last < STEADY_S:
        time.sleep(0.05)
        if (now := run.status().flash_bytes) != read:
            read, last = now, time.monotonic()
    return last - began, read


def alone(run: Run) -> dict[str, float]:
    """Measure the warm-up without requests."""
    before = run.status().flash_bytes
    seconds, read = until_warm(run)
    return {"warm_s": seconds, "bytes_per_s": (read - before) / seconds if seconds else 0.0}


def requested(run: Run, prompts: list[list[int]]) -> dict[str, Any]:
    """Measure requests during the warm-up, and again in warm memory."""
    began = time.monotonic()
    first_ms, speeds, reads, came = 0.0, [], 0, []
    for number, prompt in enumerate(prompts):
        times: list[float] = []
        answer = run.ask(prompt, MAX_TOKENS, seen=lambda token, times=times: times.append(time.monotonic()))
        first_ms = answer["ttft_ms"] if number == 0 else first_ms
        speeds.append(answer["tokens_per_s"])
        reads += answer["flash"]["reads"]
        came.append(times)
    until_warm(run)
    warm = statistics.median(run.ask(prompt, MAX_TOKENS)["tokens_per_s"] for prompt in prompts)
    return {
        "first_token_ms": first_ms,
        "tokens_per_s": speeds,
        "warm_tokens_per_s": warm,
        "reads": reads,
        "near_warm_s": near_warm_from(came, warm) - began,
    }


def near_warm_from(came: list[list[float]], warm_tokens_per_s: float) -> float:
    """Return the time of the first token from which on STRETCH tokens had NEAR_WARM of the warm speed, or infinity."""
    for times in came:
        for first, last in zip(times, times[STRETCH:], strict=False):
            if STRETCH / (last - first) >= NEAR_WARM * warm_tokens_per_s:
                return first
    return float("inf")


def one_round(kind: str, path: Path, provided_bytes: int, options: list[str]) -> dict[str, Any]:
    """Measure one run from its start to its end, by the imported code."""
    texts = Prompts(Package.open(path), None)
    prompts = [list(texts.take(n, PROMPT_TOKENS, PROMPT_TOKENS + MAX_TOKENS)) for n in range(REQUESTS)]
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    memory = ProvidedMemory(provided_bytes)
    with scratch_shell() as shell, memory.follow():
        run, ready_s = cold_run(shell, path, options)
        figures = alone(run) if kind == "alone" else requested(run, prompts)
        run.down()
    return {"kind": kind, "ready_s": ready_s, "memory_s_per_gb": memory.touch_s_per_gb, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, measured in turns")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backed", type=float, default=0.0, metavar="GIB", help="memory taken before each round")
    parser.add_argument("--only", choices=("alone", "asked"), help="one round by the code that is imported, as JSON")
    parser.add_argument("--json", action="store_true")
    arguments, options = parser.parse_known_args()
    options = [word for word in options if word != "--"]
    if arguments.only:
        row = one_round(arguments.only, arguments.package, int(arguments.backed * GIB), options)
        print(json.dumps(row))
        return
    bundles = Package.open(arguments.package).bundles_path
    checkouts = {"here": ROOT, **({"against": arguments.against.resolve()} if arguments.against else {})}
    for number in range(arguments.rounds):
        for kind in ("alone", "asked"):
            for name, root in checkouts.items():
                disk = sequential_bytes_per_s(bundles)
                command = [root / ".venv" / "bin" / "python", __file__, arguments.package.resolve(), "--only", kind]
                command += ["--backed", str(arguments.backed), "--", *options]
                done = subprocess.run(
                    [str(word) for word in command],
                    env={**os.environ, "PYTHONPATH": str(root)},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                row = {"round": number, "who": name, "disk_bytes_per_s": disk, "file_s": bundles.stat().st_size / disk}
                row |= json.loads(done.stdout)
                print(json.dumps(row) if arguments.json else row_text(row), flush=True)


def row_text(row: dict[str, Any]) -> str:
    """Return the printed line of a row."""
    disk = row["disk_bytes_per_s"]
    head = f"{row['who']:8}{row['kind']:6} ready after {row['ready_s']:5.2f} s"
    if row["kind"] == "alone":
        return (
            f"{head}, warm after {row['warm_s']:5.2f} s more: {row['bytes_per_s'] / GB:.2f} GB/s of the disk's "
            f"{disk / GB:.2f} ({row['bytes_per_s'] / disk:.0%})"
        )
    speeds = " ".join(f"{speed:.1f}" for speed in row["tokens_per_s"])
    return (
        f"{head}, first token {row['first_token_ms']:.0f} ms, tokens/s {speeds}, warm {row['warm_tokens_per_s']:.1f}; "
        f"{row['reads']:,} reads; near warm after {row['near_warm_s']:.1f} s, reading the file takes "
        f"{row['file_s']:.1f} s"
    )


if __name__ == "__main__":
    main()
