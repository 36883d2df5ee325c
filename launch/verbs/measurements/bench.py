"""`neuronpipe bench [PACKAGE] [--tests pp512,tg128]`: measure the speed of a package here, and where its time goes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from neuronpipe.launch.arguments import plan_arguments as planning
from neuronpipe.launch.bench.cases import Case, default_cases, parse_cases
from neuronpipe.launch.bench.live import live_bench
from neuronpipe.launch.bench.measure import wait_until_warm
from neuronpipe.launch.bench.planned import beaten, flash_beaten
from neuronpipe.launch.bench.report import compare, read_rows, render
from neuronpipe.launch.client import Client
from neuronpipe.launch.planning.implementations import add_use_argument, checked_uses, implementations
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.package_argument import add_package_argument
from neuronpipe.launch.planning.plan import package_and_plan
from neuronpipe.launch.supervisor.start import LiveRun
from neuronpipe.plans.measure.probe import probe, remeasure_flash, remeasure_memory
from neuronpipe.protocol.errors import UserError

MAX_REPETITIONS = 1000
MAX_BATCH = 64  # the largest number of sequences of a plan

COMMON_OPTIONS = (
    "package", "tests", "repetitions", "batch", "compare", *planning.COMMON, "ffn_resident", "mode", "workers", "json"
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    parser.add_argument(
        "--tests",
        type=parse_cases,
        metavar="LIST",
        help="tests: ppN reads a prompt of N tokens, tgN generates N tokens, ppN+tgM does both (default: pp512,tg128)",
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        default=5,
        metavar="N",
        help="repetitions of each test, after a warm-up (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=1,
        metavar="N",
        help="concurrent sequences, for tests that only decode (default: 1)",
    )
    parser.add_argument("--workload", metavar="PRESET", help="preset of a synthetic package's workload")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="show ratios to rows that were saved from --json")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the last tokens of the last test")
    planning.add_plan_arguments(parser)
    add_use_argument(parser)
    parser.add_argument(
        "--versus",
        action="append",
        metavar="ROLE=IMPLEMENTATION",
        help="compare the implementation of --use (default: the built-in one) with this one; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as a JSON list")


def main(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.repetitions <= MAX_REPETITIONS:
        raise UserError(f"--repetitions {arguments.repetitions}: between 1 and {MAX_REPETITIONS}")
    if arguments.versus and arguments.compare:
        raise UserError("--versus and --compare: one or the other")
    earlier = read_rows(arguments.compare) if arguments.compare else None
    options = _with_sequences(planning.plan_options(arguments), arguments.batch)
    options = dataclasses.replace(options, history=False)  # the cost model is compared, without corrections by runs
    package, plan = package_and_plan(arguments.package, options, plain=arguments.json)
    cases = arguments.tests or default_cases(plan.compute.context_tokens)
    if arguments.batch > 1:
        cases = _for_batch(cases, arguments.batch, plan.compute.sequences, are_default=arguments.tests is None)
    for case in cases:
        if case.context_tokens > plan.compute.context_tokens:
            raise UserError(
                f"--tests {case.name}: takes {case.context_tokens} tokens, "
                f"the context is {plan.compute.context_tokens}; see --context"
            )
    uses = implementations(arguments.use, plan)
    sides = None
    if arguments.versus:
        # Imported here: it brings numpy, and the memory of this process counts in its run's.
        from neuronpipe.launch.bench.versus import Versus, contenders
        from neuronpipe.launch.bench.versus import render as render_versus

        sides = contenders(checked_uses(arguments.use, plan), checked_uses(arguments.versus, plan))
    device = probe(package.path)
    with live_bench(
        package,
        plan,
        device,
        cases,
        arguments.repetitions,
        plain=arguments.json,
        preset=arguments.workload,
        batch=arguments.batch,
        sides=1 if sides is None else 2,
        uses=uses,
    ) as run:
        if sides is None:
            rows = [run.bench.measure(case, arguments.repetitions, run.step) for case in cases]
        else:
            versus = Versus(run.bench, run.live.directory, sides, lambda: wait_until_warm(run.client))
            rows = [row for case in cases for row in versus.measure(case, arguments.repetitions, run.step)]
        if arguments.picture:
            title = f"{rows[0]['model']}, {cases[-1].name}, {plan.compute.mode} mode"
            _draw(run.live, run.client, arguments.picture, title)
    for remeasure, why in ((remeasure_memory, beaten(rows)), (remeasure_flash, flash_beaten(rows))):
        if sides is None and why is not None:  # not before: the run would disturb this measurement
            remeasure(package.path, why, lambda line: print(f"neuronpipe: {line}", file=sys.stderr))
    if arguments.json:
        print(json.dumps(rows, indent=1))
    elif sides is not None:
        print(render_versus(rows), end="")
    else:
        print(render(rows), end="")
        if earlier is not None:
            print("\n" + compare(rows, earlier, arguments.compare), end="")
    if arguments.picture and not arguments.json:
        print(f"\n{arguments.picture}: what each process did in the last steps; open it with a browser")
    return 0


def _with_sequences(options: PlanOptions, batch: int) -> PlanOptions:
    """Return the options with as many sequences as the batch, unless they name a number."""
    if not 1 <= batch <= MAX_BATCH:
        raise UserError(f"--batch {batch}: between 1 and {MAX_BATCH}")
    if options.plan_file is None and options.sequences is None and batch > 1:
        return dataclasses.replace(options, sequences=batch)
    return options


def _for_batch(cases: tuple[Case, ...], batch: int, sequences: int, *, are_default: bool) -> tuple[Case, ...]:
    """Return the tests that a batch of several sequences can have. Raises UserError if others were typed."""
    if sequences < batch:
        raise UserError(f"--batch {batch}: the plan has {sequences} sequence(s); see --sequences")
    if are_default:
        cases = tuple(case for case in cases if not case.prefill_tokens)
    for case in cases:
        if case.prefill_tokens:
            raise UserError(
                f"--batch {batch} and --tests {case.name}: prompts are computed one after the other; take tgN"
            )
        if case.decode_tokens < 2 * batch:
            # Sequences begin one after the other: only the tokens that they decode together count.
            raise UserError(f"--batch {batch} and --tests {case.name}: too short; take tg{2 * batch} or more")
    return cases


def _draw(live: LiveRun, client: Client, file: Path, title: str) -> None:
    from neuronpipe.launch.trace.picture import write_picture  # these import numpy, too
    from neuronpipe.services.monitor.span_rings import RunTrace

    with RunTrace.open(live.directory.read(), client.status().processes) as trace:
        write_picture(file, trace.take(), title)
