"""Every command of the README and of the guide is run as it stands, page by page, in an empty folder.

`./package` is a copy of the demo model, `./checkpoint` and `./model.gguf` are small random models, and the names of a
hub's models stand for packages that were pulled before. Commands that stay (`serve`, `watch --invite`) are started,
and interrupted at the end of their page.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from neuronpipe.launch.arguments.verbs import TWO_WORD_VERBS, verb_parser
from neuronpipe.launch.planning import DEMO

from tests.conformance.checkpoints import TINY, write_checkpoint
from tests.conformance.gguf_files import write_gguf
from tests.pipeline import ROOT, Shell

PAGES = [ROOT / "README.md", *sorted((ROOT / "launch/guide").glob("*.md"))]
GENERATED = {"options.md", "api.md"}
OURS = ("neuronpipe", "./launch/neuronpipe")
STAY = ("serve", "watch --invite")
PULLED = ("qwen3-0.6b",)
NOT_RUN = {
    "pull ": "needs the hub; tests/unit/test_pull.py pulls from a mirror of it",
    "profile device": "takes most of a minute; tests/integration/test_step_profile.py",
    "profile ./package": "takes minutes; tests/integration/test_activity.py, tests/unit/test_predictor.py",
    "--install": "starts a server at every login of whoever tests; tests/unit/test_login_service.py",
    "conformance ": "takes a minute; tests/conformance",
    "--backend": "needs a driver or a runtime; tests/integration/test_accelerator.py, test_backends.py",
    "--use prefill=argv": "needs a phone; tests/integration/test_npu_program.py",
}
RUN_AT_NIGHT = {
    "bench ": "measures for many seconds; tests/integration/test_bench.py",
    "perplexity ": "computes for many seconds; tests/integration/test_same_tokens.py",
    "plan qwen3-30b-a3b --memory": "searches for many seconds; the guide plans the same for another device",
}
IN_EVERY_RUN = ("README", "install", "serve-and-clients", "swap-a-worker")
"""Pages of which the quick commands are run in CI. All commands of all pages are run at night."""
FOREIGN = {
    "docker": "tests/nightly/container.sh",
    "pkg": "Termux",
    "./launch/phone.sh": "tests/integration/test_phone.py",
    "./launch/portable.sh": "tests/nightly/arm64.sh",
    "adb": "a phone",
    "cmake": "tests/integration/test_npu_program.py",
    "pip": "tests/integration/test_wheel.py",
    "export": "a setting for a phone",
    "./launch/test": "this suite",
    "curl": "tests/integration/test_gateway.py",
}


def commands(page: Path) -> Iterator[str]:
    """The commands of a page: lines of indented blocks that begin with a program, continuation lines joined."""
    text = re.sub(r" *\\\n *", " ", page.read_text(encoding="utf-8"))
    for line in text.splitlines():
        if line.startswith("    ") and line.strip():
            command = line.strip().split("    #")[0].strip()
            if command.split()[0] in (*OURS, *FOREIGN):
                yield command


def our_words(command: str) -> list[str] | None:
    """The arguments of a neuronpipe command; None for another program."""
    words = shlex.split(command)
    return words[1:] if words[0] in OURS else None


ALL = [(page, command) for page in PAGES if page.name not in GENERATED for command in commands(page)]


def test_the_guide_has_commands_on_most_pages() -> None:
    assert len({page for page, _ in ALL}) >= 9
    assert len(ALL) > 40


@pytest.mark.parametrize("command", sorted({command for _, command in ALL if our_words(command)}))
def test_the_parser_accepts_every_command_of_the_guide(command: str) -> None:
    words = our_words(command) or []
    verb = " ".join(words[:2]) if " ".join(words[:2]) in TWO_WORD_VERBS else words[0]
    _, unknown = verb_parser(verb).parse_known_args(words[len(verb.split()) :])
    assert [word for word in unknown if word.startswith("-")] == []


@pytest.fixture
def guide_folder(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with what the guide's commands name."""
    folder = shell.folder / "guide"
    shutil.copytree(DEMO, folder / "package")
    write_checkpoint(folder / "checkpoint", TINY)
    write_gguf(folder / "model.gguf", TINY)
    (folder / "text.txt").write_text("def total(prices):\n    return sum(prices)\n" * 200)
    monkeypatch.setenv("NEURONPIPE_DATA", str(shell.folder / "data"))
    for name in PULLED:
        shutil.copytree(DEMO, shell.folder / "data" / "packages" / name)
    return folder


@pytest.mark.parametrize(
    ("page", "at_night"),
    [
        pytest.param(page, at_night, id=f"{page.stem} {'all' if at_night else 'quick'}", marks=marks)
        for page in PAGES
        if page.name not in GENERATED
        for at_night, marks in ((False, ()), (True, (pytest.mark.nightly,)))
        if at_night or page.stem in IN_EVERY_RUN
    ],
)
def test_every_command_of_a_page_succeeds(page: Path, at_night: bool, shell: Shell, guide_folder: Path) -> None:
    staying, left_out = [], NOT_RUN if at_night else NOT_RUN | RUN_AT_NIGHT
    try:
        for command in commands(page):
            words = our_words(command)
            line = " ".join(words or ())
            if words is None or any(part in line for part in left_out):
                continue
            words = [word.replace("/tmp/np-guide", str(shell.folder / "r")) for word in words]
            if words[0] == "convert":
                words.append("--overwrite")
            if words == ["chat"]:
                words.append("./package")  # without it, chat joins a live run of any folder, also another test's
            if line.startswith(STAY):
                process = shell.start(*words, *(("--port", "0") if words[0] == "serve" else ()), cwd=guide_folder)
                assert process.stdout
                assert process.stdout.readline(), process.stderr and process.stderr.read()
                staying.append(process)
                continue
            done = shell.call(*words, cwd=guide_folder)
            assert done.code == 0, f"{command}\n{done.errors}"
    finally:
        for process in staying:
            process.send_signal(signal.SIGINT)
        for process in staying:
            process.communicate(timeout=30)


def test_the_command_of_the_demo_in_the_readmes_table_fits_its_limit(shell: Shell) -> None:
    row = re.search(r"^\| \d+ MiB \| demo, .* \| `(.*)` \|", PAGES[0].read_text("utf-8"), re.MULTILINE)
    assert row is not None
    answer = shell.json(*shlex.split(row[1]))
    assert answer["memory"]["peak_bytes"] <= answer["memory"]["limit_bytes"]
