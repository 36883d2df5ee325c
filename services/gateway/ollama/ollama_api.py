"""The requests of Ollama's API, and their translation to chat and plain completions.

`/api/generate` is a conversation of one message, unless the prompt is used as it is (`raw`) or has a gap (`suffix`).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from neuronpipe.services.gateway.answers.thinking_format import ON
from neuronpipe.services.gateway.http.request_body import validated
from neuronpipe.services.gateway.http.schema_base import (
    IGNORED,
    MODE,
    NUMBER,
    SCHEMA,
    SWITCH,
    TEXT,
    Lenient,
    RequestModel,
    conflict,
    refuse_with,
    union_of,
)
from neuronpipe.services.gateway.ollama.generation_options import OllamaOptions
from neuronpipe.services.gateway.ollama.ollama_messages import NO_IMAGES, Images, OllamaMessage, chat_messages
from neuronpipe.services.gateway.openai.chat_messages import is_begun_answer
from neuronpipe.services.gateway.openai.request_schema import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MODEL,
    ChatRequest,
    CompletionRequest,
)
from neuronpipe.services.gateway.openai.thinking_options import NO_EFFORT
from neuronpipe.services.gateway.openai.tools import MAX_TOOLS, Tool
from pydantic import Field, Tag, model_validator

NO_TEMPLATE = "templates of requests are not supported: the package has its own; send a written prompt with raw"
NO_CONTEXT = "token ids of earlier responses are not supported; send the conversation to /api/chat"
DEFAULT_OPTIONS = OllamaOptions.model_validate({})
ZERO = re.compile(r"0+(\.0*)?(ns|us|ms|s|m|h)?")  # a duration as Go writes it


def _kind_of_format(value: Any) -> str | None:
    return SCHEMA if isinstance(value, dict) else MODE if isinstance(value, str) else None


def _kind_of_think(value: Any) -> str | None:
    return SWITCH if isinstance(value, bool) else MODE if isinstance(value, str) else None


def _kind_of_duration(value: Any) -> str | None:
    if isinstance(value, bool):
        return None
    return NUMBER if isinstance(value, int | float) else TEXT if isinstance(value, str) else None


Format = Annotated[
    Annotated[Literal["", "json"], Tag(MODE)] | Annotated[dict[str, Any], Tag(SCHEMA)],
    union_of("expected 'json' or a JSON schema", _kind_of_format),
]
Think = Annotated[
    Annotated[bool, Tag(SWITCH)] | Annotated[Literal["low", "medium", "high", "max"], Tag(MODE)],
    union_of("expected true, false or a level", _kind_of_think),
]
Duration = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[float, Tag(NUMBER)],
    union_of("expected seconds or a string such as '5m'", _kind_of_duration),
]


class OllamaRequest(RequestModel):
    """The fields that `/api/chat` and `/api/generate` share."""

    model: str | None = Field(None, description=f"{MODEL} `:latest` after a name has no effect.")
    stream: bool = Field(True, description="Send the completion in pieces as it is generated, one JSON object a line.")
    format: Format = Field("", description="The form of the completion: `json`, for a JSON object, or a JSON schema.")
    options: OllamaOptions | None = Field(None, description="How the completion is sampled, and where it ends.")
    think: Think | None = Field(
        None,
        description="Whether the model thinks before it answers, or for how long; by default its template decides. A "
        "completion that follows a format never begins with thinking.",
    )
    logprobs: bool = Field(False, description="Return the log-probability of each token.")
    top_logprobs: int = Field(
        0,
        ge=0,
        le=MAX_LOGPROBS,
        description="List this many of the most likely tokens beside each token, and the sampled one; requires "
        "`logprobs`.",
    )
    keep_alive: Duration | None = Field(
        None,
        description="In a request without a prompt, 0 ends the model's run, on a server whose runs end. Otherwise it "
        "has no effect: `serve --keep-alive` decides.",
    )
    truncate: bool | None = Field(None, description=IGNORED)
    shift: bool | None = Field(None, description=IGNORED)

    @model_validator(mode="after")
    def _check_logprobs(self) -> OllamaRequest:
        if self.top_logprobs and not self.logprobs:
            raise conflict("top_logprobs", "only with logprobs")
        return self

    @property
    def unloads(self) -> bool:
        """True if a request without a prompt unloads the model instead of loading it."""
        return bool(ZERO.fullmatch(self.keep_alive)) if isinstance(self.keep_alive, str) else self.keep_alive == 0

    @property
    def _max_tokens(self) -> int:
        return (self.options or DEFAULT_OPTIONS).max_tokens

    def _conversation(self, messages: list[dict[str, Any]], tools: list[Tool]) -> ChatRequest:
        """Return the chat request for these messages. Raises ApiError if that would be refused."""
        return validated(
            {
                "messages": messages,
                "continue_final_message": is_begun_answer(messages, may_call=bool(tools)),
                "tools": [tool.model_dump(exclude_none=True) for tool in tools],
                "max_completion_tokens": self._max_tokens,
                "logprobs": self.logprobs,
                "top_logprobs": self.top_logprobs if self.logprobs else None,
                **self._thinking_fields(),
                **self._shared_fields(),
            },
            ChatRequest,
        )

    def _thinking_fields(self) -> dict[str, Any]:
        """Return the fields of the chat request about thinking."""
        if self.think is True:
            return {"chat_template_kwargs": ON}
        return {"reasoning_effort": NO_EFFORT if self.think is False else self.think}

    def _shared_fields(self) -> dict[str, Any]:
        """Return the fields that chat and plain completions share."""
        response_format: dict[str, Any] | None = None
        if isinstance(self.format, dict):
            response_format = {"type": "json_schema", "json_schema": {"schema": self.format}}
        elif self.format:
            response_format = {"type": "json_object"}
        return {
            "model": self.model,
            "stream": self.stream,
            "response_format": response_format,
            **(self.options or DEFAULT_OPTIONS).as_fields(),
        }


class OllamaChatRequest(OllamaRequest):
    """Answer a conversation, with Ollama's API."""

    messages: list[OllamaMessage] = Field(
        default=[],
        max_length=MAX_MESSAGES,
        description="The messages of the conversation, oldest first. If the last is the assistant's, the completion "
        "continues it; not allowed where tools may be called. Without messages the model is loaded.",
    )
    tools: list[Tool] = Field(
        default=[], max_length=MAX_TOOLS, description="The functions that the completion may call."
    )

    @property
    def loads(self) -> bool:
        """True if the request only loads the model."""
        return not self.messages

    def as_chat(self) -> ChatRequest:
        """Translate to a chat request. Raises ApiError if that would be refused."""
        return self._conversation(list(chat_messages(self.messages)), self.tools)


class OllamaGenerateRequest(OllamaRequest):
    """Answer or continue a prompt, with Ollama's API."""

    prompt: str = Field("", description="The prompt. Without a prompt and a suffix the model is loaded.")
    system: str = Field("", description="A system message before the prompt. Not allowed with `raw` and `suffix`.")
    raw: bool = Field(False, description="With true, continue the prompt as it is, without the chat template.")
    suffix: str = Field(
        "",
        description="The text after the gap that the completion fills, for models with tokens for that. Not allowed "
        "with `raw`.",
    )
    images: Images = Field(default=[], description=NO_IMAGES)
    template: Annotated[str, refuse_with(NO_TEMPLATE)] = Field(
        "", description="Templates are refused: a package has its own. An empty string is accepted."
    )
    context: Annotated[list[int], refuse_with(NO_CONTEXT)] = Field(
        default=[], description="Token ids of earlier responses are refused; an empty list is accepted."
    )

    @model_validator(mode="after")
    def _check_prompt(self) -> OllamaGenerateRequest:
        if self.raw and self.suffix:
            raise conflict("suffix", "only without raw")
        if self.system and self.is_plain:
            raise conflict("system", "only without raw and suffix, since no chat template writes the prompt")
        return self

    @property
    def loads(self) -> bool:
        """True if the request only loads the model."""
        return not self.prompt and not self.suffix

    @property
    def is_plain(self) -> bool:
        """True if no chat template writes the prompt."""
        return self.raw or bool(self.suffix)

    def as_chat(self) -> ChatRequest:
        """Translate to a chat request. Raises ApiError if that would be refused."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self._conversation([*system, {"role": "user", "content": self.prompt}], [])

    def as_completion(self) -> CompletionRequest:
        """Translate to a plain completion. Raises ApiError if that would be refused."""
        return validated(
            {
                "prompt": self.prompt,
                "suffix": self.suffix,
                "max_tokens": self._max_tokens,
                "logprobs": self.top_logprobs if self.logprobs else None,
                **self._shared_fields(),
            },
            CompletionRequest,
        )


class OllamaShowRequest(Lenient):
    """Describe a model, with Ollama's API. Unknown fields are ignored."""

    model: str | None = Field(None, description="The name of the model. The default is the first model.")
    name: str | None = Field(None, description="The older name of `model`.")
