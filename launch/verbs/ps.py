"""`neuronpipe ps [--json]`: your live runs, what they hold, and where they are spoken with."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from neuronpipe.launch.client import Client, described, run_ended, show_warm_up
from neuronpipe.launch.formats import as_typed, show_bytes
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.messages.client import Status
from neuronpipe.protocol.messages.request import AskStatus
from neuronpipe.protocol.run_directory import RunDirectory, RunFile

PATIENCE_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    try:
        live = RunDirectory.live()
    except NotRunning:
        live = []
    runs = [_shown(directory, run_file) for directory, run_file in live]
    print(json.dumps({"runs": runs}) if arguments.json else as_typed(render(runs)))
    return 0


def _shown(directory: RunDirectory, run_file: RunFile) -> dict[str, Any]:
    """What is known of a run; of one that does not answer, what its file says."""
    facts = described(directory, run_file)
    facts["mode"] = "" if run_file.summary is None else run_file.summary.mode
    status = _status(directory)
    if status is None:
        return {**facts, "answers": False, "addresses": []}
    warm_up = status.warm_up
    return {
        **facts,
        "answers": True,
        "ready": status.ready,
        "uptime_s": round(status.uptime_s, 1),
        "memory_bytes": status.memory_bytes,
        "memory_limit_bytes": status.memory_limit_bytes,
        "texts": status.sequences_active,
        "max_texts": status.max_sequences,
        "texts_waiting": status.sequences_waiting,
        "warming_up": show_warm_up(warm_up) if warm_up is not None and not warm_up.done else "",
        "addresses": [
            address for process in status.processes if process.role == "gateway" for address in _listening(process.pid)
        ],
    }


def _status(directory: RunDirectory) -> Status | None:
    """How the run is; None when it does not say so in time. One that hangs must not hide the others."""
    deadline = time.monotonic() + PATIENCE_S
    with Client(directory.endpoint(CONTROL), run_ended(directory)) as client:
        client.send(AskStatus())
        try:
            for message in client.replies():
                if isinstance(message, Status):
                    return message
                if time.monotonic() > deadline:
                    return None
        except UserError:  # it has just ended
            return None
    return None


def _listening(pid: int) -> list[str]:
    """The addresses at which a process takes HTTP; none where the system does not tell."""
    import psutil  # only runs with a gateway pay for it

    try:
        sockets = psutil.Process(pid).net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return []
    bound = {(found.laddr.ip, found.laddr.port) for found in sockets if found.status == psutil.CONN_LISTEN}
    return [f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}" for host, port in sorted(bound)]


def render(runs: list[dict[str, Any]]) -> str:
    """A paragraph for each run: it fits a narrow terminal, and lines to paste stay whole."""
    if not runs:
        return "no run of yours is live; `neuronpipe up` starts one that stays"
    lines = []
    for run in runs:
        lines.append(f"{run['run']}")
        lines.append(f"  {run['model']}, {run['mode']} mode")
        if not run["answers"]:
            lines.append("  it does not answer at the moment")
            continue
        lines.append(f"  {'up' if run['ready'] else 'starting,'} {show_age(run['uptime_s'])}")
        held, limit = show_bytes(run["memory_bytes"]), show_bytes(run["memory_limit_bytes"])
        lines.append(f"  {held} of {limit}")
        waiting = f", {run['texts_waiting']} waiting" if run["texts_waiting"] else ""
        lines.append(f"  {run['texts']} of {run['max_texts']} texts under way{waiting}")
        if run["warming_up"]:
            lines.append(f"  warming up: {run['warming_up']}")
        lines += [f"  {address}" for address in run["addresses"]]
    return "\n".join(lines)


def show_age(seconds: float) -> str:
    """`12 s`, `3 min`, `5 h 10 min`, `2 d 3 h`."""
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if minutes < 2:
        return f"{seconds:.0f} s"
    if hours < 2:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"
