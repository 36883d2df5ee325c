"""The HTTP server's end: what is said before the connections close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import FrameType

import uvicorn


class Server(uvicorn.Server):
    """uvicorn's server, which calls `ending` as soon as it is told to end."""

    def __init__(self, config: uvicorn.Config, ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._loop = asyncio.get_running_loop()
        self._ending = ending

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self._loop.call_soon_threadsafe(self._ending)
        super().handle_exit(sig, frame)
