"""The Messages API with Anthropic's own client. The demo knows only Python; its calls are valid still."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.http_client import Server, served
from tests.pipeline import Shell

MODEL = "neuronpipe-demo"
KEY = "a-key-of-many-letters"
SIZES = {"type": "integer", "minimum": 1, "maximum": 9}
FIBONACCI = {"type": "object", "properties": {"n": SIZES, "how": {"enum": ["loop", "call"]}}, "required": ["n", "how"]}
TOOLS: list[Any] = [
    {"name": "fibonacci", "description": "A number.", "input_schema": FIBONACCI},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "def fibonacci(n):"}],
    "max_tokens": 24,
    "extra_body": {"seed": 1},
}
CACHED = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def server(long_shell: Shell) -> Iterator[Server]:
    with served(long_shell, "--sequences", "2") as one:
        yield one


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="none", max_retries=0) as one:
        yield one


def text_of(message: anthropic.types.Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def test_a_message_is_the_answer_of_a_chat_and_a_stream_builds_it_up(
    server: Server, client: anthropic.Anthropic
) -> None:
    whole = client.messages.create(**ASKED, system="You write Python.")
    assert (whole.role, whole.model, whole.stop_reason) == ("assistant", MODEL, "max_tokens")
    messages = [{"role": "system", "content": "You write Python."}, *ASKED["messages"]]
    chat = server.post("/v1/chat/completions", messages=messages, max_tokens=24, seed=1).json()
    assert text_of(whole) == chat["choices"][0]["message"]["content"] != ""
    assert whole.usage.output_tokens == chat["usage"]["completion_tokens"] == 24
    cached = whole.usage.cache_read_input_tokens or 0
    assert whole.usage.input_tokens + cached == chat["usage"]["prompt_tokens"]
    with client.messages.stream(**ASKED, system="You write Python.") as events:
        pieces = list(events.text_stream)
        streamed = events.get_final_message()
    assert "".join(pieces) == text_of(streamed) == text_of(whole)
    assert len(pieces) > 5
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("max_tokens", 24)
    assert streamed.usage.input_tokens + (streamed.usage.cache_read_input_tokens or 0) == chat["usage"]["prompt_tokens"]


def test_the_events_of_a_stream_have_their_order(client: anthropic.Anthropic) -> None:
    kinds = [event.type for event in client.messages.create(**ASKED, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_the_stop_sequence_that_was_generated_is_named_and_is_not_part_of_the_text(
    client: anthropic.Anthropic,
) -> None:
    plain = text_of(client.messages.create(**ASKED))
    stop = plain[len(plain) // 2 :][:3]
    asked = ASKED | {"stop_sequences": ["never generated", stop]}
    whole = client.messages.create(**asked)
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", stop)
    assert text_of(whole) == plain[: plain.index(stop)]
    with client.messages.stream(**asked) as events:
        streamed = events.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", stop)
    assert text_of(streamed) == text_of(whole)


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "fibonacci"}, {"type": "tool", "name": "now"}]
)
def test_a_tool_that_must_be_called_is_called_with_valid_arguments(client: anthropic.Anthropic, choice: Any) -> None:
    asked = ASKED | {"tools": TOOLS, "tool_choice": choice, "max_tokens": 60}
    whole = client.messages.create(**asked)
    (block,) = whole.content
    assert (whole.stop_reason, block.type) == ("tool_use", "tool_use")
    assert block.type == "tool_use"
    assert block.name == choice.get("name", block.name)
    if block.name == "fibonacci":
        assert 1 <= block.input["n"] <= 9
        assert block.input["how"] in ("loop", "call")
    else:
        assert (block.name, block.input) == ("now", {})
    with client.messages.stream(**asked) as events:
        deltas = [event.partial_json for event in events if event.type == "input_json"]
        (same,) = events.get_final_message().content
    assert same.type == "tool_use"
    assert (same.name, same.input) == (block.name, block.input)
    assert json.loads("".join(deltas)) == block.input


def test_a_coding_agent_goes_on_from_the_results_of_its_tools(client: anthropic.Anthropic) -> None:
    asked = ASKED | {
        "system": [{"type": "text", "text": "You write Python."} | CACHED, {"type": "text", "text": "Be short."}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "def fibonacci(n):"} | CACHED]}],
        "tools": [*TOOLS, {"name": "read", "input_schema": {"type": "object"}} | CACHED],
        "metadata": {"user_id": "agent"},
        "thinking": {"type": "disabled"},
        "max_tokens": 60,
    }
    first = client.messages.create(**asked, tool_choice={"type": "tool", "name": "fibonacci"})
    (call,) = first.content
    assert call.type == "tool_use"
    results = [
        {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": [{"type": "text", "text": "13"}, {"type": "text", "text": "(of 7)"}],
        }
        | CACHED,
        {"type": "text", "text": "Go on."},
    ]
    failed = {"type": "tool_use", "id": "toolu_2", "name": "read", "input": {"path": "a.py"}}
    messages = [
        *asked["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
        {"role": "assistant", "content": [{"type": "text", "text": "I read it."}, failed]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True, "content": "no such file"},
            ],
        },
    ]
    second = client.messages.create(**asked | {"messages": messages, "max_tokens": 4})
    assert second.stop_reason in ("max_tokens", "end_turn")
    assert (second.usage.cache_read_input_tokens or 0) > 20
    count = client.messages.count_tokens(
        **{name: asked[name] for name in ("model", "system", "tools", "thinking")}, messages=messages
    )
    assert count.input_tokens == second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0)


def test_a_count_is_of_the_prompt_and_one_that_exceeds_the_context_is_refused(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED["messages"])
    usage = client.messages.create(**ASKED).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    long: list[Any] = [{"role": "user", "content": "x = 1\n" * 200}]
    for request in (client.messages.create, client.messages.count_tokens):
        limit = {"max_tokens": 1} if request == client.messages.create else {}
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: This model's maximum context length"):
            request(model=MODEL, messages=long, **limit)


def test_a_begun_answer_is_continued(server: Server, client: anthropic.Anthropic) -> None:
    messages = [*ASKED["messages"], {"role": "assistant", "content": "    if n"}]
    chat = server.post(
        "/v1/chat/completions", messages=messages, continue_final_message=True, max_tokens=24, seed=1
    ).json()
    assert text_of(client.messages.create(**ASKED | {"messages": messages})) == chat["choices"][0]["message"]["content"]


def test_an_answer_follows_a_schema(client: anthropic.Anthropic) -> None:
    asked = ASKED | {"output_config": {"format": {"type": "json_schema", "schema": FIBONACCI}}, "max_tokens": 60}
    assert json.loads(text_of(client.messages.create(**asked)))["how"] in ("loop", "call")


def test_errors_have_the_form_of_the_api_and_name_the_field(server: Server, client: anthropic.Anthropic) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://localhost/a.png"}}
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**ASKED | {"messages": [{"role": "user", "content": [image]}]})
    error: Any = refused.value.body
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].startswith("messages.0.content.0: blocks of type 'image' are not supported here")
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.create(**ASKED | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: "):
        client.messages.create(**ASKED | {"max_tokens": 0})
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        client.messages.create(**ASKED | {"tools": [{"type": "web_search_20250305", "name": "web_search"}]})
    for method, path in (("GET", "/v1/messages"), ("POST", "/v1/messages/batches")):
        body = server.call(method, path, b"{}" if method == "POST" else None).json()
        assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
    assert server.call("POST", "/v1/messages", b"{").json()["error"]["type"] == "invalid_request_error"


def test_a_key_is_accepted_in_both_headers(server: Server, shell: Shell) -> None:
    with served(shell, "--run", server.run.path, "--key", KEY) as one:
        url = f"http://127.0.0.1:{one.port}"
        keys: list[dict[str, Any]] = [{"api_key": KEY}, {"auth_token": KEY}]
        for key in keys:
            with anthropic.Anthropic(base_url=url, max_retries=0, **key) as client:
                assert client.messages.create(**ASKED | {"max_tokens": 2}).usage.output_tokens == 2
        with (
            anthropic.Anthropic(base_url=url, max_retries=0, api_key="wrong") as client,
            pytest.raises(anthropic.AuthenticationError, match="authentication_error"),
        ):
            client.messages.create(**ASKED)
