"""The request of `POST /v1/responses`, OpenAI's newer API, and its translation to a chat request.

Nothing is stored: every request contains the whole conversation, and references to earlier responses are refused. Tools
are functions that the client runs; tools that OpenAI runs are refused by their type.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from neuronpipe.protocol.errors import quoted
from neuronpipe.protocol.messages.request import MAX_TOKENS
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
    Lenient,
    RequestModel,
    refuse_with,
    text_or,
    union_of,
    unsupported,
)
from neuronpipe.services.gateway.openai.answer_constraints import SCHEMA, STRICT_IGNORED, JsonFormat, TextFormat
from neuronpipe.services.gateway.openai.request_schema import (
    MAX_LOGPROBS,
    MODEL,
    SEED,
    STREAM,
    USER,
    ChatRequest,
    SamplingOptions,
    sampling_fields,
)
from neuronpipe.services.gateway.openai.responses_items import NOT_STORED, Item, messages_of
from neuronpipe.services.gateway.openai.thinking_options import EFFORT, Effort
from neuronpipe.services.gateway.openai.tools import (
    MAX_CALLS,
    MAX_TOOLS,
    TYPE,
    Function,
    FunctionName,
    tool_choice_tag,
)
from pydantic import Field, Tag, model_validator

LOGPROBS_INCLUDE = "message.output_text.logprobs"  # a value of `include`
NO_TEMPLATE = "prompt templates are not stored on this server"
NOT_LATER = "this server stores no responses that a client could fetch later"
RUN_BY_OPENAI = "OpenAI runs them; use a function, which the client runs"
TOOL_REASONS = {
    "custom": "their input is free text; use a function with a string among its arguments",
    "mcp": "this server does not call others; connect to the MCP server in the client, and use its tools as functions",
    "namespace": "list its functions one by one",
    "tool_search": "list all functions at once",
}
REFUSED = "This field is refused: "


NotStored = Annotated[Any, NULL_ONLY, refuse_with(NOT_STORED)]
NoTemplate = Annotated[Any, NULL_ONLY, refuse_with(NO_TEMPLATE)]
NotLater = Annotated[bool, Field(json_schema_extra={"const": False}), refuse_with(NOT_LATER)]


class FunctionTool(Function):
    """A function that the completion may call."""

    type: Literal["function"] = Field(description=TYPE)

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, value: Any) -> Any:
        return _refuse_other_tools(value)

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}

    def echoed(self) -> dict[str, Any]:
        return {**self.model_dump(), "strict": bool(self.strict)}


class ChosenFunction(RequestModel):
    """A choice of one function of `tools`, which the completion must call."""

    type: Literal["function"] = Field(description=TYPE)
    name: FunctionName = Field(description="The name of a function of `tools`.")

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, value: Any) -> Any:
        return _refuse_other_tools(value)

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}


class AllowedFunctions(RequestModel):
    """A choice that allows a subset of `tools`."""

    type: Literal["allowed_tools"] = Field(description="This choice is `allowed_tools`.")
    mode: Literal["auto", "required"] = Field(description="With `required` the completion must call a function.")
    tools: list[ChosenFunction] = Field(
        min_length=1, max_length=MAX_TOOLS, description="Only these functions of `tools` may be called."
    )

    def as_chat(self) -> dict[str, Any]:
        allowed = {"mode": self.mode, "tools": [tool.as_chat() for tool in self.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}


def _refuse_other_tools(value: Any) -> Any:
    """Refuse a tool of any type but `function`, with the reason for its type."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        reason = TOOL_REASONS.get(kind, RUN_BY_OPENAI)
        raise unsupported(f"tools of type {quoted(kind)} are not supported: {reason}")
    return value


FunctionChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(MODE)]
    | Annotated[ChosenFunction, Tag(FUNCTION)]
    | Annotated[AllowedFunctions, Tag(ALLOWED)],
    union_of("expected 'none', 'auto', 'required', or an object that names functions", tool_choice_tag),
]


class NamedSchema(RequestModel):
    """The completion is JSON that follows a schema."""

    type: Literal["json_schema"] = Field(description="This format is `json_schema`.")
    schema_: dict[str, Any] = Field(alias="schema", description=SCHEMA)
    name: str | None = Field(None, description=IGNORED)
    description: str | None = Field(None, description=IGNORED)
    strict: bool | None = Field(None, description=STRICT_IGNORED)

    def as_chat(self) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"schema": self.schema_}}


class TextOptions(RequestModel):
    """The form of the completion's text."""

    format: Annotated[TextFormat | JsonFormat | NamedSchema, Field(discriminator="type")] | None = Field(
        None, description="The form of the completion: text, a JSON object, or a JSON schema."
    )
    verbosity: str | None = Field(None, description=IGNORED)


class ReasoningOptions(Lenient):
    """Options of reasoning. Fields other than the effort are ignored: reasoning is returned as it is."""

    effort: Effort | None = Field(None, description=EFFORT)


class ResponsesRequest(SamplingOptions):
    """Answer a conversation, with the Responses API."""

    input: Annotated[
        Annotated[str, Tag(TEXT)] | Annotated[list[Item], Field(min_length=1, max_length=4096), Tag(ITEMS)],
        union_of("expected a string or a list of items", text_or(ITEMS)),
    ] = Field(description="The message of the user, or the items of the whole conversation.")
    instructions: str | None = Field(None, description="A system message before all others.")
    model: str | None = Field(None, description=MODEL)
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="The maximum number of tokens to generate. By default as many as fit the context.",
    )
    text: TextOptions | None = Field(None, description="The form of the completion's text.")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Return the log-probability of each token of the text, and list this many of the most likely "
        "tokens beside it.",
    )
    include: list[str] = Field(
        default=[],
        description=f"`{LOGPROBS_INCLUDE}` returns the log-probability of each token; other values have no effect.",
    )
    seed: int | None = Field(None, description=SEED)
    stream: bool = Field(False, description=STREAM)
    tools: list[FunctionTool] = Field(
        default=[], max_length=MAX_TOOLS, description="The functions that the completion may call."
    )
    tool_choice: FunctionChoice = Field(
        "auto",
        description="`none`, `auto`, `required`, one function, or `allowed_tools`: whether the completion calls "
        "functions, and which.",
    )
    parallel_tool_calls: bool = Field(True, description=f"Allow several calls in one completion, up to {MAX_CALLS}.")
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="This field has no effect: a conversation that does not fit the context is refused."
    )
    store: bool | None = Field(
        None, description="This field has no effect: nothing is stored, and the response has `store: false`."
    )
    user: str | None = Field(None, description=USER)
    safety_identifier: str | None = Field(None, description=USER)
    max_tool_calls: int | None = Field(None, description=IGNORED)
    reasoning: ReasoningOptions | None = Field(None, description="How long the model thinks.")
    metadata: dict[str, Any] | None = Field(None, description="An object that the response repeats.")
    service_tier: str | None = Field(None, description=IGNORED)
    prompt_cache_key: str | None = Field(None, description=IGNORED)
    prompt_cache_retention: str | None = Field(None, description=IGNORED)
    prompt_cache_options: dict[str, Any] | None = Field(None, description=IGNORED)
    image: dict[str, Any] | None = Field(None, description=IGNORED)
    stream_options: dict[str, Any] | None = Field(None, description=IGNORED)
    background: NotLater = Field(False, description=f"True is refused: {NOT_LATER}.")
    previous_response_id: NotStored = Field(None, description=f"{REFUSED}{NOT_STORED}.")
    conversation: NotStored = Field(None, description=f"{REFUSED}{NOT_STORED}.")
    prompt: NoTemplate = Field(None, description=f"{REFUSED}{NO_TEMPLATE}.")

    @property
    def logprobs_per_token(self) -> int | None:
        """Return the number of likely tokens to list for each token; None if no log-probabilities are requested."""
        return (self.top_logprobs or 0) if self.top_logprobs is not None or LOGPROBS_INCLUDE in self.include else None

    def as_chat(self) -> ChatRequest:
        """Translate to a chat request. Raises ApiError if that would be refused."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            messages = [{"role": "user", "content": self.input}]
        else:
            messages = messages_of(self.input)
            if not messages:
                raise ApiError(400, "invalid_value", "input: expected a message in it", param="input")
        logprobs: dict[str, Any] = {}
        if self.logprobs_per_token is not None:
            logprobs = {"logprobs": True, "top_logprobs": self.logprobs_per_token}
        same_fields = {name: getattr(self, name) for name in ("model", "seed", "stream", "user", "safety_identifier")}
        return validated(
            {
                "messages": system + messages,
                "max_completion_tokens": self.max_output_tokens,
                "response_format": self._response_format(),
                **sampling_fields(self),
                **logprobs,
                **same_fields,
                "tools": [tool.as_chat() for tool in self.tools],
                "tool_choice": self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.as_chat(),
                "parallel_tool_calls": self.parallel_tool_calls,
                "reasoning_effort": self._effort,
            },
            ChatRequest,
        )

    @property
    def _effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    def _response_format(self) -> dict[str, Any] | None:
        text_format = self.text.format if self.text is not None else None
        if isinstance(text_format, NamedSchema):
            return text_format.as_chat()
        return None if text_format is None else {"type": text_format.type}

    def echoed(self) -> dict[str, Any]:
        """Return the fields of a response that repeat its request."""
        text_format: dict[str, Any] = {"type": "text"}
        if self.text is not None and self.text.format is not None:
            text_format = json.loads(self.text.format.model_dump_json(by_alias=True, exclude_none=True))
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
            "reasoning": {"effort": self._effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": getattr(self, "temperature"),  # noqa: B009
            "text": {"format": text_format},
            "tool_choice": self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.model_dump(),
            "tools": [tool.echoed() for tool in self.tools],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": getattr(self, "top_p"),  # noqa: B009
            "truncation": "disabled",
            "user": self.user,
        }
