"""A chat through a pipe, with a client that answers what the test says: what is said, what is done, what is typed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from neuronpipe.launch.chat.lines import Lines
from neuronpipe.launch.chat.session import HELP, Chat, show_help
from neuronpipe.launch.client import Client, Declined
from neuronpipe.launch.generation.conversation import Conversation
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.client import Finished, FinishReason, Token
from neuronpipe.protocol.messages.request import Cancel, Generate

Answer = Callable[[Generate], str | BaseException]


class Scripted:
    """A client whose run answers as `answer` says, a character a token. An exception comes after the first token if it
    is an interrupt, else at once."""

    def __init__(self, answer: Answer, reason: FinishReason = "end") -> None:
        self._answer, self._reason = answer, reason
        self.asked: list[Generate] = []
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def request(self, ask: Generate, *_: object) -> Iterator[Message]:
        self.asked.append(ask)
        said = self._answer(ask)
        if isinstance(said, KeyboardInterrupt):
            yield Token(request=ask.request, index=0, token=7, text="half", ms=1.0)
        if isinstance(said, BaseException):
            raise said
        for index, text in enumerate(said):
            yield Token(request=ask.request, index=index, token=7, text=text, ms=1.0)
        yield Finished(
            request=ask.request, reason=self._reason, text=said, tokens=len(said), prompt_tokens=1, ttft_ms=1.0,
            tokens_per_s=1.0, tbt_ms={}, memory={}, flash={}, prefill={}, decode={}, plan="p", mode="exact",
        )  # fmt: skip


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Scripted, list[str], Conversation]]:
    """chat(typed, answer) -> the client, what was said to the person, the conversation at the end."""

    def held(
        typed: str, answer: Answer = lambda ask: "yes", reason: FinishReason = "end"
    ) -> tuple[Scripted, list[str], Conversation]:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        said: list[str] = []
        client, conversation = Scripted(answer, reason), Conversation(Package.open(DEMO))
        Chat(cast(Client, client), conversation, Generate(request="1", prompt=""), said.append).run()
        return client, said, conversation

    return held


def test_every_turn_is_asked_with_all_before_it(chat: Any, capsys: pytest.CaptureFixture[str]) -> None:
    client, said, talk = chat("one\n\ntwo\n")
    assert [ask.prompt for ask in client.asked] == ["one", "oneyes\ntwo"]
    assert len({ask.request for ask in client.asked}) == 2
    assert talk.turns == [("user", "one"), ("assistant", "yes"), ("user", "two"), ("assistant", "yes")]
    assert capsys.readouterr().out == "yes\nyes\n"
    assert said == []


def test_an_interrupt_stops_the_answer_and_the_chat_goes_on(chat: Any) -> None:
    answers: list[str | BaseException] = [KeyboardInterrupt(), "done"]
    client, said, talk = chat("one\ntwo\n", lambda ask: answers.pop(0))
    assert said == ["stopped"]
    assert client.sent == [Cancel(request="1")]
    assert talk.turns[1] == ("assistant", "half")
    assert client.asked[1].prompt == "onehalf\ntwo"


def test_a_signal_that_ends_the_command_ends_the_chat(chat: Any) -> None:
    class Told(KeyboardInterrupt):
        pass

    with pytest.raises(Told):
        chat("one\ntwo\n", lambda ask: Told())


def test_what_is_refused_was_not_said_and_the_end_of_the_run_ends_the_chat(chat: Any) -> None:
    answers: list[str | BaseException] = [Declined("too long"), "fine"]
    client, said, _ = chat("one\ntwo\n", lambda ask: answers.pop(0))
    assert said == ["too long; /clear begins a new conversation"]
    assert client.asked[1].prompt == "two"
    with pytest.raises(UserError, match="the run has ended"):
        chat("one\ntwo\n", lambda ask: UserError("the run has ended"))


def test_what_ends_an_answer_early_is_said(chat: Any) -> None:
    assert chat("one\n", reason="context")[1] == ["the context is full; /clear begins a new conversation"]
    assert "answer is empty" in chat("one\n", lambda ask: "")[1][0]


def test_a_conversation_is_cleared_and_answered_again(chat: Any) -> None:
    client, said, _ = chat("/again\none\n/again\n/clear\ntwo\n")
    assert [ask.prompt for ask in client.asked] == ["one", "one", "two"]
    assert client.asked[0].seed != client.asked[1].seed
    assert said == ["there is no answer yet", "a new conversation"]


def test_a_conversation_is_saved_but_over_no_other_file(chat: Any, tmp_path: Path) -> None:
    file, other = tmp_path / "talk.json", tmp_path / "other"
    other.write_text("precious")
    _, said, _ = chat(f"one\n/save {file}\ntwo\n/save {file}\n/save {other}\n/save\n/save {tmp_path}/no/talk\n")
    assert [m["content"] for m in json.loads(file.read_text())["messages"]] == ["one", "yes", "two", "yes"]
    assert other.read_text() == "precious"
    assert said[2:] == [
        f"{other} exists already; name another file", "/save FILE: name a file",
        f"{tmp_path}/no/talk: cannot be written: No such file or directory",
    ]  # fmt: skip


def test_a_base_model_has_no_place_for_a_system_message(chat: Any) -> None:
    _, said, _ = chat("/system Be brief.\n/system\n")
    assert "base model" in said[0]
    assert said[1] == "no system message"


def test_a_mistyped_command_is_not_said_to_the_model(chat: Any) -> None:
    client, said, _ = chat("/sav x\n /usr/bin is a folder\n/exit\nnever\n")
    assert said[0].startswith("there is no /sav; did you mean /save?")
    assert [ask.prompt for ask in client.asked] == [" /usr/bin is a folder"]


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("one\ntwo", ["one", "two"]),
        ("one\\\ntwo\nthree\n", ["one\ntwo", "three"]),
        ('"""\none\n\n  two\n"""\nthree\n', ["one\n\n  two", "three"]),
        ('"""one"""\n', ["one"]),
        ('"""one\n', ["one"]),  # it ends with the pipe
        ("one\\", ["one"]),
        ('"""\n/help\nis a word\n"""\n', ["/help\nis a word"]),
        ("", []),
    ],
)
def test_several_lines_are_one_message(monkeypatch: pytest.MonkeyPatch, typed: str, messages: list[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    lines = Lines()
    assert list(iter(lines.message, None)) == messages


def test_what_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n")))
    with pytest.raises(UserError, match="not UTF-8"):
        Lines().message()


@pytest.mark.parametrize("columns", [40, 80])
def test_the_help_fits_the_terminal(columns: int) -> None:
    shown = show_help(columns)
    assert max(map(len, shown.splitlines())) < columns
    assert all(typed in shown for typed in HELP)
