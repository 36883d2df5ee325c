"""`neuronpipe down [--run DIR]`: stop a run, and return when nothing of it is left."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.run_directory import RunDirectory, is_alive

PATIENCE_S = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `down`."""
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: the only live run)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    """Tell the supervisor, and wait for it."""
    directory, run_file = RunDirectory.find(arguments.run)
    os.kill(run_file.supervisor_pid, signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_S
    while is_alive(run_file.supervisor_pid, run_file.supervisor_started):
        if time.monotonic() > deadline:
            raise UserError(f"process {run_file.supervisor_pid} does not end; its logs are in {directory.path}")
        time.sleep(0.01)
    print(json.dumps({"run": str(directory.path), "stopped": True}) if arguments.json else f"down: {directory.path}")
    return 0
