"""`ps`: which runs are live, what they hold and where they are spoken with; `stop` is another word for `down`."""

from __future__ import annotations

import os
import signal

from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.verbs.runs.ps import render, show_age

from tests.http_client import served
from tests.pipeline import Shell


def test_ps_shows_every_live_run_also_one_that_does_not_answer(shell: Shell) -> None:
    with served(shell, DEMO) as server, shell.up(DEMO) as run:
        runs = {found["run"]: found for found in shell.json("ps")["runs"]}
        assert set(runs) == {str(server.run.path), str(run.path)}
        with_gateway, without = runs[str(server.run.path)], runs[str(run.path)]
        assert with_gateway["addresses"] == [f"http://127.0.0.1:{server.port}"]
        assert without["addresses"] == []
        status = run.status()
        for name in ("mode", "memory_limit_bytes"):
            assert without[name] == getattr(status, name)
        assert without["max_texts"] == status.max_sequences
        coordinator = run.pid("coordinator")
        os.kill(coordinator, signal.SIGSTOP)
        try:
            shown = shell.call("ps").out
        finally:
            os.kill(coordinator, signal.SIGCONT)
        assert "does not answer" in shown
        assert str(server.run.path) in shown
        assert shell.json("stop", "--run", run.path) == {"run": str(run.path), "stopped": True}


def test_a_person_sees_a_paragraph_for_each_run() -> None:
    facts = {"run": "/run/r", "model": "m", "mode": "exact", "answers": True, "ready": True, "uptime_s": 3.0}
    facts |= {"memory_bytes": 1 << 30, "memory_limit_bytes": 2 << 30, "texts": 4, "max_texts": 4, "texts_waiting": 2}
    facts |= {"warming_up": "43 %", "device_profile": "measuring", "addresses": ["http://127.0.0.1:8080"]}
    shown = render([facts], [])
    assert shown.splitlines() == [
        "/run/r", "  m, exact mode", "  up 3 s", "  1.00 GiB of 2.00 GiB", "  4 of 4 sequences active, 2 waiting",
        "  warming up: 43 %", "  device profile: is being measured; a request stops it at once",
        "  http://127.0.0.1:8080",
    ]  # fmt: skip
    assert "neuronpipe up" in render([], [])


def test_a_person_sees_a_paragraph_for_each_server_of_several_models() -> None:
    server = {"addresses": ["http://127.0.0.1:8080"], "answers": True, "models": {"a": "ready", "b": "no run"}}
    silent = {"addresses": ["http://127.0.0.1:8081"], "answers": False, "models": {}}
    assert render([], [server, silent]).splitlines() == [
        "http://127.0.0.1:8080", "  each model has a run while requests name it", "  a: ready", "  b: no run",
        "http://127.0.0.1:8081", "  it does not answer at the moment",
    ]  # fmt: skip


def test_how_long_a_run_is_live() -> None:
    assert [show_age(s) for s in (3.4, 200, 5 * 3600 + 70, 50 * 3600)] == ["3 s", "3 min", "5 h 1 min", "2 d 2 h"]
