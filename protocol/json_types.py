"""The JSON types that a schema allows: which arguments are strings, where `Calls` has arguments written one by one.

The coordinator constrains such arguments and the gateway reads them, so both decide by these functions. A schema comes
from a stranger: nothing here follows references without a bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_ALTERNATIVES = 64
JSON_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
    "string": (str,),
}


def argument_schema(schema: Any, name: str) -> Mapping[str, Any]:
    """Return the schema of an argument; {} if any value is allowed.

    schema: that of all arguments, an object
    """
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    argument = properties.get(name) if isinstance(properties, Mapping) else None
    if argument is None and isinstance(schema, Mapping):
        argument = schema.get("additionalProperties")
    if not isinstance(argument, Mapping):
        return {}
    return definition(schema, argument.get("$ref")) or argument


def allowed_types(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not name any."""
    names = set[str]()
    for part in _alternatives(schema):
        kinds = part.get("type")
        if kinds is not None:
            names |= {kind for kind in (kinds, *_list(kinds)) if isinstance(kind, str)}
        else:
            names |= {_type_of(value) for value in constants(part)}
    return names


def is_string(schema: Any) -> bool:
    """Return True if a schema allows strings and nothing else."""
    return allowed_types(schema) == {"string"}


def may_be_string(schema: Any) -> bool:
    """Return True if a schema allows strings, possibly beside other types."""
    return not (names := allowed_types(schema)) or "string" in names


def constants(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values to which a schema restricts a value by `enum` or `const`; empty if by neither."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else []


def definition(schema: Mapping[str, Any], reference: Any) -> Mapping[str, Any] | None:
    """Return the definition in a schema to which `$ref` refers; None if there is none."""
    for definitions in ("$defs", "definitions"):
        start, entries = f"#/{definitions}/", schema.get(definitions)
        if isinstance(reference, str) and reference.startswith(start) and isinstance(entries, Mapping):
            entry = entries.get(reference.removeprefix(start))
            return entry if isinstance(entry, Mapping) else None
    return None


def _alternatives(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and the schemas of which it is a combination."""
    parts = [schema]
    for _ in range(MAX_ALTERNATIVES):
        if not parts:
            return
        part = parts.pop()
        if isinstance(part, Mapping):
            yield part
            parts += [option for name in ("anyOf", "oneOf", "allOf") for option in _list(part.get(name))]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _type_of(value: Any) -> str:
    return next((name for name, kinds in JSON_TYPES.items() if isinstance(value, kinds)), "string")
