"""The doctor answers every question, says what to do about each bad answer, and survives what it examines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from neuronpipe.launch.cli import main
from neuronpipe.launch.doctor import checks as doctor_checks
from neuronpipe.launch.doctor.checks import Check, checks, render
from neuronpipe.launch.planning import DEMO
from neuronpipe.native import ffi, lib


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def state(made: list[Check], name: str) -> str:
    return next(check.state for check in made if check.name == name)


def test_whatever_is_not_well_comes_with_advice(tmp_path: Path) -> None:
    made = checks(tmp_path)
    assert all(check.advice for check in made if check.state != "ok")
    assert {"python", "kernels", "cores", "memory", "flash", "run directory"} <= {check.name for check in made}


def test_it_says_how_far_it_is_before_each_step(tmp_path: Path) -> None:
    said: list[tuple[int, int]] = []
    checks(tmp_path, lambda done, total: said.append((done, total)))
    assert said == [(number, len(said)) for number in range(len(said))]
    assert len(said) > 1


def test_missing_kernels_are_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "neuronpipe.native", None)
    made = checks(tmp_path)
    assert state(made, "kernels") == "fail"
    assert state(made, "shared memory") == "ok"


def test_kernels_for_another_machine_are_a_finding(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "neuronpipe.launch", "doctor", "--json", str(tmp_path)]
    environment = {**os.environ, "NEURONPIPE_ISA": "sparc"}  # read once, on first use: so in a process of its own
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    kernels = next(check for check in json.loads(ran.stdout)["checks"] if check["name"] == "kernels")
    assert kernels["state"] == "fail"
    assert "NEURONPIPE_ISA=sparc" in kernels["found"]


def test_it_says_what_computes_prompts_and_why(tmp_path: Path) -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    used = ffi.string(lib.np_isa_name()).decode()
    found = next(check.found for check in checks(tmp_path) if check.name == "kernels")
    if used == "avx512" and "amx_int8" not in flags:
        assert "no matrix engine" in found
    assert ("matrix engine (AMX)" in found) == (used == "amx")
    assert ("amx" in ffi.string(lib.np_isa_names()).decode().split(",")) == (lib.np_isa_amx_lacks() == ffi.NULL)


def test_a_folder_too_deep_for_sockets_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(deep))
    assert state(checks(tmp_path), "run directory") == "fail"


def test_a_missing_folder_is_a_finding(tmp_path: Path) -> None:
    assert state(checks(tmp_path / "none"), "free disk") == "fail"


def test_without_a_package_the_disk_is_that_where_pull_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONPIPE_DATA", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(doctor_checks, "_device_checks", lambda directory: [])  # they measure for seconds
    (disk,) = (check for check in checks(DEMO) if check.name == "free disk")
    assert disk.found.endswith(f" at {tmp_path}")


def test_advice_stands_below_its_finding() -> None:
    made = [
        Check(name="memory", state="warn", found="little", advice="buy more"),
        Check(name="x", state="ok", found="y"),
    ]
    assert render(made).splitlines() == [
        "warn  memory         little",
        "                     -> buy more",
        "ok    x              y",
    ]


def test_the_verb_prints_json_and_fails_when_a_check_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", str(tmp_path / "none")]) == 1
    found = json.loads(capsys.readouterr().out)["checks"]
    assert {"name", "state", "found", "advice"} == set(found[0])
