"""The gateway process: an HTTP server on an inherited socket, and a client of the run.

The HTTP server and the request models are imported inside functions, after the fork, so that no other process of a run
pays for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan, read_plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.process_facts import private_writable_bytes
from neuronpipe.protocol.run_directory import PLAN_FILE, RunDirectory
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.runtime.listener import Listener
from neuronpipe.services.runtime.pulse import Pulse, event_loop, unwatched

if TYPE_CHECKING:
    from neuronpipe.services.gateway.client.run_client import CoordinatorClient
    from neuronpipe.services.gateway.runs.served_models import ServedModels

KEEP_ALIVE_S = 15
LAST_WORDS_S = 1
RUN_ENDS_LOOK_S = 0.1
SIGNALS = (signal.SIGINT, signal.SIGTERM)
MAX_GROWTH_BYTES = 512 << 20


@frozen(kw_only=True)
class HostedPackages:
    """Packages that are served within one memory limit, each with the plan of its run.

    keep_alive_s: how long an unused run stays
    templates_bytes: the bytes by which chat templates may make one helper process grow
    """

    packages: Sequence[tuple[Package, Plan]]
    limit_bytes: int
    keep_alive_s: float
    templates_bytes: int


class GatewayService:
    """The gateway of a run that `serve` started."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def serve(self) -> None:
        """Serve until SIGTERM or SIGINT, which the supervisor sends at the end of the run."""
        assert self._job.listener is not None
        serve(self._job.package, self._job.directory, self._job.listener, pulse=self._job.pulse)


def serve(
    package: Package,
    run: RunDirectory,
    listener: Listener,
    run_ended: Callable[[], str | None] | None = None,
    pulse: Pulse | None = None,
) -> None:
    """Serve one run until SIGTERM or SIGINT, or until run_ended returns a reason.

    run_ended: polled; returns the reason once the run has ended; None if a signal announces the end
    pulse: written regularly, for a watchdog that detects a server that hangs
    """
    _run_until_signal(lambda: _serve_run(package, run, listener, run_ended), pulse or unwatched())


def serve_hosted(hosted: HostedPackages, listener: Listener, link: socket.socket, pulse: Pulse) -> None:
    """Serve several packages until SIGTERM, SIGINT, or the end of the command at the other end of the link.

    That command starts and ends the runs (see runs/hosted_packages.py).

    pulse: as in `serve`
    """
    _run_until_signal(lambda: _serve_hosted(hosted, listener, link), pulse)


def _run_until_signal(work: Callable[[], Coroutine[None, None, None]], pulse: Pulse) -> None:
    """Run a coroutine with SIGNALS blocked until the server handles them; before, they would abort the event loop.

    work: creates the coroutine. A signal before that leaves none that was never awaited.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with asyncio.Runner(loop_factory=lambda: event_loop(pulse)) as runner:
            runner.run(work())
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


async def _serve_run(
    package: Package, run: RunDirectory, listener: Listener, run_ended: Callable[[], str | None] | None
) -> None:
    from neuronpipe.plans.plan.memory_budget import templates_bytes
    from neuronpipe.services.gateway.runs.served_models import Run, ServedModel, ServedModels

    plan = read_plan(run.path / PLAN_FILE)
    model = ServedModel(package, plan)
    # The plan of a run that was started without a gateway reserves nothing for templates.
    growth_bytes = plan.memory.templates_bytes or templates_bytes(plan.memory.limit_bytes)
    model.run = Run.of(run.endpoint(CONTROL), run.path, run_ended)
    over = asyncio.ensure_future(model.run.coordinator.over.wait())
    with _end_reported(run, model.run.coordinator) if run_ended is not None else contextlib.nullcontext():
        await _serve(ServedModels([model], growth_bytes), listener, over)


@contextlib.contextmanager
def _end_reported(run: RunDirectory, coordinator: CoordinatorClient) -> Iterator[None]:
    """While the context lasts, let the kernel report the end of the run's supervisor, so that it is polled rarely.

    It has no effect if the kernel does not support it or the supervisor's process is not visible.
    """
    from neuronpipe.services.gateway.client.run_client import REPORTED_LOOK_S

    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(run.read().supervisor_pid)
    except (OSError, AttributeError, UserError):  # an old kernel or libc, or the run has just ended
        yield
        return

    def ended() -> None:
        loop.remove_reader(descriptor)
        coordinator.run_look_s = RUN_ENDS_LOOK_S  # its directory is removed a moment later
        coordinator.look_at_run()

    loop.add_reader(descriptor, ended)
    coordinator.run_look_s = REPORTED_LOOK_S
    coordinator.look_at_run()
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _serve_hosted(hosted: HostedPackages, listener: Listener, link: socket.socket) -> None:
    from neuronpipe.services.gateway.runs.hosted_packages import HostedModels
    from neuronpipe.services.gateway.runs.run_pool import RunPool
    from neuronpipe.services.gateway.runs.served_models import ServedModel

    over = asyncio.get_running_loop().create_future()
    takes_bytes = {package.manifest.name: plan.memory.total_bytes() for package, plan in hosted.packages}
    pool = RunPool(takes_bytes, hosted.limit_bytes, hosted.keep_alive_s)
    served_models = [ServedModel(package, plan) for package, plan in hosted.packages]
    models = HostedModels(served_models, pool, hosted.templates_bytes, lambda: over.set_result(None))
    await models.attach(link)
    await _serve(models, listener, over)


async def _serve(models: ServedModels, listener: Listener, over: asyncio.Future[Any]) -> None:
    import uvicorn
    from neuronpipe.services.gateway.application import Gateway
    from neuronpipe.services.gateway.http.http_server import MAX_HEAD_BYTES, BoundedProtocol, SleepingServer
    from neuronpipe.services.gateway.http.memory_account import MemoryAccount

    account = MemoryAccount()
    gateway = Gateway(models, listener, account)
    config = uvicorn.Config(
        gateway.application(),
        http=cast(Any, functools.partial(BoundedProtocol, account)),
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WORDS_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )
    # A request that would take too much memory must fail alone, without taking the machine's memory.
    with bounded_growth(), socket.socket(fileno=listener.descriptor) as listening:
        try:
            server = SleepingServer(config, SIGNALS, gateway.end)
            over.add_done_callback(lambda _: server.end())
            template_trial = asyncio.ensure_future(models.try_templates())
            await server.serve(sockets=[listening])
            template_trial.cancel()
            over.cancel()
        finally:
            await models.close()


@contextlib.contextmanager
def bounded_growth() -> Iterator[None]:
    """While the context lasts, bound the growth of this process's memory to MAX_GROWTH_BYTES; beyond it, allocations
    fail.

    The limit is on data, not on address space: each thread reserves 72 MB of addresses for a stack and a heap that stay
    almost empty.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit_bytes = private_writable_bytes() + MAX_GROWTH_BYTES
    if soft == resource.RLIM_INFINITY or soft > limit_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
