"""The JSON of arguments that a model writes without types, as in <parameter=KEY>VALUE</parameter>."""

from __future__ import annotations

import json
from typing import Any

from neuronpipe.protocol.json_types import JSON_TYPES, allowed_types, is_string

_PYTHON = {"True": "true", "False": "false", "None": "null"}


def string_json(text: str) -> str:
    """Return the JSON of a string."""
    return json.dumps(text, ensure_ascii=False)


def argument_json(text: str, schema: Any) -> str:
    """Return the JSON of a value.

    text: the value as the model wrote it
    schema: the schema of the value; a value that is no JSON of an allowed type is a string
    """
    if is_string(schema):
        return string_json(text)
    stripped = text.strip()
    stripped = _PYTHON.get(stripped, stripped)
    try:
        value = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return string_json(text)
    names = allowed_types(schema)
    kinds = tuple(kind for name in names if name != "string" for kind in JSON_TYPES.get(name, ()))
    if "string" in names and not isinstance(value, kinds):
        return string_json(text)
    return stripped  # as it was written: encoding it again could change numbers


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
