"""Processes that keep a run waiting: who it is is said, and the run ends with a line that names it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from neuronpipe.launch.planning import DEMO

from tests.pipeline import Shell, beside_progress

SLEEPING = "loader=argv:sleep 1000"
STINGY = """
from neuronpipe.services.cache.cache_service import CacheService

class Stingy(CacheService):
    def _feed(self, counts):
        pass
"""


def test_who_has_not_greeted_is_said_while_a_command_waits(shell: Shell) -> None:
    command = shell.start("up", DEMO, "--json", "--use", SLEEPING)
    try:
        assert command.stderr is not None
        lines = iter(command.stderr.readline, "")
        assert any("starting: loader.0 has not sent Hello for" in line for line in lines)
    finally:
        command.send_signal(signal.SIGINT)
        command.communicate()


@pytest.mark.nightly
def test_a_run_whose_loader_never_greets_is_given_up(shell: Shell) -> None:
    done = shell.call("run", DEMO, "-p", "x", "--use", SLEEPING)
    assert done.code == 2
    log = Path(os.environ["XDG_CACHE_HOME"]) / "neuronpipe/logs/loader.0.log"
    said = f"neuronpipe: loader.0 (argv:sleep 1000) has not sent Hello for 30 s; its log is {log}\n"
    assert beside_progress(done.errors) == said


@pytest.mark.nightly
def test_a_run_whose_cache_never_grants_says_so_and_is_given_up(shell: Shell) -> None:
    (shell.folder / "stingy.py").write_text(STINGY)
    command = shell.start(
        "run", DEMO, "-p", "x", "--ffn-resident", "30%", "--use", "cache=stingy:Stingy", cwd=shell.folder
    )
    _, errors = command.communicate(timeout=120)
    assert command.returncode == 2
    assert (
        "cache.0 (stingy:Stingy) has granted loader.0 no slots for the trigger parts it is to read for 10 s" in errors
    )
