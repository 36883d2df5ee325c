"""`neuronpipe throttle`: a run pauses while the device is too hot, says the same, works on without the watcher."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from neuronpipe.launch.client import attach
from neuronpipe.launch.planning import DEMO
from neuronpipe.protocol.messages.client import Finished, Token
from neuronpipe.protocol.messages.request import Generate

from tests.pipeline import PATIENCE_S, Shell, eventually


@pytest.fixture
def device(tmp_path: Path) -> Path:
    place = tmp_path / "sys/class/thermal/thermal_zone0"
    place.mkdir(parents=True)
    (place / "type").write_text("cpu-0-0\n")
    (place / "temp").write_text("97000\n")
    return place / "temp"


def test_a_run_pauses_while_it_is_hot_and_says_the_same(shell: Shell, device: Path) -> None:
    with shell.up(DEMO, "--context", "128") as run:
        before = run.ask("def add(a, b):", max_tokens=24)
        watcher = shell.start("throttle", "--run", run.path, "--sensors", device.parents[4], "--every", "0.1")
        try:
            assert eventually(lambda: run.status().throttle_share == 0.75)
            with attach(run.path) as client:
                answers = list(client.request(Generate(request="r", prompt="def add(a, b):", max_tokens=24)))
            tokens = [answer for answer in answers if isinstance(answer, Token)]
            assert [token.token for token in tokens] == before["token_ids"]
            # A quarter of the time is for the steps themselves.
            finished = answers[-1]
            assert isinstance(finished, Finished)
            assert sum(token.ms for token in tokens[1:]) > 2 * finished.decode["ms"]
            device.write_text("50000\n")
            assert eventually(lambda: run.status().throttle_share == 0)
            device.write_text("97000\n")
            assert eventually(lambda: run.status().throttle_share > 0)
        finally:
            watcher.send_signal(signal.SIGINT)
            said, _ = watcher.communicate(timeout=PATIENCE_S)
        assert watcher.returncode == 130
        assert "hot: cpu-0-0 97 of 90 C" in said
        assert eventually(lambda: run.status().throttle_share == 0)


def test_the_watcher_ends_with_its_run(shell: Shell, device: Path) -> None:
    with shell.up(DEMO, "--context", "64") as run:
        watcher = shell.start("throttle", "--run", run.path, "--sensors", device.parents[4], "--every", "0.1", "--json")
        assert watcher.stdout is not None
        assert json.loads(watcher.stdout.readline())["state"] == "hot"
        run.down()
        watcher.communicate(timeout=PATIENCE_S)
        assert watcher.returncode == 0


def test_one_look_needs_no_run(shell: Shell, device: Path) -> None:
    seen = shell.json("throttle", "--once", "--sensors", device.parents[4])
    assert (seen["state"], seen["sensors"][0]["celsius"], seen["throttle_share"]) == ("hot", 97.0, 0.0)
