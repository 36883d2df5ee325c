"""A wall clock that jumps, as one is set by hand, by the network or by a phone that wakes up: nothing waits by it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from neuronpipe.plans.package.reader import Package

from tests.http_client import served
from tests.pipeline import Shell, eventually

Converted = Callable[..., Package]
OPTIONS = ("--ffn-resident", "30%", "--workers", "2")
PROMPT = "the rain"
IDLE_S = 2.0  # longer than a process may be silent
HOUR_S = 3600


@pytest.fixture
def jumping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands started from now on have a wall clock that jumps."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler; on Debian: apt-get install gcc")
    library, source = tmp_path / "clock.so", Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", source, "-o", library], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    # Figures of this device that were kept lie in the future now, would be measured again, and that would be said.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_wall_clock_jumps_and_the_other_one_does_not(jumping: None) -> None:
    """What the tests below rely on."""
    script = "import json, time; print(json.dumps([(time.time(), time.monotonic()) for _ in range(10)]))"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    wall, monotonic = zip(*json.loads(said.stdout), strict=True)
    assert all(abs(later - earlier) > HOUR_S for earlier, later in itertools.pairwise(wall))
    assert list(monotonic) == sorted(monotonic)
    assert monotonic[-1] - monotonic[0] < 1


@pytest.mark.nightly
def test_a_run_does_not_notice(shell: Shell, converted: Converted, request: pytest.FixtureRequest) -> None:
    """The same text, over HTTP too; nobody is taken for silent, late or gone, at work or idle."""
    package = converted("awkward", "q8").path
    with shell.up(package, *OPTIONS) as run:
        undisturbed = run.ask(PROMPT, 24)
    request.getfixturevalue("jumping")
    with served(shell, package, *OPTIONS) as server:
        for _ in range(2):
            assert server.run.ask(PROMPT, 24)["token_ids"] == undisturbed["token_ids"]
            reply = server.post("/v1/completions", prompt=PROMPT, max_tokens=24, temperature=0, stream=True)
            assert "".join(event["choices"][0]["text"] for event in reply.events()) == undisturbed["text"]
            time.sleep(IDLE_S)
            status = server.run.status()
            assert {(process.state, process.restarts) for process in status.processes} == {("ready", 0)}


def test_a_process_that_dies_is_started_again_as_ever(shell: Shell, converted: Converted, jumping: None) -> None:
    with shell.up(converted("awkward", "q8").path, *OPTIONS) as run:
        before = run.ask(PROMPT, 24)["token_ids"]
        for _ in range(3):  # far fewer than the five within 30 s that end a run
            os.kill(run.pid("decode"), signal.SIGKILL)
            assert run.ask(PROMPT, 24)["token_ids"] == before
            assert eventually(lambda: run.status().ready)
