"""The reference of the HTTP API, launch/guide/api.md, generated from the models that validate requests.

python -m neuronpipe.services.gateway.api_reference --write
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Any

from neuronpipe.services.gateway.anthropic.messages_api import CountTokensRequest, MessagesRequest
from neuronpipe.services.gateway.http.api_errors import CODES, OLLAMA_PATH
from neuronpipe.services.gateway.http.schema_base import IGNORED
from neuronpipe.services.gateway.llamacpp.llamacpp_api import DetokenizeRequest, TokenizeRequest
from neuronpipe.services.gateway.ollama.model_endpoints import INSTEAD
from neuronpipe.services.gateway.ollama.ollama_api import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from neuronpipe.services.gateway.openai.request_schema import ChatRequest, CompletionRequest
from neuronpipe.services.gateway.openai.responses_api import ResponsesRequest
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

PATH = Path(__file__).resolve().parents[2] / "launch" / "guide" / "api.md"
COMMAND = "python -m neuronpipe.services.gateway.api_reference --write"
REFERENCE = "#/$defs/"
GET_ENDPOINTS = (
    ("/v1/models", "Return the models of this server: `chat_template` is true for chat models, `context_tokens` is the "
     "size of the context. With several models, `state` says whether a model has a run."),
    ("/v1/models/NAME", "Return one of these models."),
    ("/props", "Return the properties of a model, as llama.cpp's server does: context size, sampling defaults, slots, "
     "chat template and its tokens. `chat_template_error` says why a chat template fails; `chat_template_tools` says "
     "whether it writes tools (`template`) or the default format is used (`stated`). Parameter: `?model=NAME`."),
    ("/api/tags", "Return the models as Ollama does. Names have the tag `:latest`, which requests may leave out."),
    ("/api/ps", "Return the models that have a run, with its memory and when it ends if it is not used."),
    ("/api/version", "Return the version of Ollama whose API this is, and that of neuronpipe."),
    ("/health", "Return 200 if requests are served, else 503. With several models, return the state of each."),
    ("/metrics", "Return metrics for Prometheus."),
    ("/openapi.json", "Return the OpenAPI description of this API."),
    ("/live", "Stream snapshots of a run, four per second, as server-sent events (`Snapshot` in SPEC.md). Parameter: "
     "`?model=NAME`."),
    ("/", "Return the page: a chat, and the live pipeline."),
)  # fmt: skip
POST_ENDPOINTS: tuple[tuple[str, type[BaseModel], str], ...] = (
    ("/v1/chat/completions", ChatRequest, "OpenAI's chat completions."),
    ("/v1/completions", CompletionRequest, "OpenAI's plain completions, with several prompts, `echo` and `suffix`."),
    ("/v1/responses", ResponsesRequest, "OpenAI's responses. Nothing is stored: a request contains the whole "
     "conversation. Unsupported items and tools are refused by their type, with the reason."),
    ("/v1/messages", MessagesRequest, "Anthropic's Messages API. Unsupported blocks and tools are refused by their "
     "type. The header `anthropic-version` has no effect."),
    ("/api/chat", OllamaChatRequest, "Ollama's chat. Durations are nanoseconds: `load_duration` until the model has a "
     "run, `prompt_eval_duration` of the steps that compute the prompt, `eval_duration` since the first token."),
    ("/api/generate", OllamaGenerateRequest, "Ollama's answer to a prompt. The response has no `context`."),
    ("/api/show", OllamaShowRequest, "Return what Ollama's clients want to know of a model. `capabilities` has "
     "`thinking` if the model thinks, and `insert`, for `suffix`, if it fills gaps and has had a run."),
    ("/tokenize", TokenizeRequest, "Return `tokens`, as llama.cpp's server does."),
    ("/detokenize", DetokenizeRequest, "Return `content`, as llama.cpp's server does."),
)  # fmt: skip
SHARED_FIELDS: dict[str, tuple[type[BaseModel], ...]] = {
    "Fields of all of OpenAI's and Anthropic's endpoints that generate text": (
        ChatRequest,
        CompletionRequest,
        ResponsesRequest,
        MessagesRequest,
    ),
    "Fields of all three of OpenAI's endpoints": (ChatRequest, CompletionRequest, ResponsesRequest),
    "Further fields of chat and plain completions": (ChatRequest, CompletionRequest),
    "Fields of both of Ollama's endpoints that generate text": (OllamaChatRequest, OllamaGenerateRequest),
}
UNSUPPORTED_FIELDS: dict[type[BaseModel], tuple[str, ...]] = {
    ChatRequest: ("audio", "moderation", "web_search_options"),
    MessagesRequest: ("container", "mcp_servers"),
    OllamaGenerateRequest: ("height", "steps", "width"),
    ResponsesRequest: ("access_programs", "background_options", "context_management", "moderation"),
}
"""Fields of these APIs that the models do not have, so that they are refused as any unknown field."""
RANGE_KEYS = (
    ("minimum", "maximum", ""),
    ("minItems", "maxItems", " items"),
    ("minLength", "maxLength", " characters"),
    ("", "maxProperties", " entries"),
)
INTRODUCTION = """# Reference of the HTTP API

Generated by `python -m neuronpipe.services.gateway.api_reference --write` from the models that validate requests; do
not edit. Tasks are in [serve-and-clients.md](serve-and-clients.md).

Bodies are JSON, with `Content-Type: application/json`. null means that a field is absent. Unknown fields are refused
with status 400, which names the field. The paths of OpenAI's API also exist without `/v1`.
"""
REFUSED_ENDPOINTS = "\n".join(f"- `{OLLAMA_PATH}/{name}`: {instead}." for name, instead in INSTEAD.items())
MORE_POST = f"""### POST /v1/messages/count_tokens

Returns `input_tokens`, the number of the prompt's tokens. Takes these fields of `/v1/messages`:
{", ".join(f"`{name}`" for name in CountTokensRequest.model_fields)}.

### POST /apply-template

Takes the fields of `/v1/chat/completions` and returns `prompt`, the text that the model would continue.

### POST /v1/embeddings

Is refused with `unsupported_endpoint`: the models generate text. `/api/embed` and `/api/embeddings` are refused, too.

### Ollama's endpoints that change models

Are refused with `unsupported_endpoint`:

{REFUSED_ENDPOINTS}
"""


def text() -> str:
    _, generated = models_json_schema(
        [(kind, "validation") for _, kind, _ in POST_ENDPOINTS], ref_template=REFERENCE + "{model}"
    )
    schemas = generated["$defs"]
    roots = [kind.__name__ for _, kind, _ in POST_ENDPOINTS]
    sections = [INTRODUCTION, "## Endpoints that take a body\n"]
    shared = {title: _shared(schemas, kinds) for title, kinds in SHARED_FIELDS.items()}
    for title, kinds in SHARED_FIELDS.items():
        wider = (
            shared[wider_title] for wider_title, more_kinds in SHARED_FIELDS.items() if set(kinds) < set(more_kinds)
        )
        names = shared[title].difference(*wider)
        sections.append(f"### {title}\n\n{_fields(schemas[kinds[0].__name__], names)}\n")
    for path, kind, summary in POST_ENDPOINTS:
        schema = schemas[kind.__name__]
        shared_names = {name for title, kinds in SHARED_FIELDS.items() if kind in kinds for name in shared[title]}
        fields = _fields(schema, schema["properties"].keys() - shared_names)
        if kind in UNSUPPORTED_FIELDS:
            fields += f"\n\nRefused: {', '.join(f'`{name}`' for name in UNSUPPORTED_FIELDS[kind])}."
        sections.append(f"### POST {path}\n\n{summary}\n\n{fields}\n")
    sections += [MORE_POST, "## Objects in bodies\n"]
    for name, schema in schemas.items():
        if name not in roots and _is_reachable(name, schemas, roots):
            sections.append(f"### {_title(name)}\n\n{schema['description']}\n\n{_fields(schema)}\n")
    sections.append("## Endpoints without a body\n\n" + _table(("GET", "result"), GET_ENDPOINTS) + "\n")
    codes = [(str(status), f"`{code}`", meaning) for code, (status, meaning) in _by_status(CODES)]
    sections.append(
        "## Errors\n\n"
        'The body of an error is `{"error": {"message", "type", "param", "code"}}`; below `/v1/messages` it is '
        '`{"type": "error", "error":\n{"type", "message"}}`, below `/api` it is `{"error": MESSAGE}`. In a stream an '
        "error is the last event or object, and no `[DONE]`\nfollows.\n\n"
        + _table(("status", "code", "meaning"), codes)
    )
    return "\n".join(sections) + "\n"


def _shared(schemas: dict[str, Any], kinds: Sequence[type[BaseModel]]) -> set[str]:
    """Return the names of the fields that are the same in all of these models."""
    first, *further = (schemas[kind.__name__]["properties"] for kind in kinds)
    return {name for name, field in first.items() if all(fields.get(name) == field for fields in further)}


def _by_status(codes: dict[str, tuple[int, str]]) -> list[tuple[str, tuple[int, str]]]:
    return sorted(codes.items(), key=lambda entry: (entry[1][0], entry[0]))


def _is_reachable(name: str, schemas: dict[str, Any], roots: list[str]) -> bool:
    reached, pending = set[str](), list(roots)
    while pending:
        schema = pending.pop()
        if schema not in reached:
            reached.add(schema)
            pending += [target for target in schemas if f"'{REFERENCE}{target}'" in str(schemas[schema])]
    return name in reached


def _title(name: str) -> str:
    """Return the heading of a schema. pydantic qualifies equal names of two modules with the module."""
    *modules, title = name.split("__")
    return f"{title} ({modules[-1]})" if modules else title


def _fields(schema: dict[str, Any], names: Set[str] | None = None) -> str:
    """Return a table of these fields (None: all), and below it the names of those without effect."""
    required = schema.get("required", [])
    rows, ignored = [], []
    for name, field in schema.get("properties", {}).items():
        if names is not None and name not in names:
            continue
        if field["description"] == IGNORED:
            ignored.append(f"`{name}`")
            continue
        default = "required" if name in required else _default(field)
        rows.append((f"`{name}`", _type(field), default, field["description"]))
    table = _table(("field", "type and range", "default", "description"), rows)
    return f"{table}\n\nAccepted without effect: {', '.join(ignored)}.".strip() if ignored else table


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    if value is None:
        return ""
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value!r}`".replace("'", '"')


def _type(field: dict[str, Any]) -> str:
    """Return the type of a field, with its range, as words and links."""
    if "$ref" in field:
        title = _title(field["$ref"].removeprefix(REFERENCE))
        anchor = title.lower().replace(" ", "-").replace("(", "").replace(")", "")
        return f"[{title}](#{anchor})"
    members = field.get("anyOf") or field.get("oneOf")
    if members:
        return " or ".join(dict.fromkeys(_type(member) for member in members if member.get("type") != "null"))
    if "enum" in field:
        return ", ".join(f"`{value}`" if value else '`""`' for value in field["enum"])
    if "const" in field:
        return f"`{str(field['const']).lower() if isinstance(field['const'], bool) else field['const']}`"
    kind = str(field.get("type", "any"))
    if kind == "null":
        return "null"
    if kind == "array":
        kind = f"array of {_type(field.get('items', {}))}"
    return kind + _range(field)


def _range(field: dict[str, Any]) -> str:
    """Return the limits of a number, or of the number of items or characters."""
    for low_key, high_key, unit in RANGE_KEYS:
        low, high = field.get(low_key), field.get(high_key)
        if low_key == "minimum" and "exclusiveMinimum" in field:
            return f" (above {field['exclusiveMinimum']:g}, up to {high:g})"
        if low_key == "minimum" and "exclusiveMaximum" in field:
            high = field["exclusiveMaximum"] - 1
        if low is not None and high is not None:
            return f" ({low:,g} to {high:,g}{unit})" if high < 1e6 else f" ({low:,} to {int(high):,})"
        if high is not None:
            return f" (up to {high:,g}{unit})"
        if low is not None:
            return f" (at least {low:,g}{unit.removesuffix('s') if low == 1 else unit})"
    return ""


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def main(arguments: Sequence[str]) -> int:
    """Write the reference with --write; else return 1 if it is not up to date."""
    if "--write" in arguments:
        PATH.write_text(text(), encoding="utf-8")
    elif PATH.read_text(encoding="utf-8") != text():
        print(f"{PATH}: not up to date; run `{COMMAND}`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
