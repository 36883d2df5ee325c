"""The supervisor's control socket: a Unix socket in the run directory, through which the run's user asks for changes.

The supervisor forks, so it has no ZeroMQ. One packet of JSON each way, at most PACKET_BYTES:

    {"ask": "implementations"}                                      {"decode.0": ["package.module:Class", FOLDER], ...}
    {"ask": "end"}                                                  {"ending": true}
    {"ask": "swap", "processes": ["decode.1"],
     "use": "argv:./decoder", "folder": "/home/me",
     "patience_s": 20}                                              {"pids": {"decode.1": 4711}}

or {"error": "why not"}. A client that leaves before the answer changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from pathlib import Path
from typing import Any

from neuronpipe.launch.progress import TICK_S, passes
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.run_directory import SUPERVISOR_SOCKET

PACKET_BYTES = 1 << 16
MAX_WAITING = 8


class ControlSocket:
    """The supervisor's end."""

    def __init__(self, directory: Path) -> None:
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listening.bind(str(directory / SUPERVISOR_SOCKET))
        self._listening.listen(MAX_WAITING)
        self._clients: list[socket.socket] = []

    def descriptors(self) -> list[int]:
        """Readable when a client connects, or asks."""
        return [one.fileno() for one in (self._listening, *self._clients)]

    def requests(self) -> list[tuple[socket.socket, dict[str, Any]]]:
        """What was asked since the last call, each with the connection to answer on. Anything but a request closes its
        connection."""
        with contextlib.suppress(BlockingIOError):
            while len(self._clients) < MAX_WAITING:
                client, _ = self._listening.accept()
                client.setblocking(False)
                self._clients.append(client)
        asked = []
        for client in list(self._clients):
            try:
                request = json.loads(client.recv(PACKET_BYTES))
            except BlockingIOError:
                continue
            except (OSError, ValueError, RecursionError):
                request = None
            self._clients.remove(client)
            if isinstance(request, dict):
                asked.append((client, request))
            else:
                client.close()
        return asked


def answer(client: socket.socket, content: dict[str, Any]) -> None:
    """Answer and close the connection; a client that has left does not matter."""
    with client, contextlib.suppress(OSError):
        client.send(json.dumps(content).encode())


def _wait(control: socket.socket, timeout_s: float) -> None:
    """Until there is an answer, or it was waited for so long."""
    deadline = time.monotonic() + timeout_s
    while not select.select([control], [], [], TICK_S)[0] and time.monotonic() < deadline:
        passes()


def ask(directory: Path, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Ask the supervisor of a run. Raises UserError with its reason when it refuses."""
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
