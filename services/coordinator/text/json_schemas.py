"""The changes to a JSON schema before it becomes a grammar.

If a schema lists properties and does not mention other ones, the object has no other ones. By the standard it could
have any, and a model might write them without end.

`uniqueItems` is ignored, since no grammar can express it and schemas with it are common. Formats that the grammar
library does not know are ignored as annotations, and anchors because the library knows no references to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SINGLE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames", "unevaluatedItems")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SAYS_MORE = ("additionalProperties", "unevaluatedProperties", "allOf", "$ref", "if", "dependentSchemas")

PASSED_OVER = frozenset({"uniqueItems", "$dynamicAnchor", "$recursiveAnchor"})
KNOWN_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})


def as_followed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the changed schema. The argument stays as it is."""
    joined = {id(joined_part) for part_schema in _schemas(schema) for joined_part in _joined(part_schema, schema)}
    rewritten = _followed(schema, joined)
    assert isinstance(rewritten, dict)
    return rewritten


def _followed(value: Any, joined: set[int]) -> Any:
    if not isinstance(value, dict):
        return value
    rewritten = {name: item for name, item in value.items() if name not in PASSED_OVER}
    if not (isinstance(rewritten.get("format"), str) and rewritten["format"] in KNOWN_FORMATS):
        rewritten.pop("format", None)
    for name, item in value.items():
        if name in BY_NAME and isinstance(item, dict):
            rewritten[name] = {key: _followed(item_schema, joined) for key, item_schema in item.items()}
        elif name in LISTS and isinstance(item, list):
            rewritten[name] = [_followed(item_schema, joined) for item_schema in item]
        elif name in SINGLE:
            rewritten[name] = _followed(item, joined)
    if isinstance(value.get("properties"), dict) and id(value) not in joined and not any(n in value for n in SAYS_MORE):
        rewritten["additionalProperties"] = False
    return rewritten


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name, item in schema.items():
        if name in BY_NAME and isinstance(item, dict):
            inner = list(item.values())
        elif name in LISTS and isinstance(item, list):
            inner = item
        else:
            inner = [item] if name in SINGLE else []
        for subschema in inner:
            yield from _schemas(subschema)


def _joined(schema: dict[str, Any], document: dict[str, Any]) -> Iterator[Any]:
    """Yield the parts of a schema that must hold for the same object.

    They allow other properties: if each allowed only its own, no object would satisfy all of them.
    """
    parts = schema.get("allOf")
    together = list(parts) if isinstance(parts, list) else []
    if "$ref" in schema and "properties" in schema:
        together.append(schema)
    for part in together:
        if len(together) == 1 and part is not schema and "properties" not in schema:
            continue
        yield from _reached(part, document, set())


def _reached(part: Any, document: dict[str, Any], visited: set[int]) -> Iterator[Any]:
    """Yield a schema, the schemas that it refers to in this document, and its alternatives."""
    if not isinstance(part, dict) or id(part) in visited:
        return
    visited.add(id(part))
    yield part
    for name in ("anyOf", "oneOf", "allOf"):
        alternatives = part.get(name)
        for alternative in alternatives if isinstance(alternatives, list) else []:
            yield from _reached(alternative, document, visited)
    if isinstance(part.get("$ref"), str) and part["$ref"].startswith("#/"):
        target: Any = document
        for key in part["$ref"].removeprefix("#/").split("/"):
            target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        yield from _reached(target, document, visited)
