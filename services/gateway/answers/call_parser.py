"""Function calls in the text of a completion, in the format of a chat template.

The completion follows the grammar of its `Calls`, so the text around names and arguments is known. It is compared
without white space, because a tokenizer may drop a space beside a special token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from neuronpipe.protocol.json_types import argument_schema, is_string
from neuronpipe.services.gateway.answers.argument_values import argument_json, string_json
from neuronpipe.services.gateway.answers.json_scan import JsonScan
from neuronpipe.services.gateway.answers.keyword_scan import KeywordScan
from neuronpipe.services.gateway.answers.parts import (
    Arguments,
    CallStart,
    Content,
    Part,
    StateParser,
    held_back,
    text_end,
)
from neuronpipe.services.gateway.templates.call_format import NAME_CHARACTERS, WILD, CallFormat

MAX_KEY_CHARACTERS = 1024
MAX_NAME_CHARACTERS = 1024
MAX_SPACE_CHARACTERS = 1024  # in one of the texts around names and arguments
MAX_VALUE_CHARACTERS = 64 << 10  # a value that is no string is converted when it is complete
_TAG = re.compile(r"\s*<[^<>]*>?")


class CallParser(StateParser):
    """A parser of one completion.

    calls: the call format
    text: True if there may be text before the first call
    schemas: the JSON schemas of arguments by the name of the function, for values that are written without types
    """

    thinking = False

    def __init__(self, calls: CallFormat, *, text: bool = True, schemas: Mapping[str, Any] | None = None) -> None:
        super().__init__(self._text if text and calls.marker else self._before)
        self._format, self._schemas = calls, schemas or {}
        self._count, self._function = 0, ""
        # The text after a name may begin with characters that names have, as a number does.
        suffix = NAME_CHARACTERS.match(calls.between.replace(WILD, "0"))
        self._name_suffix = 0 if suffix is None else suffix.end()
        self._object, self._keywords = JsonScan(), KeywordScan("keywords")
        self._key, self._keys = "", 0  # the parameter that is being parsed, and how many the call has
        self._begun = False  # True once a value has begun that is passed on as it arrives
        self.complete = False

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
            at = len(self._buffer) - held_back(self._buffer, marker)
        text = self._buffer[: text_end(self._buffer[:at])]  # white space before a call is not part of the text
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
            elif len(self._buffer) > end + MAX_NAME_CHARACTERS:
                self._state = self._only_text
        yield from ()

    def _name(self) -> Iterator[Part]:
        self._buffer = self._buffer.lstrip()
        run = NAME_CHARACTERS.match(self._buffer)
        if run is None or run.end() == len(self._buffer):
            if len(self._buffer) > MAX_NAME_CHARACTERS:
                self._state = self._ignore_rest
            return
        if self._count and not run.end():  # the text after the last call may begin like that before a further one
            self._state = self._ignore_rest
            return
        end = max(0, run.end() - self._name_suffix)
        yield CallStart(self._count, self._buffer[:end])
        self._count, self.complete = self._count + 1, False
        self._function, self._keys, self._object = self._buffer[:end], 0, JsonScan()
        if self._format.argument_syntax:
            self._keywords = KeywordScan(self._format.argument_syntax)
        self._buffer, self._state = self._buffer[end:], self._between

    def _between(self) -> Iterator[Part]:
        following = self._parameter if self._format.parameter_before else self._arguments
        self._skip(self._format.between, self._keyword_arguments if self._format.argument_syntax else following)
        yield from ()

    def _arguments(self) -> Iterator[Part]:
        if not self._object.begun:
            self._buffer = self._buffer.lstrip()
        size = self._object.push(self._buffer)
        if size:
            yield Arguments(self._count - 1, self._buffer[:size])
        self._buffer = self._buffer[size:]
        if self._object.complete:
            self.complete, self._state = True, self._after

    def _keyword_arguments(self) -> Iterator[Part]:
        text, size = self._keywords.push(self._buffer)
        if text:
            yield Arguments(self._count - 1, text)
        self._buffer = self._buffer[size:]
        if self._keywords.complete:
            self.complete, self._state = True, self._after
        elif self._keywords.failed:
            self._state = self._ignore_rest

    def _after(self) -> Iterator[Part]:
        if self._format.next:
            self._skip(self._format.next, self._name)
        else:
            self._state = self._ignore_rest
        yield from ()

    def _ignore_rest(self) -> Iterator[Part]:
        self._buffer = ""
        yield from ()

    # ---- arguments that are written one by one ------------------------------------------------------------------
    def _parameter(self) -> Iterator[Part]:
        """Expect one more parameter, or the end of the call."""
        end = _match_ignoring_space(self._format.parameter_before, self._buffer)
        if end:
            self._buffer, self._state = self._buffer[end:], self._parameter_key
            return
        closing = _TAG.match(self._format.after)
        closed = None if closing is None else _match_ignoring_space(closing[0], self._buffer)
        if closed:
            yield Arguments(self._count - 1, "}" if self._keys else "{}")
            self.complete, self._state = True, self._after
        elif end is None and closed is None:
            self._state = self._ignore_rest

    def _parameter_key(self) -> Iterator[Part]:
        between = self._format.parameter_between.strip()
        at = self._buffer.find(between)
        if at >= 0:
            self._key = self._buffer[:at].strip()
            yield Arguments(self._count - 1, f"{', ' if self._keys else '{'}{string_json(self._key)}: ")
            self._keys, self._begun = self._keys + 1, False
            self._buffer, self._state = self._buffer[at + len(between) :], self._value_margin
        elif len(self._buffer) > MAX_KEY_CHARACTERS:
            self._state = self._ignore_rest

    def _value_margin(self) -> Iterator[Part]:
        """Drop the line break after the opening tag, which belongs to the tag."""
        self._buffer, self._state = (
            self._buffer.removeprefix(_margin(self._format.parameter_between[::-1])),
            self._value,
        )
        yield from ()

    def _value(self) -> Iterator[Part]:
        """Parse a value up to its closing tag and the line break before that."""
        last_margin = _margin(self._format.parameter_after)
        close = self._format.parameter_after.strip()
        schema = argument_schema(self._schemas.get(self._function), self._key)
        at = self._buffer.find(close)
        if at >= 0:
            value = self._buffer[:at].removesuffix(last_margin)
            self._buffer, self._state = self._buffer[at + len(close) :], self._parameter
            if self._begun:
                yield Arguments(self._count - 1, string_json(value)[1:])
            else:
                yield Arguments(self._count - 1, argument_json(value, schema))
        elif is_string(schema) or self._begun or len(self._buffer) > MAX_VALUE_CHARACTERS:
            size = len(self._buffer) - held_back(self._buffer, last_margin + close, close)
            text = string_json(self._buffer[:size])[1:-1]
            if text or not self._begun:
                yield Arguments(self._count - 1, text if self._begun else f'"{text}')
            self._buffer, self._begun = self._buffer[size:], True

    def _skip(self, text: str, next_state: Callable[[], Iterator[Part]]) -> None:
        """Skip text that must come next and continue with `next_state`; ignore the rest if something else comes."""
        if not text.strip():
            self._buffer, self._state = self._buffer.lstrip(), next_state
            return
        end = _match_ignoring_space(text, self._buffer)
        if end is None:
            self._state = self._ignore_rest
        elif end:
            self._buffer, self._state = self._buffer[end:], next_state


def _margin(text: str) -> str:
    """Return the line break with which a text begins; empty if it begins with none."""
    return "\n" if text.startswith("\n") else ""


def _match_ignoring_space(expected: str, text: str) -> int | None:
    """Return the length of the text that matches `expected`, ignoring white space; 0 while the match is incomplete,
    None if the text differs or has too much white space."""
    missing = [character for character in expected if not character.isspace()]
    for at, character in enumerate(text):
        if character.isspace():
            continue
        if character != missing[0] and not (missing[0] == WILD and character.isascii() and character.isalnum()):
            return None
        del missing[0]
        if not missing:
            return at + 1
    return 0 if len(text) <= len(expected) + MAX_SPACE_CHARACTERS else None
