"""Reading the body of a request, within limits on size and time, and validating it with a pydantic model."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from neuronpipe.protocol.errors import quoted, safe_name
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.memory_account import MemoryCharge, charge_of, memory_full, parsed_bytes
from neuronpipe.services.gateway.http.schema_base import UNION_TAGS, UNSUPPORTED
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

MAX_BODY_BYTES = 4 << 20
MAX_DISCARDED_BYTES = 64 << 20  # read and dropped: a client that is still sending would not read the error
BODY_GRACE_S = 5.0  # in addition to the time at the minimum rate
MIN_BODY_BYTES_PER_S = 32 << 10
BROWSER_HEADERS = {"origin", "sec-fetch-site"}
ERROR_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unsupported_parameter",
    UNSUPPORTED: "unsupported_parameter",
    "json_invalid": "invalid_json",
}
RequestT = TypeVar("RequestT", bound=BaseModel)


async def read_body(request: Request, kind: type[RequestT]) -> RequestT:
    """Return the body of a request as `kind`. Raises ApiError, which names the parameter at fault."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not _is_ollama_by_curl(request, content_type):
        # A page of another origin could send any other type without a preflight request.
        raise ApiError(415, "unsupported_media_type", "expected the header `Content-Type: application/json`")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(415, "unsupported_encoding", "compressed bodies are not supported: send no `Content-Encoding`")
    charge = charge_of(request.scope)
    data = await _receive(request, charge)
    charge.has_arrived = True
    charge.grow(parsed_bytes(data))
    body = parse_body(data, kind)
    charge.set(charge.held_bytes - len(data))
    return body


def _is_ollama_by_curl(request: Request, content_type: str) -> bool:
    """Return True for a request of Ollama's API with the type that `curl -d` sends, as in Ollama's own examples, unless
    a browser sent it: browsers add one of BROWSER_HEADERS to each request that a page of another origin makes."""
    is_form = content_type == "application/x-www-form-urlencoded"
    return is_form and request.url.path.startswith("/api/") and not BROWSER_HEADERS & set(request.headers)


def parse_body(data: bytes | bytearray, kind: type[RequestT]) -> RequestT:
    """Parse and validate a body as `kind`. Raises ApiError, which names the parameter at fault."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _api_error(error) from None


def validated(content: dict[str, Any], kind: type[RequestT]) -> RequestT:
    """Validate a request that was translated from another API as `kind`. Raises ApiError."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise _api_error(error) from None


async def _receive(request: Request, charge: MemoryCharge) -> bytearray:
    """Receive the body. While it arrives it may be aborted for a smaller request (see memory_account.py)."""
    loop, body, received_bytes, gave_way = asyncio.get_running_loop(), bytearray(), 0, False
    due_s = loop.time() + BODY_GRACE_S

    def give_way() -> None:
        nonlocal gave_way
        gave_way = True
        timer.reschedule(loop.time())

    try:
        async with asyncio.timeout_at(due_s) as timer:
            with charge.account.arriving(charge, give_way):
                async for piece in request.stream():
                    received_bytes += len(piece)
                    if not gave_way:
                        timer.reschedule(due_s + received_bytes / MIN_BODY_BYTES_PER_S)
                    if received_bytes <= MAX_BODY_BYTES:
                        charge.grow(len(piece))
                        body += piece
                    elif received_bytes > MAX_DISCARDED_BYTES:
                        break
    except TimeoutError:
        if gave_way:
            raise _closing_connection(memory_full(charge.account.limit_bytes)) from None
        message = f"the body arrived slower than {MIN_BODY_BYTES_PER_S} bytes per second"
        raise ApiError(408, "body_too_slow", message, headers=CLOSE_HEADER) from None
    except ClientDisconnect:
        raise ApiError(400, "disconnected", "the client disconnected before the end of the body") from None
    except ApiError as problem:
        raise _closing_connection(problem) from None
    if received_bytes > MAX_BODY_BYTES:
        raise ApiError(413, "body_too_large", f"the body has more than {MAX_BODY_BYTES} bytes", headers=CLOSE_HEADER)
    return body


def _closing_connection(problem: ApiError) -> ApiError:
    """Make the response close its connection, since the rest of the body is not read."""
    problem.headers += CLOSE_HEADER
    return problem


CLOSE_HEADER = (("connection", "close"),)


def _api_error(error: ValidationError) -> ApiError:
    """Return an error for the first fault, with the parameter where it is."""
    first = error.errors(include_url=False)[0]
    param = ".".join(filter(None, (_path(first["loc"]), first.get("ctx", {}).get("param")))) or None
    message = _message(first)
    if first["type"] == "extra_forbidden":
        message = f"unsupported parameter: {param!r}"
    elif param is not None:
        message = f"{param}: {message[:1].lower()}{message[1:]}"
    code = ERROR_CODES.get(first["type"], "invalid_value")
    return ApiError(400, code, " ".join(message.split()), param=param)  # it may quote line ends of the body


def _message(error: ErrorDetails) -> str:
    value, context = error["input"], error.get("ctx", {})
    if error["type"] == "union_tag_invalid":
        name = context["discriminator"].strip("'")
        return f"expected {name} {context['expected_tags']}, not {quoted(context['tag'])}"
    if error["type"] == "literal_error" and isinstance(value, str):
        return f"{error['msg']}, not {quoted(value)}"
    return error["msg"].removeprefix("Value error, ").replace(" after validation", "")


def _path(location: tuple[int | str, ...]) -> str:
    """Return the path of a field, with keys of the client's own but without the tags of unions."""
    names = (str(part) for part in location if part not in UNION_TAGS and part != "[key]")
    return safe_name(".".join(map(safe_name, names)))
