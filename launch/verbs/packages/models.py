"""`neuronpipe models [--memory BYTES] [--device DEVICE] [--all] [--json]`: show which models this machine can run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence

from neuronpipe.launch.arguments.values import parse_bytes, parse_count
from neuronpipe.launch.catalog.estimates import (
    DEFAULT_CONTEXT_TOKENS,
    PROMPT_TOKENS,
    RULE,
    Estimate,
    best,
    estimate,
    sorted_by_use,
)
from neuronpipe.launch.catalog.table import LEGEND, Line, as_json, print_lines, table_lines, wrapped
from neuronpipe.launch.formats import as_typed, line_to_paste, show_bytes
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.shapes import flash_caveat, pulled_names, probe_without_package
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.lab.devices.device_description import caveats, planner_device
from neuronpipe.plans.lab.devices.device_file import THIS_MACHINE, read_device
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import MODES
from neuronpipe.plans.planner.device_facts import MEMORY_SHARE
from neuronpipe.plans.pull.catalog import catalog
from neuronpipe.protocol.frozen import frozen


@frozen(kw_only=True)
class Target:
    """The device of the estimates.

    title: the device, for people
    device_for: (manifest) -> the device for the planner
    memory_bytes: the memory limit unless the user sets one
    sources: where its figures come from, and what they leave out
    """

    title: str
    device_for: Callable[[Manifest], Device]
    memory_bytes: int
    sources: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory",
        type=parse_bytes,
        metavar="BYTES",
        help="memory limit of a whole run, e.g. 8GiB (default: most of what is available)",
    )
    parser.add_argument(
        "--context",
        type=parse_count,
        default=DEFAULT_CONTEXT_TOKENS,
        metavar="TOKENS",
        help="context length, as in the commands shown; a longer one takes more memory (default: %(default)s)",
    )
    parser.add_argument("--mode", choices=MODES, default="exact", help="as in `run` (default: %(default)s)")
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="another device: a name that `neuronpipe simulate` knows, e.g. oneplus-12, or a device file (default: "
        "this machine)",
    )
    parser.add_argument("--all", action="store_true", help="show also what does not run, and why")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    is_here = arguments.device in (None, THIS_MACHINE)
    with Progress("planning", "models", plain=arguments.json) as progress:
        progress(0, len(catalog()))
        target = _this_machine() if is_here else _described(arguments.device)
        limit_bytes = arguments.memory or target.memory_bytes
        options = PlanOptions(memory_bytes=limit_bytes, context_tokens=arguments.context, mode=arguments.mode)
        estimates = []
        for number, model in enumerate(catalog().values(), 1):
            estimates.append(estimate(model, target.device_for, options))
            progress(number, len(catalog()))
    estimates = sorted_by_use(estimates)
    pulled = frozenset(name.casefold() for name in pulled_names()) if is_here else frozenset()
    if arguments.json:
        print(json.dumps(_document(estimates, target, options, pulled), indent=2))
    else:
        lines = list(_page(estimates, target, options, pulled, arguments=arguments, is_here=is_here))
        print_lines(lines, in_colour=sys.stdout.isatty())
    return 0


def _this_machine() -> Target:
    notes: list[str] = []
    measured, device = probe_without_package(report=notes.append)
    return Target(
        title="this machine",
        device_for=lambda manifest: device,
        memory_bytes=int(MEMORY_SHARE * device.memory_available_bytes),
        sources=(flash_caveat(measured, device), *notes),
    )


def _described(name: str) -> Target:
    model = read_device(name)
    return Target(
        title=model.name,
        device_for=lambda manifest: planner_device(model, manifest),
        memory_bytes=int(model.memory_usable_gb.value * 1e9),
        sources=caveats(model),
    )


def _document(
    estimates: Sequence[Estimate], target: Target, options: PlanOptions, pulled: frozenset[str]
) -> dict[str, object]:
    first = best(estimates)
    return {
        "device": target.title,
        "memory_bytes": options.memory_bytes,
        "context_tokens": options.context_tokens,
        "prompt_tokens": PROMPT_TOKENS,
        "mode": options.mode,
        "sources": list(target.sources),
        "order": RULE,
        "best": None if first is None else first.model.name,
        "models": [as_json(estimate, is_pulled=estimate.model.name in pulled) for estimate in estimates],
    }


def _page(
    estimates: Sequence[Estimate],
    target: Target,
    options: PlanOptions,
    pulled: frozenset[str],
    *,
    arguments: argparse.Namespace,
    is_here: bool,
) -> Iterator[Line]:
    limit_bytes = options.memory_bytes or 0
    yield Line(
        text=f"{target.title}, {show_bytes(limit_bytes)} of memory, {options.context_tokens:,} tokens of context, mode "
        f"{options.mode}",
        style="bold",
    )
    yield Line(text="")
    yield from table_lines(estimates, pulled, shows_others=arguments.all)
    hidden = sum(not estimate.runs for estimate in estimates)
    yield Line(text="")
    if hidden and not arguments.all:
        names = "1 more does" if hidden == 1 else f"{hidden} more do"
        yield from wrapped(f"{names} not run with this limit; --all says why")
    yield from wrapped(f"order: {RULE}", style="dim")
    yield from wrapped(LEGEND, style="dim")
    for source in target.sources:
        yield from wrapped(source, style="dim")
    first = best(estimates)
    if first is None:
        yield from wrapped("no model of the catalog answers at a usable speed here; a larger --memory may help")
    elif is_here:
        yield Line(text="")
        yield from _commands(first, arguments, is_pulled=first.model.name in pulled)


def _commands(first: Estimate, arguments: argparse.Namespace, *, is_pulled: bool) -> Iterator[Line]:
    """Yield the commands that run a model as it was planned."""
    name = first.model.name
    options: list[object] = ["--context", arguments.context]
    if arguments.memory is not None:
        options += ["--memory", f"{arguments.memory >> 20}MiB" if arguments.memory % (1 << 30) else f"{arguments.memory >> 30}GiB"]
    if arguments.mode != "exact":
        options += ["--mode", arguments.mode]
    yield Line(text="the first of them:", style="bold")
    if not is_pulled:
        yield Line(text=f"  {line_to_paste('pull', name)}")
    yield Line(text=f"  {line_to_paste('chat', name, *options)}")
