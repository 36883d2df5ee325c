"""Errors, in OpenAI's format."""

from __future__ import annotations

import json
import math

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


MAX_MESSAGE_CHARACTERS = 1000


class ApiError(Exception):
    """A request answered with an error. param: the field at fault; retry_after_s: when trying again may help."""

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
        if len(message) > MAX_MESSAGE_CHARACTERS:  # of a library, or of a template
            message = message[: MAX_MESSAGE_CHARACTERS - 1] + "…"
        super().__init__(message)
        self.status, self.code, self.message, self.kind, self.param = status, code, message, kind, param
        self.headers = headers
        if retry_after_s is not None:
            self.headers += (("retry-after", str(max(1, math.ceil(retry_after_s)))),)

    def body(self) -> bytes:
        """The JSON object."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def from_refusal(refused: Refused) -> ApiError:
    """The run's refusal as HTTP says it."""
    status, kind, code = REFUSALS[refused.code]
    retry_after_s = (refused.retry_after_s or 1) if status in (429, 503) else None
    message = refused.message
    if refused.code == "too_long":
        message = message[:1].upper() + message[1:]  # as OpenAI writes it: clients look for these very words
    return ApiError(status, code, message, kind=kind, retry_after_s=retry_after_s)


def prompt_too_long(context_tokens: int, prompt_tokens: int) -> ApiError:
    """The prompt takes the whole context, and an answer has a token at least."""
    said = (
        f"This model's maximum context length is {context_tokens} tokens; "
        f"the prompt has {prompt_tokens} and leaves no room for an answer, shorten it"
    )
    return ApiError(400, "context_length_exceeded", said)


def unavailable(code: str, message: str) -> ApiError:
    """There is no run to ask at the moment."""
    return ApiError(503, code, message, kind="server_error", retry_after_s=1)
