"""The reference of the API names every parameter that the vendors' clients can send, and which of them are refused."""

from __future__ import annotations

import json
import re
import typing
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from neuronpipe.services.gateway import api_reference
from neuronpipe.services.gateway.anthropic.messages_api import CountTokensRequest, MessagesRequest
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.request_body import parse_body
from neuronpipe.services.gateway.openai.request_schema import ChatRequest, CompletionRequest
from neuronpipe.services.gateway.openai.responses_api import ResponsesRequest
from openai.types import chat, completion_create_params, responses

REFERENCE = api_reference.PATH.read_text(encoding="utf-8")
FUNCTION: dict[str, Any] = {"name": "f"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
VALUES: dict[str, Any] = {
    "audio": {"voice": "v", "format": "wav"},
    "background": False,
    "best_of": 2,
    "echo": True,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "image": {"context_compression": "auto"},
    "include": [],
    "input": "x",
    "instructions": "i",
    "logit_bias": {"1": 2},
    "max_tool_calls": 2,
    "messages": [{"role": "user", "content": "x"}],
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "model": "m",
    "parallel_tool_calls": True,
    "prompt": "x",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low"},
    "thinking": {"type": "disabled"},
    "reasoning_effort": "low",
    "response_format": SCHEMA,
    "safety_identifier": "s",
    "seed": 1,
    "service_tier": "auto",
    "stop": ["x"],
    "store": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "suffix": "x",
    "temperature": 0.5,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [{"type": "function", "function": FUNCTION}],
    "top_logprobs": 2,
    "top_p": 0.5,
    "truncation": "auto",
    "user": "u",
    "verbosity": "low",
}
OTHERS = dict.fromkeys(("frequency_penalty", "presence_penalty", "max_tokens", "max_completion_tokens"), 1)
OTHERS |= {"max_output_tokens": 1, "n": 2}
BESIDE: dict[str, dict[str, Any]] = {"stream_options": {"stream": True}}


OF_ANTHROPIC: dict[str, Any] = {
    "inference_geo": "eu",
    "metadata": {"user_id": "u"},
    "output_config": {"effort": "low"},
    "speed": "fast",
    "stop_sequences": ["x"],
    "system": "s",
    "tool_choice": {"type": "auto"},
    "tools": [{"name": "f", "input_schema": {}}],
    "top_k": 1,
}


SENT_AS_HEADERS = {"user_profile_id", "workspace_id"}


class Endpoint(typing.NamedTuple):
    """sections: those of the reference that list its fields; params: those of the vendor's client."""

    kind: Any
    sections: tuple[str, ...]
    params: tuple[Any, ...]
    least: dict[str, Any]
    values: dict[str, Any]


ENDPOINTS = {
    "chat": Endpoint(
        ChatRequest,
        ("Fields of all", "Further fields", "POST /v1/chat/completions"),
        typing.get_args(chat.CompletionCreateParams),
        {"messages": VALUES["messages"]},
        {"logprobs": True},
    ),
    "completions": Endpoint(
        CompletionRequest,
        ("Fields of all", "Further fields", "POST /v1/completions"),
        typing.get_args(completion_create_params.CompletionCreateParams),
        {"prompt": "x"},
        {"logprobs": 2},
    ),
    "responses": Endpoint(
        ResponsesRequest,
        ("Fields of all", "POST /v1/responses"),
        typing.get_args(responses.ResponseCreateParams),
        {"input": "x"},
        {"tools": [{"type": "function", **FUNCTION}], "prompt": {"id": "p"}, "background": False},
    ),
    "messages": Endpoint(
        MessagesRequest,
        ("Fields of all of OpenAI's and Anthropic's", "POST /v1/messages\n"),
        (message_create_params.MessageCreateParamsBase,),
        {"messages": VALUES["messages"], "max_tokens": 1},
        OF_ANTHROPIC,
    ),
}
BESIDE_IN_CHAT = {"top_logprobs": {"logprobs": True}}


def refused_by_name(endpoint: Endpoint) -> dict[str, bool]:
    """Every parameter that the reference names for this endpoint: True if it says that the parameter is refused."""
    refused = dict[str, bool]()
    for section in re.split(r"^### ", REFERENCE, flags=re.MULTILINE):
        if not section.startswith(endpoint.sections):
            continue
        for line in section.splitlines():
            if row := re.match(r"\| `(\w+)` \|", line):
                refused[row[1]] = "| This field is refused" in line
            elif line.startswith(("Accepted without effect: ", "Refused: ")):
                refused |= dict.fromkeys(re.findall(r"`(\w+)`", line), line.startswith("Refused"))
    return refused


def known(endpoint: Endpoint) -> set[str]:
    return {name for params in endpoint.params for name in typing.get_type_hints(params)} - SENT_AS_HEADERS


def test_a_count_has_every_parameter_of_the_client() -> None:
    params = typing.get_type_hints(message_count_tokens_params.MessageCountTokensParams)
    assert params.keys() - SENT_AS_HEADERS <= CountTokensRequest.model_fields.keys()


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
def test_the_reference_names_every_parameter_of_the_client(endpoint: Endpoint) -> None:
    assert known(endpoint) - set(refused_by_name(endpoint)) == set()


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
def test_the_parameters_that_the_reference_calls_refused_are_refused(endpoint: Endpoint) -> None:
    refused = refused_by_name(endpoint)
    assert len(refused) > 20
    for name in known(endpoint) & refused.keys():
        value = (VALUES | OTHERS | endpoint.values).get(name, {"a": "b"})
        beside = BESIDE | (BESIDE_IN_CHAT if endpoint.kind is ChatRequest else {})
        body = endpoint.least | beside.get(name, {}) | {name: value}
        if refused[name]:
            with pytest.raises(ApiError) as raised:
                parse_body(json.dumps(body).encode(), endpoint.kind)
            assert (raised.value.code, raised.value.param) == ("unsupported_parameter", name)
        else:
            parse_body(json.dumps(body).encode(), endpoint.kind)
