"""What a person sees of a text while it comes, and before, from what the coordinator says."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from neuronpipe.launch import progress
from neuronpipe.launch.client import Client
from neuronpipe.launch.generation.answer import generate
from neuronpipe.launch.generation.prompt import checked_prompt
from neuronpipe.launch.generation.stream import describe_wait
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.verbs.runs import status as verb
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.client import Accepted, Finished, Status, Token, WarmUp
from neuronpipe.protocol.messages.request import Generate

ASK = Generate(request="1", prompt="the rain", max_tokens=4)
ACCEPTED = Accepted(request="1", prompt_tokens=1234)
STATUS = Status(
    run="r", ready=True, plan="p", mode="exact", processes=(), memory_bytes=0, memory_peak_bytes=0,
    memory_limit_bytes=0, sequences_active=1, max_sequences=1, sequences_waiting=0, steps=0, tokens=0, uptime_s=1.0,
)  # fmt: skip
FINISHED = Finished(
    request="1", reason="length", text=" falls", tokens=1, prompt_tokens=1234, ttft_ms=20000.0, tokens_per_s=0.042,
    tbt_ms={}, memory={"peak_bytes": 0, "limit_bytes": 0}, flash={"bytes": 0, "reads": 0, "miss_rate": 0.0},
    prefill={}, decode={}, plan="p", mode="exact",
)  # fmt: skip
COLD = dataclasses.replace(STATUS, warm_up=WarmUp(loaded_bytes=1 << 30, total_bytes=4 << 30))
WARM = dataclasses.replace(STATUS, warm_up=WarmUp(loaded_bytes=4 << 30, total_bytes=4 << 30))
Quiet = Callable[[Status | None], None]


def token(index: int, text: str) -> Token:
    return Token(request="1", index=index, token=7, text=text, ms=1.0)


class Scripted:
    """A client whose run says what the test says. A status stands for a moment in which nothing comes. before, after:
    how the run is when it is asked, and when the text has come."""

    def __init__(self, *said: Message | BaseException | None, before: Status, after: Status) -> None:
        self._said, self._before, self._after = said, before, after

    def status(self) -> Status:
        return self._after

    def request(self, ask: Generate, quiet: Quiet, seen_before: Callable[[Status], None]) -> Iterator[Message]:
        seen_before(self._before)
        for one in self._said:
            if isinstance(one, BaseException):
                raise one
            if one is None or isinstance(one, Status):
                quiet(one)
            else:
                yield one


def shown(
    *said: Message | BaseException | None,
    before: Status = STATUS,
    after: Status = STATUS,
    stays: bool = False,
    json: bool = False,
) -> None:
    client = Scripted(*said, before=before, after=after)
    generate(cast(Client, client), ASK, as_json=json, run_stays=stays)


def test_the_prompt_comes_with_the_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError):
        shown(ACCEPTED, UserError("refused"))
    assert capsys.readouterr().out == ""
    shown(ACCEPTED, token(0, " falls"), token(0, " falls"), token(1, " on"), FINISHED)
    assert capsys.readouterr().out == "the rain falls on\n"
    shown(ACCEPTED, FINISHED)  # an end token was the first
    assert capsys.readouterr().out == "the rain\n"


def test_an_error_does_not_stand_behind_the_text_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (UserError("the run has ended"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            shown(ACCEPTED, token(0, " falls"), error)
        assert capsys.readouterr().out == "the rain falls\n"


def test_a_text_that_waited_for_cold_memory_says_so_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(**how: Any) -> list[str]:
        shown(ACCEPTED, token(0, " falls"), FINISHED, **how)
        return [line for line in capsys.readouterr().err.splitlines() if " % warm " in line]

    assert said(before=COLD, after=WARM) == []  # it did not take long
    assert said(before=WARM, after=WARM, stays=True) == []
    assert len(said(before=COLD, after=WARM, stays=True)) == 1  # the next text is asked of the same run
    monkeypatch.setattr("neuronpipe.launch.generation.answer.SILENT_S", -1.0)
    whole = "memory was 25 % warm when the request began"
    assert said(before=COLD, after=WARM) == [f"neuronpipe: {whole}; it is warm now. The next request takes less time"]
    (line,) = said(
        before=COLD, after=dataclasses.replace(COLD, warm_up=WarmUp(loaded_bytes=2 << 30, total_bytes=4 << 30))
    )
    assert line == f"neuronpipe: {whole}; now 50 %, 2.00 GiB of 4.00 GiB. The next request takes less time"
    assert said(before=WARM, after=WARM) == []
    assert said(before=COLD, after=WARM, json=True) == []


def test_a_slow_model_is_not_said_to_give_no_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    shown(ACCEPTED, token(0, " falls"), FINISHED)
    assert "0.042 tokens/s" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
def test_what_the_first_token_waits_for_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    clock = iter((0.0, 1.0, 2.0, 3.0, 4.0, 8.0))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    queued = dataclasses.replace(STATUS, sequences_waiting=2)
    shown(None, None, ACCEPTED, STATUS, STATUS, queued, token(0, " falls"), FINISHED, json=as_json)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("neuronpipe: ")]
    assert lines == [
        "neuronpipe: starting, 2 s",
        "neuronpipe: reading the prompt, 1,234 tokens, 4 s",
        "neuronpipe: waiting for a KV slot, or reading the prompt, 1,234 tokens; 2 sequences are waiting, 8 s",
    ]


def test_what_was_said_of_the_wait_is_wiped_when_the_first_token_comes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SILENT_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shown(ACCEPTED, STATUS, token(0, " falls"), STATUS, FINISHED)
    before, _, after = capsys.readouterr().err.rpartition(progress.WIPE)
    assert before == f"{progress.WIPE}reading the prompt, 1,234 tokens, 0 s"
    assert after.startswith("[1 tokens, ")


def test_whatever_a_run_is_asked_for_waits_for_its_start_and_for_warm_memory() -> None:
    starting = dataclasses.replace(STATUS, ready=False)
    assert [describe_wait(status, "scoring") for status in (None, starting, STATUS, WARM)] == [
        *["starting"] * 2,
        *["scoring"] * 2,
    ]
    assert describe_wait(COLD, "scoring") == "scoring, while memory warms up: 25 %, 1.00 GiB of 4.00 GiB"


def test_status_says_that_memory_warms_up_until_it_is_warm() -> None:
    facts = {"run": "/run", "model": "m", "package": "/p"}
    assert "\nwarming up: 25 %, 1.00 GiB of 4.00 GiB\n" in verb.render(facts, COLD)
    assert "warming up" not in verb.render(facts, WARM)


@pytest.mark.parametrize(
    ("package", "chat"),
    [
        (None, "chat"),  # as of `ask`, which names none
        (DEMO, "chat"),
        (Path("/data/neuronpipe/packages/Qwen3-0.6B"), "chat Qwen3-0.6B"),
        (Path("/models/my model"), "chat '/models/my model'"),
    ],
)
def test_who_gives_no_prompt_is_told_of_a_chat_with_that_model(
    monkeypatch: pytest.MonkeyPatch, package: Path | None, chat: str
) -> None:
    monkeypatch.setenv("NEURONPIPE_DATA", "/data/neuronpipe")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(UserError, match=f"`neuronpipe {chat}` holds a conversation"):
        checked_prompt(None, package)
