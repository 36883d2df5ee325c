"""Talking to a model as a person does: `run`, `ask` and `chat` with a chat template; the chat in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from neuronpipe.launch.client import attach
from neuronpipe.plans.convert import convert
from neuronpipe.protocol.messages.request import Throttle
from psutil import STATUS_SLEEPING, Process

from tests.conformance.checkpoints import TINY, write_checkpoint
from tests.pipeline import PATIENCE_S, Run, Shell

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
GREEDY = ("--temperature", "0", "-n", "6")
CONTROLS = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]|\r")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    source = write_checkpoint(folder / "source", TINY)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    return convert(source, folder / "package", quantization="q8").path


@pytest.fixture(scope="module")
def run(long_shell: Shell, package: Path) -> Iterator[Run]:
    with long_shell.up(package) as live:
        yield live


class Terminal:
    """A chat in a terminal of `columns`, and what it shows."""

    def __init__(self, shell: Shell, *words: str | Path, columns: int = 80) -> None:
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._ours, self.shown = ours, ""
        self.process: subprocess.Popen[str] = shell.start(
            "chat", *words, stdin=theirs, stdout=theirs, stderr=theirs, environment={"TERM": "xterm"},
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)

    def send(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C once the chat waits for a key: readline loses a signal that arrives while it handles one."""
        deadline = time.monotonic() + PATIENCE_S
        while Process(self.process.pid).status() != STATUS_SLEEPING:
            assert time.monotonic() < deadline, self.shown
            time.sleep(0.001)
        self.send("\x03")

    def expect(self, text: str) -> str:
        """What is shown from now on until `text`, which is waited for."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._ours], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # it was closed on the other side
                    self.shown += CONTROLS.sub("", os.read(self._ours, 4096).decode(errors="replace"))
        before, _, self.shown = self.shown.partition(text)
        return before

    def ended(self) -> int:
        """The exit code."""
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            os.close(self._ours)


def test_run_and_ask_write_what_the_template_says(shell: Shell, long_shell: Shell, package: Path, run: Run) -> None:
    """They gave the prompt as it stands, which a model that was tuned for conversations was never shown."""
    written = run.ask("[user]hello[assistant]", 6, frame=False)["text"]
    told = run.ask("[system]Be brief.[user]hello[assistant]", 6, frame=False)["text"]
    plain = run.ask("hello", 6)["text"]
    assert len({written, told, plain}) == 3
    words = ("ask", "--run", run.path, *GREEDY)
    assert long_shell.json(*words, "hello")["text"] == written
    assert long_shell.json(*words, "-p", "hello", "--system", "Be brief.")["text"] == told
    assert long_shell.json(*words, "-p", "hello", "--raw")["text"] == plain
    assert shell.json("run", package, "-p", "hello", *GREEDY)["text"] == written
    assert long_shell.call(*words, "hello").out == written + "\n"  # nobody wants to read what a template writes
    assert long_shell.call(*words, "hello", "--raw").out == f"hello{plain}\n"
    assert "given twice" in long_shell.refused(*words, "hello", "-p", "hello", beside=True)
    assert "--system and --raw" in long_shell.refused(*words, "hello", "--raw", "--system", "x", beside=True)


def test_a_chat_through_a_pipe(long_shell: Shell, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    chat = long_shell.start("chat", "--run", run.path, *GREEDY, stdin=-1)
    out, errors = chat.communicate(f"hello\n/system Be brief.\n/save {file}\n/clear\nhello\n")
    assert chat.returncode == 0, errors
    first = run.ask("[user]hello[assistant]", 6, frame=False)["text"]
    second = run.ask("[system]Be brief.[user]hello[assistant]", 6, frame=False)["text"]
    assert out == f"{first}\n{second}\n"
    assert [message["role"] for message in json.loads(file.read_text())["messages"]] == ["system", "user", "assistant"]


def test_later_turns_find_what_earlier_ones_computed(long_shell: Shell, run: Run) -> None:
    before = run.status().cached_tokens
    chat = long_shell.start("chat", "--run", run.path, *GREEDY, stdin=-1)
    chat.communicate("a story of some length\nand on\n")
    assert run.status().cached_tokens - before >= len("a story of some length") // 4


def test_a_chat_in_a_terminal(long_shell: Shell, run: Run, tmp_path: Path) -> None:
    """Several lines at once, an answer that is stopped, and the end by Ctrl-D."""
    file = tmp_path / "talk.json"
    chat = Terminal(long_shell, "--run", run.path, "--temperature", "0", "--ignore-end", columns=40)
    chat.expect("commands]\n> ")
    with attach(run.path) as client:
        client.send(Throttle(share=0.95, for_s=60.0))
        client.status()
        chat.send("\x1b[200~one\ntwo\x1b[201~")  # pasted
        chat.send("\n")
        while not run.status().sequences_active:
            time.sleep(0.01)
        time.sleep(0.3)
        chat.send("\x03")
        chat.expect("[stopped")
        client.send(Throttle(share=0.0))
        client.status()
    chat.expect("> ")
    chat.send("th\\\nree\n")
    chat.expect("\n> ")
    chat.send("half a li")
    chat.expect("half a li")
    chat.interrupt()
    chat.expect("[Ctrl-D or /exit ends the chat]\n> ")
    chat.send("/se\ttemp\t0.5\n")
    chat.expect("[temperature 0.5]\n> ")
    chat.send(f"/save {file}\n")
    chat.expect("[saved:")
    chat.expect("> ")
    chat.send("\x04")
    assert chat.ended() == 0
    said = [message["content"] for message in json.loads(file.read_text())["messages"] if message["role"] == "user"]
    assert said[-1] == "th\nree"
    assert said[0] in ("one\ntwo", "th\nree")  # the first was taken back if nothing had come when it was stopped
    assert run.status().sequences_active == 0


def test_a_chat_has_a_run_of_its_own_where_none_is_live(shell: Shell) -> None:
    chat = shell.start("chat", "--run", shell.folder / "r", *GREEDY, stdin=-1)
    out, errors = chat.communicate("import os\n")
    assert chat.returncode == 0, errors
    assert out == shell.json("run", "-p", "import os", *GREEDY)["text"] + "\n"
    assert "a base model" in errors
    assert "this is the demo" in errors
    assert not (shell.folder / "r").exists()
