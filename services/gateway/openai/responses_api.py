"""The request of `POST /v1/responses`, OpenAI's newer API, and its translation to a chat request.

Nothing is stored: every request contains the whole conversation, and references to earlier responses are refused. Tools
    are functions that the client runs; tools that OpenAI runs are refused by their type.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from neuronpipe.protocol.errors import quoted
from neuronpipe.protocol.messages.request import MAX_TOKENS, SAMPLING_OPTIONS
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.request_body import validated
from neuronpipe.services.gateway.http.schema_base import (
    ALLOWED,
    FUNCTION,
    IGNORED,
    ITEMS,
    MODE,
    NULL_ONLY,
    TEXT,
    RequestModel,
    refuse_with,
    text_or,
    union_of,
    unsupported,
)
from neuronpipe.services.gateway.openai.answer_constraints import JsonFormat, TextFormat
from neuronpipe.services.gateway.openai.request_schema import (
    HTTP_NAMES,
    MAX_LOGPROBS,
    USER,
    ChatRequest,
    SamplingOptions,
)
from neuronpipe.services.gateway.openai.responses_items import NOT_STORED, Item, messages_of
from neuronpipe.services.gateway.openai.tools import MAX_TOOLS, Function, FunctionName, tool_choice_tag
from pydantic import Field, Tag, model_validator

LOGPROBS_INCLUDE = "message.output_text.logprobs"  # of `include`
NO_TEMPLATE = "prompt templates are not stored here"
NOT_LATER = "there is nowhere to fetch a response later"
RUN_BY_OPENAI = "OpenAI runs them; offer a function, which the client runs"
TOOL_REASONS = {
    "custom": "their input is free text; offer a function with a text among its arguments",
    "mcp": "no server is asked from here; connect to it in the client, and offer its tools as functions",
    "namespace": "offer its functions one by one",
    "tool_search": "offer all functions at once",
}


NotStored = Annotated[Any, NULL_ONLY, refuse_with(NOT_STORED)]
NoTemplate = Annotated[Any, NULL_ONLY, refuse_with(NO_TEMPLATE)]
NotLater = Annotated[bool, Field(json_schema_extra={"const": False}), refuse_with(NOT_LATER)]


class FunctionTool(Function):
    """A function that the completion may call."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, value: Any) -> Any:
        return _refusing_hosted(value)

    def as_chat(self) -> dict[str, Any]:
        """Return the tool in the form of a chat request."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}

    def echoed(self) -> dict[str, Any]:
        """Return the tool in the form of a response."""
        return {**self.model_dump(), "strict": bool(self.strict)}


class ChosenFunction(RequestModel):
    """A choice of one function of `tools`, which the completion must call."""

    type: Literal["function"]
    name: FunctionName

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, value: Any) -> Any:
        return _refusing_hosted(value)

    def as_chat(self) -> dict[str, Any]:
        """Return the choice in the form of a chat request."""
        return {"type": "function", "function": {"name": self.name}}


class AllowedFunctions(RequestModel):
    """A choice that allows a subset of `tools`."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenFunction] = Field(min_length=1, max_length=MAX_TOOLS)

    def as_chat(self) -> dict[str, Any]:
        """Return the choice in the form of a chat request."""
        allowed = {"mode": self.mode, "tools": [tool.as_chat() for tool in self.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}


def _refusing_hosted(value: Any) -> Any:
    """Refuse a tool of any type but `function`, with the reason for its type."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        reason = TOOL_REASONS.get(kind, RUN_BY_OPENAI)
        raise unsupported(f"tools of type {quoted(kind)} are not served: {reason}")
    return value


FunctionChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(MODE)]
    | Annotated[ChosenFunction, Tag(FUNCTION)]
    | Annotated[AllowedFunctions, Tag(ALLOWED)],
    union_of("expected 'none', 'auto', 'required', or an object that names functions", tool_choice_tag),
]


class NamedSchema(RequestModel):
    """The completion is JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="a JSON schema; what it cannot express is refused")
    name: str | None = Field(None, description=IGNORED)
    description: str | None = Field(None, description=IGNORED)
    strict: bool | None = Field(None, description="without effect: an answer always follows its schema")


class TextOptions(RequestModel):
    """The form of the completion's text."""

    format: Annotated[TextFormat | JsonFormat | NamedSchema, Field(discriminator="type")] | None = Field(
        None, description="what the answer is to be"
    )
    verbosity: str | None = Field(None, description=IGNORED)


class ResponsesRequest(SamplingOptions):
    """Answer a conversation, with the Responses API."""

    input: Annotated[
        Annotated[str, Tag(TEXT)] | Annotated[list[Item], Field(min_length=1, max_length=4096), Tag(ITEMS)],
        union_of("expected a text, or a list of items", text_or(ITEMS)),
    ] = Field(description="what the user says, or the whole conversation")
    instructions: str | None = Field(None, description="a system message before all others")
    model: str | None = Field(None, description="name of the model; the one that is served when not given")
    max_output_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="most tokens to generate; without it, up to the context's end"
    )
    text: TextOptions | None = Field(None, description="what the answer is to be")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="rate each token, and name this many likely ones beside it"
    )
    include: list[str] = Field(
        default=[], description=f"`{LOGPROBS_INCLUDE}` rates each token; others are without effect"
    )
    seed: int | None = Field(None, description="any integer, modulo 2^63; the same seed gives the same text")
    stream: bool = Field(False, description="send the text as it is made, as server-sent events")
    tools: list[FunctionTool] = Field(
        default=[], max_length=MAX_TOOLS, description="functions that the answer may call"
    )
    tool_choice: FunctionChoice = Field("auto", description="whether it calls any, and which")
    parallel_tool_calls: bool = Field(True, description="whether it may call more than one")
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="without effect: a conversation that does not fit is refused, whatever this says"
    )
    store: bool | None = Field(None, description="without effect: nothing is stored, and the response says so")
    user: str | None = Field(None, description=USER)
    safety_identifier: str | None = Field(None, description=USER)
    max_tool_calls: int | None = Field(None, description=IGNORED)
    reasoning: dict[str, Any] | None = Field(None, description=IGNORED)
    metadata: dict[str, Any] | None = Field(None, description="sent back with the response")
    service_tier: str | None = Field(None, description=IGNORED)
    prompt_cache_key: str | None = Field(None, description=IGNORED)
    prompt_cache_retention: str | None = Field(None, description=IGNORED)
    prompt_cache_options: dict[str, Any] | None = Field(None, description=IGNORED)
    image: dict[str, Any] | None = Field(None, description=IGNORED)
    stream_options: dict[str, Any] | None = Field(None, description=IGNORED)
    background: NotLater = Field(False, description=NOT_LATER)
    previous_response_id: NotStored = Field(None, description=NOT_STORED)
    conversation: NotStored = Field(None, description=NOT_STORED)
    prompt: NoTemplate = Field(None, description=NO_TEMPLATE)

    @property
    def logprobs_per_token(self) -> int | None:
        """Return the number of likely tokens to list for each token; None if no log-probabilities are requested."""
        return (self.top_logprobs or 0) if self.top_logprobs is not None or LOGPROBS_INCLUDE in self.include else None

    def as_chat(self) -> ChatRequest:
        """Translate to a chat request. Raises ApiError if that would be refused."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            said = [{"role": "user", "content": self.input}]
        else:
            said = messages_of(self.input)
            if not said:
                raise ApiError(400, "invalid_value", "input: expected a message in it", param="input")
        options = {HTTP_NAMES.get(option.name, option.name): getattr(self, option.name) for option in SAMPLING_OPTIONS}
        rated = {} if self.logprobs_per_token is None else {"logprobs": True, "top_logprobs": self.logprobs_per_token}
        same = {name: getattr(self, name) for name in ("model", "seed", "stream", "user", "safety_identifier")}
        return validated(
            {
                "messages": system + said,
                "max_completion_tokens": self.max_output_tokens,
                "response_format": self._response_format(),
                **options,
                **rated,
                **same,
                "tools": [tool.as_chat() for tool in self.tools],
                "tool_choice": self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.as_chat(),
                "parallel_tool_calls": self.parallel_tool_calls,
            },
            ChatRequest,
        )

    def _response_format(self) -> dict[str, Any] | None:
        asked = self.text.format if self.text is not None else None
        if isinstance(asked, NamedSchema):
            return {"type": "json_schema", "json_schema": {"schema": asked.schema_}}
        return None if asked is None else {"type": asked.type}

    def echoed(self) -> dict[str, Any]:
        """Return the fields of a response that repeat its request."""
        asked = self.text.format if self.text is not None else None
        shown = (
            {"type": "text"} if asked is None else json.loads(asked.model_dump_json(by_alias=True, exclude_none=True))
        )
        return {
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": getattr(self, "temperature"),  # noqa: B009
            "text": {"format": shown},
            "tool_choice": self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.model_dump(),
            "tools": [tool.echoed() for tool in self.tools],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": getattr(self, "top_p"),  # noqa: B009
            "truncation": "disabled",
            "user": self.user,
        }
