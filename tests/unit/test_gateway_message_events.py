"""Responses of the Messages API, whole and as events, as the anthropic client reads them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import anthropic.types as known
import pytest
from neuronpipe.protocol.messages.client import Accepted, Finished, Token
from neuronpipe.services.gateway.answers.answer_format import AnswerFormat
from neuronpipe.services.gateway.anthropic.messages_encoding import PING, MessagesEncoder
from neuronpipe.services.gateway.http.api_errors import ApiError, unavailable
from neuronpipe.services.gateway.openai.echo import empty_completion
from neuronpipe.services.gateway.openai.response_encoding import COMMENT
from neuronpipe.services.gateway.templates.call_format import DEFAULT, CallFormat
from pydantic import TypeAdapter

from tests.unit.test_gateway_answers import answering

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 5},
}
ACCEPTED = Accepted(request="r0", prompt_tokens=7)
CALLS = [("f", '{"a": 1}'), ("g", "{}")]


def encoder(*, calls: CallFormat | None = None, text: bool = True) -> MessagesEncoder:
    about: dict[str, Any] = {"with_usage": False, "with_logprobs": False, "end_tokens": {0}}
    return MessagesEncoder("model", "np", answer=AnswerFormat(calls=calls, text=text), **about)


def finished(text: str, reason: Any = "end", stop: str | None = None) -> Finished:
    return dataclasses.replace(empty_completion(7), request="r0", text=text, reason=reason, stop=stop)


def tokens_of(text: str, size: int) -> list[Token]:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return [Token(request="r0", index=index, token=7, text=piece, ms=1.0) for index, piece in enumerate(pieces)]


def events(stream: bytes) -> list[Any]:
    """Return the events as the client parses them, without pings; each must have the name of its type."""
    adapter: TypeAdapter[Any] = TypeAdapter(known.RawMessageStreamEvent)
    parsed = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = adapter.validate_json(data.removeprefix("data: "))
        assert name == f"event: {event.type}"
        parsed.append(event)
    return parsed


def streamed(form: MessagesEncoder, ended: Finished, size: int = 2) -> list[Any]:
    stream = form.accepted(0, ACCEPTED) + form.first(0)
    stream += b"".join(form.piece(0, token) for token in tokens_of(ended.text, size))
    return events(stream + form.last(0, ended) + form.usage_chunk(USAGE) + form.done)


def whole(form: MessagesEncoder, ended: Finished) -> known.Message:
    return known.Message.model_validate_json(form.whole([(0, ended)], USAGE))


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        ("end", None, ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
        ("context", None, ("model_context_window_exceeded", None)),
        ("stop", "\n\n", ("stop_sequence", "\n\n")),
    ],
)
def test_a_text_is_one_block_and_says_why_it_ends(reason: Any, stop: str | None, expected: tuple[str, Any]) -> None:
    message = whole(encoder(), finished("abc", reason, stop))
    (block,) = message.content
    assert (block.type, block.text) == ("text", "abc")  # type: ignore[union-attr]
    assert (message.type, message.role, message.model) == ("message", "assistant", "model")
    assert message.id.startswith("msg_")
    assert (message.stop_reason, message.stop_sequence) == expected
    delta = streamed(encoder(), finished("abc", reason, stop))[-2].delta
    assert (delta.stop_reason, delta.stop_sequence) == expected


def test_cached_tokens_of_the_prompt_are_no_input_tokens() -> None:
    expected = {
        "input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 5,
        "output_tokens": 3,
    }
    assert expected.items() <= whole(encoder(), finished("abc")).usage.model_dump().items()
    assert expected.items() <= streamed(encoder(), finished("abc"))[-2].usage.model_dump().items()


def test_a_stream_of_text_builds_up_one_block() -> None:
    parsed = streamed(encoder(), finished("abc"))
    assert [event.type for event in parsed] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    begun = parsed[0].message
    assert (begun.content, begun.stop_reason, begun.usage.input_tokens, begun.usage.output_tokens) == ([], None, 7, 0)
    assert (parsed[1].content_block.type, parsed[1].content_block.text) == ("text", "")
    assert [(event.delta.type, event.delta.text) for event in parsed[2:4]] == [
        ("text_delta", "ab"),
        ("text_delta", "c"),
    ]
    assert {event.index for event in parsed[1:5]} == {0}


@pytest.mark.parametrize("calls", [None, DEFAULT])
def test_an_empty_completion_is_an_empty_block_of_text(calls: CallFormat | None) -> None:
    (block,) = whole(encoder(calls=calls), finished("")).content
    assert (block.type, block.text) == ("text", "")  # type: ignore[union-attr]
    kinds = [event.type for event in streamed(encoder(calls=calls), finished(""))]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("before", ["Let me see.", ""])
def test_calls_are_blocks_after_the_text_whole_and_streamed(before: str, size: int) -> None:
    ended = finished(f"{before}\n{DEFAULT.written(CALLS)}")
    message = whole(encoder(calls=DEFAULT), ended)
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    blocks = message.content
    if before:
        assert (blocks[0].type, blocks[0].text) == ("text", before)  # type: ignore[union-attr]
    used: list[Any] = blocks[1:] if before else blocks
    assert [(block.type, block.name, block.input) for block in used] == [
        ("tool_use", "f", {"a": 1}),
        ("tool_use", "g", {}),
    ]
    assert len({block.id for block in used}) == 2

    parsed = streamed(encoder(calls=DEFAULT), ended, size)
    assert parsed[-2].delta.stop_reason == "tool_use"
    starts = [event for event in parsed if event.type == "content_block_start"]
    assert [event.index for event in starts] == list(range(len(blocks)))
    assert [event.content_block.type for event in starts] == [block.type for block in blocks]
    contents = ["".join(_texts_of(parsed, index)) for index in range(len(blocks))]
    assert contents == [*([before] if before else []), *(arguments for _, arguments in CALLS)]
    assert all(event.content_block.input == {} for event in starts[-2:])
    order = [(event.index, event.type) for event in parsed[1:-2]]
    changes = [entry for at, entry in enumerate(order) if not at or entry != order[at - 1]]
    steps = ("content_block_start", "content_block_delta", "content_block_stop")
    assert changes == [(index, step) for index in range(len(blocks)) for step in steps]


def _texts_of(parsed: list[Any], index: int) -> list[str]:
    deltas = [event.delta for event in parsed if event.type == "content_block_delta" and event.index == index]
    return [delta.text if delta.type == "text_delta" else delta.partial_json for delta in deltas]


def test_a_call_that_is_cut_off_has_no_arguments_and_is_not_to_be_made() -> None:
    text = DEFAULT.written(CALLS)
    ended = finished(text[: text.rindex("{}") + 1], "length")
    message = whole(encoder(calls=DEFAULT), ended)
    assert message.stop_reason == "max_tokens"
    assert [block.input for block in message.content] == [{"a": 1}, {}]  # type: ignore[union-attr]
    parsed = streamed(encoder(calls=DEFAULT), ended)
    assert parsed[-2].delta.stop_reason == "max_tokens"
    assert _texts_of(parsed, 1) == ["{"]


def test_arguments_are_sent_as_the_model_wrote_them() -> None:
    """Parsed and encoded again, the first would be no JSON and the second an error of Python."""
    numbers = f'{{"large": 1e999, "long": {"7" * 5000}}}'
    body = encoder(calls=DEFAULT, text=False).whole([(0, finished(DEFAULT.written([("f", numbers)])))], USAGE)
    assert f'"input": {numbers}'.encode() in body


def test_an_error_is_an_event_with_the_form_of_the_api() -> None:
    name, data = encoder().error_chunk(ApiError(503, "draining", "it ends")).decode().removesuffix("\n\n").split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert error == {"type": "error", "error": {"type": "overloaded_error", "message": "it ends"}}


def test_a_stream_begins_when_it_is_accepted_and_is_then_kept_alive_with_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.services.gateway.openai.response_sending.COMMENT_S", 0.02)

    async def scene() -> None:
        async with answering(form=encoder()) as (played, task):
            await played.shown(COMMENT, 2)
            assert PING not in played.body
            comments = played.body.count(COMMENT)
            played.say(ACCEPTED)
            await played.shown(PING, 2)
            assert played.body.count(b"event: message_start\n") == 1
            assert played.body.count(COMMENT) <= comments + 1
            played.say(*tokens_of("ab", 1), finished("ab"))
            await task
            assert played.body.endswith(b'event: message_stop\ndata: {"type": "message_stop"}\n\n')

    asyncio.run(scene())


def test_a_stream_whose_run_cannot_start_ends_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.services.gateway.openai.response_sending.RUN_READY_S", 0.02)

    async def scene() -> None:
        run = asyncio.get_running_loop().create_future()
        async with answering(run=run, form=encoder()) as (played, task):
            await played.shown(COMMENT)
            run.set_exception(unavailable("restarting", "it does not begin"))
            await task
            assert played.body.endswith(encoder().error_chunk(unavailable("restarting", "it does not begin")))

    asyncio.run(scene())
