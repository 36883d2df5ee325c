"""The helper processes in which a gateway runs the chat templates of its models.

A template that hangs or exceeds its memory limit ends its own job and a helper process; the next job starts another.
Jobs of one model run one after the other, so that a model occupies at most one of several processes. A job that would
wait longer than TURN_S is refused, so that no queue forms behind a template that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict

from neuronpipe.plans.plan.memory_budget import MAX_TEMPLATE_HELPERS
from neuronpipe.services.gateway.http.api_errors import unavailable
from neuronpipe.services.gateway.templates.template_jobs import JOB_S, WORK, TemplateError
from neuronpipe.services.untrusted.async_helper import AsyncHelper
from neuronpipe.services.untrusted.helper import UntrustedError

TURN_S = 2 * JOB_S


class TemplatePool:
    """Runs jobs of `template_jobs.py` in processes that start when they are needed. Belongs to one event loop.

    growth_bytes: the bytes by which jobs may make one process grow
    """

    def __init__(self, growth_bytes: int) -> None:
        self._growth_bytes = growth_bytes
        self._helpers: list[AsyncHelper] = []
        self._free: asyncio.LifoQueue[AsyncHelper] = asyncio.LifoQueue()
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run(self, model: str, job: bytes, turn_s: float | None = None) -> bytes:
        """Run a job of this model's template and return its result.

        turn_s: how many seconds the job may wait for earlier jobs; None means TURN_S

        Raises TemplateError, which names the limit that the template has reached, and ApiError (503) if earlier jobs
        take too long.
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(TURN_S if turn_s is None else turn_s):
                    await stack.enter_async_context(self._turns[model])
                    helper = await self._helper()
            except TimeoutError:
                message = "the chat templates of other requests take long; try again"
                raise unavailable("templates_busy", message) from None
            try:
                return await helper.call(job, JOB_S)
            except (UntrustedError, ValueError) as error:  # ValueError: the job is too long
                raise TemplateError(str(error)) from None
            finally:
                self._free.put_nowait(helper)

    async def _helper(self) -> AsyncHelper:
        if self._free.empty() and len(self._helpers) < MAX_TEMPLATE_HELPERS:
            self._helpers.append(AsyncHelper(WORK, memory_bytes=self._growth_bytes))
            return self._helpers[-1]
        return await self._free.get()

    def close(self) -> None:
        """End the processes; callers that wait for a job are cancelled."""
        for helper in self._helpers:
            helper.close()
