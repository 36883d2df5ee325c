"""launch/neuronpipe: passes on at once when installed, installs again when it has to, and says what it lacks.

The environment is a stand-in: its python writes down what it is called with, so that no test installs anything.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pipeline import PATIENCE_S, SLOWER, eventually

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "find", "mkdir", "cat", "date", "tail", "touch", "rm", "mv", "cp", "readlink", "sleep", "dirname")


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


class Checkout:
    """A checkout in a folder with a blank in its name, with a PATH that holds only what each test puts there."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a checkout"
        self.tools = folder / "tools"
        for name in ("neuronpipe", "bootstrap.sh"):
            (self.root / "launch").mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "launch" / name, self.root / "launch" / name)
        (self.root / "native").mkdir()
        (self.root / "native" / "dot.c").touch()
        (self.root / "native" / "_kernels.abi3.so").touch()
        (self.root / "pyproject.toml").touch()
        self.calls = self.root / "calls"
        script(self.root / ".venv/bin/python", f'echo "$*" >>"{self.calls}"')
        script(self.root / ".venv/bin/neuronpipe", 'for word; do echo "<$word>"; done')
        self.tools.mkdir()
        for tool in TOOLS:
            (self.tools / tool).symlink_to(shutil.which(tool) or pytest.skip(f"{tool} is not here"))
        (self.tools / "python3").symlink_to(sys.executable)
        script(self.tools / "cc", "cat >/dev/null")
        script(self.tools / "id", "echo 1000")

    def start(
        self,
        *words: str,
        program: str | Path | None = None,
        path: str | None = None,
        start_new_session: bool = False,
    ) -> subprocess.Popen[str]:
        command = [program or self.root / "launch/neuronpipe", *words]
        environment = {"PATH": path or str(self.tools), "HOME": "/"}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command,
            env=environment,
            cwd="/",
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=start_new_session,
        )

    def run(self, *words: str, program: str | Path | None = None) -> tuple[int, str, str]:
        process = self.start(*words, program=program)
        out, errors = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, errors

    def installations(self) -> int:
        return self.calls.read_text().count("--editable") if self.calls.exists() else 0


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def installed(checkout: Checkout) -> Checkout:
    assert checkout.run()[0] == 0
    assert checkout.installations() == 1
    return checkout


def test_arguments_are_passed_on_as_they_are(installed: Checkout) -> None:
    assert installed.run("run", "-p", "two words", "") == (0, "<run>\n<-p>\n<two words>\n<>\n", "")


def test_the_command_knows_how_it_was_typed(installed: Checkout) -> None:
    script(installed.root / ".venv/bin/neuronpipe", 'echo "$NEURONPIPE_COMMAND"')
    assert installed.run("up")[1] == f"{installed.root}/launch/neuronpipe\n"


def test_a_second_start_installs_nothing_and_is_quick(installed: Checkout) -> None:
    took_s = []
    for _ in range(5):
        started = time.perf_counter()
        assert installed.run("x")[0] == 0
        took_s.append(time.perf_counter() - started)
    assert installed.installations() == 1
    assert min(took_s) < 0.3 * SLOWER


def test_it_starts_through_links_from_anywhere(installed: Checkout, tmp_path: Path) -> None:
    (tmp_path / "first").symlink_to("a checkout/launch/neuronpipe")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "np").symlink_to("../first")
    assert installed.run("x", program=tmp_path / "bin" / "np")[1] == "<x>\n"
    assert installed.installations() == 1


def test_a_changed_kernel_is_compiled(installed: Checkout) -> None:
    (installed.root / "native" / "dot.c").write_text("int changed;")
    assert installed.run("x")[1] == "<x>\n"
    assert installed.installations() == 2


def test_a_changed_python_file_costs_nothing(installed: Checkout) -> None:
    (installed.root / "native" / "__init__.py").touch()
    (installed.root / "launch" / "cli.py").touch()
    assert installed.run("x")[0] == 0
    assert installed.installations() == 1


def test_a_checkout_that_moved_is_installed_again(installed: Checkout, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    installed.root.rename(moved)
    script(moved / ".venv/bin/python", f'echo "$*" >>"{moved}/calls"')
    assert installed.run("x", program=moved / "launch/neuronpipe")[1] == "<x>\n"
    assert (moved / "calls").read_text().count("--editable") == 2


def test_two_first_starts_install_once(checkout: Checkout) -> None:
    script(checkout.root / ".venv/bin/python", f'echo "$*" >>"{checkout.calls}"\nsleep 0.2')
    both = [checkout.start("a"), checkout.start("b")]
    assert [process.communicate(timeout=PATIENCE_S)[0] for process in both] == ["<a>\n", "<b>\n"]
    assert checkout.installations() == 1


def test_an_interrupted_installation_says_how_to_go_on(checkout: Checkout) -> None:
    script(checkout.root / ".venv/bin/python", f'echo "$*" >>"{checkout.calls}"\nexec sleep 30')
    process = checkout.start("x", start_new_session=True)
    assert eventually(checkout.calls.exists)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert errors.count("setting up was interrupted") == 1


def left_of(session: int) -> list[str]:
    """The processes of a session that have not ended."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, _, rest = (place / "stat").read_text().rpartition(") ")
            if int(rest.split()[3]) == session and rest[0] != "Z":
                found.append(name)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_it_sets_up_the_test_command_leaves_no_process(
    checkout: Checkout, number: signal.Signals
) -> None:
    """Not apt-get, and not the clients' installation, which ignore Ctrl-C as all that a script starts beside itself."""
    shutil.copy(ROOT / "launch/test", checkout.root / "launch/test")
    apt, clients = checkout.root / "apt", checkout.root / "clients"
    script(checkout.tools / "id", "echo 0")
    script(checkout.tools / "nice", 'exec "$@"')
    script(checkout.tools / "apt-get", f'echo >"{apt}"; sleep 300; echo')
    script(checkout.root / ".venv/bin/pip", "")
    waits = f'case "$*" in *environments*) echo >"{clients}" ;; esac\nsleep 300; echo'
    script(checkout.root / ".venv/bin/python", waits)
    process = checkout.start(program=checkout.root / "launch/test", start_new_session=True)
    assert eventually(lambda: apt.exists() and clients.exists())
    os.killpg(process.pid, number)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode in (130, 143)
    assert eventually(lambda: not left_of(process.pid), 2), left_of(process.pid)


def test_the_clients_installation_ends_with_whoever_started_it(tmp_path: Path) -> None:
    """With all that it has started in turn."""
    code = (
        "import sys; from tests.clients import environments as e; e._end_with_parent();"
        f"e._run('sh', '-c', 'sleep 300 & echo $! >{tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; wait')"
    )
    parent = subprocess.Popen(["sh", "-c", '"$@"; echo', "sh", sys.executable, "-c", code], cwd=ROOT)
    assert eventually((tmp_path / "pid").exists)
    sleeper = Path("/proc") / (tmp_path / "pid").read_text().strip()
    assert sleeper.exists()
    parent.kill()
    parent.wait()
    assert eventually(lambda: not sleeper.exists() or "(zombie)" in (sleeper / "status").read_text(), 5)


def test_a_failed_installation_shows_why_and_is_tried_again(checkout: Checkout) -> None:
    broken = f'case "$*" in *--editable*) echo "$*" >>"{checkout.calls}"; echo "error: dot.c is wrong"; exit 1 ;; esac'
    script(checkout.root / ".venv/bin/python", broken)
    for _ in range(2):
        code, out, errors = checkout.run("x")
        assert (code, out) == (1, "")
        assert "error: dot.c is wrong" in errors
        assert f"{checkout.root}/.venv/bootstrap.log" in errors
    assert checkout.installations() == 2


def test_a_missing_compiler_is_named_with_the_command_that_installs_it(checkout: Checkout) -> None:
    (checkout.tools / "cc").unlink()
    script(checkout.tools / "apt-get", "exit 1")
    command = "'apt-get update && apt-get install -y gcc libc6-dev'"  # a fresh Debian has no lists of packages
    code, out, errors = checkout.run("x")
    assert (code, out) == (2, "")
    assert f"su -c {command}" in errors
    script(checkout.tools / "sudo", "exit 1")
    assert f"sudo sh -c {command}" in checkout.run("x")[2]


def test_root_gets_the_compiler_installed(checkout: Checkout) -> None:
    compiler = checkout.tools / "cc"
    compiler.rename(checkout.tools / "kept")
    script(checkout.tools / "id", "echo 0")
    installs = f'case "$*" in *"install -y gcc libc6-dev"*) cp "{checkout.tools}/kept" "{compiler}" ;; esac'
    script(checkout.tools / "apt-get", installs)
    code, out, errors = checkout.run("x")
    assert (code, out) == (0, "<x>\n"), errors
    assert "installing with apt-get: compiler" in errors


@pytest.mark.parametrize("step", ["update", "install"])
def test_another_apts_lock_is_waited_for(checkout: Checkout, step: str) -> None:
    """Of these two only dpkg's own lock, which is a third one, can be waited for by an option of apt-get."""
    compiler, tries = checkout.tools / "cc", checkout.root / "tries"
    compiler.rename(checkout.tools / "kept")
    script(checkout.tools / "id", "echo 0")
    script(
        checkout.tools / "apt-get",
        f"""case "$1" in {step})
    echo try >>"{tries}"
    if [ "$(cat "{tries}")" = try ]; then
        echo "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt-get)"
        echo "N: Be aware that removing the lock file is not a solution and may break your system."
        echo "E: Unable to lock directory /var/lib/apt/lists/"
        exit 100
    fi
esac
case "$1" in install) cp "{checkout.tools}/kept" "{compiler}" ;; esac""",
    )
    code, out, errors = checkout.run("x")
    assert (code, out) == (0, "<x>\n"), errors
    assert errors.count("another apt holds a lock; waiting for it") == 1
    assert tries.read_text() == "try\ntry\n"


def test_an_apt_that_fails_is_not_tried_again(checkout: Checkout) -> None:
    (checkout.tools / "cc").unlink()
    script(checkout.tools / "id", "echo 0")
    script(checkout.tools / "apt-get", 'echo "E: Unable to locate package gcc"\nexit 100')
    code, _, errors = checkout.run("x")
    assert code == 1
    assert "E: Unable to locate package gcc" in errors
    assert "waiting" not in errors


def test_without_any_python_the_command_names_it(checkout: Checkout) -> None:
    (checkout.tools / "python3").unlink()
    script(checkout.tools / "apt-get", "exit 1")
    code, _, errors = checkout.run("x")
    assert code == 2
    assert "apt-get install -y python3 python3-dev python3-venv" in errors


def test_a_checkout_that_cannot_be_written_is_named(checkout: Checkout) -> None:
    shutil.rmtree(checkout.root / ".venv")
    (checkout.root / ".venv").write_text("in the way")
    code, _, errors = checkout.run("x")
    assert code == 2
    assert f"{checkout.root}/.venv cannot be written" in errors


def test_the_scripts_are_executable() -> None:
    for name in ("launch/neuronpipe", "launch/test", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name
