"""llama.cpp on a GGUF file, through its own llama-bench: in memory, and under a memory limit enforced from outside."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

THREADS = 2
CGROUPS = Path("/sys/fs/cgroup/memory")  # version 1
BLOCK_BYTES = 512  # of ru_inblock


def in_memory(
    program: Path, gguf: Path, *, prompt_tokens: list[int], tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """Return a row for each prompt length and one for decode (unless tokens is 0), with flash attention, which is
    faster here."""
    prompts = ",".join(map(str, prompt_tokens)) or "0"
    words = ["-p", prompts, "-n", str(tokens), "-r", str(repeats), "-fa", "on"]
    return [_row(result) for result in _bench(program, gguf, words)]


def under_limit(
    program: Path, gguf: Path, *, limit_bytes: int, prompt_tokens: int, tokens: int, repeats: int
) -> dict[str, Any]:
    """Measure a prompt (its time is that to first token), or decode if prompt_tokens is 0, with the file mapped.

    It runs in a control group of limit_bytes, which counts its page cache too.

    Repacking is off: the repacked copy is anonymous memory, which cannot be dropped, and the kernel would end the run.
    """
    words = ["-p", str(prompt_tokens), "-n", str(0 if prompt_tokens else tokens), "-r", str(repeats)]
    words += ["-fa", "on", "--repack", "0", "-lm", "mmap"]
    _drop_page_cache(gguf)
    with _memory_group(limit_bytes) as (join, group):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock
        (result,) = _bench(program, gguf, words, join)
        read_bytes = (resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock - before) * BLOCK_BYTES
        peak_bytes = int((group / "memory.max_usage_in_bytes").read_text())
    if peak_bytes > limit_bytes:
        raise SystemExit(f"{group}: {peak_bytes:,} bytes used of {limit_bytes:,}: the limit did not hold")
    # llama-bench computes one prompt, or one token, to warm up, and the mapping is read once at the start.
    passes = prompt_tokens * (repeats + 1) if prompt_tokens else tokens * repeats + 2
    return {
        **_row(result),
        "limit_bytes": limit_bytes,
        "peak_bytes": peak_bytes,
        "disk_bytes_per_token": read_bytes / passes,
    }


def _row(result: dict[str, Any]) -> dict[str, Any]:
    rates = result["samples_ts"]
    return {
        "test": f"pp{result['n_prompt']}" if result["n_prompt"] else f"tg{result['n_gen']}",
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_least": min(rates),
        "tokens_per_s_most": max(rates),
        "seconds": statistics.median(result["samples_ns"]) / 1e9,
        "repeats": len(rates),
        "threads": result["n_threads"],
        "repack": result["repack"],
        "model": result["model_type"],
        "model_bytes": result["model_size"],
        "build": result["build_commit"],
    }


def _bench(program: Path, gguf: Path, words: list[str], join: Callable[[], None] | None = None) -> list[dict[str, Any]]:
    command = [str(program), "-m", str(gguf), "-t", str(THREADS), "-o", "json", *words]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=join)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SystemExit(f"{program}: ended with {done.returncode}: {last}")
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def _drop_page_cache(path: Path) -> None:
    """Drop a file from the page cache: pages that are cached already would not count against the limit."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@contextmanager
def _memory_group(limit_bytes: int) -> Iterator[tuple[Callable[[], None], Path]]:
    """Create a control group with a limit. Yield a function that moves the calling process into it, and its path."""
    group = CGROUPS / f"neuronpipe-bench-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as error:
        raise SystemExit(f"{group}: no memory limit from outside: {error.strerror}; needs cgroup v1 and root") from None

    def join() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    try:
        yield join, group
    finally:
        group.rmdir()
