"""The supervisor's door: a Unix socket in the run directory, through which the run's user asks for changes to the run.

The supervisor forks, so it has no ZeroMQ. One packet of JSON each way, at most PACKET_BYTES:

    {"ask": "implementations"}                                      {"decode.0": ["package.module:Class", FOLDER], ...}
    {"ask": "end"}                                                  {"ending": true}
    {"ask": "swap", "seats": ["decode.1"], "use": "argv:./decoder",
     "folder": "/home/me", "patience_s": 20}                        {"pids": {"decode.1": 4711}}

or {"error": "why not"}. Whoever goes away before the answer changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.run_directory import DOOR

PACKET_BYTES = 1 << 16
MAX_WAITING = 8


class Door:
    """The supervisor's end."""

    def __init__(self, directory: Path) -> None:
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listening.bind(str(directory / DOOR))
        self._listening.listen(MAX_WAITING)
        self._guests: list[socket.socket] = []

    def descriptors(self) -> list[int]:
        """What can be read when somebody comes, or asks."""
        return [one.fileno() for one in (self._listening, *self._guests)]

    def requests(self) -> list[tuple[socket.socket, dict[str, Any]]]:
        """What was asked since the last call, and whom to answer. What is no request is hung up on."""
        with contextlib.suppress(BlockingIOError):
            while len(self._guests) < MAX_WAITING:
                guest, _ = self._listening.accept()
                guest.setblocking(False)
                self._guests.append(guest)
        asked = []
        for guest in list(self._guests):
            try:
                request = json.loads(guest.recv(PACKET_BYTES))
            except BlockingIOError:
                continue
            except (OSError, ValueError, RecursionError):
                request = None
            self._guests.remove(guest)
            if isinstance(request, dict):
                asked.append((guest, request))
            else:
                guest.close()
        return asked


def answer(guest: socket.socket, content: dict[str, Any]) -> None:
    """Answer, and hang up; a guest who is gone does not hear it."""
    with guest, contextlib.suppress(OSError):
        guest.send(json.dumps(content).encode())


def ask(directory: Path, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Ask the supervisor of a run. Raises UserError with its reason when it refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.settimeout(timeout_s)
        try:
            door.connect(str(directory / DOOR))
            door.send(json.dumps(request).encode())
            content = json.loads(door.recv(PACKET_BYTES) or b"null")
        except TimeoutError:
            raise UserError(f"{directory}: its supervisor did not answer within {timeout_s:.0f} s") from None
        except OSError as error:
            raise NotRunning(f"{directory}: its supervisor cannot be asked: {error.strerror}") from None
    if not isinstance(content, dict):
        raise NotRunning(f"{directory}: the run ended before its supervisor answered")
    if "error" in content:
        raise UserError(str(content["error"]))
    return content
