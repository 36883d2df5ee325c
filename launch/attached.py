"""Attaching to a live run by its run directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from neuronpipe.launch.client import Client
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.run_directory import RunDirectory


def attach(path: Path | None) -> Client:
    """A client of the run at `path`, or of the only live one. Raises NotRunning when there is none."""
    directory, run_file = RunDirectory.find(path)
    return Client(run_file.endpoints[CONTROL.name], run_ended(directory))


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
