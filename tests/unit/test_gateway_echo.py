"""Prompts that are sent back: where their tokens begin; and answers, with a coordinator played by the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, cast

import pytest
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.client import Accepted, Likely, Rated, Scored, ScoreFinished, Token
from neuronpipe.protocol.messages.request import Generate, Score
from neuronpipe.services.gateway.client.mailbox import Mailbox
from neuronpipe.services.gateway.client.run_client import CoordinatorClient
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.metrics import Metrics
from neuronpipe.services.gateway.openai.echo import EchoEncoder, EchoResponse, token_offsets
from neuronpipe.services.gateway.openai.response_encoding import COMMENT

from tests.unit.test_gateway_answers import DONE

END = 0
CONTEXT_TOKENS = 8
FIRST = Rated(token=1, piece=b"a")
SECOND = Rated(token=2, piece=b" b", logprob=-1.5, top=(Likely(token=3, piece=b" c", logprob=-0.5),))
ANSWER = (Token(request="", index=0, token=5, text=" d", ms=1.0, logprob=-0.25, piece=b" d"),)


@pytest.mark.parametrize(
    ("text", "pieces", "places"),
    [
        ("ab c", [b"ab", b" c"], [0, 2]),
        ("ab c", [b"<s>", b" ab", b" c"], [0, 0, 2]),
        ("\u00e9\u20acx", ["\u00e9".encode(), b"\xe2\x82", b"\xac", b"x"], [0, 1, 1, 2]),
        ("A  b", [b"a", b" b"], [0, 2]),
        ("", [b"<s>"], [0]),
    ],
    ids=["plain", "a begin token and its blank", "halves of a character", "what a normalizer changed", "nothing"],
)
def test_a_token_begins_where_its_text_does(text: str, pieces: list[bytes], places: list[int]) -> None:
    assert token_offsets(text, pieces) == places


class Played:
    """A coordinator that scores every prompt as "a b" and continues it with `answer`."""

    def __init__(self, answer: tuple[Token, ...], prompt_tokens: int = 2) -> None:
        self.asked: list[Generate | Score] = []
        self._answer, self._prompt_tokens = answer, prompt_tokens

    def name(self) -> str:
        return f"s{len(self.asked)}"

    async def generate(self, asks: list[Generate | Score], client: str) -> tuple[Mailbox, list[str]]:
        self.asked += asks
        mailbox = Mailbox()
        for number, ask in enumerate(asks):
            for message in self._score(ask.request) if isinstance(ask, Score) else self._continue(ask.request):
                mailbox.put(number, message)
        return mailbox, [ask.request for ask in asks]

    def cancel(self, names: list[str]) -> None:
        pass

    def _score(self, name: str) -> list[Message]:
        first = Scored(request=name, position=0, row=0, rows=1, nll=(1.5,), rated=(FIRST, SECOND))
        again = Scored(request=name, position=0, row=0, rows=2, nll=(1.5,), rated=(FIRST, SECOND))
        end = ScoreFinished(request=name, tokens=1, nll_mean=1.5, seconds=0.1)
        return [Accepted(request=name, prompt_tokens=self._prompt_tokens), first, again, end]

    def _continue(self, name: str) -> list[Message]:
        return [Accepted(request=name, prompt_tokens=2), *self._answer, DONE]


def answered(
    played: Played,
    *,
    stream: bool = False,
    max_tokens: int = 1,
    with_logprobs: bool = True,
    prompts: int = 1,
    texts: int = 1,
) -> bytes:
    asks = [
        Generate(
            request=f"r{n}", tokens=(1, 2), max_tokens=max_tokens, logprobs=1 if with_logprobs else None, owner="o"
        )
        for n in range(prompts * texts)
    ]
    form = EchoEncoder("model", "np", with_usage=False, with_logprobs=with_logprobs, end_tokens={END})
    answer = EchoResponse(
        lambda: contextlib.nullcontext(cast(CoordinatorClient, played)),
        Metrics(),
        form,
        asks,
        context_tokens=CONTEXT_TOKENS,
        sequences_per_prompt=texts,
        sent_per_prompt=texts,
        stream=stream,
    )
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    asyncio.run(answer({}, receive, send))
    return b"".join(message.get("body", b"") for message in sent)


class Slow(Played):
    """It takes its time to score."""

    async def generate(self, asks: list[Generate | Score], client: str) -> tuple[Mailbox, list[str]]:
        mailbox, names = await super().generate(asks, client)
        if not isinstance(asks[0], Score):
            return mailbox, names
        later = Mailbox()
        for message in await mailbox.take():
            asyncio.get_running_loop().call_later(0.1, later.put, *message)
        return later, names


def test_a_stream_whose_prompt_is_being_scored_is_kept_alive_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.services.gateway.openai.echo.COMMENT_S", 0.01)
    *comments, _, _ = answered(Slow(ANSWER), stream=True, max_tokens=0).split(b"\n\n")
    assert comments[0] == COMMENT.removesuffix(b"\n\n")
    assert json.loads(comments[-1].removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
    assert COMMENT not in answered(Slow(ANSWER), max_tokens=0)


def test_the_prompt_comes_before_its_answer_with_null_for_its_first_token() -> None:
    body = json.loads(answered(Played(ANSWER)))
    (choice,) = body["choices"]
    assert choice["text"] == "a b" + DONE.text
    assert choice["logprobs"] == {
        "tokens": ["a", " b", " d"],
        "token_logprobs": [None, -1.5, -0.25],
        "top_logprobs": [None, {" c": -0.5, " b": -1.5}, {" d": -0.25}],
        "text_offset": [0, 1, 3],
    }


def test_without_a_token_of_an_answer_only_the_prompt_is_scored() -> None:
    played = Played(ANSWER)
    body = json.loads(answered(played, max_tokens=0))
    assert [type(ask) for ask in played.asked] == [Score]
    assert body["choices"][0]["text"] == "a b"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.5]
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 0


def test_an_end_token_is_rated_so_that_it_takes_no_other_tokens_place() -> None:
    end = Token(request="", index=0, token=END, text="", ms=1.0, logprob=-3.0, piece=b"<end>")
    (choice,) = json.loads(answered(Played((end,))))["choices"]
    assert choice["logprobs"]["tokens"] == ["a", " b", "<end>"]


def test_texts_of_one_prompt_are_scored_once() -> None:
    played = Played(ANSWER)
    body = json.loads(answered(played, prompts=2, texts=2, with_logprobs=False))
    assert sum(isinstance(ask, Score) for ask in played.asked) == 2
    assert {ask.owner for ask in played.asked} == {"o"}
    assert [(choice["text"][:3], choice["logprobs"]) for choice in body["choices"]] == [("a b", None)] * 4
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_stream_begins_with_the_prompt(max_tokens: int) -> None:
    lines = answered(Played(ANSWER), stream=True, max_tokens=max_tokens).decode().split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    assert chunks[0]["choices"][0]["text"] == "a b"
    assert chunks[0]["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.5]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert lines[-2] == "data: [DONE]"
    assert len(chunks) == 2 + max_tokens


def test_a_prompt_that_fills_the_context_is_scored_and_not_continued() -> None:
    assert json.loads(answered(Played(ANSWER, CONTEXT_TOKENS), max_tokens=0))["choices"]
    with pytest.raises(ApiError, match="maximum context length is 8 tokens"):
        answered(Played(ANSWER, CONTEXT_TOKENS), max_tokens=1)
