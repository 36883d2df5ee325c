"""Constraints on the form of a completion: OpenAI's `response_format`, vLLM's `structured_outputs`, llama.cpp's
`grammar`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

from neuronpipe.protocol.messages.request import GrammarSyntax
from neuronpipe.services.gateway.http.schema_base import IGNORED, RequestModel, conflict
from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 1024
GBNF_RULE = "::="  # every rule of GBNF has it; a grammar without it is read as Lark

Source = Annotated[str, StringConstraints(min_length=1)]
SCHEMA = (
    "The completion follows this JSON schema. A schema that a grammar cannot express is refused; `uniqueItems` and "
    "unknown values of `format` are accepted and not enforced. An object that names `properties` has no others "
    "unless `additionalProperties` allows them."
)
STRICT_IGNORED = "This field has no effect: a completion always follows its schema."


class Constraint(NamedTuple):
    """A grammar and its syntax, as the message `Generate` has them."""

    text: str
    syntax: GrammarSyntax


class JsonSchema(RequestModel):
    """The JSON schema that the completion must follow."""

    schema_: dict[str, Any] = Field(alias="schema", description=SCHEMA)
    name: str | None = Field(None, description=IGNORED)
    description: str | None = Field(None, description=IGNORED)
    strict: bool | None = Field(None, description=STRICT_IGNORED)


class TextFormat(RequestModel):
    """The completion may be any text."""

    type: Literal["text"] = Field(description="This format is `text`.")


class JsonFormat(RequestModel):
    """The completion is a JSON object."""

    type: Literal["json_object"] = Field(description="This format is `json_object`.")


class SchemaFormat(RequestModel):
    """The completion is JSON that follows a schema."""

    type: Literal["json_schema"] = Field(description="This format is `json_schema`.")
    json_schema: JsonSchema = Field(description="This object contains the schema.")


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(RequestModel):
    """The form of the completion, as vLLM's clients request it: exactly one of the fields."""

    json_: dict[str, Any] | Source | None = Field(
        None, alias="json", description="The completion follows this JSON schema, an object or its text."
    )
    json_object: bool = Field(False, description="The completion is a JSON object.")
    regex: Source | None = Field(None, description="The whole completion matches this regular expression.")
    choice: list[Source] | None = Field(
        None, min_length=1, max_length=MAX_CHOICES, description="The completion is one of these strings."
    )
    grammar: Source | None = Field(
        None, description="The completion follows this grammar: GBNF, or Lark if it contains no `::=`."
    )

    @property
    def constraints(self) -> list[Constraint]:
        constraints = []
        if self.json_ is not None:
            schema = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            constraints.append(Constraint(schema, "json"))
        if self.json_object:
            constraints.append(Constraint("json", "json"))
        if self.regex is not None:
            constraints.append(Constraint(self.regex, "regex"))
        if self.choice is not None:
            constraints.append(Constraint(f"start: {' | '.join(map(json.dumps, self.choice))}", "lark"))
        if self.grammar is not None:
            constraints.append(Constraint(self.grammar, "gbnf" if GBNF_RULE in self.grammar else "lark"))
        return constraints

    @model_validator(mode="after")
    def _just_one(self) -> StructuredOutputs:
        if len(self.constraints) != 1:
            raise PydanticCustomError("just_one", "expected one of json, json_object, regex, choice, grammar")
        return self


class Constrained(RequestModel):
    """The fields of a request that constrain the form of the completion; at most one of them is used."""

    response_format: ResponseFormat | None = Field(
        None, description="The form of the completion, as in OpenAI's API: text, a JSON object, or a JSON schema."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="The form of the completion, as vLLM's clients request it."
    )
    grammar_: Source | None = Field(
        None, alias="grammar", description="The form of the completion: a grammar in GBNF, as llama.cpp has it."
    )

    @property
    def constraint(self) -> Constraint | None:
        """Return the constraint of the completion; None if it may be any text."""
        return next(iter(self._constraints()), None)

    def _constraints(self) -> list[Constraint]:
        constraints = [] if self.structured_outputs is None else self.structured_outputs.constraints
        if self.grammar_ is not None:
            constraints.append(Constraint(self.grammar_, "gbnf"))
        if isinstance(self.response_format, SchemaFormat):
            constraints.append(Constraint(json.dumps(self.response_format.json_schema.schema_), "json"))
        elif isinstance(self.response_format, JsonFormat):
            constraints.append(Constraint("json", "json"))
        return constraints

    @model_validator(mode="after")
    def _at_most_one(self) -> Constrained:
        if len(self._constraints()) > 1:
            param = "grammar" if self.grammar_ is not None else "structured_outputs"
            raise conflict(param, "another field constrains the completion already; use only one of them")
        return self
