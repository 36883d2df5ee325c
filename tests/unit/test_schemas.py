"""JSON schemas as answers follow them."""

from __future__ import annotations

from typing import Any

import pytest
from neuronpipe.services.coordinator.text.json_schemas import KNOWN_FORMATS, as_followed

NAME: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}}
CLOSED = NAME | {"additionalProperties": False}


def require_taken(schema: dict[str, Any]) -> None:
    """The grammar library must take what is followed."""
    llguidance = pytest.importorskip("llguidance")
    assert not llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_json_schema(schema))


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


# fmt: off
PYDANTIC_FORMATS = [
    "binary", "base64url", "base64", "date", "date-time", "directory-path", "duration", "email", "file-path", "ipv4",
    "ipv4interface", "ipv4network", "ipv6", "ipv6interface", "ipv6network", "ipvanyaddress", "ipvanyinterface",
    "ipvanynetwork", "json-string", "multi-host-uri", "name-email", "password", "path", "regex", "time", "time-delta",
    "uri", "uuid", "uuid1", "uuid3", "uuid4", "uuid5", "uuid6", "uuid7", "uuid8", "decimal", "color", "phone",
]
# fmt: on
ANNOTATIONS = {
    "title": "x",
    "description": "x",
    "default": "x",
    "examples": ["x"],
    "example": "x",
    "$comment": "x",
    "deprecated": True,
    "readOnly": True,
    "writeOnly": True,
    "contentEncoding": "base64",
    "contentMediaType": "text/plain",
    "contentSchema": {"not": {}},
    "$anchor": "x",
    "$dynamicAnchor": "x",
    "$recursiveAnchor": True,
    "$vocabulary": {},
    "x-order": 1,
}


@pytest.mark.parametrize("name", [*PYDANTIC_FORMATS, "int64", "double", "colour", "", None, 1, ["date"], {"a": 1}])
def test_a_format_that_is_not_known_is_an_annotation(name: object) -> None:
    inner = {"type": "string", "format": name}
    schema = {"type": "object", "properties": {"format": inner, "all": {"type": "array", "items": inner}}}
    followed = as_followed(schema)["properties"]
    assert followed["format"]["type"] == followed["all"]["items"]["type"] == "string"
    require_taken(as_followed(schema))


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_an_annotation_says_nothing_of_what_is_valid(name: str) -> None:
    for schema in ({"type": "string"}, NAME, {"type": "array", "items": {"type": "integer"}}):
        require_taken(as_followed(schema | {name: ANNOTATIONS[name]}))


def test_a_format_that_is_known_holds() -> None:
    for name in KNOWN_FORMATS:
        assert as_followed({"type": "string", "format": name}) == {"type": "string", "format": name}
        require_taken({"type": "string", "format": name})


def test_a_schema_that_refers_to_itself_has_an_end() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    assert (
        as_followed({"$ref": "#/$defs/node", "$defs": {"node": node}})["$defs"]["node"]["additionalProperties"] is False
    )
    both = {"allOf": [{"$ref": "#"}, NAME]}
    assert as_followed(both) == both
