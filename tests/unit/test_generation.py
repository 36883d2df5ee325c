"""What a person sees of a text while it comes, and before, from what the coordinator says."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from neuronpipe.launch import progress
from neuronpipe.launch.client import Client
from neuronpipe.launch.generation import generate
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.client import Accepted, Finished, Status, Token
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
Quiet = Callable[[Status | None], None]


def token(index: int, text: str) -> Token:
    return Token(request="1", index=index, token=7, text=text, ms=1.0)


class Scripted:
    """A client whose run says what the test says. A status stands for a moment in which nothing comes."""

    def __init__(self, *said: Message | BaseException | None) -> None:
        self._said = said

    def request(self, ask: Generate, quiet: Quiet) -> Iterator[Message]:
        for one in self._said:
            if isinstance(one, BaseException):
                raise one
            if one is None or isinstance(one, Status):
                quiet(one)
            else:
                yield one


def shown(*said: Message | BaseException | None, **options: Any) -> None:
    generate(cast(Client, Scripted(*said)), argparse.Namespace(**{"json": False, **options}), ASK)


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
        "neuronpipe: waiting for a place, or reading the prompt, 1,234 tokens; 2 texts wait, 8 s",
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
