"""`neuronpipe swap SEAT [--use IMPLEMENTATION] [--run DIR]`: have another process take a seat of a live run."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from neuronpipe.launch.progress import Progress
from neuronpipe.launch.rehearsal import Candidate, rehearse
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.plan import Plan, read_plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.run_directory import PLAN_FILE, RunDirectory
from neuronpipe.services.implementations import SWAPPABLE, Implementation, parse_seat

PATIENCE_S = 20.0
MAX_PATIENCE_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `swap`."""
    parser.add_argument("seat", metavar="SEAT", help="a process (decode.1), or all of a role (decode)")
    parser.add_argument(
        "--use",
        metavar="IMPLEMENTATION",
        help="package.module:Class, or argv:COMMAND in any language (default: a fresh process of the present one)",
    )
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: the only live run)")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        metavar="SECONDS",
        help="how long it may take to start, and to answer (default: %(default).0f)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    """Rehearse, then have the seats change hands."""
    if not 0 < arguments.patience <= MAX_PATIENCE_S:
        raise UserError(f"--patience {arguments.patience:g}: between 0 and {MAX_PATIENCE_S:.0f} seconds")
    directory, run_file = RunDirectory.find(arguments.run)
    package, plan = Package.open(Path(run_file.package)), read_plan(directory.path / PLAN_FILE)
    seats = _seats(arguments.seat, plan)
    if arguments.use is not None:
        Implementation.parse(arguments.use, Path.cwd())
    candidate = Candidate(seats, arguments.use, str(Path.cwd()), arguments.patience)
    began = time.monotonic()
    try:
        with Progress("rehearsing", "tokens", plain=arguments.json) as progress:
            rehearse(directory, run_file, package, plan, candidate, progress)
        rehearsed = time.monotonic()
        pids = candidate.take_seats(directory)
    except UserError as error:
        raise UserError(f"{arguments.seat} stays as it was: {arguments.use or 'the fresh process'}: {error}") from error
    seconds = {"rehearsal_s": round(rehearsed - began, 3), "takeover_s": round(time.monotonic() - rehearsed, 3)}
    if arguments.json:
        print(json.dumps({"run": str(directory.path), "use": arguments.use, "pids": pids, **seconds}))
    else:
        for seat, pid in pids.items():
            print(f"{seat}: process {pid}, {arguments.use or 'the same implementation'}")
        print(f"rehearsed for {seconds['rehearsal_s']:.1f} s, taken over in {1000 * seconds['takeover_s']:.0f} ms")
    return 0


def _seats(text: str, plan: Plan) -> tuple[str, ...]:
    role, index = parse_seat(text)
    here = [seat for seat in plan.compute.seats if seat.role == role]
    seats = tuple(f"{role}.{seat.index}" for seat in here if index in (None, seat.index))
    if role not in SWAPPABLE:
        raise UserError(f"{role}: its requests would be lost; end the run, and start it with --use")
    if not seats:
        raise UserError(f"{text}: this run has {', '.join(f'{role}.{seat.index}' for seat in here) or f'no {role}'}")
    return seats
