"""`neuronpipe run [PACKAGE] [TEXT]`: start a run, generate text, end the run."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from neuronpipe.launch.arguments import generation_arguments as generation
from neuronpipe.launch.arguments import plan_arguments as planning
from neuronpipe.launch.arguments.prompt_arguments import add_package_and_text_arguments, join_text
from neuronpipe.launch.catalog.offer import demo_notice, package_or_offer
from neuronpipe.launch.client import Client
from neuronpipe.launch.formats import as_typed
from neuronpipe.launch.generation.answer import generate
from neuronpipe.launch.generation.conversation import with_chat_template
from neuronpipe.launch.generation.notices import first_time
from neuronpipe.launch.generation.prompt import checked_prompt
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.planning.implementations import add_use_argument, implementations
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.package_argument import refuse_missing
from neuronpipe.launch.planning.plan import package_and_plan
from neuronpipe.launch.supervisor.logs import last_line
from neuronpipe.launch.supervisor.start import started_run
from neuronpipe.plans.cost.activation_rates import unmeasured_predictor
from neuronpipe.plans.inspect import streams_densely
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import ACCELERATOR, Plan
from neuronpipe.protocol.errors import MAX_QUOTED_CHARACTERS, UserError, quoted, safe_name
from neuronpipe.protocol.links import CONTROL

COMMON_OPTIONS = ("package", "text", *generation.COMMON, *planning.COMMON, "run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_and_text_arguments(parser)
    generation.add_generation_arguments(parser)
    planning.add_plan_arguments(parser)
    add_use_argument(parser)
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: a new one)")


def main(arguments: argparse.Namespace) -> int:
    join_text(arguments)
    path = Path(arguments.package)  # the settings file may give a string
    _refuse_prompt_as_package(path, arguments.prompt)
    options = generation.generation_options(arguments)
    plan_options = planning.plan_options(arguments)
    if arguments.package is DEMO:
        path = package_or_offer(DEMO, plan_options, may_ask=not options.as_json)
    request = options.sampling.request(checked_prompt(options.prompt, path))
    measurements: list[str] = []  # printed last: first comes the answer
    package, plan = package_and_plan(path, plan_options, plain=options.as_json, report=measurements.append)
    form = None
    if not options.raw:
        request, form = with_chat_template(request, package, options.system)
    uses = implementations(arguments.use, plan)
    thresholds = package.manifest.silent if plan.compute.mode == "thresholded" else None
    with (
        started_run(
            package,
            plan,
            arguments.run,
            stays=False,
            uses=uses,
            keeps_history=plan_options.keeps_history and not arguments.use,
        ) as live,
        Client(live.directory.endpoint(CONTROL), live.failed) as client,
    ):
        extra_fields = {} if thresholds is None else {"silent": asdict(thresholds)}
        generate(
            client,
            request,
            as_json=options.as_json,
            extra_fields=extra_fields,
            form=form,
            hides_thinking=options.hides_thinking,
        )
        accelerator_notice = _accelerator_notice(client, plan, live.directory.path)
    if not options.as_json:
        notices = [
            accelerator_notice,
            None if thresholds is None else f"mode thresholded: {thresholds.loss()}",
            *_new_notices(package, plan, plan_options if path is DEMO else None),
        ]
        for notice in notices:
            if notice is not None:
                print(as_typed(f"neuronpipe: {notice}"), file=sys.stderr)
    for line in measurements:
        print(f"neuronpipe: {line}", file=sys.stderr)
    return 0


def _new_notices(package: Package, plan: Plan, demo: PlanOptions | None) -> Iterator[str]:
    """Yield the notices that this user has not seen: about the demo, a slow package, an unmeasured predictor.

    demo: the plan options of a run of the demo for a user who named no model; None for another run
    """
    if demo is not None and first_time("demo", "run"):
        yield demo_notice(demo)
    notices = {
        "silu": streams_densely(package.manifest.model, plan),
        f"predictor-{plan.compute.mode}": unmeasured_predictor(package.manifest, plan.compute.mode),
    }
    for notice, line in notices.items():
        if line is not None and first_time(notice, package.manifest.id):
            yield line


def _accelerator_notice(client: Client, plan: Plan, directory: Path) -> str | None:
    """Return a notice if the accelerator process died during the request; its log is removed with the run."""
    if not plan.compute.accelerator_backend():
        return None
    for process in client.status().processes:
        if process.role == ACCELERATOR and process.restarts:
            count = "once" if process.restarts == 1 else f"{process.restarts} times"
            last_words = safe_name(last_line(directory / f"{process.role}.{process.index}.log"))
            outcome = "and is gone" if process.state == "gone" else "and was started again"
            return (
                f"{process.role}.{process.index} died {count} {outcome}; decode workers computed its blocks meanwhile: "
                f"{last_words}"
            )
    return None


def _refuse_prompt_as_package(path: Path, prompt: str | None) -> None:
    """Raise UserError with advice if PACKAGE does not exist and no prompt was typed: it may be the prompt."""
    if prompt is not None or os.path.exists(path):
        return
    try:
        refuse_missing(path)  # a word without a blank, or a repository, is more likely a package's name
    except UserError as error:
        if "did you mean" in str(error) or "it is a shape" in str(error) or "is not on this disk" in str(error):
            raise
        raise UserError(f"{error}; a prompt of one word is given with -p") from None
    text = str(path)
    raise UserError(
        f"{quoted(text)}: no such package directory; if it is the prompt, give it with -p: "
        f"`neuronpipe run -p {shlex.quote(text) if len(text) <= MAX_QUOTED_CHARACTERS else 'TEXT'}`"
    )
