"""How a cold start feels: the page cache is dropped, a run begins, memory warms up, texts are asked meanwhile.

    python tests/bench/cold.py PACKAGE [--against CHECKOUT] [--rounds N] [--backed GIB] [--json] [-- PLAN OPTIONS]

Two kinds of round, in turns with those of another checkout where one is named (set up, with tests/):
  alone   from `up` until requests are served, and until all that was to be loaded is there; beside what the disk gives
          in sequence (direct reads of 1 MiB, eight at a time, by fio)
  asked   texts one after the other from the moment that requests are served: tokens/s of each; then the same texts in
          warm memory; from which token on ten had 80 % of that speed, beside the time that reading the file once takes
A virtual machine's memory may cost its host more to provide than the disk takes to fill it. `--backed` takes so much
memory before, and gives it back as the run takes it: what is left is the run's own time. `memory` in the output is
what touching fresh memory costs.
Needs root (the page cache). Without fio our own reader, which does nothing else then, says what the disk gives. Not a
test: it asserts nothing about time.
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

TEXTS, PROMPT_TOKENS, MAX_TOKENS = 8, 16, 24
STEADY_S = 1.0  # nothing is read any more: memory is warm
NEAR_WARM, STRETCH = 0.8, 10
GB, GIB = 1e9, 1 << 30
AHEAD_BYTES = 800 << 20  # given back before the run takes it
MADV_DONTNEED, MADV_POPULATE_WRITE = 4, 23


def sequential_bytes_per_s(path: Path) -> float:
    """What the disk gives from end to end, by fio; where there is none, by the reader, which does nothing else then."""
    if shutil.which("fio") is None:
        return read_alone_bytes_per_s(path)
    command = ["fio", "--name=read", f"--filename={path}", "--readonly", "--rw=read", "--direct=1", "--bs=1M"]
    command += ["--iodepth=8", "--ioengine=io_uring", "--output-format=json", "--runtime=4"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def read_alone_bytes_per_s(path: Path, runtime_s: float = 4.0) -> float:
    """Direct reads of 1 MiB, eight at a time, over and over from end to end."""
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


class Held:
    """Memory that is there already: `follow` gives it back as shared memory grows."""

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
        """Until the context ends."""
        over, before = threading.Event(), shared_bytes()

        def give_back() -> None:
            while not over.wait(0.01):
                taken = shared_bytes() - before
                end = min(self._bytes, (taken + taken // 50 + AHEAD_BYTES) >> 21 << 21)
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
    """Shared memory of the whole machine."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(facts["Shmem"].split()[0])


def cold_run(shell: Shell, package: Path, options: list[str]) -> tuple[Run, float]:
    """A run started with nothing in the page cache, and the seconds until requests were served."""
    began = time.monotonic()
    run = Run(shell, Path(shell.json("up", package, *options)["run"]))
    return run, time.monotonic() - began


def until_warm(run: Run) -> tuple[float, int]:
    """Waits until nothing is read any more: seconds until the last read, bytes in all."""
    began = last = time.monotonic()
    read = run.status().flash_bytes
    while time.monotonic() - last < STEADY_S:
        time.sleep(0.05)
        if (now := run.status().flash_bytes) != read:
            read, last = now, time.monotonic()
    return last - began, read


def alone(run: Run) -> dict[str, float]:
    """Nobody asks."""
    before = run.status().flash_bytes
    seconds, read = until_warm(run)
    return {"warm_s": seconds, "bytes_per_s": (read - before) / seconds if seconds else 0.0}


def asked(run: Run, prompts: list[list[int]]) -> dict[str, Any]:
    """Texts from the first moment on, and again in warm memory."""
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
    """When the first token came from which on STRETCH tokens of a text had NEAR_WARM of the warm speed; infinity when
    none had."""
    for times in came:
        for first, last in zip(times, times[STRETCH:], strict=False):
            if STRETCH / (last - first) >= NEAR_WARM * warm_tokens_per_s:
                return first
    return float("inf")


def one_round(kind: str, path: Path, held_bytes: int, options: list[str]) -> dict[str, Any]:
    """A run from its start to its end, by the code that is imported."""
    texts = Prompts(Package.open(path), None)
    prompts = [list(texts.take(n, PROMPT_TOKENS, PROMPT_TOKENS + MAX_TOKENS)) for n in range(TEXTS)]
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    held = Held(held_bytes)
    with scratch_shell() as shell, held.follow():
        run, ready_s = cold_run(shell, path, options)
        figures = alone(run) if kind == "alone" else asked(run, prompts)
        run.down()
    return {"kind": kind, "ready_s": ready_s, "memory_s_per_gb": held.touch_s_per_gb, **figures}


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
                print(json.dumps(row) if arguments.json else shown(row), flush=True)


def shown(row: dict[str, Any]) -> str:
    """A row for a person."""
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
