"""`neuronpipe bench [PACKAGE] [--tests pp512,tg128]`: how fast a package runs here, and where the time goes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from neuronpipe.launch.bench.cases import Case, Prompts, default_cases, parse_cases
from neuronpipe.launch.bench.measure import Bench, wait_until_warm
from neuronpipe.launch.bench.planned import beaten
from neuronpipe.launch.bench.report import compare, read_rows, render
from neuronpipe.launch.client import Client
from neuronpipe.launch.planning import (
    add_package_argument,
    add_plan_arguments,
    add_use_argument,
    checked_uses,
    implementations,
    package_and_plan,
)
from neuronpipe.launch.progress import Progress
from neuronpipe.launch.supervisor.start import LiveRun, started_run
from neuronpipe.plans.measure.probe import probe, remeasure_memory
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.links import CONTROL

MAX_REPETITIONS = 1000
MAX_BATCH = 64  # as many as a plan has sequences


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    parser.add_argument(
        "--tests",
        type=parse_cases,
        metavar="LIST",
        help="ppN: a prompt of N tokens, tgN: N generated tokens, ppN+tgM: both (default: pp512,tg128)",
    )
    parser.add_argument(
        "--repetitions", type=int, default=5, metavar="N", help="of each test, after a warm-up (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="texts at once, of tests that only decode (default: 1)"
    )
    parser.add_argument("--workload", metavar="PRESET", help="of a synthetic package: the preset to run")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="show ratios to rows saved from --json")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the last tokens of the last test")
    add_plan_arguments(parser)
    add_use_argument(parser)
    parser.add_argument(
        "--versus",
        action="append",
        metavar="ROLE=IMPLEMENTATION",
        help="compare the implementation of --use (default: our own) with this one, in one run; may be given again",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as a JSON list")


def main(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.repetitions <= MAX_REPETITIONS:
        raise UserError(f"--repetitions {arguments.repetitions}: between 1 and {MAX_REPETITIONS}")
    if arguments.versus and arguments.compare:
        raise UserError("--versus and --compare: one or the other")
    earlier = read_rows(arguments.compare) if arguments.compare else None
    _make_room(arguments)
    package, plan = package_and_plan(arguments)
    cases = arguments.tests or default_cases(plan.compute.context_tokens)
    if arguments.batch > 1:
        cases = _for_batch(cases, arguments, plan.compute.sequences)
    for case in cases:
        if case.context_tokens > plan.compute.context_tokens:
            raise UserError(
                f"--tests {case.name}: takes {case.context_tokens} tokens, "
                f"the context is {plan.compute.context_tokens}; see --context"
            )
    uses = implementations(arguments.use, plan)
    sides = None
    if arguments.versus:
        # Only for this: it brings numpy, and what this process holds counts in its run's memory.
        from neuronpipe.launch.bench.versus import Versus, contenders
        from neuronpipe.launch.bench.versus import render as render_versus

        sides = contenders(checked_uses(arguments.use, plan), checked_uses(arguments.versus, plan))
    longest_tokens = max(case.prompt_tokens + case.decode_tokens for case in cases)
    prompts = Prompts(package, arguments.workload, arguments.batch * (1 + arguments.repetitions) * longest_tokens)
    device = probe(package.path)
    rows = []
    with (
        started_run(package, plan, None, stays=False, uses=uses) as live,
        Client(live.directory.endpoint(CONTROL), live.failed) as client,
        Progress("measuring", "requests", plain=arguments.json) as progress,
    ):
        requests = len(cases) * (1 + arguments.repetitions) * (1 if sides is None else 2)
        done = 0
        progress(done, requests)
        wait_until_warm(client)
        bench = Bench(package, plan, device, prompts, client, arguments.batch)

        def step() -> None:
            nonlocal done
            done += 1
            progress(done, requests)

        if sides is None:
            rows = [bench.measure(case, arguments.repetitions, step) for case in cases]
        else:
            versus = Versus(bench, live.directory, sides, lambda: wait_until_warm(client))
            rows = [row for case in cases for row in versus.measure(case, arguments.repetitions, step)]
        if arguments.picture:
            _draw(live, client, arguments.picture, f"{rows[0]['model']}, {cases[-1].name}, {plan.compute.mode} mode")
    if sides is None and (why := beaten(rows)) is not None:  # the run is over, so that it takes nothing from this
        remeasure_memory(package.path, why, lambda line: print(f"neuronpipe: {line}", file=sys.stderr))
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


def _make_room(arguments: argparse.Namespace) -> None:
    """Ask for a plan with as many sequences as texts at once."""
    if not 1 <= arguments.batch <= MAX_BATCH:
        raise UserError(f"--batch {arguments.batch}: between 1 and {MAX_BATCH}")
    if arguments.plan is None and arguments.sequences is None and arguments.batch > 1:
        arguments.sequences = arguments.batch


def _for_batch(cases: tuple[Case, ...], arguments: argparse.Namespace, sequences: int) -> tuple[Case, ...]:
    """The tests that several texts at once can have. Raises UserError for others, where they were asked for."""
    batch = arguments.batch
    if sequences < batch:
        raise UserError(f"--batch {batch}: the plan has room for {sequences} text(s) at once; see --sequences")
    if arguments.tests is None:
        cases = tuple(case for case in cases if not case.prefill_tokens)
    for case in cases:
        if case.prefill_tokens:
            raise UserError(f"--batch {batch} and --tests {case.name}: prompts are read one after the other; take tgN")
        if case.decode_tokens < 2 * batch:
            # Texts begin one after the other: only what they decode together counts.
            raise UserError(f"--batch {batch} and --tests {case.name}: too short; take tg{2 * batch} or more")
    return cases


def _draw(live: LiveRun, client: Client, file: Path, title: str) -> None:
    from neuronpipe.launch.trace.picture import write_picture  # these bring numpy, too
    from neuronpipe.services.monitor.span_rings import RunTrace

    with RunTrace.open(live.directory.read(), client.status().processes) as trace:
        write_picture(file, trace.take(), title)
