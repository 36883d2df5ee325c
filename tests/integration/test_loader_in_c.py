"""The loader in C that was written from SPEC.md: the same tokens as with ours."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from neuronpipe.plans.package.reader import Package

from tests.conformance.checkpoints import RECIPES, tokens
from tests.moved_scales import move_scales
from tests.pipeline import Shell, eventually

Converted = Callable[..., Package]
ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "native" / "client"
COMPILER = shutil.which(os.environ.get("CC", "cc"))

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler: install gcc or set CC")


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("loader") / "loader"
    files = [ROOT / "services" / "examples" / "loader.c", *sorted(CLIENT.glob("*.c"))]
    flags = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{CLIENT.parent}")
    subprocess.run([str(COMPILER), *flags, "-o", program, *files, "-lm"], check=True)
    return program


def test_the_demo_says_the_same_with_half_of_its_neurons_resident(shell: Shell, loader: Path) -> None:
    words = ("run", "-p", "import os", "-n", "8", "--ffn-resident", "50%")
    ours = shell.json(*words)
    theirs = shell.json(*words, "--use", f"loader=argv:{loader}")
    assert theirs["token_ids"] == ours["token_ids"]
    assert theirs["flash"]["bytes"] > 0


def test_it_puts_scales_where_the_plan_moves_them(shell: Shell, converted: Converted, loader: Path) -> None:
    package, prompt, plan = converted("awkward", "q4"), tokens(RECIPES["awkward"], 9), shell.folder / "plan.json"
    assert shell.call("plan", package.path, "--ffn-resident", "60%", "--without", "bundle", "-o", plan).code == 0
    move_scales(plan, package.manifest)
    with shell.up(package.path, "--plan", plan) as run:
        ours = run.ask(prompt, 12)["token_ids"]
        shell.json("swap", "loader", "--use", f"argv:{loader}", "--run", run.path)
        theirs = run.ask(prompt, 12, share_prefix=False)
    assert theirs["token_ids"] == ours
    assert theirs["flash"]["bytes"] > 0


def runs(pid: int, program: Path) -> bool:
    """Whether it was started for this program; /proc/PID/exe would be the emulator, under one."""
    return os.fsencode(program) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def test_it_is_started_again_and_swapped_like_ours(shell: Shell, converted: Converted, loader: Path) -> None:
    prompt = tokens(RECIPES["relu2"], 9)
    with shell.up(converted("relu2", "f16").path, "--ffn-resident", "50%") as run:
        said = run.ask(prompt, 16)["token_ids"]
        pid = shell.json("swap", "loader", "--use", f"argv:{loader}", "--run", run.path)["pids"]["loader.0"]
        assert runs(pid, loader)
        assert run.ask(prompt, 16, share_prefix=False)["token_ids"] == said
        os.kill(pid, signal.SIGKILL)
        assert run.ask(prompt, 16, share_prefix=False)["token_ids"] == said
        assert eventually(lambda: run.status().ready)
        assert runs(run.pid("loader"), loader)
