"""The fields of a request that decide whether and how long a model thinks, and the variables of its chat template."""

from __future__ import annotations

from typing import Annotated, Any

from neuronpipe.services.gateway.answers.thinking_format import OFF, ON
from neuronpipe.services.gateway.http.schema_base import RequestModel, conflict
from pydantic import AfterValidator, Field, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_VARIABLES = 64
MAX_VALUE_CHARACTERS = 4096
NO_EFFORT = "none"
EFFORT = (
    "How long the model thinks, such as `low`, `medium` or `high`: the chat template gets it as `reasoning_effort`. "
    "`none` turns thinking off. A completion that follows a grammar never begins with thinking."
)
SET_BY_SERVER = {
    "messages": "messages",
    "tools": "tools",
    "documents": "messages",
    "add_generation_prompt": "add_generation_prompt",
    "continue_final_message": "continue_final_message",
    "bos_token": "no field: it is part of the model",
    "eos_token": "no field: it is part of the model",
}


def _check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    for name in variables:
        if name in SET_BY_SERVER:
            raise conflict(name, f"a chat template gets this from {SET_BY_SERVER[name]}")
    return variables


def _check_variable(value: Any) -> Any:
    is_short = not isinstance(value, str) or len(value) <= MAX_VALUE_CHARACTERS
    if not (is_short and (value is None or isinstance(value, str | int | float))):
        expected = f"a string of up to {MAX_VALUE_CHARACTERS:,} characters, a number, true, false or null"
        raise PydanticCustomError("variable", "expected {expected}", {"expected": expected})
    return value


Effort = Annotated[str, StringConstraints(pattern=r"^[a-z]{1,16}$")]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
Variable = Annotated[
    Any, AfterValidator(_check_variable), WithJsonSchema({"type": ["string", "number", "boolean", "null"]})
]
Variables = Annotated[dict[VariableName, Variable], Field(max_length=MAX_VARIABLES), AfterValidator(_check_variables)]


class ThinkingOptions(RequestModel):
    """The fields of a chat request about thinking."""

    reasoning_effort: Effort | None = Field(None, description=EFFORT)
    chat_template_kwargs: Variables = Field(
        default={},
        description='Variables of the chat template, such as `{"enable_thinking": false}`: strings, numbers, booleans '
        "and null. Names that the server sets, such as `messages` and `tools`, are refused.",
    )

    def template_variables(self, *, may_think: bool) -> dict[str, Any]:
        """Return the variables of the chat template.

        may_think: False turns thinking off, whatever the request says
        """
        effort = self.reasoning_effort
        variables: dict[str, Any] = {}
        if effort is not None:
            variables = OFF if effort == NO_EFFORT else {**ON, "reasoning_effort": effort}
        return {**variables, **self.chat_template_kwargs, **({} if may_think else OFF)}

    @property
    def wants_thinking(self) -> bool:
        """False if the request turns thinking off."""
        chosen = self.chat_template_kwargs.get("enable_thinking")
        return self.reasoning_effort != NO_EFFORT if chosen is None else chosen is not False
