"""`neuronpipe ps [--json]`: list your live runs with their memory and addresses, and servers of several models.

Addresses are those of the gateway's sockets: the run directory does not know them, and a file could be wrong. A gateway
that `serve --run` put in front of a run is not shown.
"""

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

from neuronpipe.launch.client import Client, run_ended, run_facts, show_warm_up
from neuronpipe.launch.formats import as_typed, show_bytes
from neuronpipe.launch.verbs.runs.status import IDLE_PROFILE
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
    runs = [_describe_run(directory, run_file) for directory, run_file in live]
    for run in runs:
        if (server := servers.get(_parent(run["supervisor_pid"]))) is not None:
            run["addresses"] = server["addresses"]
    listing = {"runs": runs, "servers": [*servers.values()]}
    print(json.dumps(listing) if arguments.json else as_typed(render(runs, listing["servers"])))
    return 0


def _describe_run(directory: RunDirectory, run_file: RunFile) -> dict[str, Any]:
    """Return the JSON fields of a run; fewer if it does not answer."""
    facts = run_facts(directory, run_file)
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
        "device_profile": status.device_profile,
        "addresses": [
            address for process in status.processes if process.role == "gateway" for address in _listening(process.pid)
        ],
    }


def _status(directory: RunDirectory) -> Status | None:
    """Return the status of a run; None if it does not answer in time, so that it cannot hide the other runs."""
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
    """Yield the process ids of gateway and command of this user's servers of several models.

    Such a gateway belongs to no run and has no file; it is found by the name of its process.
    """
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            name = Path(entry.path, "comm").read_bytes().strip()
            if name == HOSTED_NAME and entry.stat().st_uid == os.getuid():
                yield int(entry.name), _parent(int(entry.name))


def _parent(pid: int) -> int:
    """Return the parent's process id; 0 if the process has ended."""
    with contextlib.suppress(OSError):
        return process_facts.parent(pid)
    return 0


def _server(gateway: int) -> dict[str, Any]:
    """Return the JSON fields of a server: its addresses, and its models with their states."""
    addresses = _listening(gateway)
    models = next(filter(None, map(_models, addresses)), None)
    return {"addresses": addresses, "answers": models is not None, "models": models or {}}


def _models(address: str) -> dict[str, str] | None:
    """Return the models at an address with the states of their runs; None without an answer in time."""
    host_and_port = address.removeprefix("http://").replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
    connection = http.client.HTTPConnection(host_and_port, timeout=PATIENCE_S)
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError):
        connection.request("GET", "/health")
        models = json.loads(connection.getresponse().read(MAX_HEALTH_BYTES))["models"]
        return {str(name): str(state) for name, state in models.items()}
    return None


def _listening(pid: int) -> list[str]:
    """Return the addresses at which a process listens; none if the system does not tell."""
    import psutil  # imported here: only runs with a gateway pay for it

    try:
        sockets = psutil.Process(pid).net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return []
    bound = {(socket.laddr.ip, socket.laddr.port) for socket in sockets if socket.status == psutil.CONN_LISTEN}
    return [f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}" for host, port in sorted(bound)]


def render(runs: list[dict[str, Any]], servers: list[dict[str, Any]]) -> str:
    """Return a paragraph for each run and server. They fit a narrow terminal, and lines to paste stay whole."""
    lines = [*_render_runs(runs), *_render_servers(servers)]
    if not lines:
        return "no run of yours is live; `neuronpipe up` starts one that stays"
    return "\n".join(lines)


def _render_runs(runs: list[dict[str, Any]]) -> Iterator[str]:
    for run in runs:
        yield f"{run['run']}"
        yield f"  {run['model']}, {run['mode']} mode"
        if not run["answers"]:
            yield f"  {SILENT}"
            continue
        yield f"  {'up' if run['ready'] else 'starting,'} {show_age(run['uptime_s'])}"
        used, limit = show_bytes(run["memory_bytes"]), show_bytes(run["memory_limit_bytes"])
        yield f"  {used} of {limit}"
        waiting = f", {run['texts_waiting']} waiting" if run["texts_waiting"] else ""
        yield f"  {run['texts']} of {run['max_texts']} sequences active{waiting}"
        if run["warming_up"]:
            yield f"  warming up: {run['warming_up']}"
        if run["device_profile"]:
            yield f"  device profile: {IDLE_PROFILE[run['device_profile']]}"
        yield from (f"  {address}" for address in run["addresses"])


def _render_servers(servers: list[dict[str, Any]]) -> Iterator[str]:
    for server in servers:
        yield from server["addresses"] or ["a server"]
        yield f"  {'each model has a run while requests name it' if server['answers'] else SILENT}"
        yield from (f"  {model}: {state}" for model, state in server["models"].items())


def show_age(seconds: float) -> str:
    """Return a duration, e.g. `12 s`, `3 min`, `5 h 10 min`, `2 d 3 h`."""
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if minutes < 2:
        return f"{seconds:.0f} s"
    if hours < 2:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"
