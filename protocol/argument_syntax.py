"""The syntaxes of call arguments that are neither a JSON object nor written one by one.

The coordinator constrains such arguments and the gateway reads them, so both take the characters from here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self

ArgumentSyntax = Literal["", "keywords", "python", "gemma"]


class Syntax(NamedTuple):
    """The characters of a syntax. Calls end with `end`, keys with `equals`; nested values are in braces and brackets.

    separator: the text between two arguments, and between the values of a list
    quote: the text before and after a string, which is written as it is; empty if strings are JSON
    constants: false, true and null
    sorts: True if keys are written in their order
    """

    end: str
    equals: str
    separator: str
    quote: str
    constants: tuple[str, str, str]
    sorts: bool

    @classmethod
    def of(cls, name: ArgumentSyntax) -> Self:
        return cls(*_SYNTAXES[name])

    def constant(self, value: bool | None) -> str:
        """Return false, true or null as text."""
        return self.constants[2 if value is None else int(value)]

    def written(self, arguments: str) -> str:
        """Return the arguments of a call as text; unchanged if they are no JSON object, as where they were cut off.

        arguments: JSON
        """
        try:
            value = json.loads(arguments)
            return self._members(value, self.equals) if isinstance(value, dict) else arguments
        except (ValueError, RecursionError):
            return arguments

    def value(self, value: Any) -> str:
        """Return a value as text."""
        if value is None or isinstance(value, bool):
            return self.constant(value)
        if isinstance(value, dict):
            return f"{{{self._members(value, ':' if self.quote else ': ')}}}"
        if isinstance(value, list):
            return f"[{self.separator.join(map(self.value, value))}]"
        quoted = isinstance(value, str) and self.quote
        return f"{self.quote}{value}{self.quote}" if quoted else json.dumps(value, ensure_ascii=False)

    def _members(self, members: Mapping[str, Any], equals: str) -> str:
        """Return members as text. Keys are quoted in an object of a syntax whose strings are JSON."""
        names = sorted(members, key=str.lower) if self.sorts else list(members)
        quoted = equals != self.equals
        keys = {name: json.dumps(name, ensure_ascii=False) if quoted else name for name in names}
        return self.separator.join(f"{keys[name]}{equals}{self.value(members[name])}" for name in names)


_SYNTAXES: dict[ArgumentSyntax, tuple[str, str, str, str, tuple[str, str, str], bool]] = {
    "keywords": (")", "=", ", ", "", ("false", "true", "null"), False),  # OLMo 3
    "python": (")", "=", ", ", "", ("False", "True", "None"), False),  # LFM2
    "gemma": ("}", ":", ",", '<|"|>', ("false", "true", "None"), True),  # Gemma 4
}
