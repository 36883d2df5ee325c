"""How answers are sent: when a stream's headers go out, and what a reader sees while it waits."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.client import Accepted, Likely, Refused, Token
from neuronpipe.protocol.messages.request import Generate
from neuronpipe.services.gateway.client.mailbox import Mailbox
from neuronpipe.services.gateway.client.run_client import CoordinatorClient
from neuronpipe.services.gateway.http.api_errors import ApiError, unavailable
from neuronpipe.services.gateway.http.metrics import Metrics
from neuronpipe.services.gateway.openai.chat_encoding import ChatEncoder
from neuronpipe.services.gateway.openai.echo import empty_completion
from neuronpipe.services.gateway.openai.response_encoding import (
    COMMENT,
    CompletionEncoder,
    ResponseEncoder,
)
from neuronpipe.services.gateway.openai.response_sending import GenerationResponse

from tests.pipeline import SLOWER

PATIENCE_S = 10 * SLOWER
CONTEXT_TOKENS = 8
DONE = dataclasses.replace(empty_completion(prompt_tokens=1), request="r0", text="ab", tokens=1)
TOKEN = Token(request="r0", index=0, token=7, text="ab", ms=1.0)


class Played:
    """A coordinator that takes everything, and whose answers the test puts into `mailbox`; and the client."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.holders = 0
        self.sent: list[dict[str, Any]] = []
        self._more, self._left = asyncio.Event(), asyncio.Event()

    async def generate(self, asks: list[Generate], client: str) -> tuple[Mailbox, list[str]]:
        return self.mailbox, [ask.request for ask in asks]

    def cancel(self, names: list[str]) -> None:
        pass

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self._more.set()

    async def receive(self) -> Any:
        await self._left.wait()
        return {"type": "http.disconnect"}

    def leave(self) -> None:
        """The client goes away."""
        self._left.set()

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.mailbox.put(int(getattr(message, "request", "r0")[1:]), message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def shown(self, part: bytes, times: int = 1) -> None:
        """Wait until the client has this."""
        async with asyncio.timeout(PATIENCE_S):
            while self.body.count(part) < times:
                self._more.clear()
                await self._more.wait()

    async def headers(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self.sent:
                self._more.clear()
                await self._more.wait()


@asynccontextmanager
async def answering(
    texts: int = 1,
    *,
    stream: bool = True,
    run: asyncio.Future[None] | None = None,
    form: ResponseEncoder | None = None,
) -> AsyncIterator[tuple[Played, asyncio.Task[None]]]:
    """run: what the request waits for before it can ask; form: the encoder, by default that of completions."""
    played = Played()

    @asynccontextmanager
    async def hold() -> AsyncIterator[CoordinatorClient]:
        if run is not None:
            await run
        played.holders += 1
        try:
            yield cast(CoordinatorClient, played)
        finally:
            played.holders -= 1

    answer = GenerationResponse(
        hold,
        Metrics(),
        form or CompletionEncoder("m", "f", with_usage=False, with_logprobs=False, end_tokens=()),
        [Generate(request=f"r{number}", prompt="x") for number in range(texts)],
        context_tokens=CONTEXT_TOKENS,
        sequences_per_prompt=texts,
        sent_per_prompt=texts,
        stream=stream,
    )
    task = asyncio.ensure_future(cast(Any, answer({"type": "http"}, played.receive, played.send)))
    try:
        yield played, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def accepted(*names: str, prompt_tokens: int = 1) -> list[Message]:
    return [Accepted(request=name, prompt_tokens=prompt_tokens) for name in names]


def test_a_stream_sends_its_headers_when_all_texts_are_accepted() -> None:
    async def scene() -> None:
        async with answering(texts=2) as (played, _):
            played.say(*accepted("r0"))
            await asyncio.sleep(0.01)
            assert played.sent == []
            played.say(*accepted("r1"))
            await played.headers()
            assert (played.sent[0]["status"], played.body) == (200, b"")

    asyncio.run(scene())


def test_a_refusal_before_that_has_a_status_of_its_own() -> None:
    async def scene() -> None:
        async with answering(texts=2) as (played, task):
            played.say(*accepted("r0"), Refused(request="r1", code="bad_request", message="no"))
            with pytest.raises(ApiError, match="no"):
                await task
            assert played.sent == []

    asyncio.run(scene())


def test_a_stream_that_waits_is_kept_alive_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.services.gateway.openai.response_sending.COMMENT_S", 0.02)

    async def scene() -> None:
        async with answering() as (played, task):
            await played.shown(COMMENT, 2)  # it is not even accepted, and has headers
            assert COMMENT.startswith(b":")
            played.say(*accepted("r0"))
            await played.shown(COMMENT, 4)
            played.say(TOKEN, DONE)
            await task
            events = [part for part in played.body.decode().split("\n\n") if part and not part.startswith(":")]
            assert events.pop() == "data: [DONE]"
            assert [json.loads(event[6:])["choices"][0]["text"] for event in events] == ["ab", ""]

    asyncio.run(scene())


def test_a_stream_whose_run_is_yet_to_be_started_has_its_headers_and_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.services.gateway.openai.response_sending.COMMENT_S", 0.02)

    async def scene() -> None:
        run = asyncio.get_running_loop().create_future()
        async with answering(run=run) as (played, task):
            await played.shown(COMMENT, 3)
            assert (played.sent[0]["status"], played.holders) == (200, 0)
            played.say(*accepted("r0"), TOKEN, DONE)
            run.set_result(None)
            await asyncio.wait_for(task, PATIENCE_S)
            assert played.body.endswith(b"data: [DONE]\n\n")
            assert played.body.count(b'"text": "ab"') == 1
            assert played.holders == 0

    asyncio.run(scene())


@pytest.mark.parametrize("waited", [False, True])
def test_a_run_that_cannot_begin_is_a_refusal_or_the_last_event(waited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "neuronpipe.services.gateway.openai.response_sending.RUN_READY_S", 0.02 if waited else PATIENCE_S
    )

    async def scene() -> None:
        run = asyncio.get_running_loop().create_future()
        async with answering(run=run) as (played, task):
            if waited:
                await played.shown(COMMENT)
            run.set_exception(unavailable("restarting", "it does not begin"))
            if waited:
                await asyncio.wait_for(task, PATIENCE_S)
                event = played.body.decode().removesuffix("\n\n").split("\n\n")[-1]
                assert json.loads(event.removeprefix("data: "))["error"]["code"] == "restarting"
                assert played.sent[-1].get("more_body") is None
            else:
                with pytest.raises(ApiError, match="does not begin"):
                    await asyncio.wait_for(task, PATIENCE_S)
                assert played.sent == []

    asyncio.run(scene())


def test_a_client_that_leaves_while_its_run_is_started_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.services.gateway.openai.response_sending.RUN_READY_S", 0.01)

    async def scene() -> None:
        run = asyncio.get_running_loop().create_future()
        async with answering(run=run) as (played, _):
            await played.shown(COMMENT)
            played.leave()
            async with asyncio.timeout(PATIENCE_S):
                while not run.cancelled():
                    await asyncio.sleep(0)

    asyncio.run(scene())


def test_a_whole_answer_whose_run_is_yet_to_be_started_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.services.gateway.openai.response_sending.RUN_READY_S", 0.01)

    async def scene() -> None:
        run = asyncio.get_running_loop().create_future()
        async with answering(run=run, stream=False) as (played, task):
            await asyncio.sleep(0.05)
            assert played.sent == []
            run.set_exception(unavailable("restarting", "it does not begin"))
            with pytest.raises(ApiError, match="does not begin"):
                await asyncio.wait_for(task, PATIENCE_S)

    asyncio.run(scene())


def test_a_stream_whose_text_ends_without_a_token_has_its_beginning_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompletionEncoder, "first", lambda form, number: b"first")
    monkeypatch.setattr(CompletionEncoder, "last", lambda form, number, finished: b"last")

    async def scene() -> None:
        async with answering() as (played, task):
            played.say(*accepted("r0"), DONE)
            await asyncio.wait_for(task, PATIENCE_S)
            assert played.body.startswith(b"firstlast")

    asyncio.run(scene())


def test_a_whole_answer_has_no_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.services.gateway.openai.response_sending.COMMENT_S", 0.01)

    async def scene() -> None:
        async with answering(stream=False) as (played, task):
            played.say(*accepted("r0"))
            await asyncio.sleep(0.05)
            played.say(TOKEN, DONE)
            await task
            assert json.loads(played.body)["choices"][0]["text"] == "ab"

    asyncio.run(scene())


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_that_leaves_no_room_for_an_answer_is_too_long(stream: bool) -> None:
    async def scene() -> None:
        async with answering(stream=stream) as (played, task):
            played.say(*accepted("r0", prompt_tokens=CONTEXT_TOKENS))
            with pytest.raises(
                ApiError, match=f"^This model's maximum context length is {CONTEXT_TOKENS} tokens"
            ) as it:
                await task
            assert (it.value.status, it.value.code) == (400, "context_length_exceeded")

    asyncio.run(scene())


def rated(kind: type[ResponseEncoder], *tokens: Token) -> ResponseEncoder:
    form = kind("m", "f", with_usage=False, with_logprobs=True, end_tokens=())
    for token in tokens:
        form.keep_logprobs(0, token)
    return form


@pytest.mark.parametrize("kind", [ChatEncoder, CompletionEncoder])
def test_a_whole_answer_that_grows_too_large_is_given_up(
    kind: type[ResponseEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronpipe.services.gateway.openai.response_encoding.MAX_LOGPROB_CHARACTERS", 1000)
    token = dataclasses.replace(TOKEN, logprob=-0.5, piece=b"piece")
    with pytest.raises(ApiError, match="use a stream") as refused:
        rated(kind, *[token] * 100)
    assert (refused.value.status, refused.value.code) == (400, "answer_too_large")


@pytest.mark.parametrize("kind", [ChatEncoder, CompletionEncoder])
def test_the_token_that_was_drawn_is_among_the_likely_ones(kind: type[ResponseEncoder]) -> None:
    likely = tuple(Likely(token=token, piece=piece, logprob=-0.5) for token, piece in ((1, b"one"), (2, b"two")))
    sampled = dataclasses.replace(TOKEN, token=3, piece=b"three", logprob=-9.0, top=likely)
    among = dataclasses.replace(TOKEN, token=2, piece=b"two", logprob=-0.5, top=likely)
    ratings = json.loads(rated(kind, sampled, among).whole([(0, DONE)], {}))["choices"][0]["logprobs"]
    if kind is ChatEncoder:
        tops = [[one["token"] for one in entry["top_logprobs"]] for entry in ratings["content"]]
    else:
        tops = [list(top) for top in ratings["top_logprobs"]]
    assert tops == [["one", "two", "three"], ["one", "two"]]
