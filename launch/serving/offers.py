"""The packages that `serve` offers: each with its plan, and the memory limit that their runs share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from neuronpipe.launch.formats import show_bytes
from neuronpipe.launch.planning.implementations import implementations
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.package_argument import open_package
from neuronpipe.launch.planning.plan import plan_here
from neuronpipe.launch.planning.search import followed_limit_bytes
from neuronpipe.launch.serving.restarting import Backoff
from neuronpipe.launch.supervisor.start import LiveRun
from neuronpipe.plans.measure.probe import probe
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan
from neuronpipe.plans.plan.memory_budget import gateway_bytes, templates_bytes
from neuronpipe.plans.planner.plan_options import LimitTooSmall, MemoryLimit, size_to_type
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.runtime.implementations import Implementations


@dataclass
class Offer:
    """A package, its plan, and the state of its run.

    keeps_history: as in `started_run`
    live: the run; None while there is none
    is_ending: the run was told to end; its processes may still exist
    contexts: closing them waits for the end of the run
    began: when the run started (monotonic clock, seconds)
    refused_until: after runs that ended by themselves, when the next one may start (monotonic clock, seconds)
    reason: why the last run ended
    """

    package: Package
    plan: Plan
    uses: Implementations
    keeps_history: bool = False
    live: LiveRun | None = None
    is_ending: bool = False
    contexts: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    began: float = 0.0
    backoff: Backoff = field(default_factory=Backoff)
    refused_until: float = 0.0
    reason: str = ""


def make_offers(
    paths: Sequence[Path],
    options: PlanOptions,
    uses: Sequence[str] = (),
    *,
    plain: bool,
    report: Callable[[str], None] | None = None,
) -> dict[str, Offer]:
    """Return the packages by the names of their models, each with its plan.

    With a --memory of a number of bytes, each plan may use all of it except the gateway's part.

    uses: values of --use
    plain, report: as in `plan_here`

    Raises UserError, which names the package.
    """
    offers: dict[str, Offer] = {}
    packages = _open_packages(paths, options, plain=plain)
    gateway = functools.partial(_gateway_bytes, [package for _, package in packages.values()])
    plan_options = options
    if options.memory_bytes is not None and options.has_fixed_limit:
        typed = MemoryLimit.of(options.memory_bytes)
        limit = MemoryLimit(max(1, typed - gateway(typed)), unit=typed.unit)
        plan_options = dataclasses.replace(options, memory_bytes=limit)
    for name, (path, package) in packages.items():
        with _errors_of(path, options, gateway):
            plan = plan_here(package, plan_options, plain=plain, several=True, report=report).plan
            keeps_history = options.keeps_history and not uses
            offers[name] = Offer(package, plan, implementations(uses, plan), keeps_history)
    return offers


def _open_packages(paths: Sequence[Path], options: PlanOptions, *, plain: bool) -> dict[str, tuple[Path, Package]]:
    """Open all packages. Two models of one name are refused here, before the device is measured for any package."""
    packages: dict[str, tuple[Path, Package]] = {}
    for path in paths:
        with _errors_of(path, options):
            package = open_package(path, plain=plain)
        name = package.manifest.name
        if name in packages:
            raise UserError(f"{path} and {packages[name][0]}: both models are called {name}; serve one of them")
        packages[name] = path, package
    return packages


def _gateway_bytes(packages: Iterable[Package], limit_bytes: int) -> int:
    """Return the gateway's part of a limit for the gateway and all runs."""
    chat_models = sum(package.manifest.chat is not None for package in packages)
    return gateway_bytes(chat_models, templates_bytes(limit_bytes))


def _limit_with_gateway(min_bytes: int, gateway: Callable[[int], int]) -> int:
    """Return the smallest limit that leaves min_bytes beside the gateway's part, which grows more slowly."""
    limit_bytes = min_bytes
    while (needed_bytes := min_bytes + gateway(limit_bytes)) > limit_bytes:
        limit_bytes = needed_bytes
    return limit_bytes


@contextlib.contextmanager
def _errors_of(path: Path, options: PlanOptions, gateway: Callable[[int], int] = lambda limit: 0) -> Iterator[None]:
    """Add the package to errors, and to those about --memory the gateway's part and the limit that is enough for both.

    gateway: returns the gateway's part of a limit
    """
    try:
        yield
    except UserError as error:
        message = str(error)
        if not message.startswith(str(path)):
            message = f"{path.name}: {message}"
        if options.memory_bytes is not None and options.has_fixed_limit and "--memory" in message:
            typed = MemoryLimit.of(options.memory_bytes)
            message += f"; of {typed.as_typed} the gateway takes {show_bytes(gateway(typed))}"
            if isinstance(error, LimitTooSmall):
                enough_bytes = _limit_with_gateway(error.min_bytes, gateway)
                message += f", so that --memory {size_to_type(enough_bytes, typed.unit)} is the least"
        raise UserError(message) from None


def total_limit_bytes(options: PlanOptions, path: Path) -> int:
    """Return the limit of the gateway and all runs together.

    It is the number of --memory, a share of all memory for `--memory auto`, else the memory that is available now.

    path: a package, whose file system is probed with this machine
    """
    if options.memory_bytes is not None and options.has_fixed_limit:
        return options.memory_bytes
    device = probe(path)
    return followed_limit_bytes(device) if options.follows_available_memory else device.memory_available_bytes


def shared_limit_bytes(options: PlanOptions, total_bytes: int, offers: Iterable[Offer]) -> int:
    """Return the limit of all runs together, within the total.

    With `--memory auto` that is the total, because such runs shrink by themselves when the gateway needs memory.
    """
    if options.follows_available_memory:
        return total_bytes
    return max(1, total_bytes - _gateway_bytes((offer.package for offer in offers), total_bytes))
