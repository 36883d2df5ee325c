"""Packages whose runs come and go.

A run is started when a request names its package. It is ended when it was unused for a while or its memory is needed
for another run. `run_pool.py` decides that. The serving command, at the other end of a link, starts and ends runs by
order of the gateway.

| message, a line of JSON | sender | meaning |
|---|---|---|
| `{"serving": true}` | the gateway | the gateway accepts requests |
| `{"start": NAME}`, `{"end": NAME}` | the gateway | start or end the run of this package |
| `{"started": NAME, "directory": PATH}` | the command | the run was started; its coordinator reports when it is ready |
| `{"ended": NAME, "why": TEXT, "again_in_s": SECONDS}` | the command | the run has ended or could not be started |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.run_directory import RunDirectory
from neuronpipe.services.gateway.client.run_client import CoordinatorClient
from neuronpipe.services.gateway.http.api_errors import ApiError, unavailable
from neuronpipe.services.gateway.runs.run_pool import RunPool
from neuronpipe.services.gateway.runs.served_models import HEALTH_S, Run, ServedModel, ServedModels

STATE_NAMES = {"asleep": "no run", "starting": "starting", "live": "ready", "leaving": "ending", "ending": "ending"}
LOOK_S = 0.05
ORDERED = "it was ended"


class HostedModels(ServedModels):
    """The packages of a command that serves several.

    end_server: called when the command at the other end of the link has ended
    """

    def __init__(
        self, models: Sequence[ServedModel], pool: RunPool, templates_bytes: int, end_server: Callable[[], None]
    ) -> None:
        super().__init__(models, templates_bytes)
        self._pool, self._end_server = pool, end_server
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {model.name: [] for model in models}
        self._tasks: set[asyncio.Task[None]] = set()
        self._due: asyncio.TimerHandle | None = None
        self._ended: tuple[str, str] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def attach(self, link: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=link)
        self._start_task(self._listen(reader))
        self._send({"serving": True})

    # ---- requests --------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def _acquire(self, model: ServedModel) -> AsyncIterator[CoordinatorClient]:
        name = model.name
        await self._wait_for_run(name)
        try:
            assert model.run is not None
            yield model.run.coordinator
        finally:
            self._pool.release(name, self._loop.time())
            self._send_orders()

    async def _wait_for_run(self, name: str) -> None:
        """Wait until a package has a live run, and acquire it. Raises ApiError if it cannot be started."""
        if self._ended is not None:
            raise unavailable(*self._ended)
        if self._pool.state(name) == "live":
            self._pool.acquire(name)
            return
        live = self._loop.create_future()
        self._waiting[name].append(live)
        self._pool.request(name)
        self._send_orders()
        try:
            await live
        except asyncio.CancelledError:
            if live.done() and not live.cancelled() and live.exception() is None:
                self._pool.release(name, self._loop.time())  # `_wake` acquired it for a client that has just left
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiting[name].remove(live)
            if not self._waiting[name]:
                self._pool.withdraw(name)
            self._send_orders()

    def _wake(self, name: str, problem: ApiError | None = None) -> None:
        """Acquire the run for all requests that wait for it, or fail them with an error."""
        waiting, self._waiting[name] = self._waiting[name], []
        for live in waiting:
            if live.done():
                continue
            if problem is not None:
                live.set_exception(problem)
            else:
                self._pool.acquire(name)  # acquired at once, so that no other package takes its room
                live.set_result(None)

    async def health(self) -> dict[str, Any]:
        if self._ended is not None:
            raise unavailable(*self._ended)
        return {"status": "ok", "models": {name: STATE_NAMES[self._pool.state(name)] for name in self._by_name}}

    def facts(self) -> list[dict[str, Any]]:
        return [facts | {"state": STATE_NAMES[self._pool.state(facts["id"])]} for facts in super().facts()]

    def unload(self, model: ServedModel) -> None:
        if not self._pool.dismiss(model.name):
            raise ApiError(409, "in_use", f"other requests use {model.name}; it ends after them, when it is unused")
        self._send_orders()

    def unused_for_s(self, model: ServedModel) -> float:
        return self._pool.unused_for_s(model.name, self._loop.time())

    def end(self, code: str, reason: str) -> None:
        self._ended = code, reason
        super().end(code, reason)
        for name in self._waiting:
            self._wake(name, unavailable(code, reason))

    async def close(self) -> None:
        if self._due is not None:
            self._due.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().close()
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()

    # ---- the command -----------------------------------------------------------------------------------------
    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = json.loads(line)
            if "started" in message:
                self._run_began(self._by_name[message["started"]], Path(message["directory"]))
            elif "ended" in message:
                await self._run_ended(self._by_name[message["ended"]], message["why"], message["again_in_s"])
            self._send_orders()
        self._end_server()

    def _run_began(self, model: ServedModel, directory: Path) -> None:
        """Connect to a run. A restarted gateway gets this message also for runs that it did not order."""
        self._pool.starting(model.name)
        model.run = Run.of(RunDirectory(directory).endpoint(CONTROL), directory)
        self._start_task(self._await_ready(model, model.run))

    async def _await_ready(self, model: ServedModel, run: Run) -> None:
        ready = False
        while not ready and model.run is run:
            with contextlib.suppress(ApiError):  # it does not answer yet
                ready = (await run.coordinator.fresh_status(HEALTH_S)).ready
            await asyncio.sleep(0 if ready else LOOK_S)
        if model.run is run:
            self._pool.started(model.name, self._loop.time())
            self._wake(model.name)
            self._send_orders()

    async def _run_ended(self, model: ServedModel, why: str, again_in_s: float) -> None:
        ordered = self._pool.state(model.name) == "ending"
        run, model.run = model.run, None
        self._pool.ended(model.name)
        if not ordered:
            message = f"the run of {model.name} has ended: {why}"
            problem = ApiError(503, "restarting", message, kind="server_error", retry_after_s=again_in_s)
            self._wake(model.name, problem)
        if run is not None:
            run.end("ended", ORDERED if ordered else why)
            await run.coordinator.close()

    def _send_orders(self) -> None:
        """Send the orders that are due, and schedule the next ones."""
        now = self._loop.time()
        for order in self._pool.orders(now):
            self._send({order.act: order.name})
        if self._due is not None:
            self._due.cancel()
        self._due = None
        if math.isfinite(due_at := self._pool.due_at()):
            self._due = self._loop.call_at(due_at, self._send_orders)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(message).encode() + b"\n")

    def _start_task(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
