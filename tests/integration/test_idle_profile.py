"""A run that stays measures its device while nobody uses it, and a request goes first."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from neuronpipe.launch.planning import DEMO

from tests.pipeline import Run, Shell, eventually

# Stands in for the measurement, which takes minutes: it starts a process in a session of its own, as runs are.
MEASURES_SLOWLY = """
import pathlib, subprocess, sys, tempfile, time
pathlib.Path(tempfile.mkdtemp(), "file").touch()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""
MEASURES_AT_ONCE = "import sys; sys.exit(0)"
COMMAND = """
import sys
from neuronpipe.launch.supervisor import idle_profile
idle_profile.MODULE, idle_profile.IDLE_S = {module!r}, {idle_s}
from neuronpipe.launch.cli import main
sys.exit(main())
"""


@contextlib.contextmanager
def measured_run(shell: Shell, folder: Path, code: str, *words: str, idle_s: float = 0.5) -> Iterator[Run]:
    """A run with a cache of its own, where `code` measures after `idle_s`."""
    (folder / "measures_for_test.py").write_text(code)
    program = (sys.executable, "-c", COMMAND.format(module="measures_for_test", idle_s=idle_s))
    environment = {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    run = Run(shell, Path(shell.json("up", DEMO, *words, program=program, environment=environment)["run"]))
    try:
        yield run
    finally:
        run.down()


def measuring(shell: Shell) -> list[int]:
    """The processes that measure, and what they started."""
    found = []
    for pid in shell.processes():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"measures_for_test" in words or b"import time; time.sleep(600)" in words:
                found.append(pid)
    return found


def test_a_request_ends_the_measurement_of_an_idle_run_at_once(shell: Shell, tmp_path: Path) -> None:
    with measured_run(shell, tmp_path, MEASURES_SLOWLY) as run:
        assert run.status().device_profile in ("waiting", "measuring")
        assert eventually(lambda: run.status().device_profile == "measuring" and len(measuring(shell)) == 2)
        assert "is being measured" in shell.call("status", "--run", run.path).out
        assert "is being measured" in shell.call("ps").out
        assert len(measuring(shell)) == 2  # looking at a run does not end it
        assert run.ask("def f(", max_tokens=2)["tokens"] == 2
        assert eventually(lambda: not measuring(shell), 5.0)
        assert run.status().device_profile == "waiting"
        assert list(Path(shell.folder).glob("np-*")) == []
        assert eventually(lambda: len(measuring(shell)) == 2)  # the next idle time is its chance
    assert eventually(lambda: not shell.leftovers(), 5.0)


def test_a_run_is_measured_once(shell: Shell, tmp_path: Path) -> None:
    with measured_run(shell, tmp_path, MEASURES_AT_ONCE) as run:
        assert eventually(lambda: run.status().device_profile == "measured")
        run.ask("def f(", max_tokens=2)
        assert not eventually(lambda: run.status().device_profile != "measured", 1.5)


def test_who_opts_out_is_not_measured(shell: Shell, tmp_path: Path) -> None:
    with measured_run(shell, tmp_path, MEASURES_SLOWLY, "--no-idle-profile", idle_s=0.1) as run:
        assert not eventually(lambda: bool(measuring(shell)), 1.5)
        assert run.status().device_profile == ""
        assert "device profile" not in shell.call("ps").out


def test_a_measurement_that_fails_is_shown_with_its_log(shell: Shell, tmp_path: Path) -> None:
    with measured_run(shell, tmp_path, "raise SystemExit('no flash here')") as run:
        assert eventually(lambda: run.status().device_profile == "failed")
        assert "no flash here" in (run.path / "device-profile.log").read_text()
        assert "device-profile.log" in shell.call("status", "--run", run.path).out
