"""Grammars of arguments as keywords, as in f(key=value) or f{key:value}.

They come in the order of the syntax, and none that is required may be missing. Other arguments are allowed where the
schema allows other properties. Values are JSON if the syntax has JSON's values, and follow their schema then. In other
syntaxes they have the types, constants and properties of their schema; `unenforced` names what is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from neuronpipe.protocol.argument_syntax import Syntax
from neuronpipe.protocol.json_types import allowed_types, constants, definition
from neuronpipe.protocol.messages.request import Calls
from neuronpipe.services.coordinator.text.call_parameters import DEFINITIONS, OTHER_NAME, Until

IGNORED: tuple[str, ...] = (
    "pattern",
    "minLength",
    "maxLength",
    "format",
    "minItems",
    "maxItems",
    "prefixItems",
    "patternProperties",
)
IGNORED += ("allOf", "not", "if", "minProperties", "maxProperties", "contains", "propertyNames")
MAX_VALUES = 4096  # of all arguments of a function, nested ones included
_NAME = re.compile(r"""[^\s=:,(){}\[\]<>"']+""")


class KeywordError(Exception):
    """Arguments that cannot be written in a syntax, with the reason in one line."""


class KeywordGrammar:
    """The rules of one function's arguments. Arguments as in `ParameterGrammar`; raises KeywordError."""

    def __init__(
        self, calls: Calls, schema: Mapping[str, Any], prefix: str, lark: Callable[[str], str], until: Until
    ) -> None:
        self._syntax = Syntax.of(calls.argument_syntax)
        self._is_json = not self._syntax.quote and self._syntax.constants == ("false", "true", "null")
        self._schema, self._prefix, self._lark, self._until = schema, prefix, lark, until
        self._lines: list[str] = []
        self._values, self._names, self._named = 0, 0, dict[str, str]()
        self._unenforced: str | None = None
        self.expression = self._members(schema, self._syntax.equals)
        """The arguments as part of a rule."""

    def rules(self) -> Iterator[str]:
        """Yield the lines of the grammar that `expression` needs."""
        yield from self._lines

    def unenforced(self) -> str | None:
        """Return a keyword of the schema that the grammar ignores; None if there is none."""
        return self._unenforced

    # ---- members of an object ------------------------------------------------------------------------------------
    def _members(self, schema: Mapping[str, Any], equals: str) -> str:
        """Return the members of an object, in braces of whoever calls, as part of a rule."""
        properties, required = schema.get("properties"), schema.get("required")
        names = [*properties] if isinstance(properties, dict) else []
        required_names = (
            {name for name in required if isinstance(name, str)} if isinstance(required, list) else set[str]()
        )
        quoted = equals != self._syntax.equals
        for name in [] if quoted else [name for name in names if not _NAME.fullmatch(name)]:
            if name in required_names:
                raise KeywordError(f"the name {name[:40]!r} cannot be written in this call format")
            names.remove(name)
        if self._syntax.sorts:
            names.sort(key=str.lower)
        members = [self._member(name, self._property(schema, name), equals) for name in names]
        separator, following = self._lark(self._syntax.separator), ""
        firsts = list[str]()
        if self._allows_others(schema, names):
            additional = schema.get("additionalProperties")
            other_member = self._member(None, additional if isinstance(additional, dict) else {}, equals)
            following = self._rule(f"({separator} {other_member})*")
            firsts.append(f"{other_member} {following}")
        for name, member in zip(reversed(names), reversed(members), strict=True):
            if name in required_names:
                firsts = [f"{member} {following}"]
                following = self._rule(f"{separator} {member} {following}")
            else:
                firsts.append(f"{member} {following}")
                following = self._rule(f"({separator} {member})? {following}")
        if not firsts:
            return ""
        optional = "" if required_names.intersection(names) else "?"
        return f"({' | '.join(reversed(firsts))}){optional}"

    def _member(self, name: str | None, schema: Any, equals: str) -> str:
        quoted = equals != self._syntax.equals
        if name is None:
            key = f"{OTHER_NAME} {_quoted(equals)}" if not quoted else f'"\\"" {OTHER_NAME} {_quoted(chr(34) + equals)}'
        else:
            key = self._lark(f"{json.dumps(name) if quoted else name}{equals}")
        return self._rule(f"{key} {self._value(schema if isinstance(schema, Mapping) else {})}")

    @staticmethod
    def _property(schema: Mapping[str, Any], name: str) -> Any:
        return schema["properties"][name]

    @staticmethod
    def _allows_others(schema: Mapping[str, Any], names: list[str]) -> bool:
        return schema.get("additionalProperties", not names and "properties" not in schema) is not False

    # ---- values --------------------------------------------------------------------------------------------------
    def _value(self, schema: Mapping[str, Any]) -> str:
        """Return a value as part of a rule."""
        self._values += 1
        if self._values > MAX_VALUES:
            raise KeywordError(f"the schema has more than {MAX_VALUES} values")
        if self._is_json:
            return self._json(schema)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._referenced(reference)
        self._unenforced = self._unenforced or next((word for word in IGNORED if word in schema), None)
        if values := constants(schema):
            return f"({' | '.join(self._lark(self._syntax.value(value)) for value in values)})"
        for word in ("anyOf", "oneOf"):
            options = schema.get(word)
            if isinstance(options, list) and options:
                return f"({' | '.join(self._value(option) for option in options if isinstance(option, Mapping))})"
        types = sorted(allowed_types({"type": schema.get("type")}))
        if len(types) > 1:
            return f"({' | '.join(self._typed(schema, name) for name in types)})"
        return self._typed(schema, types[0]) if types else self._anything()

    def _typed(self, schema: Mapping[str, Any], name: str) -> str:
        if name == "boolean":
            return f"({self._lark(self._syntax.constant(False))} | {self._lark(self._syntax.constant(True))})"
        if name == "null":
            return self._lark(self._syntax.constant(None))
        if name == "object":
            return f'"{{" {self._members(schema, ":" if self._syntax.quote else ": ")} "}}"'
        if name == "array":
            items = schema.get("items")
            item = self._rule(self._value(items if isinstance(items, Mapping) else {}))
            return f'"[" ({item} ({self._lark(self._syntax.separator)} {item})*)? "]"'
        if name == "string" and self._syntax.quote:
            rule = self._new_name()
            self._lines += self._until(rule, self._syntax.quote)
            return f"{self._lark(self._syntax.quote)} {rule}"
        return self._json({**schema, "type": name})

    def _referenced(self, reference: str) -> str:
        """Return the rule of a definition, which may contain itself."""
        if reference not in self._named:
            self._named[reference] = name = self._new_name()
            target = definition(self._schema, reference)
            self._lines.append(f"{name}: {self._value({} if target is None else target)}\n")
        return self._named[reference]

    def _anything(self) -> str:
        if "" not in self._named:
            self._named[""] = name = self._new_name()
            types = ("string", "number", "boolean", "null", "object", "array")
            self._lines.append(f"{name}: {' | '.join(self._typed({}, kind) for kind in types)}\n")
        return self._named[""]

    def _json(self, schema: Mapping[str, Any]) -> str:
        definitions = {name: self._schema[name] for name in DEFINITIONS if name in self._schema}
        return f"%json {json.dumps({**definitions, **schema, 'x-guidance': self._schema['x-guidance']})}"

    def _rule(self, expression: str) -> str:
        name = self._new_name()
        self._lines.append(f"{name}: {expression}\n")
        return name

    def _new_name(self) -> str:
        self._names += 1
        return f"{self._prefix}k{self._names}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
