"""`neuronpipe swap PROCESS [--use IMPLEMENTATION] [--run DIR]`: replace a process of a live run between two steps."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

from neuronpipe.launch.conformance.trial import Candidate, run_trial
from neuronpipe.launch.progress import Progress
from neuronpipe.launch.supervisor.replacement import MAX_PATIENCE_S
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan, read_plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.run_directory import PLAN_FILE, RunDirectory
from neuronpipe.services.runtime.implementations import SWAPPABLE, Implementation, parse_process

PATIENCE_S = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("process", metavar="PROCESS", help="a process (decode.1), or all of a role (decode)")
    parser.add_argument(
        "--use",
        metavar="IMPLEMENTATION",
        help="package.module:Class, or argv:COMMAND in any language (default: a new process of the current one)",
    )
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: the only live run)")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        metavar="SECONDS",
        help="time limit to start, and for each answer (default: %(default).0f)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.patience <= MAX_PATIENCE_S:
        raise UserError(f"--patience {arguments.patience:g}: between 0 and {MAX_PATIENCE_S:.0f} seconds")
    directory, run_file = RunDirectory.find(arguments.run)
    package, plan = Package.open(Path(run_file.package)), read_plan(directory.path / PLAN_FILE)
    processes = _processes(arguments.process, plan)
    if arguments.use is not None:
        Implementation.parse(arguments.use, Path.cwd())
    candidate = Candidate(processes, arguments.use, str(Path.cwd()), arguments.patience)
    began = time.monotonic()
    try:
        with Progress("testing", "tokens", plain=arguments.json) as progress:
            agreement = run_trial(directory, run_file, package, plan, candidate, progress)
        tested = time.monotonic()
        pids = candidate.replace_processes(directory)
    except UserError as error:
        raise UserError(
            f"{arguments.process} stays as it was: {arguments.use or 'the new process'}: {error}"
        ) from error
    seconds = {"trial_s": round(tested - began, 3), "takeover_s": round(time.monotonic() - tested, 3)}
    if arguments.json:
        distance = None if agreement is None else dataclasses.asdict(agreement)
        run = {"run": str(directory.path), "use": arguments.use, "pids": pids, "agreement": distance}
        print(json.dumps({**run, **seconds}))
    else:
        for name, pid in pids.items():
            print(f"{name}: process {pid}, {arguments.use or 'the same implementation'}")
        if agreement is not None:
            print(agreement)
        print(f"tested for {seconds['trial_s']:.1f} s, taken over in {1000 * seconds['takeover_s']:.0f} ms")
    return 0


def _processes(text: str, plan: Plan) -> tuple[str, ...]:
    role, index = parse_process(text)
    specs = [spec for spec in plan.compute.processes if spec.role == role]
    processes = tuple(f"{role}.{spec.index}" for spec in specs if index in (None, spec.index))
    if role not in SWAPPABLE:
        raise UserError(f"{role}: its requests would be lost; end the run, and start it with --use")
    if not processes:
        raise UserError(f"{text}: this run has {', '.join(f'{role}.{spec.index}' for spec in specs) or f'no {role}'}")
    return processes
