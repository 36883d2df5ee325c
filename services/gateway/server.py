"""The HTTP server's end: what is said before the connections close."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterable
from types import FrameType

import uvicorn


class Server(uvicorn.Server):
    """uvicorn's server, which calls `ending` when it is told to end, by `signals` that waited until it started."""

    def __init__(self, config: uvicorn.Config, signals: Iterable[signal.Signals], ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._signals = signals
        self._loop = asyncio.get_running_loop()
        self._ending = ending

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """The handlers are set by now."""
        await super().startup(sockets)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self._loop.call_soon_threadsafe(self._ending)
        super().handle_exit(sig, frame)
