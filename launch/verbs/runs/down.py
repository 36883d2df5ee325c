"""`neuronpipe down [--run DIR]`: stop a run, and return when nothing is left of it."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

from neuronpipe.launch.supervisor.control import ask
from neuronpipe.protocol.errors import NotRunning
from neuronpipe.protocol.run_directory import RunDirectory

PATIENCE_S = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: the only live run)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    # Through the control socket: a signal would reach another process if the run lives in another PID namespace.
    directory, _ = RunDirectory.find(arguments.run)
    with directory.ending(PATIENCE_S), contextlib.suppress(NotRunning):  # it is ending already
        ask(directory.path, {"ask": "end"}, PATIENCE_S)
    print(json.dumps({"run": str(directory.path), "stopped": True}) if arguments.json else f"down: {directory.path}")
    return 0
