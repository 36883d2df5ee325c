"""The supervisor's control socket: a Unix socket in the run directory that takes requests to change the run.

The supervisor forks, so it has no ZeroMQ. Request and answer are one packet of JSON each, at most PACKET_BYTES:

    {"ask": "implementations"}                                      {"decode.0": ["package.module:Class", FOLDER], ...}
    {"ask": "end"}                                                  {"ending": true}
    {"ask": "swap", "processes": ["decode.1"],
     "use": "argv:./decoder", "folder": "/home/me",
     "patience_s": 20}                                              {"pids": {"decode.1": 4711}}

or {"error": REASON}. The mode of the run directory guards the access. A client that leaves before the answer changes
nothing.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from pathlib import Path
from typing import Any

from neuronpipe.launch.progress import TICK_S, refresh
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.run_directory import SUPERVISOR_SOCKET

PACKET_BYTES = 1 << 16
MAX_WAITING = 8


class ControlSocket:
    """The supervisor's end of the control socket."""

    def __init__(self, directory: Path) -> None:
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listening.bind(str(directory / SUPERVISOR_SOCKET))
        self._listening.listen(MAX_WAITING)
        self._clients: list[socket.socket] = []

    def descriptors(self) -> list[int]:
        """Return the descriptors that become readable when a client connects or sends a request."""
        return [connection.fileno() for connection in (self._listening, *self._clients)]

    def requests(self) -> list[tuple[socket.socket, dict[str, Any]]]:
        """Return the requests since the last call, each with the connection to answer on.

        Invalid requests are dropped, and their connections closed.
        """
        with contextlib.suppress(BlockingIOError):
            while len(self._clients) < MAX_WAITING:
                client, _ = self._listening.accept()
                client.setblocking(False)
                self._clients.append(client)
        requests = []
        for client in list(self._clients):
            try:
                request = json.loads(client.recv(PACKET_BYTES))
            except BlockingIOError:
                continue
            except (OSError, ValueError, RecursionError):
                request = None
            self._clients.remove(client)
            if isinstance(request, dict):
                requests.append((client, request))
            else:
                client.close()
        return requests


def answer(client: socket.socket, content: dict[str, Any]) -> None:
    """Send an answer and close the connection; a client that has left is ignored."""
    with client, contextlib.suppress(OSError):
        client.send(json.dumps(content).encode())


def _wait(control: socket.socket, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not select.select([control], [], [], TICK_S)[0] and time.monotonic() < deadline:
        refresh()


def ask(directory: Path, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Send a request to the supervisor of a run, and return its answer.

    Raises UserError if the supervisor refuses or does not answer in time, NotRunning if the run has ended.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        control.settimeout(timeout_s)
        try:
            control.connect(str(directory / SUPERVISOR_SOCKET))
            control.send(json.dumps(request).encode())
            _wait(control, timeout_s)
            content = json.loads(control.recv(PACKET_BYTES) or b"null")
        except TimeoutError:
            raise UserError(f"{directory}: its supervisor did not answer within {timeout_s:.0f} s") from None
        except OSError as error:
            raise NotRunning(f"{directory}: its supervisor cannot be asked: {error.strerror}") from None
    if not isinstance(content, dict):
        raise NotRunning(f"{directory}: the run ended before its supervisor answered")
    if "error" in content:
        raise UserError(str(content["error"]))
    return content
