"""tests/native/run.sh says of every C test what came of it: one that checked nothing is skipped, not passed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CMAKE = """#!/bin/sh
# In the place of CMake: of a C test that is a shell script it makes a program.
[ "$1" = --build ] || exit 0
cp "{sources}"/test_*.c "$2"
cd "$2" && for one in test_*.c; do mv $one ${{one%.c}} && chmod +x ${{one%.c}}; done
"""


def ran(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> tuple[int, str]:
    """The exit status of run.sh and what it says of one program."""
    sources, tools = folder / "a checkout/tests/native", folder / "tools"
    sources.mkdir(parents=True)
    tools.mkdir()
    shutil.copy(ROOT / "tests/native/run.sh", sources)
    (sources / "test_one.c").write_text(f"#!/bin/sh\n{program}\n")
    (tools / "cmake").write_text(CMAKE.format(sources=sources))
    (tools / "cmake").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    done = subprocess.run(["sh", sources / "run.sh", "native"], capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("echo 5 checks, 0 failed", 0, "native test_one: ok, 5 checks, 0 failed\n"),
        ("echo no tiles here, 0 checks; exit 77", 0, "native test_one: skipped, no tiles here, 0 checks\n"),
        (
            "echo '  io_uring: not tested'; echo '  filters: not tested'; echo all passed",
            0,
            "native test_one: ok, all passed, but not: io_uring, but not: filters\n",
        ),
        ("echo wrong; exit 1", 1, "wrong\nnative test_one: FAILED (exit status 1)\n"),
    ],
)
def test_what_came_of_a_c_test_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, code: int, said: str
) -> None:
    assert ran(tmp_path, monkeypatch, program) == (code, said)
