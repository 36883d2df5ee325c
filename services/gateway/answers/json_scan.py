"""The end of a JSON object or array in text that arrives in pieces."""

from __future__ import annotations


class JsonScan:
    """Follows the brackets of one JSON object.

    begun: True once there is any text
    complete: True once the object is closed
    """

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False
        self.begun = self.complete = False

    def push(self, text: str) -> int:
        """Follow more text; return how many of its characters belong to the object."""
        self.begun = self.begun or bool(text)
        for at, character in enumerate(text):
            if self.complete:
                return at
            self._follow(character)
        return len(text)

    def _follow(self, character: str) -> None:
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
