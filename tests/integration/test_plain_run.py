"""A run that asks for no runtime has none: what the extras bring is neither imported nor mapped, by nobody."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from neuronpipe.launch.planning import DEMO

from tests.pipeline import Run, Shell

EXTRAS = re.compile(r"/(onnx|onnxruntime|onnxruntime_qnn|pyopencl)/|libOpenCL")
PROMPT = "def main(arguments):"


def mapped(run: Run) -> dict[str, set[str]]:
    """Of the extras' libraries, those that each process has mapped, by its role and index."""
    names = {f"{one.role}.{one.index}": Path(f"/proc/{one.pid}/maps") for one in run.status().processes}
    return {name: {found.group() for found in EXTRAS.finditer(maps.read_text())} for name, maps in names.items()}


def test_no_process_of_a_plain_run_maps_a_runtime(shell: Shell) -> None:
    with shell.up(DEMO, "--workers", "2") as run:
        run.ask(PROMPT, 4)
        found = mapped(run)
    assert {"coordinator.0", "decode.0", "decode.1", "loader.0", "cache.0", "prefill.0"} <= set(found)
    assert not any(found.values()), found


def test_only_the_process_that_was_given_a_runtime_maps_it(shell: Shell) -> None:
    pytest.importorskip("onnxruntime")
    with shell.up(DEMO, "--backend", "prefill=onnx:cpu") as run:
        run.ask(PROMPT, 4)
        found = mapped(run)
    assert "/onnxruntime/" in found.pop("prefill.0")
    assert not any(found.values()), found


@pytest.mark.parametrize("words", [["run", "-p", PROMPT, "-n", "2"], ["plan", str(DEMO)]])
def test_no_command_imports_one_unasked(words: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "neuronpipe.launch", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "neuronpipe" in imported
    assert imported.isdisjoint({"onnx", "onnxruntime", "onnxruntime_qnn", "pyopencl"})
