"""`neuronpipe trace [--run DIR] [--seconds N] [-o FILE] [--picture FILE.svg]`: record the steps of
a run."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from neuronpipe.launch.client import attach
from neuronpipe.launch.progress import Elapsed, Progress
from neuronpipe.launch.trace.chrome import write_chrome
from neuronpipe.launch.trace.picture import write_picture
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.run_directory import RunDirectory, RunFile
from neuronpipe.services.monitor.span_rings import Row, RunTrace

POLL_S = 0.005  # a ring of 4096 spans holds tens of milliseconds of a small model
MAX_SECONDS = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: the only live run)")
    parser.add_argument(
        "--seconds", type=float, default=0.0, metavar="N", help="record for N seconds (default: show the last steps)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE.json",
        help="write trace events for ui.perfetto.dev (default: to stdout)",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the last tokens")


def main(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.seconds <= MAX_SECONDS:
        raise UserError(f"--seconds {arguments.seconds:g}: between 0 and {MAX_SECONDS:g}")
    if not (arguments.output or arguments.picture) and sys.stdout.isatty():
        raise UserError("trace events are for programs: use --picture FILE.svg for a picture, or -o FILE.json")
    directory, run_file = RunDirectory.find(arguments.run)
    with attach(directory.path) as client:
        with Elapsed() as elapsed:
            processes = client.status(lambda: elapsed.say("waiting for the run to answer")).processes
        with RunTrace.open(run_file, processes) as trace:
            rows = _record(trace, arguments.seconds)
    if not any(span.step for row in rows for span in row.spans):  # evictions have spans without a step
        when = f"in these {arguments.seconds:g} s" if arguments.seconds else "yet"
        meanwhile = " meanwhile" if arguments.seconds else ""
        raise UserError(
            f"{directory.path}: no step was computed {when}; ask it something{meanwhile} with `neuronpipe ask`"
        )
    if arguments.picture:
        write_picture(arguments.picture, rows, _title(run_file))
        print(f"{arguments.picture}: what each process did in the last steps; open it with a browser")
    if arguments.output:
        with whole_file(arguments.output) as place, place.open("w", encoding="utf-8") as file:
            write_chrome(file, rows)
        count = sum(len(row.spans) for row in rows)
        print(f"{arguments.output}: {count:,} spans over {_length_s(rows):.1f} s; open it at https://ui.perfetto.dev")
    elif not arguments.picture:
        write_chrome(sys.stdout, rows)
        print()
    lost = sum(row.lost for row in rows)
    if lost:
        print(f"neuronpipe: {lost:,} spans were overwritten before they could be read", file=sys.stderr)
    return 0


def _record(trace: RunTrace, seconds: float) -> list[Row]:
    """Return the spans in the rings, or those of the next seconds."""
    arrays = trace.take_arrays()
    if seconds == 0:
        return trace.rows(arrays)
    parts: list[list[tuple[Any, int]]] = []
    began, took = time.monotonic(), 0.0
    with Progress("recording", "ms", plain=not sys.stderr.isatty()) as progress:
        while took < seconds:
            time.sleep(min(POLL_S, seconds - took))
            parts.append(trace.take_arrays())
            took = time.monotonic() - began
            progress(int(1000 * min(took, seconds)), int(1000 * seconds))
    rings = zip(*parts, strict=True)
    return trace.rows([(np.concatenate([spans for spans, _ in ring]), sum(lost for _, lost in ring)) for ring in rings])


def _title(run_file: RunFile) -> str:
    summary = run_file.summary
    model = f"{summary.model} {summary.quantization} {summary.mode}, " if summary else ""
    return f"{model}run {run_file.run}"


def _length_s(rows: Sequence[Row]) -> float:
    spans = [span for row in rows for span in row.spans]
    return (max(span.end_ns for span in spans) - min(span.start_ns for span in spans)) / 1e9
