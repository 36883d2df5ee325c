"""The encoders of `/api/chat` and `/api/generate`: one JSON object, or a stream of objects, one a line.

The objects of a stream have more of the thinking or the text, or calls that are complete; a call that is cut off is
left out. The last object has the measurements. While nothing else is sent, spaces keep a stream alive: JSON allows them
before an object.
"""

from __future__ import annotations

import json
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from neuronpipe.protocol.messages.client import Finished, Token
from neuronpipe.services.gateway.answers.answer_format import Call, parse_answer
from neuronpipe.services.gateway.answers.parts import Arguments, CallStart, Part, Reasoning
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.openai.chat_encoding import ChatEncoder
from neuronpipe.services.gateway.openai.response_encoding import FINISH_REASONS

NS_PER_MS = 1_000_000
LINE_ENDS = str.maketrans("\n\r", "  ")
NOT_ASCII = re.compile(r"[^\0-\x7f]")


class RequestTimer:
    """The time since a request arrived, in nanoseconds.

    clock: returns nanoseconds of a clock that never goes back
    load_ns: the time until the model had a run for the request
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock, self._arrived_ns = clock, clock()
        self.load_ns = 0

    def loaded(self) -> None:
        self.load_ns = self.total_ns

    @property
    def total_ns(self) -> int:
        return self._clock() - self._arrived_ns


def timestamp(seconds: float | None = None) -> str:
    """Return a time as Ollama writes it, in UTC.

    seconds: since 1970; None: now
    """
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


class OllamaEncoder(ChatEncoder):
    """The base of both encoders.

    model: the name of the model as the request has it
    timer: started when the request arrived
    """

    media_type = b"application/x-ndjson"
    prefix = ""
    done, keep_alive = b"", b" "

    def __init__(self, model: str | None, timer: RequestTimer, name: str, *about: Any, **more: Any) -> None:
        super().__init__(name, *about, **more)
        self._model, self._timer = model or name, timer
        self._open_call: tuple[str, list[str]] | None = None  # name and pieces of the arguments, in a stream
        self._call_count = 0
        self._decode_ms = 0.0  # since the first token
        self._finished: Finished | None = None

    def acquired(self) -> None:
        self._timer.loaded()

    # ---- in pieces -------------------------------------------------------------------------------------------
    def first(self, number: int) -> bytes:
        return b""

    def piece(self, number: int, token: Token) -> bytes:
        """Return the object of a token; nothing while its text may belong to a call."""
        self._count_time(token)
        rated = self._with_logprobs and token.token not in self._end_tokens
        return self._object_of(number, self._push(number, token), self._encode_logprobs(token, 0) if rated else ())

    def last(self, number: int, finished: Finished) -> bytes:
        """Return the object with the text that was held back; nothing if there is none."""
        self._finished = finished
        return self._object_of(number, self._parser(number).finish(), ())

    def usage_chunk(self, total: dict[str, Any]) -> bytes:
        assert self._finished is not None
        return self._encoded(self._message("", "", ()), (), self._measurements(self._finished))

    def error_chunk(self, problem: ApiError) -> bytes:
        """Return the last object of a stream that ends with an error."""
        return json.dumps(problem.ollama()).encode() + b"\n"

    def _object_of(self, number: int, parts: Iterable[Part], logprobs: Sequence[str]) -> bytes:
        thinking, text, calls = "", "", list[str]()
        for part in parts:
            if isinstance(part, CallStart):
                calls += self._closed_call()
                self._open_call = part.name, []
            elif isinstance(part, Arguments):
                assert self._open_call is not None
                self._open_call[1].append(part.text)
            elif isinstance(part, Reasoning):
                thinking += part.text
            else:
                text += part.text
        if self._parser(number).complete:
            calls += self._closed_call()
        is_empty = not (thinking or text or calls or logprobs)
        return b"" if is_empty else self._encoded(self._message(thinking, text, calls), logprobs)

    def _closed_call(self) -> list[str]:
        """Return the call that is complete now, in a list; an empty list if there is none."""
        if self._open_call is None:
            return []
        (name, pieces), self._open_call = self._open_call, None
        return [self._encoded_call(Call(name, "".join(pieces)))]

    # ---- in one piece ----------------------------------------------------------------------------------------
    def take(self, number: int, token: Token) -> None:
        self._count_time(token)
        super().take(number, token)

    def whole(self, sent: Sequence[tuple[int, Finished]], total: dict[str, Any]) -> bytes:
        """Return the body of a whole response."""
        ((number, finished),) = sent
        answer = parse_answer(finished.text, self._answer)
        calls = [self._encoded_call(call) for call in (answer.calls if answer.complete else answer.calls[:-1])]
        logprobs = [logprob for (logprob,) in self._logprobs.pop(number, [])]
        message = self._message(answer.reasoning, answer.text, calls)
        return self._encoded(message, logprobs, self._measurements(finished))

    # ---- both ------------------------------------------------------------------------------------------------
    @abstractmethod
    def _message(self, thinking: str, text: str, calls: Sequence[str]) -> str:
        """Return the members of an object that have parts of the completion.

        calls: the JSON of complete calls
        """

    def _encoded(self, message: str, logprobs: Sequence[str], ending: dict[str, Any] | None = None) -> bytes:
        """Return an object, as a line.

        ending: further members of the last object; None if it is not the last
        """
        opening = json.dumps({"model": self._model, "created_at": timestamp()})[:-1]
        rated = f', "logprobs": [{", ".join(logprobs)}]' if logprobs else ""
        closing = json.dumps({"done": ending is not None, **(ending or {})})[1:]
        return f"{opening}, {message}{rated}, {closing}\n".encode()

    def _encoded_call(self, call: Call) -> str:
        """Return the JSON of a complete call. Arguments are inserted as they are: parsing could change numbers."""
        function = json.dumps({"index": self._call_count, "name": call.name})[:-1]
        self._call_count += 1
        arguments = _one_line(call.arguments)
        return f'{{"id": "{self._new_call_id()}", "function": {function}, "arguments": {arguments}}}}}'

    def _count_time(self, token: Token) -> None:
        if token.index:
            self._decode_ms += token.ms

    def _measurements(self, finished: Finished) -> dict[str, Any]:
        return {
            "done_reason": FINISH_REASONS[finished.reason],
            "total_duration": self._timer.total_ns,
            "load_duration": self._timer.load_ns,
            "prompt_eval_count": finished.prompt_tokens,
            "prompt_eval_duration": round(NS_PER_MS * finished.prefill.get("ms", 0.0)),
            "eval_count": finished.tokens,
            "eval_duration": round(NS_PER_MS * self._decode_ms),
        }


class OllamaChatEncoder(OllamaEncoder):
    """The encoder of responses of `/api/chat`."""

    def _message(self, thinking: str, text: str, calls: Sequence[str]) -> str:
        members = {"role": "assistant", "content": text} | ({"thinking": thinking} if thinking else {})
        message = json.dumps(members)
        return f'"message": {message[:-1]}, "tool_calls": [{", ".join(calls)}]}}' if calls else f'"message": {message}'


class OllamaGenerateEncoder(OllamaEncoder):
    """The encoder of responses of `/api/generate`."""

    def _message(self, thinking: str, text: str, calls: Sequence[str]) -> str:
        members = {"response": text} | ({"thinking": thinking} if thinking else {})
        return json.dumps(members)[1:-1]


def _one_line(arguments: str) -> str:
    """Return JSON in one line of ASCII: clients split lines also at characters that its strings may contain."""
    return NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], arguments.translate(LINE_ENDS))
