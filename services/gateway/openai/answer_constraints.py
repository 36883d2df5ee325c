"""What an answer is to be, in the forms that clients know: OpenAI's `response_format`, vLLM's `structured_outputs`,
llama.cpp's `grammar`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

from neuronpipe.protocol.messages.request import GrammarSyntax
from neuronpipe.services.gateway.http.schema_base import IGNORED, RequestModel, conflict
from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 1024
IS_LARK_WITHOUT = "::="  # which every rule of GBNF has

Source = Annotated[str, StringConstraints(min_length=1)]


class Constraint(NamedTuple):
    """A grammar as `Generate` has it."""

    text: str
    syntax: GrammarSyntax


class JsonSchema(RequestModel):
    """The schema of an answer."""

    schema_: dict[str, Any] = Field(alias="schema", description="a JSON schema; what it cannot express is refused")
    name: str | None = Field(None, description=IGNORED)
    description: str | None = Field(None, description=IGNORED)
    strict: bool | None = Field(None, description="without effect: an answer always follows its schema")


class TextFormat(RequestModel):
    """Any text."""

    type: Literal["text"]


class JsonFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(RequestModel):
    """What a JSON schema describes."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(RequestModel):
    """One of these."""

    json_: dict[str, Any] | Source | None = Field(None, alias="json", description="a JSON schema, or its text")
    json_object: bool = Field(False, description="any JSON object")
    regex: Source | None = Field(None, description="a regular expression for the whole answer")
    choice: list[Source] | None = Field(None, min_length=1, max_length=MAX_CHOICES, description="one of these texts")
    grammar: Source | None = Field(None, description="GBNF; without any `::=`, a Lark grammar")

    @property
    def constraints(self) -> list[Constraint]:
        """Those that are given."""
        made = []
        if self.json_ is not None:
            made.append(Constraint(self.json_ if isinstance(self.json_, str) else json.dumps(self.json_), "json"))
        if self.json_object:
            made.append(Constraint("json", "json"))
        if self.regex is not None:
            made.append(Constraint(self.regex, "regex"))
        if self.choice is not None:
            made.append(Constraint(f"start: {' | '.join(map(json.dumps, self.choice))}", "lark"))
        if self.grammar is not None:
            made.append(Constraint(self.grammar, "gbnf" if IS_LARK_WITHOUT in self.grammar else "lark"))
        return made

    @model_validator(mode="after")
    def _just_one(self) -> StructuredOutputs:
        if len(self.constraints) != 1:
            raise PydanticCustomError("just_one", "expected one of json, json_object, regex, choice, grammar")
        return self


class Constrained(RequestModel):
    """The parts of a request that say what the answer is to be: at most one of them does."""

    response_format: ResponseFormat | None = Field(None, description="what the answer is to be")
    structured_outputs: StructuredOutputs | None = Field(None, description="the same, as vLLM's clients say it")
    grammar_: Source | None = Field(None, alias="grammar", description="the same, in GBNF as llama.cpp has it")

    @property
    def constraint(self) -> Constraint | None:
        """The answer's grammar."""
        return next(iter(self._constraints()), None)

    def _constraints(self) -> list[Constraint]:
        made = [] if self.structured_outputs is None else self.structured_outputs.constraints
        if self.grammar_ is not None:
            made.append(Constraint(self.grammar_, "gbnf"))
        if isinstance(self.response_format, SchemaFormat):
            made.append(Constraint(json.dumps(self.response_format.json_schema.schema_), "json"))
        elif isinstance(self.response_format, JsonFormat):
            made.append(Constraint("json", "json"))
        return made

    @model_validator(mode="after")
    def _at_most_one(self) -> Constrained:
        if len(self._constraints()) > 1:
            param = "grammar" if self.grammar_ is not None else "structured_outputs"
            raise conflict(param, "the answer has another form already; give one of the two")
        return self
