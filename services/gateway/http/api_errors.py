"""Errors in the format of OpenAI's API."""

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
    """The error response to a request.

    kind: `type` of OpenAI's error object
    param: the field at fault
    retry_after_s: sent as the header Retry-After, rounded up to whole seconds
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

    def body(self) -> bytes:
        """Return the error object as JSON."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def from_refusal(refused: Refused) -> ApiError:
    """Return the HTTP error for a refusal by the coordinator."""
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
