"""`neuronpipe ps [--json]`: your live runs, what they hold, and where they are spoken with; and the servers of several
models, whose runs come and go."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neuronpipe.launch.client import Client, described, run_ended, show_warm_up
from neuronpipe.launch.formats import as_typed, show_bytes
from neuronpipe.protocol import process_facts
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.messages.client import Status
from neuronpipe.protocol.messages.request import AskStatus
from neuronpipe.protocol.run_directory import RunDirectory, RunFile
from neuronpipe.services.runtime.listener import HOSTED_NAME

PATIENCE_S = 2.0
MAX_HEALTH_BYTES = 1 << 20
SILENT = "it does not answer at the moment"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    try:
        live = RunDirectory.live()
    except NotRunning:
        live = []
    servers = {command: _server(gateway) for gateway, command in _hosted_gateways()}
    runs = [_shown(directory, run_file) for directory, run_file in live]
    for run in runs:
        if (server := servers.get(_parent(run["supervisor_pid"]))) is not None:
            run["addresses"] = server["addresses"]
    said = {"runs": runs, "servers": [*servers.values()]}
    print(json.dumps(said) if arguments.json else as_typed(render(runs, said["servers"])))
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


# ---- servers of several models ---------------------------------------------------------------------------------------
def _hosted_gateways() -> Iterator[tuple[int, int]]:
    """Of this user's servers of several models, the gateway's process id and that of the command. Such a gateway
    belongs to no run, and no file says where it is: as for the addresses of runs, what the system shows is believed."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            name = Path(entry.path, "comm").read_bytes().strip()
            if name == HOSTED_NAME and entry.stat().st_uid == os.getuid():
                yield int(entry.name), _parent(int(entry.name))


def _parent(pid: int) -> int:
    """0 for a process that has ended."""
    with contextlib.suppress(OSError):
        return process_facts.parent(pid)
    return 0


def _server(gateway: int) -> dict[str, Any]:
    """Where it listens, and how the models are that it serves."""
    addresses = _listening(gateway)
    models = next(filter(None, map(_models, addresses)), None)
    return {"addresses": addresses, "answers": models is not None, "models": models or {}}


def _models(address: str) -> dict[str, str] | None:
    """The models at an address, each with the state of its run; None where nobody answers in time."""
    place = address.removeprefix("http://").replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
    connection = http.client.HTTPConnection(place, timeout=PATIENCE_S)
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError):
        connection.request("GET", "/health")
        found = json.loads(connection.getresponse().read(MAX_HEALTH_BYTES))["models"]
        return {str(name): str(state) for name, state in found.items()}
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


def render(runs: list[dict[str, Any]], servers: list[dict[str, Any]]) -> str:
    """A paragraph for each run, and for each server of several models: they fit a narrow terminal, and lines to paste
    stay whole."""
    lines = [*_of_runs(runs), *_of_servers(servers)]
    if not lines:
        return "no run of yours is live; `neuronpipe up` starts one that stays"
    return "\n".join(lines)


def _of_runs(runs: list[dict[str, Any]]) -> Iterator[str]:
    for run in runs:
        yield f"{run['run']}"
        yield f"  {run['model']}, {run['mode']} mode"
        if not run["answers"]:
            yield f"  {SILENT}"
            continue
        yield f"  {'up' if run['ready'] else 'starting,'} {show_age(run['uptime_s'])}"
        held, limit = show_bytes(run["memory_bytes"]), show_bytes(run["memory_limit_bytes"])
        yield f"  {held} of {limit}"
        waiting = f", {run['texts_waiting']} waiting" if run["texts_waiting"] else ""
        yield f"  {run['texts']} of {run['max_texts']} texts under way{waiting}"
        if run["warming_up"]:
            yield f"  warming up: {run['warming_up']}"
        yield from (f"  {address}" for address in run["addresses"])


def _of_servers(servers: list[dict[str, Any]]) -> Iterator[str]:
    for server in servers:
        yield from server["addresses"] or ["a server"]
        yield f"  {'each model has a run while requests name it' if server['answers'] else SILENT}"
        yield from (f"  {model}: {state}" for model, state in server["models"].items())


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
