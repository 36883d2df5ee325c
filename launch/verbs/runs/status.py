"""`neuronpipe status [--run DIR] [--json]`: show the processes, memory and counters of a live
run."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from neuronpipe.launch.client import attach, run_facts, show_warm_up
from neuronpipe.launch.formats import show_bytes
from neuronpipe.launch.progress import Elapsed
from neuronpipe.launch.supervisor.idle_profile import LOG
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.client import ProfileState, Status
from neuronpipe.protocol.run_directory import RunDirectory, RunFile
from neuronpipe.services.runtime.miss_counts import is_far_above

SEGMENTS = ("fixed", "kv", "slots")
IDLE_PROFILE: dict[ProfileState, str] = {
    "waiting": "will be measured when no request has come for a while",
    "measuring": "is being measured; a request stops it at once",
    "measured": "was measured while the run was idle; the next start plans with it",
    "failed": f"could not be measured while the run was idle, see {LOG}; `neuronpipe profile device` measures it",
}
"""What `status` and `ps` say of the profile that the run measures by itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: the only live run)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    directory, run_file = RunDirectory.find(arguments.run)
    facts = run_facts(directory, run_file) | {"segments": segment_memory(run_file)}
    with attach(directory.path) as client, Elapsed(plain=arguments.json) as elapsed:
        status = client.status(lambda: elapsed.say("waiting for the run to answer"))
    print(json.dumps({**dataclasses.asdict(status), **facts}) if arguments.json else render(facts, status))
    return 0


def segment_memory(run_file: RunFile) -> dict[str, dict[str, int]]:
    """Return the used and reserved sizes of the largest segments; nothing if the run's supervisor is not visible."""
    sizes = {}
    with contextlib.suppress(UserError):
        for name in SEGMENTS:
            with run_file.open_segment(name) as segment:
                sizes[name] = {"used_bytes": segment.resident_bytes, "reserved_bytes": segment.layout.total_bytes}
    return sizes


def _used(name: str, size: dict[str, int]) -> str:
    used, reserved = show_bytes(size["used_bytes"]), show_bytes(size["reserved_bytes"])
    return f"{name} {used}" if size["used_bytes"] >= size["reserved_bytes"] else f"{name} {used} of {reserved}"


def show_misses(status: Status) -> str:
    """Return a warning if the run misses far more than its plan expects, or has released pins for that; else empty.

    Misses that `deviations` states are not repeated.
    """
    far = not status.deviations and is_far_above(status.miss_rate, status.planned_miss_rate)
    if not far and status.pins == "held":
        return ""
    rates = f"{status.miss_rate:.0%} of the clusters that tokens need, the plan expects {status.planned_miss_rate:.0%}"
    if status.pins == "let_go":
        return f"{rates}; the plan's pins were released, because fewer clusters are missed without them"
    return f"{rates}; a trial without the plan's pins is under way" if status.pins == "tried" else rates


def render(facts: dict[str, Any], status: Status) -> str:
    segments = facts.get("segments", {})
    lines = [
        f"{facts['run']}: {'ready' if status.ready else 'starting'}, up {status.uptime_s:.0f} s",
        f"model {facts['model']}, {facts['package']}, {status.mode} mode, plan {status.plan}",
        f"memory {show_bytes(status.memory_bytes)}, peak {show_bytes(status.memory_peak_bytes)}, "
        f"limit {show_bytes(status.memory_limit_bytes)}",
        *([f"in it: {', '.join(_used(name, size) for name, size in segments.items())}"] if segments else []),
        f"sequences {status.sequences_active} of {status.max_sequences}, {status.sequences_waiting} waiting; "
        f"{status.steps} steps, {status.tokens} tokens, {show_bytes(status.flash_bytes)} read from flash",
        *([f"warming up: {show_warm_up(status.warm_up)}"] if status.warm_up and not status.warm_up.done else []),
        *([f"off the plan: {status.deviations}"] if status.deviations else []),
        *([f"misses {misses}"] if (misses := show_misses(status)) else []),
        *([f"device profile: {IDLE_PROFILE[status.device_profile]}"] if status.device_profile else []),
        *([f"throttled: pauses for {status.throttle_share:.0%} of the time"] if status.throttle_share else []),
        "",
        f"{'process':<16}{'pid':>8}{'core':>6}  {'state':<10}{'step':>8}{'restarts':>10}  numerics, work",
    ]
    for process in status.processes:
        core = "any" if process.core is None else str(process.core)
        name = f"{process.role}.{process.index}"
        row = f"{name:<16}{process.pid:>8}{core:>6}  {process.state:<10}{process.step:>8}{process.restarts:>10}"
        backend = f" by {process.backend}" if process.backend else ""
        notes = [text for text in (f"{process.numerics}{backend if process.numerics else ''}", process.work) if text]
        lines.append(f"{row}  {', '.join(notes)}".rstrip())
    return "\n".join(lines)
