"""Requests for several servers: which one gets a conversation, and streams that go on at another server."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from neuronpipe.services.examples.replica_routing import ResumedStream, ranked, routing_key, with_seed

SYSTEM = {"role": "system", "content": "Be brief."}
ASKS = {"role": "user", "content": "Which city?"}
LATER = [{"role": "assistant", "content": "Rome."}, {"role": "user", "content": "Why?"}]
LONG = "import os\n" * 20


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"messages": [SYSTEM, ASKS]}, {"messages": [SYSTEM, ASKS, *LATER]}),
        ({"system": "Be brief.", "messages": [ASKS]}, {"system": "Be brief.", "messages": [ASKS, *LATER]}),
        ({"instructions": LONG, "input": [ASKS]}, {"instructions": LONG, "input": [ASKS, *LATER], "stream": True}),
        ({"prompt": LONG}, {"prompt": LONG + "more", "max_tokens": 3}),
        ({"prompt_cache_key": "mine", "prompt": "a"}, {"prompt_cache_key": "mine", "prompt": "b"}),
    ],
    ids=["chat", "messages", "responses", "plain", "named"],
)
def test_the_requests_of_a_conversation_have_one_key(first: dict[str, Any], later: dict[str, Any]) -> None:
    assert routing_key(first) == routing_key(later)
    assert routing_key(first) != routing_key(first | {"model": "another"})


def test_other_conversations_have_other_keys() -> None:
    bodies: list[dict[str, Any]] = [{"messages": [SYSTEM, {**ASKS, "content": str(number)}]} for number in range(9)]
    bodies += [{"prompt": [1, 2, number]} for number in range(9)]
    bodies += [{"prompt": 7}, {"messages": [3]}, {"messages": []}, {}]
    assert len({routing_key(body) for body in bodies}) == len(bodies)


def test_a_replica_that_goes_moves_no_conversation_but_its_own() -> None:
    before: dict[str, set[str]] = {name: set() for name in "abcd"}
    keys = [str(number) for number in range(400)]
    first = {key: ranked(key, "", before)[0] for key in keys}
    assert all(60 < count < 140 for count in Counter(first.values()).values())
    after = {name: models for name, models in before.items() if name != "b"}
    for key in keys:
        order = ranked(key, "", before)
        assert ranked(key, "", after) == [name for name in order if name != "b"]


def test_replicas_with_a_run_of_the_model_come_first() -> None:
    loaded = {"a": {"x"}, "b": set[str](), "c": {"x", "y"}, "d": {"y"}}
    for key in map(str, range(20)):
        assert set(ranked(key, "x", loaded)[:2]) == {"a", "c"}
    assert ranked("key", "x", {}) == []


def test_a_completion_that_may_be_generated_again_has_a_seed() -> None:
    for path in ("/v1/chat/completions", "/completions", "/v1/responses", "/v1/messages"):
        assert isinstance(with_seed(path, {})["seed"], int)
        assert with_seed(path, {"seed": 3}) == {"seed": 3}
    options = with_seed("/api/chat", {"options": {"top_k": 2, "seed": -1}})["options"]
    assert options.keys() == {"top_k", "seed"}
    assert options["seed"] >= 0
    for path in ("/tokenize", "/v1/messages/count_tokens", "/api/show"):
        assert with_seed(path, {"content": "x"}) == {"content": "x"}


def attempt(id_: str, candidates: int, tokens: int, order: random.Random) -> bytes:
    """The stream of one attempt: the candidates' events are mixed in any order."""
    left = dict.fromkeys(range(candidates), tokens)
    events = [f'data: {{"id": "cmpl-{id_}", "choices": []}}', ": waiting"]
    while left:
        number = order.choice([*left])
        token = tokens - left[number]
        delta = {"tool_calls": [{"id": f"call_{id_[::-1]}"}]} if token == 1 else {"content": f"{number}.{token} "}
        chunk = {"id": f"cmpl-{id_}", "choices": [{"index": number, "delta": delta}]}
        events.append(f"data: {json.dumps(chunk)}")
        left[number] -= 1
        if not left[number]:
            del left[number]
    return "".join(f"{event}\n\n" for event in [*events, "data: [DONE]"]).encode()


@pytest.mark.parametrize("seed", range(30))
def test_a_stream_goes_on_at_another_replica_where_it_broke_off(seed: int) -> None:
    chance = random.Random(seed)
    candidates, tokens = chance.randint(1, 3), chance.randint(2, 12)
    ids = ["".join(chance.choices("0123456789abcdef", k=24)) for _ in range(3)]
    stream, got = ResumedStream(b"\n\n"), b""
    for number, id_ in enumerate(ids):
        stream.begin()
        data = attempt(id_, candidates, tokens, chance)
        data = data if number == 2 else data[: chance.randrange(len(data))]
        while data:
            size = chance.randint(1, 40)
            got += stream.push(data[:size])
            data = data[size:]
    got += stream.finish()
    *events, rest = got.decode().split("\n\n")
    assert rest == ""
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1] if not event.startswith(":")]
    assert len({chunk["id"] for chunk in chunks}) == 1
    for candidate in range(candidates):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == candidate]
        texts = [choice["delta"].get("content", "") for choice in choices]
        assert texts == [f"{candidate}.{token} " if token != 1 else "" for token in range(tokens)]


def test_an_error_of_a_server_that_ends_is_no_part_of_the_stream() -> None:
    stream, error = ResumedStream(b"\n\n"), b'data: {"error": {"message": "x", "code": "draining"}}\n\n'
    text = b'data: {"text": "\\"code\\": \\"draining\\""}\n\n'
    assert stream.push(text + error[:20]) == text
    assert not stream.broken
    assert stream.push(error[20:]) == b""
    assert stream.broken
    stream.begin()
    assert stream.push(text + b"data: [DONE]\n\n") == b"data: [DONE]\n\n"
    assert not stream.broken


def test_lines_are_joined_like_events() -> None:
    stream = ResumedStream(b"\n")
    assert stream.push(b'{"response": "a"}\n{"respo') == b'{"response": "a"}\n'
    stream.begin()
    assert stream.push(b'{"response": "a"}\n{"response": "b"}\n{"done": true}') == b'{"response": "b"}\n'
    assert stream.finish() == b'{"done": true}'
