"""Bounds on CPU time that hold on any machine: they are stated in turns of a fixed piece of Python."""

from __future__ import annotations

import time
from collections.abc import Callable


def python_loops(work: Callable[[], object]) -> float:
    """CPU time of `work`, in turns of the loop below, which takes some 0.05 s. The loop is timed
    before and after, since the speed of a shared machine changes."""
    before_s = _loop_s()
    began = time.process_time()
    work()
    took_s = time.process_time() - began
    return 2 * took_s / (before_s + _loop_s())


def takes_fewer_loops(work: Callable[[], object], loops: float) -> bool:
    """Whether `work` takes fewer turns, in the best of three tries: what else a machine does only adds."""
    return any(python_loops(work) < loops for _ in range(3))


def _loop_s() -> float:
    began = time.process_time()
    counts: dict[int, tuple[int, float]] = {}
    for number in range(250_000):
        key = number % 1009
        seen, total = counts.get(key, (0, 0.0))
        counts[key] = (seen + 1, max(total, number / 3))
    assert sum(seen for seen, _ in counts.values()) == 250_000
    return time.process_time() - began
