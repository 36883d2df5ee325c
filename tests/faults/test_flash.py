"""Flash that fails under a live run: a clear error for the texts that need it, and the run serves the next request."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

from tests.pipeline import PATIENCE_S, Run, Shell, eventually

Converted = Callable[..., Package]
OPTIONS = ("--ffn-resident", "30%")
PROMPT, OTHER = "the rain", "a dog in"
ERROR = r"bundles\.bin: layer \d, neurons \d+ to \d+: .* cannot be read or does not match its checksum"


@pytest.fixture
def package(converted: Converted, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(converted("qwen2", "q8").path, tmp_path / "package"))


class Faults:
    """What flash does from now on, see flash.c."""

    def __init__(self, control: Path) -> None:
        self._control = control
        control.write_bytes(b".")

    def order(self, order: str) -> None:
        with self._control.open("r+b") as file:
            file.write(order.encode())


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Commands started from now on have failing flash at hand."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler; on Debian: apt-get install gcc")
    library, control = tmp_path / "flash.so", tmp_path / "order"
    source = Path(__file__).with_name("flash.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", source, "-o", library, "-ldl"], check=True)
    made = Faults(control)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("FLASH_FAULTS", str(control))
    return made


@pytest.fixture
def run(shell: Shell, package: Path, faults: Faults) -> Iterator[Run]:
    with shell.up(package, *OPTIONS) as live:
        yield live


def unharmed(run: Run) -> None:
    assert run.status().ready
    assert all(process.restarts == 0 for process in run.status().processes)


@pytest.mark.parametrize("order", ["e", "z", "f"], ids=["EIO", "end of file", "flipped bits"])
def test_flash_that_fails_for_a_while(run: Run, faults: Faults, order: str) -> None:
    """EIO, an early end of the file, flipped bits: errors while it lasts, the same tokens afterwards."""
    before = run.ask(PROMPT, 8)["token_ids"]
    faults.order(order)
    for prompt in (OTHER, PROMPT):
        with pytest.raises(UserError, match=ERROR):
            run.ask(prompt, 30)
    faults.order(".")
    assert eventually(lambda: answer(run) == before, 5)
    unharmed(run)


def answer(run: Run) -> list[int] | None:
    """None: refused, because a cluster that failed is asked for again only when the loader has seen the refusal."""
    try:
        return list(run.ask(PROMPT, 8)["token_ids"])
    except UserError:
        return None


def test_short_reads_change_nothing(run: Run, faults: Faults) -> None:
    before = run.ask(PROMPT, 30)["token_ids"]
    run.ask(OTHER, 30)
    faults.order("s")
    assert run.ask(PROMPT, 30)["token_ids"] == before
    unharmed(run)


def test_a_file_cut_off_under_a_run_and_put_right(shell: Shell, package: Path) -> None:
    file, whole = package / "bundles.bin", (package / "bundles.bin").read_bytes()
    with shell.up(package, *OPTIONS) as run:
        before = run.ask(PROMPT, 8)["token_ids"]
        os.truncate(file, 4096)
        for prompt in (OTHER, PROMPT):
            with pytest.raises(UserError, match=ERROR):
                run.ask(prompt, 30)
        unharmed(run)
        with file.open("r+b") as opened:  # in place: the loader has this very file open
            opened.write(whole)
        assert eventually(lambda: answer(run) == before, 5)
        unharmed(run)


def replace_files(package: Path, spare: Path) -> None:
    """Every file replaced by another of the same size, by name, as a package manager or `cp` through a rename does."""
    for file in package.iterdir():
        spare.write_bytes(bytes(reversed(file.read_bytes())))
        spare.rename(file)


def test_a_package_replaced_under_a_run_does_not_disturb_it(shell: Shell, package: Path, tmp_path: Path) -> None:
    with shell.up(package, *OPTIONS) as run:
        before = run.ask(PROMPT, 8)["token_ids"]
        replace_files(package, tmp_path / "spare")
        run.ask(OTHER, 30)
        assert run.ask(PROMPT, 8)["token_ids"] == before
        unharmed(run)


@pytest.mark.parametrize(("role", "file"), [("coordinator", "tokenizer.json"), ("loader", "checksums.bin")])
def test_a_process_started_later_believes_nothing_that_was_replaced(
    shell: Shell, converted: Converted, tmp_path: Path, role: str, file: str
) -> None:
    """It cannot have the files that the run began with, so the run ends with one line that names one."""
    package = Path(shutil.copytree(converted("awkward", "q8").path, tmp_path / "package"))
    process = shell.start("run", package, "-p", "x", "-n", "100", "--ffn-resident", "10%")  # takes seconds
    assert process.stdout is not None
    assert process.stdout.read(2)  # it generates
    replace_files(package, tmp_path / "spare")
    (victim,) = (pid for pid in shell.processes() if Path(f"/proc/{pid}/comm").read_text().startswith(f"np-{role}"))
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    error = f"neuronpipe: {package / file}: does not match the manifest's sha256: damaged; convert the model again\n"
    assert re.sub(r"neuronpipe: starting, \d+ s\n", "", errors) == error  # a slow start says so
