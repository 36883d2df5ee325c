"""The bodies of requests: what is understood, and within which bounds. Anything else is refused by its name.

A field that is null counts as not given, as in OpenAI's API. The descriptions are those of the served OpenAPI document.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

MOST_STOPS = 16
MOST_CHOICES = 16
MOST_TOKENS = 1 << 24

StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=MOST_TOKENS)]], Field(min_length=1)]


class Body(BaseModel):
    """What all parts of a request share."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


class StreamOptions(Body):
    """How a stream is sent."""

    include_usage: bool = Field(False, description="send a last chunk with the token counts")


class Sampling(Body):
    """What chat and plain completions share."""

    model: str | None = Field(None, description="name of the model; the one that is served when not given")
    n: int = Field(1, ge=1, le=MOST_CHOICES, description="texts per prompt; with a seed, text i is drawn with seed + i")
    temperature: float = Field(1.0, ge=0, le=100, description="0 takes the most likely token")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the likeliest tokens that make up this probability")
    top_k: int = Field(0, ge=0, lt=1 << 31, description="draw from this many likeliest tokens; 0 from all")
    seed: int | None = Field(
        None, ge=0, lt=1 << 63, description="the same request with the same seed gives the same text"
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)] = Field(
        default=[], description="texts that end the answer; they are not part of it"
    )
    stream: bool = Field(False, description="send the text as it is made, as server-sent events")
    stream_options: StreamOptions | None = Field(None, description="only with `stream`")
    user: str | None = Field(None, description="accepted, and without effect")

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop texts as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionRequest(Sampling):
    """Continue a text."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_CHOICES)]
    ) = Field(description="a text, its token ids, or a list of either")
    max_tokens: int = Field(16, ge=1, le=MOST_TOKENS, description="most tokens to generate")

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt, in order."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast(list[str | list[int]], self.prompt)


class TextPart(Body):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] = Field(description="the text, whole or in parts")
    name: str | None = None

    @property
    def text(self) -> str:
        """The text, parts joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Sampling):
    """Answer a conversation."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS, description="most tokens to generate")
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="the same, by its newer name; without either, up to the context's end"
    )

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens, max_completion_tokens: give one of the two")
        return self
