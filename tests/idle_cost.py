"""What processes cost while nothing is asked of them: wake-ups, and processor time, as the kernel counts them."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_NAME = re.compile(r"^Name:\s+(.*)$", re.MULTILINE)
_SLEPT = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)$", re.MULTILINE)


class Cost(NamedTuple):
    """Of some processes, since they were started. wakeups: by thread name, how often a thread had slept and went on,
    whatever else the machine did; cpu_s: processor time."""

    wakeups: Counter[str]
    cpu_s: float


def cost_so_far(pids: Iterable[int]) -> Cost:
    """Of all threads of these processes; those that have ended cost nothing."""
    wakeups, cpu_s = Counter[str](), 0.0
    for pid in pids:
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            with contextlib.suppress(OSError):
                text = status.read_text()
                (name,), (slept,) = _NAME.findall(text), _SLEPT.findall(text)
                wakeups[name] += int(slept)
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            cpu_s += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Cost(wakeups, cpu_s)


def cost_over(pids: Iterable[int], seconds: float) -> Cost:
    """What these processes cost in the next so many seconds."""
    watched = [*pids]
    before = cost_so_far(watched)
    time.sleep(seconds)
    after = cost_so_far(watched)
    return Cost(after.wakeups - before.wakeups, after.cpu_s - before.cpu_s)
