"""JSON schemas as answers follow them."""

from __future__ import annotations

from typing import Any

import pytest
from neuronpipe.services.coordinator.constraints.schemas import as_followed

NAME: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}}
CLOSED = NAME | {"additionalProperties": False}


def test_an_object_that_names_its_properties_has_no_others_wherever_it_stands() -> None:
    schema = {"type": "array", "items": {"anyOf": [NAME, {"$ref": "#/$defs/x"}]}, "$defs": {"x": NAME}}
    assert as_followed(schema) == {
        "type": "array",
        "items": {"anyOf": [CLOSED, {"$ref": "#/$defs/x"}]},
        "$defs": {"x": CLOSED},
    }
    assert "additionalProperties" not in NAME, "what was given stays as it is"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        NAME | {"additionalProperties": {"type": "integer"}},
        NAME | {"additionalProperties": True},
        {"enum": [{"properties": {"a": 1}}]},
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
    ],
)
def test_what_says_itself_what_else_there_may_be_stays(schema: dict[str, Any]) -> None:
    assert as_followed(schema) == schema


def test_parts_of_one_object_are_not_closed_one_by_one() -> None:
    schema = {
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"age": {"type": "integer"}}}],
        "$defs": {"base": NAME},
    }
    assert as_followed(schema) == schema


def test_a_reference_alone_is_no_part_of_anything() -> None:
    assert as_followed({"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": NAME}})["$defs"]["x"] == CLOSED


def test_items_need_not_differ() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    assert as_followed(schema) == {"type": "array", "items": {"type": "integer"}}


def test_a_schema_that_refers_to_itself_has_an_end() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    assert (
        as_followed({"$ref": "#/$defs/node", "$defs": {"node": node}})["$defs"]["node"]["additionalProperties"] is False
    )
    both = {"allOf": [{"$ref": "#"}, NAME]}
    assert as_followed(both) == both
