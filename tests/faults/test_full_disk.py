"""Disks that are full: one line that says so, nothing half-written, and what was there before is there still.

Where a command writes files only, a limit on their size stands for the disk: the kernel refuses a write in the same
place. A run's shared memory would fall under such a limit as well, so runs get a disk that is small.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from neuronpipe.plans.package.reader import Package

from tests.conformance.checkpoints import TINY, write_checkpoint
from tests.pipeline import Done, Shell, beside_progress

Converted = Callable[..., Package]


def refused(done: Done, reason: str) -> str:
    """The line with which a command gives up. Progress may stand before it."""
    assert done.code == 2, done
    assert "Traceback" not in done.errors
    line = done.errors.splitlines()[-1]
    assert line.startswith("neuronpipe: ")
    assert reason in line
    return line


def files_of_at_most(limit_bytes: int) -> dict[str, Any]:
    """For a command whose files may not grow beyond this."""
    return {"preexec_fn": lambda: psutil.Process().rlimit(psutil.RLIMIT_FSIZE, (limit_bytes, limit_bytes))}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextlib.contextmanager
def disk_of(folder: Path, size: str) -> Iterator[None]:
    """A small disk at this folder, or the test is skipped."""
    mount = ("mount", "-t", "tmpfs", "-o", size, "none", folder)
    if os.getuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a small disk, and not everywhere")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with disk_of(disk, "size=64k"):
        yield disk


@pytest.mark.parametrize("twin", [(), ("--gguf", "twin.gguf")], ids=["alone", "with a twin"])
def test_a_synthetic_package_appears_whole_or_not_at_all(shell: Shell, tmp_path: Path, twin: tuple[str, ...]) -> None:
    words = ("synth", "turbosparse-100m", "-o", "made", *twin)
    refused(shell.call(*words, cwd=tmp_path, **files_of_at_most(100_000)), "File too large")
    assert content(tmp_path) == {}


def test_a_package_that_was_to_be_replaced_stays(shell: Shell, converted: Converted, tmp_path: Path) -> None:
    package = Path(shutil.copytree(converted("qwen2", "q8").path, tmp_path / "package"))
    source, before = write_checkpoint(tmp_path / "source", TINY), content(package)
    done = shell.call("convert", source, "-o", package, "--overwrite", **files_of_at_most(20_000))
    refused(done, "could not be written and was removed: File too large")
    assert content(package) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["package", "source"]


def test_a_predictor_stays_until_the_new_one_is_there(shell: Shell, tmp_path: Path) -> None:
    package, text = tmp_path / "package", tmp_path / "text"
    text.write_text("the rain in the other house " * 200)
    shell.json("convert", write_checkpoint(tmp_path / "source", TINY), "-o", package, "--activation", "relu")
    profile = ("profile", package, "--text", text, "--tokens", "512", "--rank", "32")
    shell.json(*profile)
    before = content(package)
    refused(shell.call(*profile, "--recall", "0.9", **files_of_at_most(5000)), "File too large")
    assert content(package) == before
    assert Package.open(package).predictor is not None


def test_what_is_written_about_a_run_appears_whole_or_not_at_all(
    shell: Shell, converted: Converted, tmp_path: Path
) -> None:
    old = "what was here before"
    for name in ("trace.json", "plan.json", "picture.svg"):
        (tmp_path / name).write_text(old)
    with shell.up(converted("awkward", "q8").path) as run:
        run.ask("the rain", 4)
        for words in (
            ("trace", "--run", run.path, "-o", tmp_path / "trace.json"),
            ("trace", "--run", run.path, "--picture", tmp_path / "picture.svg"),
            ("plan", converted("awkward", "q8").path, "-o", tmp_path / "plan.json"),
        ):
            said = refused(shell.call(*words, **files_of_at_most(100)), "cannot be written: File too large")
            assert str(words[-1]) in said
    assert content(tmp_path) == dict.fromkeys(("trace.json", "plan.json", "picture.svg"), old.encode())


def test_logits_that_find_no_room_are_not_kept(shell: Shell, converted: Converted, small_disk: Path) -> None:
    text = shell.folder / "text"
    text.write_text("the rain in the other house")
    words = ("perplexity", converted("awkward", "q8").path, "--text", text, "-o", small_disk / "logits.npy")
    (small_disk / "others").write_bytes(b"\1" * 60_000)
    assert "logits.npy" in refused(shell.call(*words), "cannot be written: No space left on device")
    assert [path.name for path in small_disk.iterdir()] == ["others"]


@pytest.mark.parametrize("files", [1, 2, 3, 4, 5, 6, 8, 10, 13])
def test_a_run_directory_that_finds_no_room_is_said_in_one_line_and_leaves_nothing(
    shell: Shell, converted: Converted, files: int
) -> None:
    """From the directory itself to the sockets and logs of the last services."""
    with disk_of(shell.folder, f"size=1m,nr_inodes={files}"):
        done = shell.call("run", converted("awkward", "q8").path, "-p", "x", "-n", "1")
        assert (done.code, len(beside_progress(done.errors).splitlines())) == (2, 1), done
        assert "No space left on device" in done.errors
        assert "Traceback" not in done.errors
        assert not shell.leftovers()


@pytest.mark.parametrize("verb", ["run", "up"])
def test_a_full_temporary_folder_is_said_in_one_line_and_nothing_is_left(
    shell: Shell, converted: Converted, verb: str
) -> None:
    with disk_of(shell.folder, "size=64k"):
        (shell.folder / "others").write_bytes(b"\1" * (64 << 10))
        words = ("-p", "x", "-n", "1") if verb == "run" else ()
        line = refused(shell.call(verb, converted("awkward", "q8").path, *words), "No space left on device")
        assert "make room, or set TMPDIR to another folder" in line
        assert not shell.leftovers()


def test_too_few_open_files_are_said_before_anything_is_begun(shell: Shell, converted: Converted) -> None:
    def allowed(soft: int, hard: int) -> Done:
        limit = {"preexec_fn": lambda: psutil.Process().rlimit(psutil.RLIMIT_NOFILE, (soft, hard))}
        return shell.call("run", converted("awkward", "q8").path, "-p", "x", "-n", "1", **limit)

    assert "raise it with `ulimit -n 1024`" in refused(allowed(20, 20), "open files, and the limit is 20")
    assert not shell.leftovers()
    assert allowed(20, 1000).code == 0  # it raises the limit by itself as far as it may


@pytest.mark.parametrize(
    "words",
    [("bench", "--json", "--tests", "tg2", "--repetitions", "1"), ("run", "-p", "the rain", "-n", "4"), ("plan",)],
    ids=lambda words: words[0],
)
def test_output_that_finds_no_room_is_not_taken_for_written(
    shell: Shell, converted: Converted, words: tuple[str, ...]
) -> None:
    with Path("/dev/full").open("w") as full:
        done = shell.call(words[0], converted("awkward", "q8").path, *words[1:], stdout=full)
    refused(done, "the output: cannot be written: No space left on device")
