"""`/live`: the run as a monitor sees it, a snapshot four times a second, while clients view it.

One observer serves all clients, in a thread of its own; the event loop, which also sends completions, only passes on
its snapshots. Without clients there is no observer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from neuronpipe.protocol.errors import UserError
from neuronpipe.services.gateway.http.api_errors import ApiError, unavailable
from neuronpipe.services.gateway.openai.response_sending import run_while_connected
from neuronpipe.services.monitor.observer import Observer
from starlette.types import Receive, Scope, Send

EVERY_S = 0.25
MAX_VIEWERS = 32


class LiveFeed:
    """Snapshots of one run for all viewers, taken while there are viewers."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._viewers: set[LiveResponse] = set()
        self._watching: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes] | None = None
        self._over = unavailable("ended", "the last viewer has disconnected")
        self._ending: str | None = None

    def view(self) -> LiveResponse:
        """Return a response for one more viewer. Raises ApiError if there are too many, or the server ends."""
        self._require_no_end()
        if len(self._viewers) >= MAX_VIEWERS:
            raise ApiError(
                429,
                "rate_limit_exceeded",
                f"{MAX_VIEWERS} clients view this run already; try again later",
                kind="rate_limit_error",
                retry_after_s=5,
            )
        return LiveResponse(self)

    def end(self, reason: str) -> None:
        self._ending = reason
        self._fail_next(unavailable("draining", reason))

    def _require_no_end(self) -> None:
        if self._ending is not None:
            raise unavailable("draining", self._ending)

    def _fail_next(self, problem: ApiError) -> None:
        """Raise an error where the next snapshot is awaited."""
        if self._next is not None and not self._next.done():
            self._next.set_exception(problem)
            self._next.exception()  # mark it as retrieved, though its viewer may have left

    async def enter(self, view: LiveResponse) -> None:
        """Count a viewer; the first one starts the observer."""
        self._viewers.add(view)
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    def leave(self, view: LiveResponse) -> None:
        """Remove a viewer; the observer ends without viewers."""
        self._viewers.discard(view)

    async def next(self) -> bytes:
        """Return the next snapshot as an event. Raises ApiError when the run or the server has ended."""
        self._require_no_end()
        if self._watching is None:
            raise self._over
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._next)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "observer")  # the observer's sockets belong to one thread
        observer: Observer | None = None
        try:
            observer = await loop.run_in_executor(thread, Observer, self._run)
            while self._viewers:
                began = time.monotonic()
                event = await loop.run_in_executor(thread, _event, observer)
                if self._next is not None and not self._next.done():
                    self._next.set_result(event)
                await asyncio.sleep(max(0.0, EVERY_S - (time.monotonic() - began)))
        except UserError as error:
            self._over = unavailable("ended", str(error))
        except Exception as error:  # a bug; without this, viewers would be told that the run has ended
            traceback.print_exc()
            message = f"the run cannot be observed: {type(error).__name__}; the server's log has the details"
            self._over = ApiError(500, "internal", message, kind="server_error")
        finally:
            self._watching = None
            self._fail_next(self._over)
            if observer is not None:
                thread.submit(observer.close)
            thread.shutdown(wait=False)


class LiveResponse:
    """The response to one viewer: an ASGI application."""

    def __init__(self, live: LiveFeed) -> None:
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send snapshots until the client goes away."""
        await self._live.enter(self)
        try:
            await run_while_connected(receive, self._show(send))
        finally:
            self._live.leave(self)

    async def _show(self, send: Send) -> None:
        event = await self._live.next()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while True:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                event = await self._live.next()
        except ApiError as problem:
            event = b"data: " + problem.body() + b"\n\n"
            await send({"type": "http.response.body", "body": event})


def _event(observer: Observer) -> bytes:
    observer.poll()
    return b"data: " + json.dumps(dataclasses.asdict(observer.snapshot())).encode() + b"\n\n"
