"""Attaching to a live run by its run directory, and what scripts are told of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from neuronpipe.launch.client import Client
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.run_directory import RunDirectory, RunFile


def attach(path: Path | None) -> Client:
    """A client of the run at `path`, or of the only live one. Raises NotRunning when there is none."""
    directory, run_file = RunDirectory.find(path)
    return Client(run_file.endpoints[CONTROL.name], run_ended(directory))


def described(directory: RunDirectory, run_file: RunFile) -> dict[str, Any]:
    """Which run it is, by the names that every verb's --json has for it. run: what --run takes."""
    return {
        "run": str(directory.path),
        "id": run_file.run,
        "model": "" if run_file.facts is None else run_file.facts.model,
        "package": run_file.package,
        "plan": run_file.plan,
        "supervisor_pid": run_file.supervisor_pid,
    }


def run_ended(directory: RunDirectory) -> Callable[[], str | None]:
    """What tells whether a run is over: the reason, None while it lives."""

    def reason() -> str | None:
        try:
            directory.read()
        except NotRunning:
            return f"{directory.path}: the run has ended"
        except UserError as error:
            return str(error)
        return None

    return reason
