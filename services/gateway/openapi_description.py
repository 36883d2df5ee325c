"""The OpenAPI description at /openapi.json, generated from the models that validate requests."""

from __future__ import annotations

from typing import Any

from neuronpipe.services.gateway.anthropic.messages_api import CountTokensRequest, MessagesRequest
from neuronpipe.services.gateway.http.api_errors import MESSAGES_PATH, OLLAMA_PATH
from neuronpipe.services.gateway.llamacpp.llamacpp_api import DetokenizeRequest, TokenizeRequest
from neuronpipe.services.gateway.ollama.ollama_api import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from neuronpipe.services.gateway.openai.request_schema import ChatRequest, CompletionRequest
from neuronpipe.services.gateway.openai.responses_api import ResponsesRequest
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REFERENCE = "#/components/schemas/"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
USAGE = {
    "type": "object",
    "required": [
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
        "prompt_tokens_details",
        "completion_tokens_details",
    ],
    "properties": {
        "prompt_tokens_details": {
            "type": "object",
            "required": ["cached_tokens"],
            "properties": {"cached_tokens": {"type": "integer"}},
        },
        "completion_tokens_details": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
    "additionalProperties": {"type": "integer"},
}
MODEL = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {"id": {"type": "string"}, "object": {"const": "model"}, "created": {"type": "integer"}},
}
MODELS = {"type": "object", "required": ["data"], "properties": {"data": {"type": "array", "items": MODEL}}}
RESPONSE = {
    "type": "object",
    "required": ["id", "object", "created_at", "model", "status", "output", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "response"},
        "status": {"enum": ["completed", "incomplete"]},
        "output": {"type": "array", "items": {"type": "object", "required": ["id", "type", "status"]}},
    },
}
ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
MESSAGE = {
    "type": "object",
    "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
    "properties": {
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "content": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["type"]}},
        "stop_reason": {"type": "string"},
        "stop_sequence": {"type": ["string", "null"]},
        "usage": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
}
OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
OLLAMA_RESPONSE = {
    "type": "object",
    "required": ["model", "created_at", "done", "done_reason"],
    "properties": {
        "model": {"type": "string"},
        "created_at": {"type": "string"},
        "message": {"type": "object", "required": ["role", "content"]},
        "response": {"type": "string"},
        "done": {"const": True},
        "done_reason": {"enum": ["stop", "length", "load"]},
        **{
            name: {"type": "integer", "minimum": 0}
            for name in (
                "total_duration",
                "load_duration",
                "prompt_eval_count",
                "prompt_eval_duration",
                "eval_count",
                "eval_duration",
            )
        },
    },
}
OLLAMA_MODEL = {"type": "object", "required": ["details", "model_info", "capabilities", "modified_at"]}
OLLAMA_MODELS = {
    "type": "object",
    "required": ["models"],
    "properties": {"models": {"type": "array", "items": {"type": "object", "required": ["name", "model", "digest"]}}},
}
OLLAMA_VERSIONS = {"type": "object", "required": ["version"], "properties": {"version": {"type": "string"}}}
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
TOKEN_COUNT = {
    "type": "object",
    "required": ["input_tokens"],
    "properties": {"input_tokens": {"type": "integer"}},
}
TOKENIZED = {"type": "object", "required": ["tokens"], "properties": {"tokens": {"type": "array"}}}
DETOKENIZED = {"type": "object", "required": ["content"], "properties": {"content": {"type": "string"}}}
APPLIED = {"type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}}
PROPS = {"type": "object", "required": ["default_generation_settings", "total_slots"]}
CHOICE = {"type": "object", "required": ["index", "finish_reason", "logprobs"]}
ERROR_DESCRIPTIONS = {
    "400": "The request is invalid.",
    "401": "A key is required.",
    "403": "The Host or Origin header is not allowed.",
    "404": "The path or the model does not exist.",
    "408": "The body arrived too slowly.",
    "413": "The body is too large.",
    "415": "The body is not declared as JSON, or it is compressed.",
    "429": "Too many requests; try again after Retry-After seconds.",
    "431": "The headers are too large.",
    "500": "An internal error occurred.",
    "503": "The server is not ready; try again after Retry-After seconds.",
}


def openapi_document(version: str) -> dict[str, Any]:
    kinds: tuple[type[BaseModel], ...] = (
        ChatRequest,
        CompletionRequest,
        ResponsesRequest,
        MessagesRequest,
        CountTokensRequest,
        OllamaChatRequest,
        OllamaGenerateRequest,
        OllamaShowRequest,
        TokenizeRequest,
        DetokenizeRequest,
    )
    _, generated = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REFERENCE + "{model}")
    schemas = {name: _nullable(schema) for name, schema in generated["$defs"].items()}
    schemas |= {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR, "OllamaError": OLLAMA_ERROR, "Usage": USAGE}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "neuronpipe",
            "version": version,
            "description": "OpenAI's, Anthropic's and Ollama's APIs for the models of this server.",
        },
        "paths": {
            "/v1/chat/completions": _text("chat", ChatRequest, "chat.completion"),
            "/v1/completions": _text("completion", CompletionRequest, "text_completion"),
            "/v1/responses": _posted("respond", ResponsesRequest, RESPONSE, streams=EVENTS),
            MESSAGES_PATH: _posted("createMessage", MessagesRequest, MESSAGE, error="AnthropicError", streams=EVENTS),
            f"{MESSAGES_PATH}/count_tokens": _posted(
                "countTokens", CountTokensRequest, TOKEN_COUNT, error="AnthropicError"
            ),
            **_ollama_paths(),
            "/tokenize": _posted("tokenize", TokenizeRequest, TOKENIZED),
            "/detokenize": _posted("detokenize", DetokenizeRequest, DETOKENIZED),
            "/apply-template": _posted("applyTemplate", ChatRequest, APPLIED),
            "/props": _plain("props", PROPS),
            "/v1/models": _plain(
                "models", {"type": "object", "properties": {"data": {"type": "array", "items": MODEL}}}
            ),
            "/v1/models/{name}": _plain("model", MODEL, "name"),
            "/health": _plain("health", {"type": "object", "properties": {"status": {"const": "ok"}}}),
            "/metrics": {"get": {"operationId": "metrics", "responses": _responses({"text/plain": {}})}},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        "security": [{}, {"key": []}, {"header": []}],
    }


def _ollama_paths() -> dict[str, Any]:
    error = "OllamaError"
    chat = _posted("ollamaChat", OllamaChatRequest, OLLAMA_RESPONSE, error=error, streams=LINES)
    generate = _posted("ollamaGenerate", OllamaGenerateRequest, OLLAMA_RESPONSE, error=error, streams=LINES)
    return {
        f"{OLLAMA_PATH}/chat": chat,
        f"{OLLAMA_PATH}/generate": generate,
        f"{OLLAMA_PATH}/show": _posted("ollamaShow", OllamaShowRequest, OLLAMA_MODEL, error=error),
        f"{OLLAMA_PATH}/tags": _plain("ollamaTags", OLLAMA_MODELS, error=error),
        f"{OLLAMA_PATH}/ps": _plain("ollamaRunning", OLLAMA_MODELS, error=error),
        f"{OLLAMA_PATH}/version": _plain("ollamaVersion", OLLAMA_VERSIONS, error=error),
    }


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Allow null for every optional field: it counts as absent."""
    required = schema.get("required", [])
    properties = {
        name: field if name in required else {"anyOf": [field, {"type": "null"}]}
        for name, field in schema.get("properties", {}).items()
    }
    return {**schema, "properties": properties}


def _responses(content: dict[str, Any], error: str = "Error") -> dict[str, Any]:
    """Describe the responses of an endpoint: the content of one that succeeds, and the schema of errors."""
    error_content = {"application/json": {"schema": {"$ref": REFERENCE + error}}}
    errors = {status: {"description": text, "content": error_content} for status, text in ERROR_DESCRIPTIONS.items()}
    return {"200": {"description": "The response.", "content": content}} | errors


def _text(name: str, kind: type[BaseModel], answer: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": answer},
            "choices": {"type": "array", "items": CHOICE},
            "usage": {"$ref": f"{REFERENCE}Usage"},
        },
    }
    return _posted(name, kind, schema, streams=EVENTS)


def _posted(
    name: str, kind: type[BaseModel], answer: dict[str, Any], *, error: str = "Error", streams: str = ""
) -> dict[str, Any]:
    """Describe a POST endpoint: its request model, and the schemas of its response and of errors.

    streams: the media type of a stream; empty if the endpoint has none
    """
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if streams:
        content[streams] = {"schema": {"type": "string"}}
    body = {"application/json": {"schema": {"$ref": REFERENCE + kind.__name__}}}
    return {
        "post": {
            "operationId": name,
            "summary": kind.__doc__,
            "requestBody": {"required": True, "content": body},
            "responses": _responses(content, error),
        }
    }


def _plain(name: str, schema: dict[str, Any], *parameters: str, error: str = "Error") -> dict[str, Any]:
    places = [
        {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}} for parameter in parameters
    ]
    content = {"application/json": {"schema": schema}}
    return {"get": {"operationId": name, "parameters": places, "responses": _responses(content, error)}}
