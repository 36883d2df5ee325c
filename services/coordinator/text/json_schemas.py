"""JSON schemas as answers follow them: stricter in one point than they are written, and looser in one.

An object that names its properties and says nothing of others has no others. By the letter it could have any, and a
model that has lost its way would write them for ever.

`uniqueItems` is passed over: whether an item is new cannot be said by a grammar, and a schema with it is common. What
JSON Schema calls an annotation says nothing of what is valid, and is passed over too: a format that the grammar library
does not know, and anchors, to which nothing that the library knows refers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames", "unevaluatedItems")
MANY = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SAYS_MORE = ("additionalProperties", "unevaluatedProperties", "allOf", "$ref", "if", "dependentSchemas")

PASSED_OVER = frozenset({"uniqueItems", "$dynamicAnchor", "$recursiveAnchor"})
KNOWN_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})


def as_followed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema that answers follow; the given one stays as it is."""
    joined = {id(part) for one in _schemas(schema) for part in _joined(one, schema)}
    made = _followed(schema, joined)
    assert isinstance(made, dict)
    return made


def _followed(value: Any, joined: set[int]) -> Any:
    if not isinstance(value, dict):
        return value
    made = {name: item for name, item in value.items() if name not in PASSED_OVER}
    if not (isinstance(made.get("format"), str) and made["format"] in KNOWN_FORMATS):
        made.pop("format", None)
    for name, item in value.items():
        if name in BY_NAME and isinstance(item, dict):
            made[name] = {key: _followed(one, joined) for key, one in item.items()}
        elif name in MANY and isinstance(item, list):
            made[name] = [_followed(one, joined) for one in item]
        elif name in ONE:
            made[name] = _followed(item, joined)
    if isinstance(value.get("properties"), dict) and id(value) not in joined and not any(n in value for n in SAYS_MORE):
        made["additionalProperties"] = False
    return made


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """It and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name, item in schema.items():
        if name in BY_NAME and isinstance(item, dict):
            inner = list(item.values())
        elif name in MANY and isinstance(item, list):
            inner = item
        else:
            inner = [item] if name in ONE else []
        for one in inner:
            yield from _schemas(one)


def _joined(schema: dict[str, Any], document: dict[str, Any]) -> Iterator[Any]:
    """The schemas that describe one object together with others: closed one by one, no object would satisfy all."""
    parts = schema.get("allOf")
    together = list(parts) if isinstance(parts, list) else []
    if "$ref" in schema and "properties" in schema:
        together.append(schema)
    for part in together:
        if len(together) == 1 and part is not schema and "properties" not in schema:
            continue
        yield from _reached(part, document, set())


def _reached(part: Any, document: dict[str, Any], seen: set[int]) -> Iterator[Any]:
    """A schema, what it refers to in this document, and its alternatives."""
    if not isinstance(part, dict) or id(part) in seen:
        return
    seen.add(id(part))
    yield part
    for name in ("anyOf", "oneOf", "allOf"):
        alternatives = part.get(name)
        for one in alternatives if isinstance(alternatives, list) else []:
            yield from _reached(one, document, seen)
    if isinstance(part.get("$ref"), str) and part["$ref"].startswith("#/"):
        target: Any = document
        for key in part["$ref"].removeprefix("#/").split("/"):
            target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        yield from _reached(target, document, seen)
