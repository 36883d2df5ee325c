"""`neuronpipe models [--memory BYTES] [--device DEVICE] [--all] [--json]`: show which models this machine can run."""

from __future__ import annotations

import argparse
import json
import shutil
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
from neuronpipe.launch.formats import line_to_paste, show_bytes
from neuronpipe.launch.planning.shapes import flash_caveat, probe_without_package, pulled_names
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.lab.devices.device_description import caveats, planner_device
from neuronpipe.plans.lab.devices.device_file import THIS_MACHINE, read_device
from neuronpipe.plans.lab.shapes.pulled_manifest import manifest_of_pulled
from neuronpipe.plans.measure.kernel_speed import kernel_cases_of_all
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import MODES
from neuronpipe.plans.planner.device_facts import MEMORY_SHARE
from neuronpipe.plans.pull.catalog import catalog
from neuronpipe.plans.pull.package_library import data_folder
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen


@frozen(kw_only=True)
class Target:
    """The device of the estimates.

    title: the device, for people
    device_for: (manifest) -> the device for the planner
    memory_bytes: the memory limit unless the user sets one
    sources: where its figures come from, and what they leave out
    pulled: names of the models that are on this disk
    free_bytes: free space for packages; None: not known
    """

    title: str
    is_here: bool
    device_for: Callable[[Manifest], Device]
    memory_bytes: int
    sources: tuple[str, ...]
    pulled: frozenset[str] = frozenset()
    free_bytes: int | None = None


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
    if arguments.context <= PROMPT_TOKENS:
        raise UserError(f"--context {arguments.context}: expected more than the {PROMPT_TOKENS} tokens of a prompt")
    with Progress("planning", "models", plain=arguments.json) as progress:
        progress(0, len(catalog()))
        target = _this_machine() if arguments.device in (None, THIS_MACHINE) else _described(arguments.device)
        limit_bytes = arguments.memory or target.memory_bytes
        estimates = []
        for number, model in enumerate(catalog().values(), 1):
            estimates.append(
                estimate(
                    model,
                    target.device_for,
                    limit_bytes=limit_bytes,
                    context_tokens=arguments.context,
                    mode=arguments.mode,
                )
            )
            progress(number, len(catalog()))
    estimates = sorted_by_use(estimates)
    if arguments.json:
        print(json.dumps(_document(arguments, estimates, target, limit_bytes), indent=2))
    else:
        print_lines(list(_page(arguments, estimates, target, limit_bytes)), in_colour=sys.stdout.isatty())
    return 0


def _this_machine() -> Target:
    notes: list[str] = []
    cases = kernel_cases_of_all(manifest_of_pulled(model) for model in catalog().values())
    measured, device = probe_without_package(cases, report=notes.append)
    return Target(
        title="this machine",
        is_here=True,
        device_for=lambda manifest: device,
        memory_bytes=int(MEMORY_SHARE * device.memory_available_bytes),
        sources=(flash_caveat(measured, device), *notes),
        pulled=frozenset(name.casefold() for name in pulled_names()),
        free_bytes=_free_bytes(),
    )


def _described(name: str) -> Target:
    model = read_device(name)
    return Target(
        title=model.name,
        is_here=False,
        device_for=lambda manifest: planner_device(model, manifest),
        memory_bytes=int(model.memory_usable_gb.value * 1e9),
        sources=caveats(model),
    )


def _free_bytes() -> int | None:
    """Return the free space of the disk that packages are stored on; None if it is not known."""
    try:
        folder = data_folder()
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free
    except (OSError, UserError):  # a user without a home
        return None


def _document(
    arguments: argparse.Namespace, estimates: Sequence[Estimate], target: Target, limit_bytes: int
) -> dict[str, object]:
    first = best(estimates, target.free_bytes, target.pulled)
    return {
        "device": target.title,
        "memory_bytes": limit_bytes,
        "context_tokens": arguments.context,
        "prompt_tokens": PROMPT_TOKENS,
        "mode": arguments.mode,
        "sources": list(target.sources),
        "order": RULE,
        "best": None if first is None else first.model.name,
        "models": [as_json(estimate, is_pulled=estimate.model.name in target.pulled) for estimate in estimates],
    }


def _page(
    arguments: argparse.Namespace, estimates: Sequence[Estimate], target: Target, limit_bytes: int
) -> Iterator[Line]:
    yield from wrapped(
        f"{target.title}: {show_bytes(limit_bytes)} of memory for a run, {arguments.context:,} tokens of context, mode "
        f"{arguments.mode}",
        style="bold",
    )
    yield Line(text="")
    yield from table_lines(estimates, target.pulled, shows_others=arguments.all)
    yield Line(text="")
    hidden = sum(not estimate.runs for estimate in estimates)
    if hidden and not arguments.all:
        yield from wrapped(f"{hidden} of {len(estimates)} models do not run like this; --all shows why")
    for note in (f"order: {RULE}", LEGEND, *target.sources):
        yield from wrapped(note, style="dim")
    first = best(estimates, target.free_bytes, target.pulled)
    if first is None:
        yield from wrapped("no model that fits answers at the pace of reading here")
    elif target.is_here:
        yield Line(text="")
        yield Line(text="the first of these that fits the disk:", style="bold")
        yield from _commands(first, arguments, is_pulled=first.model.name in target.pulled)


def _commands(first: Estimate, arguments: argparse.Namespace, *, is_pulled: bool) -> Iterator[Line]:
    """Yield the commands that run a model as it was planned."""
    name = first.model.name
    options: list[object] = ["--context", first.context_tokens]
    if arguments.memory is not None:
        options += ["--memory", shortest_size(arguments.memory)]
    if arguments.mode != "exact":
        options += ["--mode", arguments.mode]
    if not is_pulled:
        yield Line(text=f"  {line_to_paste('pull', name)}")
    yield Line(text=f"  {line_to_paste('chat', name, *options)}")


def shortest_size(size_bytes: int) -> str:
    """Return a size as it is typed, e.g. 8GiB."""
    for shift, unit in ((30, "GiB"), (20, "MiB")):
        if size_bytes % (1 << shift) == 0:
            return f"{size_bytes >> shift}{unit}"
    return str(size_bytes)
