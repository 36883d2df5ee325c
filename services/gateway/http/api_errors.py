"""Errors in the format of OpenAI's API, and in those of Anthropic's and Ollama's APIs on their paths."""

from __future__ import annotations

import json
import math
from typing import Any

from neuronpipe.protocol.messages.client import Refused

REFUSALS = {
    "bad_request": (400, "invalid_request_error", "invalid_value"),
    "too_long": (400, "invalid_request_error", "context_length_exceeded"),
    "busy": (429, "rate_limit_error", "rate_limit_exceeded"),
    "starting": (503, "server_error", "starting"),
    "draining": (503, "server_error", "draining"),
    "cancelled": (503, "server_error", "cancelled"),
    "failed": (500, "server_error", "failed"),
    "ended_a_process": (500, "server_error", "request_ended_a_process"),
}
CODES: dict[str, tuple[int, str]] = {
    "invalid_http": (400, "The request is not valid HTTP."),
    "invalid_json": (400, "The body is not valid JSON."),
    "invalid_value": (400, "A field has an invalid value; `param` names it."),
    "missing_required_parameter": (400, "A required field is missing; `param` names it."),
    "unsupported_parameter": (400, "A field is unknown or not supported; `param` names it."),
    "unsupported_endpoint": (400, "The endpoint is not supported: embeddings, and changes of Ollama's models."),
    "messages_refused": (400, "The chat template refuses the conversation."),
    "context_length_exceeded": (400, "The prompt leaves no room for a completion in the context."),
    "answer_too_large": (400, "The log-probabilities are too large for a response that is sent whole."),
    "disconnected": (400, "The client disconnected before the end of the body."),
    "invalid_api_key": (401, "The key is missing or wrong."),
    "host_not_allowed": (403, "Without a key, the Host header must name loopback."),
    "origin_not_allowed": (403, "The request comes from a page of an origin that `--cors` does not name."),
    "not_found": (404, "The path does not exist."),
    "model_not_found": (404, "The model is not served."),
    "method_not_allowed": (405, "The path does not accept this method."),
    "in_use": (409, "Other requests use the model that is to be unloaded."),
    "body_too_slow": (408, "The body arrived too slowly."),
    "body_too_large": (413, "The body exceeds the limit."),
    "request_too_large": (413, "The request would take more memory than all requests together may."),
    "unsupported_media_type": (415, "The body is not declared as JSON."),
    "unsupported_encoding": (415, "The body is compressed."),
    "rate_limit_exceeded": (429, "Too many sequences are running or waiting; try again after Retry-After seconds."),
    "head_too_large": (431, "The headers exceed the limit."),
    "failed": (500, "An error in the run."),
    "internal": (500, "An error in the server; its log has the details."),
    "chat_template_failed": (500, "The chat template fails; the message names its line or the limit."),
    "request_ended_a_process": (500, "The request made processes die and is not run again."),
    "cancelled": (503, "The run cancelled the request."),
    "starting": (503, "The run is starting, or one of its processes is being restarted."),
    "draining": (503, "The run or the server is ending."),
    "ended": (503, "The run has ended."),
    "restarting": (503, "The run has ended and is started again after Retry-After seconds."),
    "asleep": (503, "The model has no run that could be observed; a request for it starts one."),
    "too_many_connections": (503, "Too many connections are open."),
    "memory_full": (503, "Other requests use the memory for requests; try again."),
    "templates_busy": (503, "The chat templates of other requests take long; try again."),
}
"""Status and meaning of every error code, for the reference."""
MAX_MESSAGE_CHARACTERS = 1000
MESSAGES_PATH = "/v1/messages"
OLLAMA_PATH = "/api"
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""The types of errors of Anthropic's API, except that of other statuses below 500 and above."""


class ApiError(Exception):
    """The error response to a request.

    kind: `type` of OpenAI's error object
    param: the field at fault, if any
    retry_after_s: sent as the header Retry-After, in whole seconds, at least 1
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        if len(message) > MAX_MESSAGE_CHARACTERS:  # it may quote a library or a chat template
            message = message[: MAX_MESSAGE_CHARACTERS - 1] + "…"
        super().__init__(message)
        self.status, self.code, self.message, self.kind, self.param = status, code, message, kind, param
        self.headers = headers
        if retry_after_s is not None:
            self.headers += (("retry-after", str(max(1, math.ceil(retry_after_s)))),)

    def body(self, path: str = "") -> bytes:
        """Return the body of the response.

        path: the path of the request, which decides the format
        """
        if _is_below(path, MESSAGES_PATH):
            return json.dumps(self.anthropic()).encode()
        if _is_below(path, OLLAMA_PATH):
            return json.dumps(self.ollama()).encode()
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def anthropic(self) -> dict[str, Any]:
        """Return the error object of Anthropic's API; its message names the field at fault."""
        kind = ANTHROPIC_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        message = self.message
        if self.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"  # Anthropic's wording: clients search for it
        return {"type": "error", "error": {"type": kind, "message": message}}

    def ollama(self) -> dict[str, str]:
        """Return the error object of Ollama's API; its message names the field at fault."""
        message = self.message
        if self.code == "model_not_found":
            message = f"model not found: {message}"  # Ollama's wording: clients search for it
        return {"error": message}


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")


def from_refusal(refused: Refused) -> ApiError:
    status, kind, code = REFUSALS[refused.code]
    retry_after_s = (refused.retry_after_s or 1) if status in (429, 503) else None
    message = refused.message
    if refused.code == "too_long":
        message = message[:1].upper() + message[1:]  # OpenAI's wording: clients search for it
    return ApiError(status, code, message, kind=kind, retry_after_s=retry_after_s)


def prompt_too_long(context_tokens: int, prompt_tokens: int) -> ApiError:
    """Return the error for a prompt that leaves no room for a completion token."""
    message = (
        f"This model's maximum context length is {context_tokens} tokens; "
        f"the prompt has {prompt_tokens} and leaves no room for an answer, shorten it"
    )
    return ApiError(400, "context_length_exceeded", message)


def unavailable(code: str, message: str) -> ApiError:
    """Return a 503 that asks the client to try again in a second."""
    return ApiError(503, code, message, kind="server_error", retry_after_s=1)
