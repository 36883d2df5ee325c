"""The README's tables of parameters: all that OpenAI's client can send is there, and what they say is what is done."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.services import gateway
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.request_body import parse_body
from neuronpipe.services.gateway.openai.request_schema import ChatRequest, CompletionRequest
from neuronpipe.services.gateway.openai.responses_api import ResponsesRequest
from openai.types import chat, completion_create_params, responses

README = (Path(gateway.__path__[0]) / "README.md").read_text()
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


class Endpoint(typing.NamedTuple):
    """letter: of it, in the table that it shares with another; params: those of OpenAI's client."""

    kind: Any
    letter: str
    table: str
    params: tuple[Any, ...]
    least: dict[str, Any]
    values: dict[str, Any]


ENDPOINTS = {
    "chat": Endpoint(
        ChatRequest,
        "C",
        "## Parameters",
        typing.get_args(chat.CompletionCreateParams),
        {"messages": VALUES["messages"]},
        {"logprobs": True},
    ),
    "completions": Endpoint(
        CompletionRequest,
        "P",
        "## Parameters",
        typing.get_args(completion_create_params.CompletionCreateParams),
        {"prompt": "x"},
        {"logprobs": 2},
    ),
    "responses": Endpoint(
        ResponsesRequest,
        "",
        "### Responses",
        typing.get_args(responses.ResponseCreateParams),
        {"input": "x"},
        {"tools": [{"type": "function", **FUNCTION}], "prompt": {"id": "p"}, "background": False},
    ),
}
BESIDE_IN_CHAT = {"top_logprobs": {"logprobs": True}}


def rows(endpoint: Endpoint) -> dict[str, str]:
    """What the table says of each parameter: supported, ignored, refused, ..."""
    text = README[README.index(endpoint.table) :]
    found = dict[str, str]()
    for line in text[text.index("|") :].splitlines():
        if not line.startswith("|"):
            break
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if endpoint.letter and endpoint.letter not in cells.pop(0):
            continue
        for name in re.findall(r"`([a-z_]+)`", names):
            found[name] = cells[0]
    return found


def known(endpoint: Endpoint) -> set[str]:
    return {name for params in endpoint.params for name in typing.get_type_hints(params)}


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
def test_the_table_names_every_parameter_of_the_client(endpoint: Endpoint) -> None:
    assert known(endpoint) - set(rows(endpoint)) == set()


@pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)
def test_what_the_table_says_of_a_parameter_is_done(endpoint: Endpoint) -> None:
    for name, said in rows(endpoint).items():
        value = (VALUES | OTHERS | endpoint.values).get(name, {"a": "b"})
        beside = BESIDE | (BESIDE_IN_CHAT if endpoint.kind is ChatRequest else {})
        body = endpoint.least | beside.get(name, {}) | {name: value}
        if said.startswith("refused"):
            with pytest.raises(ApiError) as raised:
                parse_body(json.dumps(body).encode(), endpoint.kind)
            assert (raised.value.code, raised.value.param) == ("unsupported_parameter", name)
        else:
            parse_body(json.dumps(body).encode(), endpoint.kind)
