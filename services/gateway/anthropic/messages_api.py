"""The requests of `POST /v1/messages` and `POST /v1/messages/count_tokens`, and their translation to chat requests.

Tools are functions that the client runs; tools that Anthropic runs or defines are refused by their type.
"""

from __future__ import annotations

from typing import Any, Literal

from neuronpipe.protocol.errors import quoted
from neuronpipe.protocol.messages.request import MAX_TOKENS
from neuronpipe.services.gateway.answers.thinking_format import ON
from neuronpipe.services.gateway.anthropic.content_blocks import (
    MAX_BLOCKS,
    InputMessage,
    TextContent,
    chat_messages,
    text_of,
)
from neuronpipe.services.gateway.http.request_body import validated
from neuronpipe.services.gateway.http.schema_base import (
    IGNORED,
    Lenient,
    RequestModel,
    conflict,
    missing_parameter,
    unsupported,
)
from neuronpipe.services.gateway.openai.chat_messages import is_begun_answer
from neuronpipe.services.gateway.openai.request_schema import (
    MAX_MESSAGES,
    MAX_STOPS,
    MODEL,
    SEED,
    STREAM,
    USER,
    ChatRequest,
    SamplingOptions,
    StopText,
    sampling_fields,
)
from neuronpipe.services.gateway.openai.responses_api import NamedSchema
from neuronpipe.services.gateway.openai.thinking_options import EFFORT, NO_EFFORT, Effort
from neuronpipe.services.gateway.openai.tools import MAX_CALLS, MAX_TOOLS, FunctionName
from pydantic import Field, model_validator

DEFINED_BY_ANTHROPIC = "Anthropic runs or defines them; use a tool with an input_schema, which the client runs"
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class ClientTool(Lenient):
    """A tool that the completion may call, and that the client runs."""

    type: Literal["custom"] = Field("custom", description="The only supported type is `custom`.")
    name: FunctionName = Field(description="The name of the tool.")
    description: str | None = Field(None, description="This text tells the model what the tool does.")
    input_schema: dict[str, Any] = Field(
        description="The JSON schema of the arguments; generated arguments always follow it."
    )
    strict: bool | None = Field(
        None,
        description="If true, a schema with parts that a grammar cannot express is refused; otherwise they are "
        "ignored.",
    )

    @model_validator(mode="before")
    @classmethod
    def _only_custom(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise unsupported(f"tools of type {quoted(kind)} are not supported: {DEFINED_BY_ANTHROPIC}")
        return value

    def as_chat(self) -> dict[str, Any]:
        function = self.model_dump(include={"name", "description", "strict"}, exclude_none=True)
        return {"type": "function", "function": {**function, "parameters": self.input_schema}}


class ChoiceOfTool(RequestModel):
    """The answer to whether the completion calls tools, and which."""

    type: Literal["auto", "any", "tool", "none"] = Field(
        description="With `any` the completion must call a tool, with `tool` that of `name`."
    )
    name: FunctionName | None = Field(None, description="The name of a tool of `tools`; required with `tool`.")
    disable_parallel_tool_use: bool = Field(
        False, description=f"Allow one call in a completion instead of up to {MAX_CALLS}."
    )

    @model_validator(mode="after")
    def _check_name(self) -> ChoiceOfTool:
        if self.type == "tool" and self.name is None:
            raise missing_parameter("name")
        return self

    def as_chat(self) -> str | dict[str, Any]:
        return CHOICES.get(self.type) or {"type": "function", "function": {"name": self.name}}


AUTO = ChoiceOfTool.model_validate({"type": "auto"})


class OutputConfig(RequestModel):
    """The form of the completion's text."""

    format: NamedSchema | None = Field(None, description="The JSON schema that the completion follows.")
    effort: Effort | None = Field(None, description=EFFORT)


class Thinking(Lenient):
    """A switch for thinking before the answer."""

    type: Literal["enabled", "adaptive", "disabled"] = Field(description="With `disabled` the model does not think.")
    budget_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="This field has no effect: models here decide how long they think."
    )


class Metadata(Lenient):
    """Facts about the request. Fields other than the end user are ignored."""

    user_id: str | None = Field(None, description=USER)


class CountTokensRequest(RequestModel):
    """Count the tokens of a conversation's prompt."""

    messages: list[InputMessage] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description=f"The messages of the conversation, oldest first, with at most {MAX_BLOCKS} blocks in all. If the "
        "last is the assistant's, the completion continues it; not allowed where tools may be called.",
    )
    system: TextContent | None = Field(None, description="A system message before all others, a string or in blocks.")
    model: str | None = Field(None, description=MODEL)
    tools: list[ClientTool] = Field(
        default=[], max_length=MAX_TOOLS, description="The tools that the completion may call."
    )
    tool_choice: ChoiceOfTool | None = Field(None, description="Whether the completion calls tools, and which.")
    output_config: OutputConfig | None = Field(None, description="The form of the completion's text.")
    cache_control: dict[str, Any] | None = Field(None, description=IGNORED)
    context_management: dict[str, Any] | None = Field(None, description=IGNORED)
    speed: str | None = Field(None, description=IGNORED)
    thinking: Thinking | None = Field(None, description="Whether the model thinks; by default its template decides.")

    @model_validator(mode="after")
    def _check_size(self) -> CountTokensRequest:
        blocks = sum(1 if isinstance(message.content, str) else len(message.content) for message in self.messages)
        if blocks > MAX_BLOCKS:
            raise conflict("messages", f"{blocks} blocks exceed the limit of a request, {MAX_BLOCKS}")
        return self

    def as_chat(self) -> ChatRequest:
        """Translate to a chat request. Raises ApiError if that would be refused."""
        choice = self.tool_choice or AUTO
        system = [] if self.system is None else [{"role": "system", "content": text_of(self.system)}]
        messages = system + chat_messages(self.messages)
        may_call = bool(self.tools) and choice.type != "none"
        return validated(
            {
                "messages": messages,
                "continue_final_message": is_begun_answer(messages, may_call=may_call),
                "model": self.model,
                "tools": [tool.as_chat() for tool in self.tools],
                "tool_choice": choice.as_chat(),
                "parallel_tool_calls": not choice.disable_parallel_tool_use,
                **self._thinking_fields(),
                **self._generation_fields(),
            },
            ChatRequest,
        )

    def _thinking_fields(self) -> dict[str, Any]:
        """Return the fields of the chat request about thinking."""
        effort = self.output_config.effort if self.output_config is not None else None
        if self.thinking is None:
            return {"reasoning_effort": effort}
        if self.thinking.type == "disabled":
            return {"reasoning_effort": NO_EFFORT}
        return {"reasoning_effort": effort, "chat_template_kwargs": ON}

    def _generation_fields(self) -> dict[str, Any]:
        """Return the further fields of the chat request."""
        return {}


class MessagesRequest(CountTokensRequest, SamplingOptions):
    """Answer a conversation, with Anthropic's Messages API."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS, description="The maximum number of tokens to generate.")
    stop_sequences: list[StopText] = Field(
        default=[],
        max_length=MAX_STOPS,
        description="Strings that end the completion and are not part of it. They have no effect where a completion "
        "consists of tool calls only.",
    )
    stream: bool = Field(False, description=STREAM)
    metadata: Metadata | None = Field(None, description="The end user.")
    seed: int | None = Field(None, description=SEED)
    diagnostics: dict[str, Any] | None = Field(None, description=IGNORED)
    inference_geo: str | None = Field(None, description=IGNORED)
    service_tier: str | None = Field(None, description=IGNORED)

    def _generation_fields(self) -> dict[str, Any]:
        schema = self.output_config.format if self.output_config is not None else None
        return {
            **sampling_fields(self),
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "seed": self.seed,
            "user": self.metadata.user_id if self.metadata is not None else None,
            "response_format": schema.as_chat() if schema is not None else None,
        }
