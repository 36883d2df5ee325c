"""The gateway process: an HTTP server on a socket that it was given, and a client of the run.

What it needs from elsewhere (the HTTP server, the validation of requests) is imported here and not before the fork:
no other process of a run pays for it.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.plan import read_plan
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.run_directory import PLAN_FILE, RunDirectory
from neuronpipe.services.gateway.listener import Listener
from neuronpipe.services.job import Job

if TYPE_CHECKING:
    import uvicorn
    from neuronpipe.services.gateway.coordinator import Coordinator

KEEP_ALIVE_S = 15
MAX_GROWTH_BYTES = 512 << 20
LAST_WORDS_S = 1
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GatewayService:
    """The gateway of a run that `serve` started."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def serve(self) -> None:
        """Serve until told to stop."""
        assert self._job.listener is not None
        serve(self._job.package, self._job.directory, self._job.listener)


def serve(
    package: Package, run: RunDirectory, listener: Listener, run_ended: Callable[[], str | None] = lambda: None
) -> None:
    """Serve until SIGTERM, SIGINT, or the end of the run. Signals wait until the server takes them: one that came
    before would break off the event loop."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        asyncio.run(_serve(package, run, listener, run_ended))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


async def _serve(package: Package, run: RunDirectory, listener: Listener, run_ended: Callable[[], str | None]) -> None:
    import uvicorn
    from neuronpipe.services.gateway.application import Gateway
    from neuronpipe.services.gateway.coordinator import Coordinator
    from neuronpipe.services.gateway.http_server import MAX_HEAD_BYTES, BoundedProtocol, announcing

    _limit_memory()
    coordinator = Coordinator(run.endpoint(CONTROL), run_ended)
    context_tokens = read_plan(run.path / PLAN_FILE).compute.context_tokens
    gateway = Gateway(package, coordinator, listener, run.path, context_tokens)
    config = uvicorn.Config(
        gateway.application(),
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WORDS_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        callback_notify=announcing(SIGNALS, gateway.end),
    )
    with socket.socket(fileno=listener.descriptor) as listening:
        try:
            server = uvicorn.Server(config)
            ending = asyncio.create_task(_end_with_run(coordinator, server))
            await server.serve(sockets=[listening])
            ending.cancel()
        finally:
            await coordinator.close()


async def _end_with_run(coordinator: Coordinator, server: uvicorn.Server) -> None:
    await coordinator.over.wait()
    server.should_exit = True


def _limit_memory() -> None:
    """No request may make this process take the machine's memory: beyond this an allocation fails, and with it that
    request alone."""
    # Not with psutil: importing it would cost every gateway a megabyte.
    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = size_bytes + MAX_GROWTH_BYTES
    if soft == resource.RLIM_INFINITY or soft > wanted:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
