"""The account of requests in flight: who is refused, who gives way, and that bodies are never larger than estimated."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from neuronpipe.protocol.messages.client import Likely, Token
from neuronpipe.services.gateway.anthropic.messages_api import MessagesRequest
from neuronpipe.services.gateway.client.mailbox import MAX_WAITING_BYTES, Mailbox
from neuronpipe.services.gateway.http import request_body as bodies
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.memory_account import (
    SCOPE_KEY,
    MemoryAccount,
    MemoryCharge,
    message_bytes,
    parsed_bytes,
)
from neuronpipe.services.gateway.http.request_body import parse_body, read_body
from neuronpipe.services.gateway.http.schema_base import RequestModel
from neuronpipe.services.gateway.ollama.ollama_api import OllamaChatRequest, OllamaGenerateRequest
from neuronpipe.services.gateway.openai.request_schema import ChatRequest, CompletionRequest
from starlette.requests import Request


def refusal(grow: Callable[[], None]) -> tuple[int, str]:
    with pytest.raises(ApiError) as raised:
        grow()
    return raised.value.status, raised.value.code


def test_all_charges_together_stay_within_the_limit() -> None:
    account = MemoryAccount(100)
    with account.charge() as first, account.charge() as second:
        first.grow(60)
        assert refusal(lambda: second.grow(50)) == (503, "memory_full")
        second.grow(40)
        assert account.held_bytes == 100
    assert account.held_bytes == 0


def test_what_never_fits_is_not_asked_to_come_again() -> None:
    assert refusal(lambda: MemoryCharge(MemoryAccount(100)).grow(101)) == (413, "request_too_large")


def test_the_largest_body_that_is_still_arriving_gives_way_to_a_smaller_request() -> None:
    account, ended = MemoryAccount(100), list[str]()
    with contextlib.ExitStack() as stack:
        charges = {name: stack.enter_context(account.charge()) for name in ("large", "larger", "small")}
        for name, size in (("large", 40), ("larger", 55)):
            stack.enter_context(account.arriving(charges[name], lambda name=name: ended.append(name)))
            charges[name].grow(size)
        charges["small"].grow(20)
        assert (ended, account.held_bytes) == (["larger"], 60)
        assert refusal(lambda: charges["small"].grow(45)) == (503, "memory_full")  # it would be the larger one
        assert ended == ["larger"]


def test_a_request_that_has_arrived_goes_before_bodies_that_are_still_arriving() -> None:
    """Their clients may have left: what they had sent is read first."""
    account, ended = MemoryAccount(100), list[str]()
    with contextlib.ExitStack() as stack:
        charges = {name: stack.enter_context(account.charge()) for name in ("first", "second", "third", "arrived")}
        for name, size in (("first", 30), ("second", 40), ("third", 20)):
            stack.enter_context(account.arriving(charges[name], lambda name=name: ended.append(name)))
            charges[name].grow(size)
        charges["arrived"].grow(10)
        charges["arrived"].has_arrived = True
        charges["arrived"].grow(60)
        assert (ended, account.held_bytes) == (["second", "first"], 90)
        assert not account.has_room(20, charges["arrived"]), "tokens that wait for a client go before no body"
        with account.charge() as other:
            other.has_arrived = True
            assert refusal(lambda: other.grow(40)) == (503, "memory_full")
        assert ended == ["second", "first"], "no body is aborted in vain"


def test_memory_is_given_back_when_large_requests_have_ended() -> None:
    given_back = list[int]()
    account = MemoryAccount(100, lambda: given_back.append(account.held_bytes))
    for size in (30, 30, 10):
        with account.charge() as charge:
            charge.grow(size)
    assert given_back == [0]


PROMPT, CHAT = b'{"prompt":"x",', b'{"messages":[{"role":"user","content":"x"}],'
MESSAGES, OLLAMA = b'{"max_tokens":1,"messages":[', b'{"messages":['
REPEATED: list[tuple[type[RequestModel], bytes, bytes, bytes]] = [
    (CompletionRequest, PROMPT + b'"metadata":{"a":[', b"[]", b"]}}"),
    (CompletionRequest, PROMPT + b'"metadata":{"a":[', b"{}", b"]}}"),
    (CompletionRequest, PROMPT + b'"metadata":{"a":[', b'{"a":0}', b"]}}"),
    (CompletionRequest, PROMPT + b'"metadata":{"a":[', b'"ab"', b"]}}"),
    (CompletionRequest, PROMPT + b'"metadata":{"a":[', b"1.5", b"]}}"),
    (CompletionRequest, b'{"prompt":[', b"1000", b"]}"),
    (CompletionRequest, b'{"prompt":[', b"[1000]", b"]}"),
    (ChatRequest, b'{"messages":[', b'{"role":"user","content":""}', b"]}"),
    (ChatRequest, b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":""}', b"]}]}"),
    (ChatRequest, CHAT + b'"tools":[{"type":"function","function":{"name":"f","parameters":{"a":[', b"{}", b"]}}}]}"),
    (MessagesRequest, MESSAGES, b'{"role":"user","content":""}', b"]}"),
    (MessagesRequest, MESSAGES + b'{"role":"user","content":[', b'{"type":"text","text":""}', b"]}]}"),
    (
        MessagesRequest,
        MESSAGES + b'{"role":"assistant","content":[',
        b'{"type":"tool_use","id":"","name":"f","input":{}}',
        b"]}]}",
    ),
    (OllamaChatRequest, OLLAMA, b'{"role":"user","content":""}', b"]}"),
    (
        OllamaChatRequest,
        OLLAMA + b'{"role":"assistant","tool_calls":[',
        b'{"function":{"name":"f","arguments":{}}}',
        b"]}]}",
    ),
    (OllamaGenerateRequest, PROMPT + b'"options":{"stop":[', b'"a"', b"]}}"),
    (OllamaGenerateRequest, PROMPT + b'"format":{"a":[', b"{}", b"]}}"),
]


@pytest.mark.parametrize(("kind", "begin", "item", "end"), REPEATED)
def test_a_body_takes_no_more_memory_than_was_estimated(
    kind: type[RequestModel], begin: bytes, item: bytes, end: bytes
) -> None:
    parse_body(PROMPT[:-1] + b"}", CompletionRequest)  # what is made once
    body = begin + b",".join([item] * (100_000 // len(item))) + end
    tracemalloc.start()
    with contextlib.suppress(ApiError):  # one that is refused has been parsed before
        parse_body(body, kind)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < parsed_bytes(body)
    assert parsed_bytes(body) < 150 * len(body)


def test_commas_inside_of_a_long_text_are_not_taken_for_values() -> None:
    text = b'{"prompt": "' + rb"f(a, [b, {c: \"d, e\"}]), " * 20_000 + b'"}'
    assert parsed_bytes(text) < 1.1 * len(text)


def arriving(pieces: Callable[[], Awaitable[bytes | None]], charge: MemoryCharge) -> Request:
    """A request whose body comes in these pieces; None: it does not go on."""

    async def receive() -> dict[str, Any]:
        piece = await pieces()
        if piece is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": piece, "more_body": True}

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "headers": headers, SCOPE_KEY: charge}, receive)


async def refused(request: Request) -> tuple[int, str, bool]:
    with pytest.raises(ApiError) as raised:
        await read_body(request, CompletionRequest)
    return raised.value.status, raised.value.code, ("connection", "close") in raised.value.headers


def test_a_body_that_comes_too_slowly_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_GRACE_S", 0.05)

    async def slowly() -> bytes:
        await asyncio.sleep(0.02)
        return b" "

    with MemoryAccount().charge() as charge:
        assert asyncio.run(refused(arriving(slowly, charge))) == (408, "body_too_slow", True)


def test_a_body_that_gives_way_is_told_to_come_again() -> None:
    async def work() -> tuple[int, str, bool]:
        account, pieces = MemoryAccount(100), iter([b" " * 90, None])

        async def next_piece() -> bytes | None:
            return next(pieces)

        with account.charge() as large, account.charge() as small:
            reading = asyncio.create_task(refused(arriving(next_piece, large)))
            while not large.held_bytes:
                await asyncio.sleep(0)
            small.grow(50)
            return await reading

    assert asyncio.run(work()) == (503, "memory_full", True)


def test_bodies_that_do_not_fit_are_refused_while_they_arrive() -> None:
    async def endless() -> bytes:
        return b" " * 10

    with MemoryAccount(100).charge() as charge:
        assert asyncio.run(refused(arriving(endless, charge))) == (413, "request_too_large", True)
        assert charge.held_bytes == 100


def tokens(count: int) -> list[Token]:
    top = tuple(Likely(token=n, piece=b"x", logprob=-1.0) for n in range(20))
    return [Token(request="r", index=n, token=n, text="x", ms=1.0, top=top) for n in range(count)]


def test_a_stream_whose_reader_takes_nothing_is_ended_when_too_much_waits() -> None:
    mailbox, ended = Mailbox(), list[int]()
    mailbox.overflow = lambda: ended.append(1)
    with MemoryAccount().charge() as charge:
        mailbox.charge = charge
        enough = MAX_WAITING_BYTES // message_bytes(tokens(1)[0]) + 1
        for token in tokens(enough):  # a reader that is only busy elsewhere
            mailbox.put(0, token)
        assert not ended
        mailbox.blocked = True
        mailbox.put(0, tokens(1)[0])
        assert ended
        assert charge.held_bytes > MAX_WAITING_BYTES
        asyncio.run(mailbox.take())
        assert charge.held_bytes == 0


def test_a_waiting_token_takes_no_more_memory_than_is_counted() -> None:
    tracemalloc.start()
    waiting = tokens(1000)
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held_bytes < sum(map(message_bytes, waiting))
