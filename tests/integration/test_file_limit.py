"""Commands in a shell that allows no files, or small ones (`ulimit -f`): each ends in one line that says so."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.checkpoints import TINY, write_checkpoint
from tests.hub_mirror import hub_mirror

DEMO = Path(__file__).resolve().parents[2] / "plans" / "demo" / "package"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    return write_checkpoint(tmp_path_factory.mktemp("source") / "model", TINY)


def refused(
    folder: Path,
    limit_bytes: int,
    *words: str,
    program: tuple[str, ...] = ("-m", "neuronpipe.launch"),
    **environment: str,
) -> str:
    """What a command says that may write files of so many bytes: its last line."""
    done = subprocess.run(
        [sys.executable, *program, *words],
        env=os.environ | {"NEURONPIPE_DATA": str(folder / "data"), "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert f"this shell allows files of {limit_bytes:,} bytes at most (`ulimit -f`)" in line
    return line


@pytest.mark.parametrize("limit_bytes", [0, 20_000])
def test_conversions_say_that_files_may_not_be_so_large(limit_bytes: int, source: Path, tmp_path: Path) -> None:
    options = ("--activation", "relu")
    line = refused(tmp_path, limit_bytes, "convert", str(source), "-o", str(tmp_path / "package"), *options)
    assert "package" in line
    refused(tmp_path, limit_bytes, "convert", str(source), *options)
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize("limit_bytes", [0, 20_000])
def test_a_pull_says_that_files_may_not_be_so_large(limit_bytes: int, source: Path, tmp_path: Path) -> None:
    with hub_mirror() as mirror:
        mirror.add("org/model", source)
        refused(
            tmp_path, limit_bytes, "pull", "org/model", "--activation", "relu",
            HF_ENDPOINT=mirror.address, NO_PROXY="127.0.0.1",
        )  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ("plan", str(DEMO), "-o", "plan.json"),
        ("run", str(DEMO), "-p", "x", "-n", "1"),
        ("up", str(DEMO)),
    ],
)
def test_verbs_that_write_say_that_no_files_are_allowed(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(tmp_path, 0, *words)


def test_a_run_says_that_its_segments_may_not_be_so_large(tmp_path: Path) -> None:
    assert "segment" in refused(tmp_path, 1_500_000, "run", str(DEMO), "-p", "x", "-n", "1")


def test_a_command_that_needs_a_temporary_folder_says_that_there_is_none(tmp_path: Path) -> None:
    program = (
        "-c",
        "import sys, tempfile; from neuronpipe.launch import cli; cli._run = lambda words: tempfile.gettempdir(); "
        "sys.exit(cli.main([]))",
    )
    assert "set TMPDIR to one" in refused(tmp_path, 0, program=program)
