"""Environments of the clients: one of Python for each compatible group, and one of Node, below build/.

    python -m tests.clients.environments [GROUP...]     # make those that CI uses, or these

A group's list is `GROUP.txt` beside this file; Node's is `node/package-lock.json`. What was made from the same list is
taken as it is. Several processes may ask for a group at once: one makes it, the others wait. As a command it ends, with
all that it started, when the process that started it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

HERE = Path(__file__).resolve().parent
PLACE = HERE.parents[1] / "build" / "clients"
NODE = "node"
IN_CI = (NODE,)
STAMP = "made-from"
PR_SET_PDEATHSIG = 1


class Missing(Exception):
    """An environment cannot be made here, and why."""


def python(group: str) -> Path:
    """The interpreter of a group, made if need be. Raises Missing."""
    with _created_folder(group, HERE / f"{group}.txt") as folder:
        if folder is not None:
            _run(sys.executable, "-m", "venv", folder)
            pip = (folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps")
            _run(*pip, "--requirement", HERE / f"{group}.txt")
    return PLACE / group / "bin/python"


def node() -> tuple[str, Path]:
    """The program `node`, and the folder with the clients' files and packages, made if need be. Raises Missing."""
    program = shutil.which("node")
    if program is None or shutil.which("npm") is None:
        raise Missing("there is no node with npm")
    with _created_folder(NODE, HERE / "node/package-lock.json") as folder:
        if folder is not None:
            for file in (HERE / "node").glob("package*.json"):
                shutil.copy(file, folder)
            _run("npm", "ci", "--no-audit", "--no-fund", cwd=folder)
    for file in (HERE / "node").glob("*.mjs"):
        shutil.copy(file, PLACE / NODE)
    return program, PLACE / NODE


@contextlib.contextmanager
def _created_folder(group: str, described_by: Path) -> Iterator[Path | None]:
    """Yield an empty folder to fill, or None if one from the same list exists. It is complete when filling succeeds."""
    PLACE.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(described_by.read_bytes() + sys.version.encode()).hexdigest()
    folder = PLACE / group
    with (PLACE / f"{group}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / STAMP).is_file() and (folder / STAMP).read_text() == digest:
            yield None
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
        (folder / STAMP).write_text(digest)


def _run(*words: str | Path, cwd: Path | None = None) -> None:
    command = [*map(str, words)]
    with subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        output_lines = (errors + out).strip().splitlines() or ["nothing was said"]
        raise Missing(f"{Path(words[0]).name} failed: {output_lines[-1][:200]}")


def _environment() -> dict[str, str]:
    """Ours, without what makes our own Python's packages the clients'."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def main(groups: Sequence[str]) -> int:
    """Make groups; 1 when one of them cannot be made."""
    code = 0
    for group in groups or IN_CI:
        try:
            _ = node() if group == NODE else python(group)
        except Missing as why:
            print(f"{group}: {why}", file=sys.stderr)
            code = 1
    return code


def _kill_descendants(pid: int) -> None:
    """Kill what a process has started. Nothing but the standard library is installed yet."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        children += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGSTOP)  # it starts nothing meanwhile
            _kill_descendants(child)
            os.kill(child, signal.SIGKILL)


def _end_with_parent() -> None:
    """Have SIGTERM sent when the parent ends, and end by it as by Ctrl-C.

    The handler ends what was started, since the signal may arrive before Popen has returned who that is.
    """

    def end(number: int, frame: FrameType | None) -> None:
        _kill_descendants(os.getpid())
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGTERM, end)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    _end_with_parent()
    sys.exit(main(sys.argv[1:]))
