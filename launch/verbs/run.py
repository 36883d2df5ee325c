"""`neuronpipe run [PACKAGE] [TEXT]`: start a pipeline, generate, end it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from neuronpipe.launch.arguments.prompt import add_package_and_text_arguments, take_text
from neuronpipe.launch.chat.conversation import asked_in_conversation
from neuronpipe.launch.client import Client
from neuronpipe.launch.formats import as_typed
from neuronpipe.launch.generation import add_generation_arguments, generate, generate_request
from neuronpipe.launch.notices import first_time
from neuronpipe.launch.planning import (
    DEMO,
    add_plan_arguments,
    add_use_argument,
    implementations,
    package_and_plan,
    refuse_missing,
    what_the_demo_is,
)
from neuronpipe.launch.supervisor.logs import last_line
from neuronpipe.launch.supervisor.start import started_run
from neuronpipe.plans.cost.activation_rates import unmeasured_predictor
from neuronpipe.plans.inspect import streams_densely
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import ACCELERATOR, Plan
from neuronpipe.protocol.errors import MAX_QUOTED_CHARACTERS, UserError, quoted, safe_name
from neuronpipe.protocol.links import CONTROL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_and_text_arguments(parser)
    add_generation_arguments(parser)
    add_plan_arguments(parser)
    add_use_argument(parser)
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: a new one)")


def main(arguments: argparse.Namespace) -> int:
    take_text(arguments)
    if isinstance(arguments.package, str):  # the settings file may name one that holds a blank
        arguments.package = Path(arguments.package)
    _refuse_a_prompt_as_package(arguments)
    ask = generate_request(arguments)
    measured: list[str] = []
    package, plan = package_and_plan(arguments, measured=measured.append)
    if not arguments.raw:
        ask = asked_in_conversation(ask, package, arguments.system)
    uses = implementations(arguments.use, plan)
    with (
        started_run(package, plan, arguments.run, stays=False, uses=uses) as live,
        Client(live.directory.endpoint(CONTROL), live.failed) as client,
    ):
        silent = package.manifest.silent if plan.compute.mode == "thresholded" else None
        generate(client, arguments, ask, {} if silent is None else {"silent": asdict(silent)})
        lost = _lost_accelerator(client, plan, live.directory.path)
    notes = (
        lost,
        None if silent is None else f"mode thresholded: {silent.loss()}",
        *([] if arguments.json else _news(package, plan, is_default=arguments.package is DEMO)),
    )
    for said in notes:
        if said is not None and not arguments.json:
            print(as_typed(f"neuronpipe: {said}"), file=sys.stderr)
    for line in measured:
        print(f"neuronpipe: {line}", file=sys.stderr)
    return 0


def _news(package: Package, plan: Plan, *, is_default: bool) -> Iterator[str]:
    """What this user was not told yet: what the demo is, where no package was named; what is slow or unmeasured."""
    if is_default and first_time("demo", "run"):
        yield what_the_demo_is()
    of_package = {
        "silu": streams_densely(package.manifest.model, plan),
        f"predictor-{plan.compute.mode}": unmeasured_predictor(package.manifest, plan.compute.mode),
    }
    for notice, line in of_package.items():
        if line is not None and first_time(notice, package.manifest.id):
            yield line


def _lost_accelerator(client: Client, plan: Plan, directory: Path) -> str | None:
    """That an accelerator ended before the text did: its log goes with the run."""
    if not plan.compute.accelerator_backend():
        return None
    for one in client.status().processes:
        if one.role == ACCELERATOR and one.restarts:
            often = "once" if one.restarts == 1 else f"{one.restarts} times"
            words = safe_name(last_line(directory / f"{one.role}.{one.index}.log"))
            back = "and is gone" if one.state == "gone" else "and was started again"
            return f"{one.role}.{one.index} ended {often} {back}; decode workers computed its blocks meanwhile: {words}"
    return None


def _refuse_a_prompt_as_package(arguments: argparse.Namespace) -> None:
    """One word without a blank is the package's name, and people give the prompt there."""
    if arguments.prompt is None and not os.path.exists(arguments.package):
        try:
            refuse_missing(arguments.package)  # a word, or a repository, is more likely a name
        except UserError as error:
            if "did you mean" in str(error) or "it is a shape" in str(error):
                raise
            raise UserError(f"{error}; a prompt of one word is given with -p") from None
        text = str(arguments.package)
        raise UserError(
            f"{quoted(text)}: no such package directory; if it is the prompt, give it with -p: "
            f"`neuronpipe run -p {shlex.quote(text) if len(text) <= MAX_QUOTED_CHARACTERS else 'TEXT'}`"
        )
