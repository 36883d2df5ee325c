"""The pipeline as somebody outside sees it: commands, their output, the processes and files they make and leave.

Every process of a `Shell` carries its mark in the environment, which forked services inherit, so that whatever is left
of a run is found, whoever its parent is by then.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from neuronpipe.launch.client import attach
from neuronpipe.launch.generation.answer import to_json
from neuronpipe.launch.verbs.runs import down
from neuronpipe.protocol.errors import NotRunning
from neuronpipe.protocol.messages.client import Finished, Status, Token
from neuronpipe.protocol.messages.request import Generate

ROOT = Path(__file__).resolve().parents[1]
COMMAND = (sys.executable, "-m", "neuronpipe.launch")
MARK = "NEURONPIPE_TEST_MARK"
# How many times slower than usual the machine is, under an emulator for one: all waiting gets so much more time.
SLOWER = float(os.environ.get("NEURONPIPE_TEST_SLOWER", "1"))
PATIENCE_S = 60.0 * SLOWER
# Where other runs of this user are; and the size that pytest-xdist says every terminal has.
NOT_INHERITED = ("XDG_RUNTIME_DIR", "LINES", "COLUMNS")
_PSS = re.compile(r"^(Pss|Pss_Shmem|Pss_File):\s+(\d+) kB", re.MULTILINE)
_PROGRESS = re.compile(r"neuronpipe: (?:.*, \d+ s|quantization \w+: .*)\n")
_marks = itertools.count()

# What a script starts in the background ignores it, and so would our commands, which are ended by it.
signal.signal(signal.SIGINT, signal.default_int_handler)


class Done(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    errors: str


def beside_progress(errors: str) -> str:
    """What a command says on stderr, without the lines of progress that it adds where the machine is slow, and without
    the quantization that a conversion has chosen."""
    return _PROGRESS.sub("", errors)


class Shell:
    """Starts commands with run directories in a folder of its own, and finds everything that came of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = f"{os.getpid()}-{next(_marks)}"

    def start(
        self,
        *words: str | Path,
        program: Sequence[str | Path] = COMMAND,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a command; its standard input is empty. environment: what differs from ours."""
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        variables = {
            **inherited,
            "TMPDIR": str(self.folder),
            MARK: self._mark,
            "NEURONPIPE_CONFIG": "",
            **(environment or {}),
        }
        defaults: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(
            [*map(str, program), *map(str, words)], env=variables, text=True, **{**defaults, **options}
        )

    def call(self, *words: str | Path, **options: Any) -> Done:
        """Run a command to its end."""
        process = self.start(*words, **options)
        out, errors = process.communicate(timeout=PATIENCE_S)
        return Done(process.returncode, out, errors)

    def json(self, *words: str | Path, **options: Any) -> dict[str, Any]:
        """The one JSON object of a command that succeeds."""
        done = self.call(*words, "--json", **options)
        assert done.code == 0, done.errors
        return dict(json.loads(done.out))

    def refused(self, *words: str | Path, beside: bool = False) -> str:
        """The one line with which a command refuses bad input. The manner is checked here: nothing stays, unless runs
        go on `beside` it."""
        done = self.call(*words)
        assert done.code == 2, done
        assert "Traceback" not in done.errors
        (line,) = beside_progress(done.errors).splitlines()
        assert line.startswith("neuronpipe: ")
        assert beside or not self.leftovers(), self.leftovers()
        return line

    @contextlib.contextmanager
    def up(self, package: Path, *words: str | Path, **options: Any) -> Iterator[Run]:
        """A run that stays while the context does."""
        run = Run(self, Path(self.json("up", package, "--no-idle-profile", *words, **options)["run"]))
        try:
            yield run
        finally:
            run.down()

    def processes(self) -> list[int]:
        """Every live process that descends from one of this shell's commands."""
        mark = f"{MARK}={self._mark}".encode()
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (place / "environ").read_bytes().split(b"\0"):
                    found.append(int(place.name))
        return found

    def leftovers(self) -> list[str]:
        """Processes and run directories there are now."""
        return [f"process {pid}" for pid in self.processes()] + [str(p) for p in self.folder.glob("neuronpipe-*")]

    def pss_bytes(self, *, code: bool = True) -> int:
        """Proportional set sizes of all processes in sum, shared memory left out, and each memory file once.

        code: count pages of programs and libraries as well, which take a smaller share while something else on the
            machine has them open too

        Processes are looked at one after the other: shared pages that a second one begins to use in between would
        count half as much again.
        """
        total, files = 0, {}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                sizes = dict(_PSS.findall(Path(f"/proc/{pid}/smaps_rollup").read_text()))
                total += 1024 * (int(sizes["Pss"]) - int(sizes["Pss_Shmem"]))
                total -= 0 if code else 1024 * int(sizes["Pss_File"])
                for file in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        if str(file.readlink()).startswith("/memfd:"):
                            found = file.stat()
                            files[found.st_ino] = 512 * found.st_blocks
        return total + sum(files.values())

    def end(self) -> None:
        """Kill what is left."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def compiled_engine() -> list[Path]:
    """The archive of native code that the editable install has left, if it has: what is built of the same sources need
    not compile them again."""
    return sorted((ROOT / "build/editable").glob("*/libneuronpipe.a"), key=lambda path: path.stat().st_mtime)[-1:]


@contextlib.contextmanager
def scratch_shell() -> Iterator[Shell]:
    """A shell for a script, in a folder of its own, which leaves nothing behind. SIGTERM ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="np-") as folder:
        shell = Shell(Path(folder))
        try:
            yield shell
        finally:
            shell.end()


class Run:
    """A live run, asked in this process: that spares the start of an interpreter per question."""

    def __init__(self, shell: Shell, path: Path) -> None:
        self.shell, self.path = shell, path

    def ask(
        self, prompt: str | list[int], max_tokens: int = 12, seen: Callable[[Token], None] | None = None, **options: Any
    ) -> dict[str, Any]:
        """The object `ask --json` prints; `seen` is called with every token. Unless `share_prefix` is among the options
        the whole prompt is computed, whatever was asked before."""
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, tuple(prompt))
        ask = Generate(
            request="test",
            prompt=text,
            tokens=ids,
            max_tokens=max_tokens,
            **{"temperature": 0.0, "share_prefix": False, **options},
        )
        tokens: list[Token] = []
        with attach(self.path) as client:
            for message in client.request(ask):
                if isinstance(message, Token) and message.index == len(tokens):
                    tokens.append(message)
                    if seen is not None:
                        seen(message)
                if isinstance(message, Finished):
                    return to_json(message, tokens)
        raise AssertionError("the run ended without an answer")

    def status(self) -> Status:
        """What the coordinator says of the run."""
        with attach(self.path) as client:
            return client.status()

    def pid(self, role: str, index: int = 0) -> int:
        """The pid of a process now. Raises StopIteration while there is none."""
        return next(p.pid for p in self.status().processes if (p.role, p.index) == (role, index) and p.pid)

    def has(self, role: str, index: int = 0) -> bool:
        """Whether there is such a process now."""
        return any((p.role, p.index) == (role, index) and p.pid for p in self.status().processes)

    def down(self) -> None:
        """End the run, if it has not ended, as `neuronpipe down` does, but without the start of an interpreter."""
        with contextlib.suppress(NotRunning), contextlib.redirect_stdout(None):
            down.main(argparse.Namespace(run=self.path, json=True))


def eventually(true: Callable[[], Any], within_s: float = 10.0, every_s: float = 0.03) -> bool:
    """Whether something becomes true in time: `within_s` seconds on a machine of usual speed, looked at so often."""
    deadline = time.monotonic() + within_s * SLOWER
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True
