"""Processes of a live run are replaced, and the output does not change; what fails its trial leaves it alone."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from neuronpipe.launch.supervisor import control
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import NotRunning, UserError

from tests.conformance.checkpoints import RECIPES, tokens
from tests.pipeline import PATIENCE_S, SLOWER, Run, Shell, eventually

Converted = Callable[..., Package]
PROMPT = tokens(RECIPES["relu2"], 20)
FIRING_LOG = "neuronpipe.services.examples.firing:FiringLog"
SOON = ("--patience", f"{SLOWER:g}")
LATER = ("--patience", f"{4 * SLOWER:g}")  # it must be ready by then, whatever else the machine does
WORKERS = """
import dataclasses, os, time
from neuronpipe.services.worker.decode import DecodeService
from neuronpipe.services.loader.loader_service import LoaderService

class EndsAtOnce:
    def __init__(self, job):
        raise RuntimeError("nothing works today")

class SaysNothing:
    def __init__(self, job):
        time.sleep(1000)

class SaysHelloForAnother(DecodeService):
    def __init__(self, job):
        super().__init__(job)
        self._service._hello = type(self._service._hello)(
            role="decode", index=job.process.index, pid=1, incarnation=job.incarnation + 5, protocol="1.0", slots=1)

class OneBitOff(DecodeService):
    def compute(self, step):
        outcome = super().compute(step)
        words = self._worker.memory.view("exchange", "logits").cast("B").cast("I")
        words[7] ^= 1
        return outcome

class SaysNoNumerics(DecodeService):
    def __init__(self, job):
        super().__init__(job)
        self._service._hello = dataclasses.replace(self._service._hello, numerics="")

class NeverAnswers(DecodeService):
    def compute(self, step):
        time.sleep(1000)

class ReadsNothing(LoaderService):
    def __init__(self, job):
        super().__init__(job)
        self._core.serve = lambda descriptors, timeout_ms: time.sleep(timeout_ms / 1000)

class OnlyInTrials(DecodeService):
    def __init__(self, job):
        if job.directory.path.name != "trial":
            raise RuntimeError("stage fright")
        super().__init__(job)

class DiesWhenOnTheRoad(DecodeService):
    def compute(self, step):
        if self._worker._job.directory.path.name != "trial":
            os.kill(os.getpid(), 9)
        return super().compute(step)
"""


@pytest.fixture(scope="module")
def undisturbed(long_shell: Shell, converted: Converted) -> list[int]:
    with long_shell.up(converted("relu2", "f16").path, "--workers", "1") as run:
        return list(run.ask(PROMPT, 60)["token_ids"])


@pytest.fixture(scope="module")
def half(long_shell: Shell, converted: Converted) -> Iterator[Run]:
    with long_shell.up(converted("relu2", "f16").path, "--workers", "2", "--ffn-resident", "50%") as run:
        yield run


@pytest.fixture(scope="module")
def small(long_shell: Shell, converted: Converted) -> Iterator[Run]:
    (long_shell.folder / "experiment.py").write_text(WORKERS)
    with long_shell.up(converted("relu2", "f16").path, "--workers", "2") as run:
        yield run


def pids(run: Run) -> dict[str, int]:
    return {f"{p.role}.{p.index}": p.pid for p in run.status().processes}


def swap_while_asking(run: Run, *words: str) -> tuple[list[int], dict[str, int]]:
    """The tokens of texts that are generated meanwhile, one after the other, and the new processes."""
    answers: list[list[int]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set() or not answers:
            answers.append(list(run.ask(PROMPT, 60)["token_ids"]))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        said = run.shell.json("swap", *words, "--run", run.path, "--patience", f"{20 * SLOWER:g}")
    finally:
        over.set()
        asking.join(PATIENCE_S)
    assert not asking.is_alive()
    assert all(answer == answers[0] for answer in answers)
    return answers[0], dict(said["pids"])


@pytest.mark.parametrize(
    "words",
    [
        ("decode.1",),
        ("decode", "--use", FIRING_LOG),
        # These are replaced in a run of a mixture below.
        *(pytest.param((role,), marks=pytest.mark.nightly) for role in ("prefill", "loader", "cache")),
    ],
    ids=lambda words: words[0],
)
def test_texts_go_on_with_the_same_tokens(half: Run, undisturbed: list[int], words: tuple[str, ...]) -> None:
    before = pids(half)
    answer, taken = swap_while_asking(half, *words)
    assert answer == undisturbed
    after = pids(half)
    assert {name for name in before if before[name] != after[name]} == set(taken)
    assert all(after[name] == pid for name, pid in taken.items())
    assert {process.restarts for process in half.status().processes} == {0}  # nobody was lost
    assert half.ask(PROMPT, 60)["token_ids"] == undisturbed


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly) for name in ("turbosparse", "smallthinker", "qwen3moe")],
)
def test_texts_of_a_mixture_go_on_with_the_same_tokens(name: str, shell: Shell, converted: Converted) -> None:
    """Read by cluster or by expert, chosen before attention or behind it."""
    package = converted(name, "f16").path
    (shell.folder / "experiment.py").write_text(WORKERS)
    with shell.up(package, "--workers", "1") as run:
        undisturbed = run.ask(PROMPT, 60)["token_ids"]
    with shell.up(package, "--workers", "2", "--ffn-resident", "50%") as run:
        for words in (("decode.1", "--use", FIRING_LOG), ("prefill",), ("loader",), ("cache",)):
            answer, _ = swap_while_asking(run, *words)
            assert answer == undisturbed, words
        said = shell.call("swap", "decode.1", "--use", "experiment:OneBitOff", "--run", run.path, cwd=shell.folder)
        assert said.code == 2
        assert "computes other bits in the same numerics: logits" in said.errors
        assert run.ask(PROMPT, 60)["token_ids"] == undisturbed
        fired = (run.path / "decode.1.log").read_text()
        assert re.search(r"^step \d+: (\d+/\d+ ?)+$", fired, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ("decode.1", "--use", "experiment:EndsAtOnce"),
            "ended before it was ready: RuntimeError: nothing works today",
        ),
        (("decode.1", "--use", "experiment:SaysNothing", *SOON), f"was not ready within {SLOWER:.0f} s"),
        pytest.param(
            ("decode.1", "--use", "experiment:SaysHelloForAnother", *SOON),
            f"was not ready within {SLOWER:.0f} s",
            marks=pytest.mark.nightly,
        ),
        (("decode.1", "--use", "experiment:OneBitOff"), "computes other bits in the same numerics: logits"),
        (("decode.1", "--use", "experiment:SaysNoNumerics"), "Hello.numerics is empty, and it computes steps"),
        pytest.param(
            ("decode.0", "--use", "experiment:NeverAnswers", *LATER),
            "asked for a text of 5 tokens after a prompt of 12, it answered",
            marks=pytest.mark.nightly,
        ),
        (
            ("loader", "--use", "experiment:ReadsNothing", *LATER),
            "asked for a text of 5 tokens after a prompt of 12, it answered",
        ),
        (("decode.1", "--use", "experiment:NoSuch"), "module experiment has no NoSuch"),
        (("cache", "--use", "argv:sh -c 'echo no cache today >&2; exit 1'"), "no cache today"),
    ],
    ids=lambda words: words[2].rpartition(":")[2] if isinstance(words, tuple) else None,
)
def test_what_fails_leaves_the_old_one_working_and_says_why(small: Run, words: tuple[str, ...], why: str) -> None:
    prompt = tokens(RECIPES["relu2"], 6)
    before, said = pids(small), small.ask(prompt, 6)["token_ids"]
    done = small.shell.call("swap", *words, "--run", small.path, cwd=small.shell.folder)
    assert done.code == 2
    (line,) = [line for line in done.errors.splitlines() if "testing" not in line]  # progress, where it is slow
    assert line.startswith(f"neuronpipe: {words[0]} stays as it was: {words[2]}: ")
    assert why in line
    assert pids(small) == before
    assert small.ask(prompt, 6)["token_ids"] == said


@pytest.mark.parametrize("name", ["OnlyInTrials", "DiesWhenOnTheRoad"])
def test_one_that_fails_after_the_replacement_makes_way_for_the_implementation_before(small: Run, name: str) -> None:
    prompt = tokens(RECIPES["relu2"], 6)
    said = small.ask(prompt, 6)["token_ids"]
    done = small.shell.call(
        *("swap", "decode.1", "--use", f"experiment:{name}"),
        *("--run", small.path, "--patience", f"{20 * SLOWER:g}"),
        cwd=small.shell.folder,
    )
    if name == "OnlyInTrials":
        assert done.code == 2
        assert "ended before it was ready: RuntimeError: stage fright" in done.errors
    else:
        assert done.code == 0, done.errors

    def ours_again() -> bool:
        """The other worker goes on meanwhile, so a text or two may end before this one has died too often."""
        assert small.ask(prompt, 12)["token_ids"][:6] == said
        text, _ = control.ask(small.path, {"ask": "implementations"}, 5.0)["decode.1"]
        return bool(text == "neuronpipe.services.worker.decode:DecodeService")

    assert eventually(ours_again)
    assert eventually(lambda: small.status().ready)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("coordinator",), "coordinator: its requests would be lost"),
        (("decode.2",), "decode.2: this run has decode.0, decode.1"),
        (("decode", "--use", "nothing"), "neither package.module:Class nor argv:COMMAND"),
        (("decode", "--patience", "0"), "--patience 0: between 0 and 600 seconds"),
    ],
)
def test_what_cannot_be_swapped_is_refused(small: Run, words: tuple[str, ...], said: str) -> None:
    assert said in small.shell.refused("swap", *words, "--run", small.path, beside=True)


def test_without_a_run_there_is_nothing_to_swap(shell: Shell) -> None:
    assert shell.call("swap", "decode.0", "--run", shell.folder / "none").code == 3


def test_what_is_no_request_gets_no_answer_and_what_makes_no_sense_is_refused(small: Run) -> None:
    for packet in (b"", b"\xff\x00", b"[]", b"{" * 1000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.settimeout(5)
            client.connect(str(small.path / control.SUPERVISOR_SOCKET))
            client.send(packet)
            assert client.recv(100) == b""
    for request, why in (
        ({"ask": "money"}, "expected implementations, swap or end"),
        ({"ask": "swap", "processes": ["coordinator.0"], "patience_s": 1}, "processes: "),
        ({"ask": "swap", "processes": ["cache.0"], "patience_s": -1}, "patience_s: "),
        ({"ask": "swap", "processes": ["cache.0"], "patience_s": 1, "use": 7}, "use, folder: expected text"),
    ):
        with pytest.raises(UserError, match=why):
            control.ask(small.path, request, 5.0)
    with pytest.raises(NotRunning):
        control.ask(Path("/nowhere"), {"ask": "implementations"}, 5.0)
