"""Models that think, with the clients of all three APIs: between special tokens, and in harmony's channels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import anthropic
import ollama
import openai
import pytest
from neuronpipe.plans.package.reader import Package
from neuronpipe.services.gateway.answers.thinking_format import HARMONY

from tests.http_client import Server, served
from tests.pipeline import Shell
from tests.scripted_model import END, PENALTY, write_scripted_package
from tests.unit.test_call_formats import HARMONY as HARMONY_TEMPLATE

TAGS_TEMPLATE = """{% for m in messages %}{{ m.reasoning_content or '' }}{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}<|answer|>{% if enable_thinking is defined and not enable_thinking %}<think></think>
{%- endif %}{% endif %}{# {{ reasoning_effort }} #}"""
TAGS_SCRIPT = {
    "<|answer|>": ["<think>"],
    "<think>": ["a"],
    "a": ["b"],
    "b": ["c"],
    "c": ["</think>"],
    "</think>": ["x"],
    "x": ["y"],
    "y": ["z"],
    "z": [END],
}
HARMONY_SCRIPT = {
    "assistant": ["<|channel|>"],
    "<|channel|>": ["analysis", "final", "commentary"],
    "analysis": ["<|message|>"],
    "final": ["<|message|>"],
    "<|message|>": ["a", "x"],
    "a": ["b"],
    "b": ["c"],
    "c": ["<|end|>"],
    "<|end|>": ["<|start|>"],
    "<|start|>": ["assistant"],
    "x": ["y"],
    "y": ["z"],
    "z": [END],
}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "temperature": 0}
SCRIPTED = {"presence_penalty": PENALTY}
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
ANSWER = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}


class Served(NamedTuple):
    """A server of a model that thinks, and its clients."""

    server: Server
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic
    package: Package


@pytest.fixture(scope="module", params=["tags", "harmony"])
def thinker(
    request: pytest.FixtureRequest, long_shell: Shell, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    if request.param == "tags":
        special = ["<|answer|>", "<think>", "</think>"]
        script, template, words = TAGS_SCRIPT, TAGS_TEMPLATE, list[str]()
    else:
        words = ["assistant", "analysis", "final", "commentary"]
        script, template = HARMONY_SCRIPT, HARMONY_TEMPLATE
        special = [name for name in HARMONY.tokens if name != "<|return|>"]
    folder = tmp_path_factory.mktemp(request.param)
    package = write_scripted_package(folder, script, template, special=special, words=words)
    with served(long_shell, package.path) as server:
        url = f"http://127.0.0.1:{server.port}"
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as one,
            anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as other,
        ):
            yield Served(server, one, other, package)


@pytest.fixture
def asked(thinker: Served) -> dict[str, Any]:
    return {**ASKED, **SCRIPTED, "model": thinker.package.manifest.name, "max_tokens": 60}


def test_a_chat_completion_has_its_reasoning_whole_and_streamed(thinker: Served, asked: dict[str, Any]) -> None:
    whole = thinker.openai.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("abc", "xyz")  # type: ignore[attr-defined]
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == 4  # the tag or header before it, and its three
    chunks = list(thinker.openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    reasoning = [getattr(delta, "reasoning_content", None) for delta in deltas]
    assert [part for part in reasoning if part] == ["a", "b", "c"]
    assert "".join(delta.content or "" for delta in deltas) == "xyz"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens_details == whole.usage.completion_tokens_details


def test_a_response_has_an_item_of_reasoning_that_can_be_sent_back(thinker: Served) -> None:
    about: dict[str, Any] = {
        "model": thinker.package.manifest.name,
        "temperature": 0,
        "extra_body": SCRIPTED,
        "max_output_tokens": 60,
    }
    question = {"role": "user", "content": "?"}
    whole = thinker.openai.responses.create(**about, input=[question])
    reasoning, message = whole.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert [(part.type, part.text) for part in reasoning.content] == [("reasoning_text", "abc")]
    assert (message.type, whole.output_text) == ("message", "xyz")
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == 4
    with thinker.openai.responses.stream(**about, input=[question]) as events:
        seen = list(events)
        final = events.get_final_response()
    deltas = [event.delta for event in seen if event.type == "response.reasoning_text.delta"]
    assert deltas == ["a", "b", "c"]
    assert [item.type for item in final.output] == ["reasoning", "message"]
    kinds = [event.type for event in seen]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    again = thinker.openai.responses.create(**about, input=[question, *whole.output, question])  # type: ignore[list-item]
    assert again.output_text == "xyz"


def test_a_message_has_a_block_of_thinking_that_can_be_sent_back(thinker: Served) -> None:
    about: dict[str, Any] = {
        "model": thinker.package.manifest.name,
        "extra_body": {**SCRIPTED, "temperature": 0},
        "max_tokens": 60,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    question = {"role": "user", "content": "?"}
    whole = thinker.anthropic.messages.create(**about, messages=[question])
    assert [(block.type, getattr(block, block.type)) for block in whole.content] == [
        ("thinking", "abc"),
        ("text", "xyz"),
    ]
    with thinker.anthropic.messages.stream(**about, messages=[question]) as stream:
        thoughts = [event.thinking for event in stream if event.type == "thinking"]
        final = stream.get_final_message()
    assert thoughts == ["a", "b", "c"]
    assert [block.model_dump() for block in final.content] == [block.model_dump() for block in whole.content]
    assert whole.stop_reason == final.stop_reason == "end_turn"
    messages: Any = [question, {"role": "assistant", "content": whole.content}, question]
    again = thinker.anthropic.messages.create(**about, messages=messages)
    assert [block.type for block in again.content] == ["thinking", "text"]


def test_thinking_can_be_turned_off_in_all_three(thinker: Served, asked: dict[str, Any]) -> None:
    name = thinker.package.manifest.name
    first = "xyz" if "<think>" in thinker.package.chat_template() else "abc"  # the script of the answer's beginning
    asked["max_tokens"] = 3
    for off in ({"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}):
        message = thinker.openai.chat.completions.create(**asked, **off).choices[0].message  # type: ignore[call-overload]
        assert (message.content, hasattr(message, "reasoning_content")) == (first, False)
    response = thinker.openai.responses.create(
        model=name, input="?", reasoning={"effort": "none"}, temperature=0, max_output_tokens=3, extra_body=SCRIPTED
    )
    assert [item.type for item in response.output] == ["message"]
    answer = thinker.anthropic.messages.create(
        model=name,
        messages=[{"role": "user", "content": "?"}],
        max_tokens=3,
        thinking={"type": "disabled"},
        extra_body={**SCRIPTED, "temperature": 0},
    )
    assert [block.type for block in answer.content] == ["text"]


def test_a_completion_that_follows_a_schema_is_the_answer_alone(thinker: Served, asked: dict[str, Any]) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": ANSWER}}
    message = thinker.openai.chat.completions.create(**asked, response_format=schema).choices[0].message
    assert json.loads(message.content or "") == {"n": 7}
    assert not hasattr(message, "reasoning_content")


def test_a_call_may_follow_reasoning(thinker: Served, asked: dict[str, Any]) -> None:
    asked["max_tokens"] = 150  # a call is spelled byte by byte
    choice = thinker.openai.chat.completions.create(**asked, tools=[TOOL], tool_choice="required").choices[0]
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "abc"  # type: ignore[attr-defined]
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "12 mm"}
    messages = [*ASKED["messages"], choice.message, result]
    more = thinker.openai.chat.completions.create(**asked | {"messages": messages}, tools=[TOOL])
    assert more.choices[0].finish_reason in ("stop", "tool_calls")


def test_the_terminal_shows_the_answer_alone_in_a_pipe_and_has_both_in_json(thinker: Served, long_shell: Shell) -> None:
    words = ("run", thinker.package.path, "--temperature", "0", "--presence-penalty", str(PENALTY), "-p", "?")
    assert long_shell.call(*words).out == "xyz\n"
    answer = long_shell.json(*words)
    assert (answer["reasoning"], answer["text"]) == ("abc", "xyz")


def test_ollamas_clients_get_thinking_beside_the_text_and_turn_it_off(thinker: Served) -> None:
    name = thinker.package.manifest.name
    asked: dict[str, Any] = {"model": name, "options": {"temperature": 0, "num_predict": 60, **SCRIPTED}}
    with ollama.Client(host=f"http://127.0.0.1:{thinker.server.port}") as client:
        assert client.show(name).capabilities == ["completion", "tools", "thinking"]
        whole = client.chat(**asked, messages=ASKED["messages"])
        assert (whole.message.thinking, whole.message.content, whole.done_reason) == ("abc", "xyz", "stop")
        pieces = list(client.chat(**asked, messages=ASKED["messages"], think=True, stream=True))
        assert [piece.message.thinking for piece in pieces if piece.message.thinking] == ["a", "b", "c"]
        assert "".join(piece.message.content or "" for piece in pieces) == "xyz"
        generated = client.generate(**asked, prompt="?", think="low")
        assert (generated.thinking, generated.response) == ("abc", "xyz")
        first = "xyz" if "<think>" in thinker.package.chat_template() else "abc"  # as above
        short = asked | {"options": asked["options"] | {"num_predict": 3}}
        plain = client.chat(**short, messages=ASKED["messages"], think=False)
        assert (plain.message.thinking, plain.message.content) == (None, first)
        again = client.chat(**asked, messages=[*ASKED["messages"], whole.message, *ASKED["messages"]])
    earlier: Any = {"role": "assistant", "content": "xyz", "reasoning_content": "abc"}
    messages = [*ASKED["messages"], earlier, *ASKED["messages"]]
    same = thinker.openai.chat.completions.create(model=name, messages=messages, max_tokens=1)
    assert same.usage is not None
    assert (again.message.content, again.prompt_eval_count) == ("xyz", same.usage.prompt_tokens)
