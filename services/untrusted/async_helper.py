"""A helper process for code in an asyncio event loop."""

from __future__ import annotations

import asyncio

from neuronpipe.services.untrusted.helper import Helper, Outcome
from neuronpipe.services.untrusted.process import Prepare


class AsyncHelper:
    """A `Helper` whose jobs are awaited. It must be created, used and closed in one running event loop."""

    def __init__(self, work: str | Prepare, *, memory_bytes: int, setup: bytes = b"", setup_bytes: int = 0) -> None:
        self._helper = Helper(work, memory_bytes=memory_bytes, setup=setup, setup_bytes=setup_bytes)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._helper.descriptor, self._look)
        self._results: dict[int, asyncio.Future[Outcome]] = {}
        self._due: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        return self._helper.pid

    @property
    def jobs(self) -> int:
        return len(self._results)

    async def call(self, payload: bytes, timeout_s: float) -> bytes:
        """Run a job after those submitted before, and return its answer. Raises errors as `Helper.call`."""
        result: asyncio.Future[Outcome] = self._loop.create_future()
        job = self._helper.submit(payload, timeout_s)
        self._results[job] = result
        self._watch()
        try:
            return (await result).result()
        finally:
            self._results.pop(job, None)

    def close(self) -> None:
        """End the process for good; callers that await a job are cancelled."""
        self._loop.remove_reader(self._helper.descriptor)
        if self._due is not None:
            self._due.cancel()
        self._helper.dispose()
        for result in self._results.values():
            result.cancel()

    def _look(self) -> None:
        for outcome in self._helper.receive():
            result = self._results.get(outcome.job)
            if result is not None and not result.done():
                result.set_result(outcome)
        self._watch()

    def _watch(self) -> None:
        if self._due is not None:
            self._due.cancel()
        due_s = self._helper.due_s
        self._due = None if due_s is None else self._loop.call_later(due_s, self._look)
