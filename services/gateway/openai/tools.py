"""Tools (functions that a completion may call): the request models, and the offer that is made to the model.

`Offer.of` evaluates `tools`, `tool_choice` and `parallel_tool_calls`, or their older form, `functions` and
`function_call`. `PromptWriter.write_prompt` writes the offer into the prompt and returns the call format of the model's
template. `Offer.calls` combines both into the grammar that `Generate` carries, and answers/call_parser.py finds the
calls in the completion.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from neuronpipe.protocol.errors import quoted
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.messages.request import Calls
from neuronpipe.protocol.messages.request import Function as CallableFunction
from neuronpipe.services.gateway.answers.thinking_format import Begin, ThinkingFormat
from neuronpipe.services.gateway.http.schema_base import ALLOWED, FUNCTION, MODE, RequestModel, conflict, union_of
from neuronpipe.services.gateway.templates.call_format import CallFormat
from pydantic import ConfigDict, Field, StringConstraints, Tag

MAX_TOOLS = 128
MAX_CALLS = 32  # per completion
NAME = "The name of the function."
TYPE = "The only supported type is `function`."
FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


class Function(RequestModel):
    """A function of the client that the model may call."""

    model_config = ConfigDict(extra="ignore")

    name: FunctionName = Field(description=NAME)
    description: str | None = Field(None, description="This text tells the model what the function does.")
    parameters: dict[str, Any] = Field(
        default={"type": "object", "properties": {}},
        description="The JSON schema of the arguments; generated arguments always follow it.",
    )
    strict: bool | None = Field(
        None,
        description="If true, a schema with parts that a grammar cannot express is refused; otherwise they are "
        "ignored.",
    )


class Tool(RequestModel):
    """A tool that the completion may call."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"] = Field(description=TYPE)
    function: Function = Field(description="This object describes the function.")


class CalledFunction(RequestModel):
    """The name and arguments of a call."""

    model_config = ConfigDict(extra="ignore")

    name: FunctionName = Field(description=NAME)
    arguments: str = Field(description="The arguments: a JSON object, as a string.")


class ToolCall(RequestModel):
    """A call in an earlier message of the assistant."""

    model_config = ConfigDict(extra="ignore")

    id: str = Field(description="The id of the call, which its result repeats.")
    type: Literal["function"] = Field("function", description=TYPE)
    function: CalledFunction = Field(description="The name and arguments of the call.")


class FunctionReference(RequestModel):
    """A reference to a function of `tools`."""

    name: FunctionName = Field(description=NAME)


class NamedFunction(RequestModel):
    """A choice of one function, which the completion must call."""

    type: Literal["function"] = Field(description=TYPE)
    function: FunctionReference = Field(description="The function of `tools` that is called.")


class AllowedFunctions(RequestModel):
    """A subset of `tools`, and whether one of them must be called."""

    mode: Literal["auto", "required"] = Field(description="With `required` the completion must call a function.")
    tools: list[NamedFunction] = Field(
        min_length=1, max_length=MAX_TOOLS, description="Only these functions of `tools` may be called."
    )


class AllowedTools(RequestModel):
    """A choice that allows a subset of `tools`."""

    type: Literal["allowed_tools"] = Field(description="This choice is `allowed_tools`.")
    allowed_tools: AllowedFunctions = Field(description="The allowed functions.")


class FunctionsFields(NamedTuple):
    """The names of the fields that offer functions, for messages."""

    functions: str
    choice: str


TOOLS, FUNCTIONS = FunctionsFields("tools", "tool_choice"), FunctionsFields("functions", "function_call")


def tool_choice_tag(value: Any) -> str | None:
    """Return the union tag of a `tool_choice`; None if it is neither a string nor an object."""
    if isinstance(value, dict):
        return ALLOWED if value.get("type") == "allowed_tools" else FUNCTION
    return MODE if isinstance(value, str) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(MODE)]
    | Annotated[NamedFunction, Tag(FUNCTION)]
    | Annotated[AllowedTools, Tag(ALLOWED)],
    union_of("expected 'none', 'auto', 'required', or an object that names functions", tool_choice_tag),
]


FunctionChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag(MODE)] | Annotated[FunctionReference, Tag(FUNCTION)],
    union_of("expected 'none', 'auto', or an object with the name of a function", tool_choice_tag),
]


@frozen
class Offer:
    """The functions that a completion may call.

    functions: all functions of the request; the prompt describes them
    allowed: those of them that the completion may call
    required: True if the completion consists of calls only, at least one
    several: True if it may contain more than one call
    """

    functions: tuple[Function, ...]
    allowed: tuple[Function, ...]
    required: bool
    several: bool

    @classmethod
    def of(
        cls, offered: Sequence[Function], choice: Any, *, several: bool = True, fields: FunctionsFields = TOOLS
    ) -> Self | None:
        """Return the offer of a request; None if the completion is text only.

        Raises PydanticCustomError if functions and choice contradict each other.

        choice: a `ToolChoice`, a `FunctionChoice`, or None
        """
        functions = {function.name: function for function in offered}
        if len(functions) < len(offered):
            names = [function.name for function in offered]
            twice = next(name for name in names if names.count(name) > 1)
            raise conflict(fields.functions, f"two functions have the name {quoted(twice)}")
        chosen_names, required = [*functions], choice == "required"
        if isinstance(choice, NamedFunction | FunctionReference):
            name = choice.name if isinstance(choice, FunctionReference) else choice.function.name
            chosen_names, required, several = [name], True, False
        elif isinstance(choice, AllowedTools):
            chosen_names = [tool.function.name for tool in choice.allowed_tools.tools]
            required = choice.allowed_tools.mode == "required"
        if not functions and choice not in (None, "none", "auto"):
            raise conflict(fields.choice, f"there are no {fields.functions} to choose from")
        for name in chosen_names:
            if name not in functions:
                raise conflict(fields.choice, f"no function of {fields.functions} has the name {quoted(name)}")
        if not functions or choice == "none":
            return None
        allowed = tuple(functions[name] for name in dict.fromkeys(chosen_names))
        return cls(tuple(functions.values()), allowed, required, several)

    def descriptions(self) -> list[dict[str, Any]]:
        """Return the functions in the form that chat templates take."""
        return [
            {
                "type": "function",
                "function": {
                    "name": function.name,
                    "description": function.description or "",
                    "parameters": function.parameters,
                },
            }
            for function in self.functions
        ]

    def schemas(self) -> dict[str, Any]:
        """Return the JSON schemas of arguments by the name of the function."""
        return {function.name: function.parameters for function in self.functions}

    def calls(self, form: CallFormat, thinking: ThinkingFormat | None = None, *, begins: Begin = "content") -> Calls:
        """Return the field `calls` of the message `Generate`, for calls in this format.

        thinking: the format of what may come before text and calls; None if nothing may
        begins: where the completion begins, in a completion with thinking
        """
        functions = tuple(
            CallableFunction(
                name=function.name, arguments=json.dumps(function.parameters), strict=bool(function.strict)
            )
            for function in self.allowed
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
            parameter_before=form.parameter_before,
            parameter_between=form.parameter_between,
            parameter_after=form.parameter_after,
            argument_syntax=form.argument_syntax,
            opening="" if thinking is None else thinking.answer,
            thoughts=() if thinking is None else thinking.thoughts(begins),
            in_thought=thinking is not None and begins == "reasoning",
        )
