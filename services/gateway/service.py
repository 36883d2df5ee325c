"""The gateway process: an HTTP server on a socket that it was given, and a client of the run.

What it needs from elsewhere (the HTTP server, the validation of requests) is imported here and not before the fork:
no other process of a run pays for it.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.plan import Plan, read_plan
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.run_directory import PLAN_FILE, RunDirectory
from neuronpipe.services.gateway.listener import Listener
from neuronpipe.services.job import Job
from neuronpipe.services.pulse import Pulse, event_loop, unwatched

if TYPE_CHECKING:
    from neuronpipe.services.gateway.models import Models

KEEP_ALIVE_S = 15
LAST_WORDS_S = 1
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@frozen(kw_only=True)
class Hosted:
    """Packages that are served within one limit, each with the plan of its run, and how long a run stays that nobody
    uses."""

    packages: Sequence[tuple[Package, Plan]]
    limit_bytes: int
    keep_alive_s: float


class GatewayService:
    """The gateway of a run that `serve` started."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def serve(self) -> None:
        """Serve until told to stop."""
        assert self._job.listener is not None
        serve(self._job.package, self._job.directory, self._job.listener, pulse=self._job.pulse)


def serve(
    package: Package,
    run: RunDirectory,
    listener: Listener,
    run_ended: Callable[[], str | None] = lambda: None,
    pulse: Pulse | None = None,
) -> None:
    """Serve one run until SIGTERM, SIGINT, or its end. pulse: shows whether the server gets on, where it is watched."""
    _until_told(_serve_run(package, run, listener, run_ended), pulse or unwatched())


def serve_hosted(hosted: Hosted, listener: Listener, link: socket.socket, pulse: Pulse) -> None:
    """Serve several packages until SIGTERM, SIGINT, or the end of the command at the other end of the link, which
    starts and ends their runs. pulse: shows whether the server gets on."""
    _until_told(_serve_hosted(hosted, listener, link), pulse)


def _until_told(work: Coroutine[None, None, None], pulse: Pulse) -> None:
    """Signals wait until the server takes them: one that came before would break off the event loop."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with asyncio.Runner(loop_factory=lambda: event_loop(pulse)) as runner:
            runner.run(work)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


async def _serve_run(
    package: Package, run: RunDirectory, listener: Listener, run_ended: Callable[[], str | None]
) -> None:
    from neuronpipe.services.gateway.models import Model, Models, Run

    model = Model(package, read_plan(run.path / PLAN_FILE))
    model.run = Run.of(run.endpoint(CONTROL), run.path, run_ended)
    over = asyncio.ensure_future(model.run.coordinator.over.wait())
    await _serve(Models([model]), listener, over)


async def _serve_hosted(hosted: Hosted, listener: Listener, link: socket.socket) -> None:
    from neuronpipe.services.gateway.hosted import HostedModels
    from neuronpipe.services.gateway.models import Model
    from neuronpipe.services.gateway.pool import Pool

    over = asyncio.get_running_loop().create_future()
    takes_bytes = {package.manifest.name: plan.memory.total_bytes() for package, plan in hosted.packages}
    pool = Pool(takes_bytes, hosted.limit_bytes, hosted.keep_alive_s)
    models = HostedModels([Model(*one) for one in hosted.packages], pool, lambda: over.set_result(None))
    await models.attach(link)
    await _serve(models, listener, over)


async def _serve(models: Models, listener: Listener, over: asyncio.Future[Any]) -> None:
    import uvicorn
    from neuronpipe.services.gateway.application import Gateway
    from neuronpipe.services.gateway.http_server import MAX_HEAD_BYTES, BoundedProtocol, announcing
    from neuronpipe.services.gateway.templates import bounded_growth

    gateway = Gateway(models, listener)
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
    # No request may take the machine's memory: it fails alone.
    with bounded_growth(), socket.socket(fileno=listener.descriptor) as listening:
        try:
            server = uvicorn.Server(config)
            over.add_done_callback(lambda _: setattr(server, "should_exit", True))
            await server.serve(sockets=[listening])
            over.cancel()
        finally:
            await models.close()
