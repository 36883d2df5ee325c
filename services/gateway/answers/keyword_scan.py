"""The arguments of a call that are written as keywords, as JSON, in text that arrives in pieces."""

from __future__ import annotations

import json
import re

from neuronpipe.protocol.argument_syntax import ArgumentSyntax, Syntax
from neuronpipe.services.gateway.answers.argument_values import string_json
from neuronpipe.services.gateway.answers.parts import held_back

MAX_KEY_CHARACTERS = 1024
MAX_BARE_CHARACTERS = 1024  # of a number or a constant
MAX_DEPTH = 128
_CONSTANTS = {"False": "false", "True": "true", "None": "null", "false": "false", "true": "true", "null": "null"}
_ENDS = frozenset(",)]}")
_QUOTED = re.compile(r'"(\\.|[^"\\])*"', re.DOTALL)


class KeywordScan:
    """Reads the arguments of one call up to, and without, the character that ends them.

    complete: True once they have ended
    failed: True if the text is not what the grammar allows
    """

    def __init__(self, syntax: ArgumentSyntax) -> None:
        self._syntax = Syntax.of(syntax)
        self._quote = self._syntax.quote or '"'
        self._closers = [self._syntax.end]  # what ends each object or list that is open
        self._state = self._key_or_end
        self._escaped = self._filled = False  # the last character was a backslash; the innermost object has members
        self._output: list[str] = ["{"]
        self.complete = self.failed = False

    def push(self, text: str) -> tuple[str, int]:
        """Return JSON, and how many characters of the text were read; the rest must be pushed again with more."""
        at = 0
        while at < len(text) and not (self.complete or self.failed):
            before = self._state
            size = self._state(text[at:])
            if not size and self._state == before:
                break
            at += size
        output, self._output = "".join(self._output), []
        return output, at

    # ---- states: each reads the beginning of a text, returns the number of characters, and sets the next state -----
    def _key_or_end(self, text: str) -> int:
        if text[0].isspace():
            return 1
        if text[0] == self._closers[-1]:
            return self._close()
        self._state = self._key
        return 0

    def _key(self, text: str) -> int:
        if text[0].isspace():
            return 1
        equals = self._syntax.equals if len(self._closers) == 1 else ":"
        quoted = _QUOTED.match(text) if text[0] == '"' else None
        at = -1 if text[0] == '"' and quoted is None else text.find(equals, 0 if quoted is None else quoted.end())
        if at < 0 or at > MAX_KEY_CHARACTERS:
            self.failed = len(text) > MAX_KEY_CHARACTERS
            return 0
        key = string_json(text[:at].strip()) if quoted is None else quoted[0]
        self._output.append(f"{', ' if self._filled else ''}{key}: ")
        self._state = self._value
        return at + len(equals)

    def _value(self, text: str) -> int:
        if text[0].isspace():
            return 1
        if text[0] in "{[":
            return self._open(text[0])
        if text.startswith(self._quote):
            self._output.append('"')
            self._state = self._raw if self._syntax.quote else self._string
            return len(self._quote)
        if not self._quote.startswith(text):
            self._state = self._bare
        return 0

    def _item_or_end(self, text: str) -> int:
        if text[0].isspace():
            return 1
        if text[0] == "]":
            return self._close()
        self._state = self._value
        return 0

    def _open(self, bracket: str) -> int:
        self._closers.append("}" if bracket == "{" else "]")
        self.failed = len(self._closers) > MAX_DEPTH
        self._output.append(bracket)
        self._filled, self._state = False, self._key_or_end if bracket == "{" else self._item_or_end
        return 1

    def _close(self) -> int:
        """End the innermost object or list. What ends the arguments belongs to the text after them."""
        closer = self._closers.pop()
        self.complete = not self._closers
        self._output.append("}" if self.complete else closer)
        self._state = self._after
        return 0 if self.complete else 1

    def _string(self, text: str) -> int:
        """Read a JSON string, as it is."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._state = self._after
                self._output.append(text[: at + 1])
                return at + 1
        self._output.append(text)
        return len(text)

    def _raw(self, text: str) -> int:
        """Read a string that ends with the quote and is written as it is."""
        at = text.find(self._quote)
        size = len(text) - held_back(text, self._quote) if at < 0 else at
        self._output.append(string_json(text[:size])[1:-1])
        if at < 0:
            return size
        self._output.append('"')
        self._state = self._after
        return at + len(self._quote)

    def _bare(self, text: str) -> int:
        """Read a number or a constant, up to what follows it."""
        size = next((at for at, character in enumerate(text) if character in _ENDS or character.isspace()), None)
        if size is None or size > MAX_BARE_CHARACTERS:
            self.failed = len(text) > MAX_BARE_CHARACTERS
            return 0
        self._output.append(_bare_json(text[:size]))
        self._state = self._after
        return size

    def _after(self, text: str) -> int:
        if text[0].isspace():
            return 1
        if text[0] == self._closers[-1]:
            return self._close()
        if text[0] != ",":
            self.failed = True
            return 0
        is_list = self._closers[-1] == "]"
        self._output.append(", " if is_list else "")
        self._filled, self._state = not is_list, self._value if is_list else self._key
        return 1


def _bare_json(text: str) -> str:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        return text if isinstance(json.loads(text, parse_constant=str), int | float) else string_json(text)
    except (ValueError, RecursionError):
        return string_json(text)
