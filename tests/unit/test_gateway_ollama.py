"""Ollama's API: what a request is as a request of OpenAI's API, and what is refused with the name of its field."""

from __future__ import annotations

import json
import time
from typing import Any

import ollama
import pytest
from neuronpipe.protocol.messages.request import MAX_TOKENS
from neuronpipe.services.gateway.answers.thinking_format import OFF, ON
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.request_body import parse_body
from neuronpipe.services.gateway.ollama.generation_options import OllamaOptions
from neuronpipe.services.gateway.ollama.ollama_api import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from neuronpipe.services.gateway.ollama.ollama_messages import OllamaMessage, chat_messages
from neuronpipe.services.gateway.openai.request_schema import MAX_MESSAGES, ChatRequest, CompletionRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
USER = {"role": "user", "content": "hello"}
CALL = {"function": {"name": "f", "arguments": {"a": 1}}}


def chat(**body: Any) -> ChatRequest:
    return parse_body(json.dumps({"messages": [USER], **body}).encode(), OllamaChatRequest).as_chat()


def generate(**body: Any) -> OllamaGenerateRequest:
    return parse_body(json.dumps({"prompt": "hello", **body}).encode(), OllamaGenerateRequest)


def plain(**body: Any) -> CompletionRequest:
    return generate(**body).as_completion()


def options(**values: Any) -> ChatRequest:
    return chat(options=values)


def conversation(request: ChatRequest) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in request.messages]


# ---- conversations -------------------------------------------------------------------------------------------
def test_a_stream_is_the_default_and_the_model_is_optional() -> None:
    assert (chat().stream, chat().model) == (True, None)
    assert (chat(stream=False).stream, chat(model="m:latest").model) == (False, "m:latest")
    assert generate().as_chat().stream
    assert plain(raw=True).stream


def test_a_prompt_is_a_conversation_of_one_message() -> None:
    assert conversation(generate().as_chat()) == [("user", "hello")]
    assert conversation(generate(system="Be short.").as_chat()) == [("system", "Be short."), ("user", "hello")]


def test_a_raw_prompt_and_a_gap_are_plain_completions() -> None:
    assert not generate().is_plain
    assert generate(raw=True).is_plain
    raw = plain(raw=True)
    assert (raw.prompt, raw.suffix, raw.logprobs, raw.max_tokens) == ("hello", "", None, MAX_TOKENS)
    assert generate(suffix="end").is_plain
    assert (plain(suffix="end").suffix, plain(prompt="", suffix="end").prompt) == ("end", "")


@pytest.mark.parametrize(
    ("body", "loads"), [({"prompt": ""}, True), ({}, False), ({"prompt": "", "suffix": "x"}, False)]
)
def test_a_request_without_a_prompt_only_loads_the_model(body: dict[str, Any], loads: bool) -> None:
    assert generate(**body).loads == loads
    assert parse_body(b"{}", OllamaChatRequest).loads
    assert not parse_body(json.dumps({"messages": [USER]}).encode(), OllamaChatRequest).loads


@pytest.mark.parametrize("keep_alive", [0, 0.0, "0", "0s", "00.0m"])
def test_a_request_without_a_prompt_unloads_the_model_at_no_time_to_live(keep_alive: Any) -> None:
    assert not any(generate(prompt="", keep_alive=time).unloads for time in (None, 5, -1, "10m", "0.5s"))
    assert generate(prompt="", keep_alive=keep_alive).unloads
    assert chat(keep_alive=keep_alive).messages


def test_calls_get_ids_and_results_belong_to_the_calls_that_they_name() -> None:
    messages = [
        USER,
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [CALL, {"function": {"name": "g", "arguments": {"b": "ä\n"}, "index": 1}}],
        },
        {"role": "tool", "tool_name": "g", "content": "8"},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "tool_calls": [CALL, CALL | {"id": "c9"}]},
        {"role": "tool", "tool_name": "f", "tool_call_id": "c9", "content": "9"},
        {"role": "tool", "tool_name": "f", "content": "10"},
        {"role": "tool", "tool_name": "h", "content": "11"},
    ]
    turns = chat(messages=messages, tools=[TOOL]).messages
    (first, second), (third, ninth) = turns[1].calls, turns[4].calls
    assert (first[1:], second[1:]) == (("f", '{"a": 1}'), ("g", '{"b": "ä\\n"}'))
    assert ninth[0] == "c9"
    assert len({first[0], second[0], third[0], "c9"}) == 4
    results = [(turn.tool_call_id, turn.name, turn.text) for turn in turns if turn.role == "tool"]
    assert results[:4] == [
        (second[0], "g", "8"),
        (first[0], None, "7"),
        ("c9", "f", "9"),
        (third[0], "f", "10"),
    ]
    assert results[4][0] not in {first[0], second[0], third[0], "c9"}


def test_new_ids_differ_from_those_that_a_client_states_anywhere() -> None:
    stated = [
        {"role": "assistant", "tool_calls": [CALL, CALL | {"id": "call_1"}]},
        {"role": "tool", "tool_call_id": "call_0", "content": "7"},
        {"role": "tool", "content": "8"},
    ]
    turns = [*chat_messages([OllamaMessage.model_validate(message) for message in stated])]
    assert [call["id"] for call in turns[0]["tool_calls"]] == ["call_2", "call_1"]
    assert [turn["tool_call_id"] for turn in turns[1:]] == ["call_0", "call_2"]


def test_results_find_their_calls_quickly_however_many_calls_wait() -> None:
    calls = OllamaMessage.model_validate({"role": "assistant", "tool_calls": [CALL] * 128})
    result = OllamaMessage.model_validate({"role": "tool", "tool_name": "g", "content": ""})
    began_s = time.process_time()
    assert len([*chat_messages([*[calls] * 200, *[result] * 3000])]) == 3200
    assert time.process_time() - began_s < 2, "each result was compared with every call"


def test_a_begun_answer_is_continued_with_what_was_thought_before_it() -> None:
    begun = {"role": "assistant", "content": "Sure: ", "thinking": "hm", "images": [], "notes": 1}
    request = chat(messages=[USER, begun])
    assert request.begun_message is not None
    assert (request.begun_message.text, request.begun_message.thought) == ("Sure: ", "hm")
    assert conversation(request) == [("user", "hello"), ("assistant", "Sure: ")]
    ended = chat(messages=[USER, {"role": "assistant", "thinking": "hm"}, USER])
    assert ended.begun_message is None
    assert [message.thought for message in ended.messages] == ["", "hm", ""]


@pytest.mark.parametrize(
    ("think", "variables"),
    [
        (None, {}),
        (False, OFF),
        (True, ON),
        ("low", ON | {"reasoning_effort": "low"}),
    ],
)
def test_the_template_is_told_how_much_to_think(think: Any, variables: dict[str, Any]) -> None:
    for request in (chat(think=think), generate(think=think).as_chat()):
        assert request.template_variables(may_think=True) == variables
        assert request.wants_thinking == (think is not False)


def test_tools_of_the_client_are_offered() -> None:
    def add(a: int, b: int = 2) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    tools = [ollama.Tool(**TOOL), ollama._utils.convert_function_to_tool(add)]
    bare = TOOL | {"function": {"name": "g"}}
    offer = chat(tools=[*(tool.model_dump(mode="json", exclude_none=True) for tool in tools), bare]).offer
    assert offer is not None
    assert [function.name for function in offer.functions] == ["f", "add", "g"]
    assert (offer.required, offer.several) == (False, True)
    assert offer.functions[0].parameters == SCHEMA
    assert offer.functions[1].parameters["properties"]["a"] == {"type": "integer", "description": "the first"}
    assert chat(tools=[]).offer is None


@pytest.mark.parametrize("request_of", [chat, plain])
def test_a_format_constrains_the_completion(request_of: Any) -> None:
    raw = {"raw": True} if request_of is plain else {}
    assert request_of(format="", **raw).constraint is None
    assert request_of(format="json", **raw).constraint == ("json", "json")
    constraint = request_of(format=SCHEMA, **raw).constraint
    assert (json.loads(constraint.text), constraint.syntax) == (SCHEMA, "json")


def test_log_probabilities_are_requested_as_in_each_api() -> None:
    assert chat().logprobs_per_token is plain(raw=True).logprobs_per_token is None
    assert chat(logprobs=True).logprobs_per_token == plain(raw=True, logprobs=True).logprobs_per_token == 0
    rated = {"logprobs": True, "top_logprobs": 3}
    assert chat(**rated).logprobs_per_token == plain(raw=True, **rated).logprobs_per_token == 3


# ---- options -------------------------------------------------------------------------------------------------
def test_the_defaults_of_sampling_are_those_of_ollama() -> None:
    sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.0}
    for request in (chat(), plain(raw=True)):
        assert sampling.items() <= request.options.items()
        assert (request.seed, request.stop_strings) == (None, ())
    assert chat().max_completion_tokens == MAX_TOKENS


def test_options_reach_the_request_by_their_names_there() -> None:
    request = options(
        num_predict=5,
        temperature=0,
        top_k=-1,
        top_p=0,
        min_p=0.1,
        seed=7,
        stop=["a", "\n"],
        repeat_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
    )
    assert (request.max_completion_tokens, request.seed, request.stop_strings) == (5, 7, ("a", "\n"))
    assert request.options == {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 0.0,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "frequency_penalty": -0.5,
        "presence_penalty": 0.5,
        "penalty_tokens": 64,
        "ignore_end": False,
    }
    assert options(stop="x").stop_strings == ("x",)


@pytest.mark.parametrize("limit", [0, -1, -2])
def test_a_limit_of_0_or_less_is_none(limit: int) -> None:
    assert options(num_predict=limit).max_completion_tokens == MAX_TOKENS


def test_a_seed_of_minus_one_is_random_and_others_are_not() -> None:
    assert options(seed=-1).seed is None
    assert (options(seed=0).seed, options(seed=-7).seed) == (0, -7)


@pytest.mark.parametrize(("last", "tokens"), [({}, 64), ({"repeat_last_n": 7}, 7), ({"repeat_last_n": -1}, 0)])
def test_penalties_count_the_last_tokens_or_all(last: dict[str, int], tokens: int) -> None:
    sampling = options(repeat_penalty=1.2, **last).options
    assert (sampling["repetition_penalty"], sampling["penalty_tokens"]) == (1.2, tokens)


def test_penalties_count_nothing_at_a_window_of_0() -> None:
    off = options(repeat_penalty=1.2, presence_penalty=1, repeat_last_n=0).options
    assert (off["repetition_penalty"], off["presence_penalty"]) == (1.0, 0.0)


def test_every_option_of_the_client_is_known() -> None:
    assert ollama.Options.model_fields.keys() <= OllamaOptions.model_fields.keys()
    loading = {"numa": False, "num_ctx": 8192, "num_batch": 2, "num_gpu": 99, "main_gpu": 0, "low_vram": True}
    loading |= {"f16_kv": True, "logits_all": True, "vocab_only": False, "use_mmap": True, "use_mlock": False}
    loading |= {"embedding_only": False, "num_thread": 8, "num_keep": 4, "penalize_newline": True}
    off = {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "tfs_z": 1, "typical_p": 1.0}
    assert options(**loading, **off).options == chat().options


def test_every_field_of_the_client_is_known_or_refused() -> None:
    """Width, height and steps are of images."""
    chat_fields, generate_fields = ollama._types.ChatRequest.model_fields, ollama._types.GenerateRequest.model_fields
    assert chat_fields.keys() <= OllamaChatRequest.model_fields.keys()
    assert generate_fields.keys() - OllamaGenerateRequest.model_fields.keys() == {"width", "height", "steps"}


# ---- refusals ------------------------------------------------------------------------------------------------
REFUSED_IN_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": "hello"}, "messages", "array"),
    ({"messages": [{"content": "x"}]}, "messages.0.role", "required"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
    ({"messages": [USER | {"thinking": "hm"}]}, "messages.0.thinking", "user has no thinking"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "not 'wizard'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content", "string"),
    ({"messages": [USER | {"images": ["aGk="]}]}, "messages.0.images", "read only text"),
    ({"messages": [USER | {"tool_calls": [CALL]}]}, "messages.0.tool_calls", "user cannot call"),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
        "messages.1.tool_calls.0.function.arguments",
        "an object",
    ),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "a b"}}]}]},
        "messages.1.tool_calls.0.function.name",
        "pattern",
    ),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, "messages", "have no results"),
    ({"messages": [USER, {"role": "assistant", "content": "x"}], "tools": [TOOL]}, "messages", "cannot be continued"),
    ({"messages": [USER] * (MAX_MESSAGES + 1)}, "messages", f"at most {MAX_MESSAGES}"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
    ({"tools": [TOOL, TOOL]}, "tools", "two functions have the name 'f'"),
    ({"tools": [TOOL] * 129}, "tools", "at most 128"),
    ({"tool_choice": "auto"}, "tool_choice", "unsupported parameter"),
    ({"prompt": "x"}, "prompt", "unsupported parameter"),
]
REFUSED_IN_GENERATE: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ["x"]}, "prompt", "string"),
    ({"template": "{{ .Prompt }}"}, "template", "the package has its own"),
    ({"context": [1, 2]}, "context", "send the conversation to /api/chat"),
    ({"context": "x"}, "context", "array"),
    ({"images": ["aGk="]}, "images", "read only text"),
    ({"raw": True, "suffix": "x"}, "suffix", "only without raw"),
    ({"raw": True, "system": "x"}, "system", "only without raw and suffix"),
    ({"suffix": "x", "system": "x"}, "system", "only without raw and suffix"),
    ({"raw": "yes"}, "raw", "boolean"),
    ({"width": 64}, "width", "unsupported parameter"),
]
REFUSED_IN_BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"model": 7}, "model", "string"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"format": "xml"}, "format", "not 'xml'"),
    ({"format": 7}, "format", "expected 'json' or a JSON schema"),
    ({"think": "much"}, "think", "not 'much'"),
    ({"think": 1}, "think", "expected true, false or a level"),
    ({"keep_alive": True}, "keep_alive", "seconds or a string"),
    ({"top_logprobs": 2}, "top_logprobs", "only with logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"options": []}, "options", "an object"),
    ({"options": {"num_predict": "many"}}, "options.num_predict", "integer"),
    ({"options": {"num_predict": -3}}, "options.num_predict", "-2"),
    ({"options": {"temperature": -1}}, "options.temperature", "0"),
    ({"options": {"top_k": 1.5}}, "options.top_k", "integer"),
    ({"options": {"top_p": 1.1}}, "options.top_p", "1"),
    ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty", "0.01"),
    ({"options": {"seed": "x"}}, "options.seed", "integer"),
    ({"options": {"stop": 7}}, "options.stop", "a string or a list of strings"),
    ({"options": {"stop": [""]}}, "options.stop.0", "at least 1"),
    ({"options": {"num_ctx": "large"}}, "options.num_ctx", "integer"),
    ({"options": {"mirostat": 2}}, "options.mirostat", "no mirostat here"),
    ({"options": {"tfs_z": 0.5}}, "options.tfs_z", "only 1"),
    ({"options": {"typical_p": 0.7}}, "options.typical_p", "only 1"),
    ({"options": {"repeat_last_n": -2}}, "options.repeat_last_n", "-1"),
    ({"options": {"ignore_end": True}}, "options.ignore_end", "unsupported parameter"),
    ({"options": {"temprature": 1}}, "options.temprature", "unsupported parameter"),
]


def checked_refusal(raised: pytest.ExceptionInfo[ApiError], param: str, reason: str) -> None:
    problem = raised.value
    assert (problem.status, problem.param) == (400, param)
    assert reason in problem.message
    assert json.loads(problem.body("/api/chat")) == {"error": problem.message}
    assert param in problem.message


@pytest.mark.parametrize(("body", "param", "reason"), REFUSED_IN_CHAT + REFUSED_IN_BOTH, ids=lambda x: str(x)[:60])
def test_what_a_chat_does_not_serve_is_refused_with_its_field(body: Any, param: str, reason: str) -> None:
    with pytest.raises(ApiError) as raised:
        chat(**body)
    checked_refusal(raised, param, reason)


@pytest.mark.parametrize(("body", "param", "reason"), REFUSED_IN_GENERATE + REFUSED_IN_BOTH, ids=lambda x: str(x)[:60])
def test_what_is_not_generated_is_refused_with_its_field(body: Any, param: str, reason: str) -> None:
    with pytest.raises(ApiError) as raised:
        generate(**body).as_chat()
    checked_refusal(raised, param, reason)


@pytest.mark.parametrize(
    "harmless",
    [
        {"keep_alive": "10m"},
        {"keep_alive": -1},
        {"keep_alive": 0},
        {"truncate": True, "shift": False},
        {"options": None, "format": None, "think": None, "keep_alive": None},
    ],
    ids=json.dumps,
)
def test_what_changes_nothing_is_accepted(harmless: dict[str, Any]) -> None:
    assert chat(**harmless).model_dump() == chat().model_dump()
    empty = {"template": "", "context": [], "images": [], "system": "", "suffix": "", "raw": False}
    assert generate(**harmless, **empty).as_chat().model_dump() == generate().as_chat().model_dump()


def test_a_model_is_described_by_either_name() -> None:
    for body in ({"model": "m"}, {"name": "m"}, {"model": "m", "verbose": True, "system": "s"}):
        request = parse_body(json.dumps(body).encode(), OllamaShowRequest)
        assert (request.model or request.name) == "m"
    with pytest.raises(ApiError, match="name: "):
        parse_body(b'{"name": 7}', OllamaShowRequest)


def test_an_error_has_the_form_of_the_api_of_its_path() -> None:
    problem = ApiError(404, "model_not_found", "the model 'x' is not served here", param="model")
    for path in ("/api/chat", "/api/other", "/api"):
        assert json.loads(problem.body(path)) == {"error": "model not found: the model 'x' is not served here"}
    for path in ("/apis", "/v1/api/chat", ""):
        assert json.loads(problem.body(path))["error"]["code"] == "model_not_found"
