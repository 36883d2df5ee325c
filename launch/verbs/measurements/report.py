"""`neuronpipe report [PACKAGE] [--json]`: measure a package briefly, and write a report to share."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

from neuronpipe.launch.arguments import plan_arguments as planning
from neuronpipe.launch.bench.cases import default_cases
from neuronpipe.launch.bench.live import live_bench
from neuronpipe.launch.planning.package_argument import add_package_argument
from neuronpipe.launch.planning.plan import package_and_plan
from neuronpipe.launch.report.document import MAX_NAME_CHARACTERS
from neuronpipe.plans.measure.probe import cache_state, probe
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.schema import to_json

REPETITIONS = 3

COMMON_OPTIONS = ("package", "name", *planning.COMMON, "mode", "workers", "json", "output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    parser.add_argument(
        "--name",
        default="",
        metavar="TEXT",
        help="what the report calls this device, e.g. 'OnePlus 12' (default: on Android the model, otherwise nothing)",
    )
    planning.add_plan_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of Markdown")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the report to a file (default: stdout)"
    )


def main(arguments: argparse.Namespace) -> int:
    if len(arguments.name) > MAX_NAME_CHARACTERS or not arguments.name.isprintable():
        raise UserError(f"--name: at most {MAX_NAME_CHARACTERS} printable characters")
    if arguments.output is not None and not arguments.output.parent.is_dir():
        raise UserError(f"--output {arguments.output}: there is no folder {arguments.output.parent}; make it first")
    options = dataclasses.replace(planning.plan_options(arguments), history=False)  # as in `bench`
    package, plan = package_and_plan(arguments.package, options, plain=arguments.json)
    device, cases = probe(package.path), default_cases(plan.compute.context_tokens)
    with live_bench(package, plan, device, cases, REPETITIONS, plain=arguments.json) as run:
        rows = [run.bench.measure(case, REPETITIONS, run.step) for case in cases]

    # Imported after the run: the memory of this process counts in it.
    from neuronpipe.launch.report.facts import kernel_release, report_of, reported_device, this_program
    from neuronpipe.launch.report.markdown import render
    from neuronpipe.services.offload.npu.chips import android_property

    now = time.time()
    reported = reported_device(
        device,
        cache_state(package.path),
        name=arguments.name,
        release=kernel_release(),
        android=android_property,
        now=now,
    )
    report = report_of(rows, plan, reported, program=this_program(), now=now)
    text = json.dumps(to_json(report), indent=1) + "\n" if arguments.json else render(report)
    if arguments.output is None:
        print(text, end="")
        return 0
    with whole_file(arguments.output) as place:
        place.write_text(text, encoding="utf-8")
    print(f"{arguments.output}: the report; it names neither you nor this host")
    return 0
