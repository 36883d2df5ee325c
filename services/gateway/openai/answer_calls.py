"""Function calls in a completion: parsing them as tokens arrive, and encoding them as in OpenAI's API.

The completion follows the grammar of its `Calls`, so the text around names and arguments is known. It is compared
without white space, because a tokenizer may drop a space beside a special token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from neuronpipe.protocol.messages.client import Finished, Token
from neuronpipe.services.gateway.openai.response_encoding import ChatEncoder
from neuronpipe.services.gateway.templates.call_format import NAME_CHARACTERS, WILD, CallFormat


class Content(NamedTuple):
    """More text of the completion that belongs to no call."""

    text: str


class CallStart(NamedTuple):
    """The beginning of a call.

    call: its number in the completion, from 0
    """

    call: int
    name: str


class Arguments(NamedTuple):
    """More of a call's arguments, which are a JSON object.

    call: as in `CallStart`
    """

    call: int
    text: str


Part = Content | CallStart | Arguments


class TextParser:
    """A parser of one completion that calls no functions: all of it is text."""

    complete = False

    def push(self, text: str) -> Iterator[Part]:
        if text:
            yield Content(text)

    def finish(self) -> Iterator[Part]:
        yield from ()


class CallParser:
    """A parser of one completion, which is fed text as it arrives.

    calls: the call format
    text: True if there may be text before the first call
    complete: True if the last call is complete
    """

    def __init__(self, calls: CallFormat, *, text: bool = True) -> None:
        self._format = calls
        self._buffer = ""  # text that was not parsed yet
        self._state = self._text if text and calls.marker else self._before
        self._count = 0
        self._depth, self._quoted, self._escaped = 0, False, False
        self.complete = False

    def push(self, text: str) -> Iterator[Part]:
        """Parse more text; yield the parts that are certain now. Text that may begin a call is held back."""
        self._buffer += text
        while self._buffer:
            before = self._buffer, self._state
            yield from self._state()
            if (self._buffer, self._state) == before:
                return

    def finish(self) -> Iterator[Part]:
        """Yield the text that was held back, at the end of the completion, unless it belongs to a call."""
        if self._buffer and not self._count and self._state in (self._text, self._before, self._name):
            yield Content(self._buffer)
        self._buffer = ""

    # ---- states: each parses the beginning of the buffer and sets the next state ----------------------------
    def _text(self) -> Iterator[Part]:
        marker = self._format.marker
        at = self._buffer.find(marker)
        if at >= 0:
            self._state = self._before
        else:  # the end of the buffer may be the beginning of a marker
            starts = (size for size in range(len(marker) - 1, 0, -1) if self._buffer.endswith(marker[:size]))
            at = len(self._buffer) - next(starts, 0)
        text = self._buffer[:at].rstrip()  # white space before a call is not part of the text
        if text:
            yield Content(text)
        self._buffer = self._buffer[len(text) :]

    def _only_text(self) -> Iterator[Part]:
        yield Content(self._buffer)
        self._buffer = ""

    def _before(self) -> Iterator[Part]:
        end = _match_ignoring_space(self._format.before, self._buffer)
        if end is None:
            self._state = self._only_text
        elif end:
            # Until the name follows, the text may turn out not to be a call.
            name = NAME_CHARACTERS.match(self._buffer, end)
            if name is not None and name.end() < len(self._buffer):
                self._buffer, self._state = self._buffer[end:], self._name
        yield from ()

    def _name(self) -> Iterator[Part]:
        self._buffer = self._buffer.lstrip()
        name = NAME_CHARACTERS.match(self._buffer)
        if name is not None and name.end() < len(self._buffer):
            yield CallStart(self._count, name[0])
            self._count, self.complete = self._count + 1, False
            self._buffer, self._state = self._buffer[name.end() :], self._between

    def _between(self) -> Iterator[Part]:
        self._skip(self._format.between, self._arguments)
        yield from ()

    def _arguments(self) -> Iterator[Part]:
        if not self._depth:
            self._buffer = self._buffer.lstrip()
        for at, character in enumerate(self._buffer):
            self._count_brackets(character)
            if self.complete:
                yield Arguments(self._count - 1, self._buffer[: at + 1])
                self._buffer, self._state = self._buffer[at + 1 :], self._after
                return
        if self._buffer:
            yield Arguments(self._count - 1, self._buffer)
            self._buffer = ""

    def _after(self) -> Iterator[Part]:
        if self._format.next:
            self._skip(self._format.next, self._name)
        else:
            self._state = self._ignore_rest
        yield from ()

    def _ignore_rest(self) -> Iterator[Part]:
        self._buffer = ""
        yield from ()

    def _skip(self, text: str, next_state: Any) -> None:
        """Skip text that must come next and continue with `next_state`; ignore the rest if something else comes."""
        end = _match_ignoring_space(text, self._buffer)
        if end is None:
            self._state = self._ignore_rest
        elif end:
            self._buffer, self._state = self._buffer[end:], next_state

    def _count_brackets(self, character: str) -> None:
        """Follow one more character of the JSON object of the arguments."""
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped, self._quoted = character == "\\", character != '"'
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.complete = self._depth == 0


def _match_ignoring_space(expected: str, text: str) -> int | None:
    """Return the length of the text that matches `expected`, ignoring white space; 0 while the match is incomplete,
    None if the text differs."""
    missing = [character for character in expected if not character.isspace()]
    for at, character in enumerate(text):
        if character.isspace():
            continue
        if character != missing[0] and not (missing[0] == WILD and character.isascii() and character.isalnum()):
            return None
        del missing[0]
        if not missing:
            return at + 1
    return 0


def parser_of(calls: CallFormat | None, *, text: bool = True) -> CallParser | TextParser:
    """Return a parser of one completion.

    calls: the call format; None if no functions may be called
    text: True if there may be text before the first call
    """
    return TextParser() if calls is None else CallParser(calls, text=text)


class Call(NamedTuple):
    """A call in a completion.

    arguments: JSON, which is incomplete if the completion was cut off
    """

    name: str
    arguments: str


def parse_answer(text: str, calls: CallFormat | None, *, before: bool = True) -> tuple[str, list[Call], bool]:
    """Parse a whole completion; return its text, its calls, and True if it ends with a complete call.

    calls: as in `parser_of`
    before: True if there may be text before the first call
    """
    parser = parser_of(calls, text=before)
    content, parsed_calls = "", list[Call]()
    for part in (*parser.push(text), *parser.finish()):
        if isinstance(part, Content):
            content += part.text
        elif isinstance(part, CallStart):
            parsed_calls.append(Call(part.name, ""))
        else:
            call = parsed_calls[part.call]
            parsed_calls[part.call] = Call(call.name, call.arguments + part.text)
    return content, parsed_calls, bool(parsed_calls) and parser.complete


class ToolCallEncoder(ChatEncoder):
    """The encoder of `/v1/chat/completions` with functions that may be called.

    calls: the call format
    text: True if there may be text before the first call
    """

    def __init__(self, *about: Any, calls: CallFormat, text: bool, **more: Any) -> None:
        super().__init__(*about, **more)
        self._calls, self._may_have_text = calls, text
        self._parsers: dict[int, CallParser] = {}

    def first(self, number: int) -> bytes:
        """Return the chunk that names the role; its content is null because there may be no text."""
        self._parsers[number] = CallParser(self._calls, text=self._may_have_text)
        return self._event(number, '"delta": {"role": "assistant", "content": null}', "null", "null")

    def piece(self, number: int, token: Token) -> bytes:
        """Return the chunks of a token. Without log-probabilities there are none while its text may begin a call."""
        deltas = [self._delta(part) for part in self._parsers[number].push(token.text)]
        rated = self._with_logprobs and token.token not in self._end_tokens
        if not rated:
            return b"".join(self._event(number, delta, "null", "null") for delta in deltas)
        logprobs = self._logprob_lists([self._encode_logprobs(token, self._text_offset(number, token))])
        first, *later_deltas = deltas or [self._empty_content]
        events = [self._event(number, first, logprobs, "null")]
        return b"".join(events + [self._event(number, delta, "null", "null") for delta in later_deltas])

    def last(self, number: int, finished: Finished) -> bytes:
        """Return the chunks of held back text and the chunk that ends a sequence."""
        parts = self._parsers.pop(number).finish()
        events = [self._event(number, self._delta(part), "null", "null") for part in parts]
        return b"".join(events) + super().last(number, finished)

    def _delta(self, part: Part) -> str:
        if isinstance(part, Content):
            return self._text_content(part.text)
        if isinstance(part, CallStart):
            call = {"index": part.call, **self._call(part.name, "")}
        else:
            call = {"index": part.call, "function": {"arguments": part.text}}
        return f'"delta": {{"tool_calls": [{json.dumps(call)}]}}'

    def _content(self, finished: Finished) -> dict[str, Any]:
        text, calls, _ = parse_answer(finished.text, self._calls, before=self._may_have_text)
        message: dict[str, Any] = {"role": "assistant", "content": text or None, "refusal": None}
        if calls:
            message["tool_calls"] = [self._call(*call) for call in calls]
        else:
            message["content"] = text
        return {"message": message}

    def _reason(self, finished: Finished) -> str:
        reason = super()._reason(finished)
        complete = reason == "stop" and parse_answer(finished.text, self._calls, before=self._may_have_text)[2]
        return "tool_calls" if complete else reason

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        return {"id": new_call_id(self._calls), "type": "function", "function": {"name": name, "arguments": arguments}}


def new_call_id(calls: CallFormat) -> str:
    """Return a new id for a call, in the form that the template accepts."""
    return calls.id_of(f"call_{os.urandom(12).hex()}")
