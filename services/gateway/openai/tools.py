"""Functions that an answer may call: what requests say of them, and what is offered to the model.

`Offer.of` reads `tools`, `tool_choice` and `parallel_tool_calls`. `Chat.prompt` writes the offer into the prompt in the
format of the model's template and says which that is; `Offer.calls` makes of both what `Generate` needs; and
`answer_calls.Reader` finds the calls in the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from neuronpipe.protocol.errors import quoted
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.messages.request import Calls
from neuronpipe.protocol.messages.request import Function as CallableFunction
from neuronpipe.services.gateway.http.schema_base import ALLOWED, FUNCTION, MODE, RequestModel, conflict, union_of
from neuronpipe.services.gateway.templates.call_format import CallFormat
from pydantic import ConfigDict, Field, StringConstraints, Tag

MAX_TOOLS = 128
MAX_CALLS = 32  # in one answer
FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


class Function(RequestModel):
    """A function of the client's."""

    model_config = ConfigDict(extra="ignore")

    name: FunctionName
    description: str | None = Field(None, description="what it does, for the model")
    parameters: dict[str, Any] = Field(
        default={"type": "object", "properties": {}}, description="JSON schema of its arguments, which follow it always"
    )
    strict: bool | None = Field(None, description="refuse a schema that says what cannot be kept; else that is ignored")


class Tool(RequestModel):
    """A function that the answer may call."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    function: Function


class CalledFunction(RequestModel):
    """A function, and with what it was called."""

    model_config = ConfigDict(extra="ignore")

    name: FunctionName
    arguments: str = Field(description="a JSON object, as text")


class ToolCall(RequestModel):
    """A call in an earlier answer."""

    model_config = ConfigDict(extra="ignore")

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionReference(RequestModel):
    """A function of `tools`."""

    name: FunctionName


class NamedFunction(RequestModel):
    """This function is called."""

    type: Literal["function"]
    function: FunctionReference


class AllowedFunctions(RequestModel):
    """Some of the functions of `tools`, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedTools(RequestModel):
    """Only some of `tools` may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def tool_choice_tag(value: Any) -> str | None:
    """What a `tool_choice` is."""
    if isinstance(value, dict):
        return ALLOWED if value.get("type") == "allowed_tools" else FUNCTION
    return MODE if isinstance(value, str) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(MODE)]
    | Annotated[NamedFunction, Tag(FUNCTION)]
    | Annotated[AllowedTools, Tag(ALLOWED)],
    union_of("expected 'none', 'auto', 'required', or an object that names functions", tool_choice_tag),
]


@frozen
class Offer:
    """What an answer may call.

    functions: all that the client has: the prompt describes them
    allowed: those of them that the answer may call
    required: whether it must call one, and says nothing else
    several: whether it may make more than one call
    """

    functions: tuple[Function, ...]
    allowed: tuple[Function, ...]
    required: bool
    several: bool

    @classmethod
    def of(cls, tools: Sequence[Tool], choice: Any, *, several: bool = True) -> Self | None:
        """What a request offers; None when the answer is a text. choice: a `ToolChoice`, or None. Raises
        PydanticCustomError where the two contradict each other."""
        functions = {tool.function.name: tool.function for tool in tools}
        if len(functions) < len(tools):
            names = [tool.function.name for tool in tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise conflict("tools", f"{quoted(twice)} is there twice")
        wanted, required = [*functions], choice == "required"
        if isinstance(choice, NamedFunction):
            wanted, required, several = [choice.function.name], True, False
        elif isinstance(choice, AllowedTools):
            wanted = [one.function.name for one in choice.allowed_tools.tools]
            required = choice.allowed_tools.mode == "required"
        if not functions and choice not in (None, "none", "auto"):
            raise conflict("tool_choice", "there are no tools to choose from")
        for name in wanted:
            if name not in functions:
                raise conflict("tool_choice", f"{quoted(name)} is none of the tools")
        if not functions or choice == "none":
            return None
        allowed = tuple(functions[name] for name in dict.fromkeys(wanted))
        return cls(tuple(functions.values()), allowed, required, several)

    def descriptions(self) -> list[dict[str, Any]]:
        """The functions as templates know them."""
        return [
            {
                "type": "function",
                "function": {"name": one.name, "description": one.description or "", "parameters": one.parameters},
            }
            for one in self.functions
        ]

    def calls(self, form: CallFormat) -> Calls:
        """What `Generate` says of the calls."""
        functions = tuple(
            CallableFunction(name=one.name, arguments=json.dumps(one.parameters), strict=bool(one.strict))
            for one in self.allowed
        )
        return Calls(
            functions=functions,
            before=form.before,
            between=form.between,
            next=form.next,
            after=form.after,
            marker=form.marker,
            text=not self.required,
            most=MAX_CALLS if self.several and form.next else 1,
        )
