"""Functions that answers call, with OpenAI's own client. The demo knows only Python; its calls are valid still."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from neuronpipe.plans.convert import convert
from tokenizers import Tokenizer

from tests.conformance.checkpoints import TINY, write_checkpoint
from tests.http_client import Server, served
from tests.pipeline import Shell
from tests.unit.test_call_formats import LIST

MODEL = "neuronpipe-demo"
SIZES = {"type": "integer", "minimum": 1, "maximum": 9}
FIBONACCI = {"type": "object", "properties": {"n": SIZES, "how": {"enum": ["loop", "call"]}}, "required": ["n", "how"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "fibonacci", "description": "A number.", "parameters": FIBONACCI}},
    {"type": "function", "function": {"name": "now"}},
]
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "def fibonacci(n):"}],
    "tools": TOOLS,
    "max_tokens": 60,
}
CALLED: Any = {"name": "fibonacci", "arguments": '{"n": 7, "how": "loop"}'}
NAMED = {"type": "function", "function": {"name": "fibonacci"}}


@pytest.fixture(scope="module")
def server(long_shell: Shell) -> Iterator[Server]:
    with served(long_shell, "--sequences", "2") as one:
        yield one


def checked(call: Any) -> None:
    """A call is of a function that there is, with arguments of its schema."""
    arguments = json.loads(call.function.arguments)
    if call.function.name == "fibonacci":
        assert 1 <= arguments["n"] <= 9
        assert arguments["how"] in ("loop", "call")
    else:
        assert (call.function.name, arguments) == ("now", {})


@pytest.mark.parametrize("seed", range(6))
def test_a_call_that_is_required_is_valid_whatever_the_model_is_after(client: openai.OpenAI, seed: int) -> None:
    answer = client.chat.completions.create(**ASKED, tool_choice="required", temperature=2, seed=seed)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls or []
    checked(call)


def test_a_response_calls_what_a_chat_calls_whole_and_streamed_and_goes_on_from_the_result(
    client: openai.OpenAI,
) -> None:
    chat = client.chat.completions.create(**ASKED, tool_choice=NAMED, temperature=0)  # type: ignore[arg-type]
    (expected,) = chat.choices[0].message.tool_calls or []
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": ASKED["messages"],
        "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],
        "max_output_tokens": 60,
        "temperature": 0,
    }
    whole = client.responses.create(**asked, tool_choice={"type": "function", "name": "fibonacci"})
    (call,) = whole.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == (expected.function.name, expected.function.arguments)  # type: ignore[union-attr]
    assert (whole.status, call.status) == ("completed", "completed")
    with client.responses.stream(**asked, tool_choice={"type": "function", "name": "fibonacci"}) as events:
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        streamed = events.get_final_response()
    (same,) = streamed.output
    assert same.type == "function_call"
    assert "".join(deltas) == same.arguments == call.arguments
    assert len(deltas) > 5
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "13"}
    more = client.responses.create(**asked | {"input": [*asked["input"], call, result], "max_output_tokens": 4})
    assert more.usage is not None
    assert whole.usage is not None
    assert more.usage.input_tokens_details.cached_tokens >= whole.usage.input_tokens
    assert more.usage.input_tokens > whole.usage.input_tokens + 20


def test_stop_texts_do_not_cut_what_must_be_a_call(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED, tool_choice="required", stop=["\n", '"'])
    assert answer.choices[0].finish_reason == "tool_calls"


def test_the_function_that_is_named_is_called(client: openai.OpenAI) -> None:
    for name in ("fibonacci", "now"):
        named: Any = {"type": "function", "function": {"name": name}}
        answer = client.chat.completions.create(**ASKED, tool_choice=named, n=2, temperature=1.5)
        for choice in answer.choices:
            (call,) = choice.message.tool_calls or []
            assert call.function.name == name
            checked(call)


def test_a_stream_of_a_call_is_the_call_of_the_whole_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASKED, "tool_choice": NAMED, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as events:
        streamed = events.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"
    calls = [one.message.tool_calls[0].function for one in (streamed, whole)]  # type: ignore[index]
    assert (calls[0].name, calls[0].arguments) == (calls[1].name, calls[1].arguments)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].id
    assert (deltas[0].function.name, deltas[0].function.arguments) == ("fibonacci", "")  # type: ignore[union-attr]
    assert "".join(delta.function.arguments for delta in deltas) == calls[1].arguments  # type: ignore[union-attr,misc]
    assert len(deltas) > 5


def test_the_model_that_decides_writes_python(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASKED, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**asked).choices[0]
    assert (whole.finish_reason, whole.message.tool_calls) == ("length", None)
    chunks = client.chat.completions.create(**asked, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.message.content != ""


def test_a_call_that_is_cut_off_says_so(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASKED, "tool_choice": NAMED, "temperature": 0}
    tokens = client.chat.completions.create(**asked).usage
    assert tokens is not None
    cut = client.chat.completions.create(**asked | {"max_tokens": tokens.completion_tokens - 12}).choices[0]
    assert cut.finish_reason == "length"
    assert not (cut.message.tool_calls or [])[0].function.arguments.endswith("}")


def test_functions_of_the_older_form_are_called_and_their_results_are_sent_back(client: openai.OpenAI) -> None:
    asked = {name: value for name, value in ASKED.items() if name != "tools"} | {"temperature": 0}
    asked |= {"functions": [tool["function"] for tool in TOOLS], "function_call": {"name": "fibonacci"}}
    choice = client.chat.completions.create(**asked).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("function_call", None, None)
    call = choice.message.function_call
    assert call is not None
    checked(SimpleNamespace(function=call))
    deltas = [piece.choices[0].delta.function_call for piece in client.chat.completions.create(**asked, stream=True)]
    assert "".join(delta.arguments or "" for delta in deltas if delta is not None) == call.arguments
    result = {"role": "function", "name": "fibonacci", "content": "13"}
    messages = [*ASKED["messages"], choice.message, result]
    again = client.chat.completions.create(**asked | {"messages": messages, "function_call": "none"})
    assert again.choices[0].message.function_call is None
    assert again.choices[0].message.content


def test_an_answer_and_what_was_returned_are_sent_back(server: Server, client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**ASKED, tool_choice=NAMED, temperature=0)  # type: ignore[arg-type]
    message = first.choices[0].message
    (call,) = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "13"}
    for answer in (message, message.model_dump()):
        messages = [*ASKED["messages"], answer, result]
        second = client.chat.completions.create(**ASKED | {"messages": messages, "temperature": 0, "max_tokens": 4})
        assert second.usage is not None
        details = second.usage.prompt_tokens_details
        assert details is not None
        assert (details.cached_tokens or 0) >= first.usage.prompt_tokens  # type: ignore[union-attr]
        assert second.usage.prompt_tokens > first.usage.prompt_tokens + 20  # type: ignore[union-attr]


def test_without_tools_or_with_none_that_count_nothing_changes(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ASKED["messages"], "max_tokens": 8, "temperature": 0}
    plain = client.chat.completions.create(**asked)
    for more in ({"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = client.chat.completions.create(**asked, **more)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == plain.choices[0].message.content
        assert answer.usage.prompt_tokens == plain.usage.prompt_tokens  # type: ignore[union-attr]


def test_a_schema_that_cannot_be_followed_is_refused_by_its_function(client: openai.OpenAI) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "not": {}}}, "required": ["a"]}
    tool = {"name": "paint", "parameters": odd, "strict": True}
    with pytest.raises(openai.BadRequestError, match=r"arguments of 'paint': .*not"):
        client.chat.completions.create(**ASKED | {"tools": [{"type": "function", "function": tool}]})
    loose = {"type": "function", "function": {**tool, "strict": False}}
    asked = ASKED | {"tools": [loose], "tool_choice": "required", "temperature": 0}
    client.chat.completions.create(**asked)


def mark_tokens(source: Path, *names: str) -> None:
    """Give the last tokens of a checkpoint, before its end token, these names."""
    library = Tokenizer.from_file(str(source / "tokenizer.json"))
    text = json.loads(library.to_str())
    vocabulary, added = text["model"]["vocab"], text["added_tokens"]
    first = library.get_vocab_size() - 1 - len(names)
    for name in [name for name, id_ in vocabulary.items() if first <= id_ < first + len(names)]:
        del vocabulary[name]
        text["model"]["merges"].pop()
    text["added_tokens"] = [
        *({**added[0], "id": first + number, "content": name} for number, name in enumerate(names)),
        *added,
    ]
    (source / "tokenizer.json").write_text(json.dumps(text))


@pytest.fixture(scope="module")
def special(long_shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, openai.OpenAI, str]]:
    """A server of a model with a chat template and special tokens, its client and the model's name."""
    folder = tmp_path_factory.mktemp("special")
    source = write_checkpoint(folder / "source", replace(TINY, context_tokens=1024))
    mark_tokens(source, "[TOOL_CALLS]", "[SUFFIX]", "[PREFIX]")
    (source / "chat_template.jinja").write_text(LIST)
    package = convert(source, folder / "package", quantization="q8")
    with served(long_shell, package.path) as one:
        url = f"http://127.0.0.1:{one.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield one, client, package.manifest.name


def test_a_template_that_knows_tools_is_asked_in_its_own_way_and_its_special_tokens_mark_calls(
    special: tuple[Server, openai.OpenAI, str],
) -> None:
    _, client, model = special
    asked = ASKED | {"model": model, "tool_choice": "required", "max_tokens": 200}
    choice = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    checked(call)
    assert len(call.id) == 9  # as the template wants them
    # One call: of many the random weights might make more than fit.
    with client.chat.completions.stream(**asked, parallel_tool_calls=False) as events:
        streamed = events.get_final_completion().choices[0].message.tool_calls or []
    assert streamed
    result = {"role": "tool", "tool_call_id": call.id, "content": "13"}
    messages = [*ASKED["messages"], choice.message, result]
    more = client.chat.completions.create(**asked | {"messages": messages, "tool_choice": "auto"})
    assert more.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_a_gap_is_shown_as_the_model_knows_it_and_its_tokens_end_the_answer(
    special: tuple[Server, openai.OpenAI, str],
) -> None:
    server, client, model = special
    asked: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 8, "logprobs": 1}
    filled = client.completions.create(**asked, prompt="def f(", suffix="):\n")
    plain = client.completions.create(**asked, prompt="[SUFFIX]):\n[PREFIX]def f(")
    assert filled.choices[0].text == plain.choices[0].text
    assert filled.usage is not None
    assert plain.usage is not None
    assert filled.usage.total_tokens == plain.usage.total_tokens
    (mark,) = server.post("/tokenize", content="[PREFIX]").json()["tokens"]
    ended = client.completions.create(**asked, prompt="def f(", suffix="):", logit_bias={str(mark): 100})
    assert (ended.choices[0].finish_reason, ended.choices[0].text) == ("stop", "")
    assert ended.choices[0].logprobs is not None
    assert ended.choices[0].logprobs.tokens == []


def test_ollamas_api_has_the_template_the_tools_and_the_gaps_of_the_model(
    special: tuple[Server, openai.OpenAI, str],
) -> None:
    server, client, model = special
    described = server.post("/api/show", model=model).json()
    assert described["capabilities"] == ["completion", "tools", "insert"]
    assert described["template"] == LIST
    options = {"temperature": 0, "num_predict": 8}
    gap = server.post("/api/generate", prompt="def f(", suffix="):\n", options=options, stream=False).json()
    same = client.completions.create(model=model, prompt="def f(", suffix="):\n", temperature=0, max_tokens=8)
    assert gap["response"] == same.choices[0].text
    call = {"function": {"name": "fibonacci", "arguments": {"n": 7, "how": "loop"}}}
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": "fibonacci", "content": "13"},
    ]
    answer = server.post("/api/chat", messages=messages, tools=TOOLS, options=options, stream=False).json()
    called = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": CALLED}]}
    chat = [*ASKED["messages"], called, {"role": "tool", "tool_call_id": "c", "content": "13"}]
    again = client.chat.completions.create(model=model, messages=chat, tools=TOOLS, temperature=0, max_tokens=8)
    assert again.usage is not None
    assert answer["prompt_eval_count"] == again.usage.prompt_tokens
    assert answer["message"]["content"] == (again.choices[0].message.content or "")


def test_a_gap_is_refused_where_the_model_fills_none(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="suffix: the model that is served has no tokens for filling"):
        client.completions.create(model=MODEL, prompt="def f(", suffix="):")
