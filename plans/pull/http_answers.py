"""Answers of a hub over HTTP, with limits on bytes, time, redirects, and the waiting that a hub may ask for.

The session is huggingface_hub's, which handles proxies and certificates. Compressed answers are refused.
"""

from __future__ import annotations

import contextlib
import email.utils
import importlib
import logging
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any
from urllib.parse import urljoin, urlsplit

from neuronpipe.protocol.errors import UserError, quoted, safe_name

ENDPOINT = "https://huggingface.co"
AGAIN = "the same command goes on from here"
ANSWER_S = 30.0  # for a connection, and for the next bytes of an answer
MAX_HEAD_S = 60.0  # for everything before the first byte of the content
MIN_BYTES_PER_S = 1024  # over WINDOW_S of waiting; a slower connection counts as broken
WINDOW_S = 30.0
MAX_REDIRECTS = 5
MAX_WAIT_S = 120.0  # total waiting that a hub may ask for before a command gives up
FIRST_WAIT_S = 1.0  # if a busy hub does not say how long to wait; doubled for each further answer
REDIRECTS = (301, 302, 303, 307, 308)
_RESET_S = re.compile(r"\bt=(\d{1,9})\b")  # in the RateLimit header: seconds until the limit is lifted
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(?:\d{1,18}|\*)", re.ASCII)

Tell = Callable[[str], None]
"""Is called with a line for the user, who waits."""


class ConnectionBroken(UserError):
    """A connection that failed or is too slow. The request can be repeated."""


class Refused(UserError):
    """An answer with an error status.

    status: the HTTP status
    code: the header X-Error-Code; "" if there is none
    """

    def __init__(self, message: str, status: int, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Answer:
    """The content of an answer, from byte `start` of the file on. Raises UserError if an answer with a part of the file
    does not state which."""

    def __init__(self, answer: Any, what: str, endpoint: str, network: tuple[type[Exception], ...]) -> None:
        self._answer, self._what, self._endpoint, self._network = answer, what, endpoint, network
        self.start = 0
        if answer.status_code == 206:
            match = _RANGE.fullmatch(answer.headers.get("content-range", ""))
            if match is None:
                raise UserError(f"{what}: {endpoint} sends a part of it and does not say which; use another mirror")
            self.start = int(match[1])

    @property
    def length_bytes(self) -> int | None:
        """Length of the content; None if the answer does not state it."""
        length = self._answer.headers.get("content-length", "")
        return int(length) if re.fullmatch(r"[0-9]{1,18}", length) else None

    def pieces(self, max_bytes: int) -> Iterator[bytes]:
        """Yield the content as it arrives. Raises UserError if it exceeds `max_bytes`, ConnectionBroken if the
        connection fails or is slower than MIN_BYTES_PER_S."""
        waited_s, window_bytes, all_bytes = 0.0, 0, 0
        content = iter(self._answer.iter_raw())
        while True:
            began_s = time.monotonic()
            try:
                piece = next(content, None)
            except self._network as error:
                raise connection_broken(self._what, self._endpoint, error) from None
            if piece is None:
                return
            waited_s += time.monotonic() - began_s
            window_bytes += len(piece)
            all_bytes += len(piece)
            if all_bytes > max_bytes:
                raise UserError(f"{self._what}: {self._endpoint} sends more than the {max_bytes} bytes it may have")
            if waited_s >= WINDOW_S:
                if window_bytes < MIN_BYTES_PER_S * waited_s:
                    raise ConnectionBroken(
                        f"{self._what}: {self._endpoint} sent {window_bytes} bytes in {waited_s:.0f} s: too slow to go "
                        f"on; {AGAIN}"
                    )
                waited_s, window_bytes = 0.0, 0
            yield piece


def connection_broken(what: str, endpoint: str, error: Exception) -> ConnectionBroken:
    reason = safe_name(str(error) or type(error).__name__)
    advice = f"look at the network, or name a mirror in HF_ENDPOINT; {AGAIN}"
    return ConnectionBroken(f"{what}: no connection to {endpoint}: {reason}; {advice}")


class Web:
    """The connection to a hub. HF_TOKEN is sent to the hub, and not to hosts that it redirects to."""

    def __init__(self, endpoint: str, tell: Tell) -> None:
        """Raises UserError if huggingface_hub is not installed, or address or token cannot be used."""
        self.endpoint, self._tell = endpoint, tell
        if not endpoint.startswith(("http://", "https://")) or _origin(endpoint) is None:
            raise UserError(f"HF_ENDPOINT: {quoted(endpoint)} is no address; expected one such as {ENDPOINT}")
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        try:
            from huggingface_hub import errors, utils  # takes 0.3 s to import, and not every phone has it
        except ImportError:
            raise UserError(
                "pull needs huggingface_hub; "
                f"install it with `{shlex.quote(sys.executable)} -m pip install huggingface_hub`"
            ) from None
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        self._utils: Any = utils
        self._offline: type[Exception] = errors.OfflineModeIsEnabled
        # The HTTP package differs between versions of the library. Its errors derive from that package's.
        http_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]
        package = importlib.import_module(http_error.__module__.partition(".")[0])
        self._network = (http_error, package.InvalidURL, package.StreamError)
        self._headers: dict[str, str] = self._utils.build_hf_headers(
            library_name="neuronpipe", library_version=version("neuronpipe")
        ) | {"Accept-Encoding": "identity"}  # a range of a compressed file is not a range of the file
        token = self._headers.get("authorization", "")
        if not (token.isascii() and token.isprintable()):
            raise UserError("HF_TOKEN: holds characters that no token has")

    @contextlib.contextmanager
    def answer(self, address: str, what: str, start: int | None = None, stop: int | None = None) -> Iterator[Answer]:
        """Request an address and yield the answer. Raises Refused for an error status, ConnectionBroken for a
        connection that fails, UserError for a violation of the protocol.

        what: the beginning of errors
        start, stop: the requested range of bytes, excluding stop; None: from the beginning, to the end. A hub may
            ignore the range and send the whole file; see `Answer.start`.
        """
        headers = dict(self._headers)
        if start is not None:
            headers["Range"] = f"bytes={start}-" + ("" if stop is None else str(stop - 1))
        answer = self._successful(address, headers, what)
        try:
            encoding = answer.headers.get("content-encoding", "identity").strip().lower()
            if encoding not in ("", "identity"):
                raise UserError(
                    f"{what}: {self.endpoint} sends it compressed ({safe_name(encoding)}), though it was asked for as "
                    "it is; use another mirror"
                )
            yield Answer(answer, what, self.endpoint, self._network)
        finally:
            with contextlib.suppress(*self._network):
                answer.close()

    def _successful(self, address: str, headers: dict[str, str], what: str) -> Any:
        """Return a successful answer, after as much waiting as the hub asks for. Raises Refused for other errors, or
        after MAX_WAIT_S."""
        waited_s, next_wait_s = 0.0, FIRST_WAIT_S
        while True:
            answer = self._redirected(address, headers, what)
            status = answer.status_code
            if status in (200, 206):
                return answer
            code, requested_s = answer.headers.get("x-error-code", ""), _retry_after_s(answer.headers)
            answer.close()
            if status != 429 and (status != 503 or requested_s is None):
                raise Refused(f"{what}: {self.endpoint} answered {status}; try again, {AGAIN}", status, code)
            wait_s = next_wait_s if requested_s is None else requested_s
            if waited_s + wait_s > MAX_WAIT_S:
                raise Refused(
                    f"{what}: {self.endpoint} answered {status} and asks to wait {_duration(wait_s)}; try again then, "
                    f"{AGAIN}",
                    status,
                    code,
                )
            self._tell(f"{self.endpoint} answered {status}: it is asked again in {_duration(wait_s)}")
            time.sleep(wait_s)
            waited_s, next_wait_s = waited_s + wait_s, 2 * next_wait_s

    def _redirected(self, address: str, headers: dict[str, str], what: str) -> Any:
        """Follow redirects, and return the answer after them. Raises UserError for forbidden or too many redirects."""
        home = _origin(address)
        for _ in range(MAX_REDIRECTS + 1):
            answer = self._head(address, headers, what)
            if answer.status_code not in REDIRECTS:
                return answer
            location = answer.headers.get("location", "")
            answer.close()
            target = _redirect_target(address, location)
            if target is None:
                raise UserError(f"{what}: {self.endpoint} redirects to {quoted(location)}, which is not followed")
            address = target
            if _origin(address) != home:
                headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
        raise UserError(f"{what}: {self.endpoint} redirects more than {MAX_REDIRECTS} times")

    def _head(self, address: str, headers: dict[str, str], what: str) -> Any:
        """Return an answer whose content is not read yet. Raises ConnectionBroken if the connection fails or the
        headers take more than MAX_HEAD_S, UserError in offline mode."""
        # The session's timeout applies to single reads only, so a thread waits, which is abandoned if it is late.
        answers: list[Any] = []
        errors: list[Exception] = []
        late = threading.Event()

        def ask() -> None:
            try:
                session = self._utils.get_session()
                request = session.build_request("GET", address, headers=headers, timeout=ANSWER_S)
                answers.append(session.send(request, stream=True, follow_redirects=False))
                if late.is_set():
                    answers[0].close()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(MAX_HEAD_S)
        late.set()
        if answers:
            return answers[0]
        if not errors:
            raise ConnectionBroken(f"{what}: {self.endpoint} did not answer within {MAX_HEAD_S:.0f} s; {AGAIN}")
        error = errors[0]
        if isinstance(error, self._offline):
            raise UserError("HF_HUB_OFFLINE is set, so nothing is asked of a hub; unset it to pull")
        if isinstance(error, (*self._network, OSError, ValueError)):
            raise connection_broken(what, self.endpoint, error)
        raise error


def _origin(address: str) -> tuple[str, str, int | None] | None:
    try:
        parts = urlsplit(address)
        return (parts.scheme, parts.hostname, parts.port) if parts.hostname else None
    except ValueError:
        return None


def _redirect_target(address: str, location: str) -> str | None:
    """Return the target of a redirect. None if it may not be followed: it is empty, has another scheme than HTTP, or
    leads from an encrypted connection to an unencrypted one."""
    try:
        target = urljoin(address, location)
    except ValueError:
        return None
    allowed = ("https",) if address.startswith("https:") else ("http", "https")
    origin = _origin(target)
    return target if location and origin is not None and origin[0] in allowed else None


def _retry_after_s(headers: Any) -> float | None:
    text = headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]{1,12}", text):
        return float(text)
    if text:
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            moment = email.utils.parsedate_to_datetime(text)
            return max((moment.astimezone(UTC) - datetime.now(UTC)).total_seconds(), 0.0)
    match = _RESET_S.search(headers.get("ratelimit", ""))
    return float(match[1]) if match else None


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 3600:.1f} hours"
