"""A live run to measure: started for a benchmark, warm, with its prompts and a count of the finished requests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from neuronpipe.launch.bench.cases import Case, Prompts
from neuronpipe.launch.bench.measure import Bench, wait_until_warm
from neuronpipe.launch.client import Client
from neuronpipe.launch.progress import Progress
from neuronpipe.launch.supervisor.start import LiveRun, started_run
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.links import CONTROL
from neuronpipe.services.runtime.implementations import Implementations


@frozen
class LiveBench:
    """A warm run, and what its tests share. step: to call after each request, for the progress"""

    live: LiveRun
    client: Client
    bench: Bench
    step: Callable[[], None]


@contextlib.contextmanager
def live_bench(
    package: Package,
    plan: Plan,
    device: Device,
    cases: Sequence[Case],
    repetitions: int,
    *,
    plain: bool,
    preset: str | None = None,
    batch: int = 1,
    sides: int = 1,
    uses: Implementations | None = None,
) -> Iterator[LiveBench]:
    """Start a run of the plan, wait until it is warm, and end it with the context.

    plain: show progress as lines
    preset: the one of `Prompts`
    sides: number of implementations that each test measures
    uses: implementations that replace built-in ones

    Raises UserError if there is no such preset, or if the run cannot be started.
    """
    longest_tokens = max(case.prompt_tokens + case.decode_tokens for case in cases)
    prompts = Prompts(package, preset, batch * (1 + repetitions) * longest_tokens)
    requests = len(cases) * (1 + repetitions) * sides
    finished_requests = 0
    with (
        started_run(package, plan, None, stays=False, uses=uses) as live,
        Client(live.directory.endpoint(CONTROL), live.failed) as client,
        Progress("measuring", "requests", plain=plain) as progress,
    ):

        def step() -> None:
            nonlocal finished_requests
            finished_requests += 1
            progress(finished_requests, requests)

        progress(finished_requests, requests)
        wait_until_warm(client)
        yield LiveBench(live, client, Bench(package, plan, device, prompts, client, batch), step)
