"""Grammars of arguments that are written one by one, as in <parameter=KEY>VALUE</parameter>.

They come in the order of the schema's properties, and none that is required may be missing. Other arguments are allowed
where the schema allows other properties.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from neuronpipe.protocol.json_types import argument_schema, constants, is_string, may_be_string
from neuronpipe.protocol.messages.request import Calls

OTHER_NAME = r"/[A-Za-z0-9_.-]{1,64}/"
OF_STRINGS = ("pattern", "minLength", "maxLength", "format")  # a free text ends where its closing tag is
DEFINITIONS = ("$defs", "definitions")

Until = Callable[[str, str], Iterator[str]]
"""Yields the lines of a grammar that define any text up to another text: the name of the rule, the other text."""


class ParameterGrammar:
    """The rules of one function's arguments.

    prefix: the beginning of the names of all rules
    lark: turns a text into a part of a rule
    until: see `Until`
    """

    def __init__(
        self, calls: Calls, schema: Mapping[str, Any], prefix: str, lark: Callable[[str], str], until: Until
    ) -> None:
        self._calls, self._schema, self._prefix = calls, schema, prefix
        self._lark, self._until = lark, until
        properties = schema.get("properties")
        self._names = [*properties] if isinstance(properties, dict) else []

    def expression(self) -> str:
        """Return the arguments as part of a rule."""
        required = self._schema.get("required")
        required_names = required if isinstance(required, list) else []
        parts = [
            f"{self._prefix}p{number}{'' if name in required_names else '?'}" for number, name in enumerate(self._names)
        ]
        return " ".join([*parts, f"{self._prefix}other*"] if self._allows_others() else parts)

    def rules(self) -> Iterator[str]:
        """Yield the lines of the grammar that `expression` needs."""
        for number, name in enumerate(self._names):
            yield from self._rules(f"{self._prefix}p{number}", name)
        if self._allows_others():
            yield from self._rules(f"{self._prefix}other", None)

    def unenforced(self) -> str | None:
        """Return a keyword of a string's schema that the grammar ignores; None if there is none."""
        schemas = [argument_schema(self._schema, name) for name in self._names]
        return next((word for schema in schemas if is_string(schema) for word in OF_STRINGS if word in schema), None)

    def _allows_others(self) -> bool:
        lists_none = not self._names and "properties" not in self._schema
        return self._schema.get("additionalProperties", lists_none) is not False

    def _rules(self, rule: str, name: str | None) -> Iterator[str]:
        """Yield the rule of one argument; of any other than the named ones if there is no name."""
        calls, schema = self._calls, argument_schema(self._schema, name or "")
        if name is None:
            begin = f"{self._lark(calls.parameter_before)} {OTHER_NAME} {self._lark(calls.parameter_between)}"
        else:
            begin = self._lark(f"{calls.parameter_before}{name}{calls.parameter_between}")
        if values := constants(schema):
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            yield f"{rule}: {begin} ({' | '.join(self._lark(f'{t}{calls.parameter_after}') for t in texts)})\n"
        elif may_be_string(schema):
            yield f"{rule}: {begin} {rule}v\n"
            yield from self._until(f"{rule}v", calls.parameter_after)
        else:
            value = f"%json {json.dumps(self._value_schema(schema))}"
            yield f"{rule}: {begin} {value} {self._lark(calls.parameter_after)}\n"

    def _value_schema(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        definitions = {name: self._schema[name] for name in DEFINITIONS if name in self._schema}
        return {**definitions, **schema, "x-guidance": self._schema["x-guidance"]}
