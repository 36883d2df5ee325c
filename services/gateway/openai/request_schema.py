"""The request models of chat and plain completions: fields, types, ranges and defaults. Unknown fields are refused.

null means that a field is absent, as in OpenAI's API. Fields without an effect are accepted, because clients send them
to every server. The descriptions appear in /openapi.json and in launch/guide/api.md.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from neuronpipe.protocol.messages.request import MAX_BIAS, MAX_TOKENS, RANGES, SAMPLING_OPTIONS
from neuronpipe.protocol.options import Option
from neuronpipe.services.gateway.http.schema_base import (
    IGNORED,
    TEXT,
    TEXTS,
    TOKEN_LISTS,
    TOKENS,
    RequestModel,
    conflict,
    text_or,
    union_of,
)
from neuronpipe.services.gateway.openai.answer_constraints import Constrained
from neuronpipe.services.gateway.openai.chat_messages import ChatMessage
from neuronpipe.services.gateway.openai.thinking_options import ThinkingOptions
from neuronpipe.services.gateway.openai.tools import (
    FUNCTIONS,
    MAX_CALLS,
    MAX_TOOLS,
    Function,
    FunctionChoice,
    Offer,
    Tool,
    ToolChoice,
)
from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, Tag, create_model, model_validator
from pydantic_core import PydanticCustomError

MAX_STOPS = 16
MAX_CHOICES = 128
MAX_PROMPTS = 128
MAX_SEQUENCES = 1024
MAX_MESSAGES = 4096
MAX_LOGPROBS = int(RANGES["logprobs"].maximum)
MAX_BIASES = 4096
OFF = -1
HTTP_NAMES = {"ignore_end": "ignore_eos"}  # sampling options that other servers call by another name
DEFAULTS = {"temperature": 1.0}  # where OpenAI's default differs from that of `Generate`
MINUS_ONE_IS_OFF = {"top_k"}  # options for which -1 counts as 0, as on other servers
EXPECTED_LIMIT = "expected 1 or more, or -1 for as many as fit the context"
MODEL = "The name of the model, as in /v1/models. The default is the first model."
SEED = (
    "The seed of the random numbers: any integer, modulo 2^63. The same request with the same seed gives the same "
    "completion. By default every request has a random seed."
)
STREAM = "Send the completion in pieces as it is generated, as server-sent events."
USER = "The end user. End users share the run fairly; the field has no other effect, and nothing is stored."


def _to_the_end(tokens: int) -> int:
    return MAX_TOKENS if tokens == OFF else tokens


def _at_least_one(tokens: int) -> int:
    if tokens == 0:
        raise PydanticCustomError("too_few", EXPECTED_LIMIT)
    return tokens


def _prompt_tag(value: Any) -> str | None:
    if not isinstance(value, list):
        return TEXT if isinstance(value, str) else None
    first = value[0] if value else ""
    tags = ((str, TEXTS), (bool, None), (int, TOKENS), (list, TOKEN_LISTS))  # bool first: True is an int
    return next((tag for kind, tag in tags if isinstance(first, kind)), None)


StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Stops = Annotated[
    Annotated[StopText, Tag(TEXT)] | Annotated[list[StopText], Field(max_length=MAX_STOPS), Tag(TEXTS)],
    union_of("expected a string or a list of strings", text_or(TEXTS)),
]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,8}$")]
TokenId = Annotated[int, Field(ge=0, lt=MAX_TOKENS)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[TokenIds, Tag(TOKENS)]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag(TEXTS)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), Tag(TOKEN_LISTS)],
    union_of("expected a string, a list of token ids, or a list of either", _prompt_tag),
]
TokenLimitOrZero = Annotated[int, Field(ge=OFF, le=MAX_TOKENS), AfterValidator(_to_the_end)]
TokenLimit = Annotated[TokenLimitOrZero, AfterValidator(_at_least_one)]


class StreamOptions(RequestModel):
    """The options of a stream. Other fields are ignored: they only affect how text is split into events."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = Field(False, description="Send the token counts in an additional last chunk.")


def option_field(option: Option, alias: str | None, default: Any) -> tuple[Any, Any]:
    """Return the pydantic field of a sampling option: type, default, range and description."""
    meaning, limits = option.meaning, dict[str, Any]()
    if option.range is not None:
        limits = {"gt" if option.range.exclusive else "ge": option.range.minimum, "le": option.range.maximum}
    if option.name in MINUS_ONE_IS_OFF:
        meaning, limits = f"{meaning}; {OFF} counts as 0", limits | {"ge": OFF}
    description = f"{meaning[:1].upper()}{meaning[1:].rstrip('.')}."
    return option.kind, Field(default, alias=alias, description=description, **limits)


if TYPE_CHECKING:  # the fields are created at run time from the declarations of `Generate`
    SamplingOptions = RequestModel
else:
    SamplingOptions = create_model(
        "SamplingOptions",
        __base__=RequestModel,
        **{
            option.name: option_field(option, HTTP_NAMES.get(option.name), DEFAULTS.get(option.name, option.default))
            for option in SAMPLING_OPTIONS
        },
    )


def sampling_fields(request: SamplingOptions) -> dict[str, Any]:
    """Return the sampling options of a request by the names of their fields."""
    return {HTTP_NAMES.get(option.name, option.name): getattr(request, option.name) for option in SAMPLING_OPTIONS}


class GenerationRequest(Constrained, SamplingOptions):
    """The fields that chat and plain completions share."""

    model: str | None = Field(None, description=MODEL)
    n: int = Field(
        1,
        ge=1,
        le=MAX_CHOICES,
        description=f"The number of completions per prompt; completion i uses seed + i. A request has at most "
        f"{MAX_SEQUENCES} completions.",
    )
    logit_bias: dict[TokenKey, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] = Field(
        default={},
        max_length=MAX_BIASES,
        description="A map from token ids to numbers that are added to their logits; -100 bans a token.",
    )
    seed: int | None = Field(None, description=SEED)
    stop: Stops = Field(
        default=[],
        description=f"Strings that end the completion and are not part of it, up to {MAX_STOPS}. They have no effect "
        "where a completion consists of tool calls only.",
    )
    stream: bool = Field(False, description=STREAM)
    stream_options: StreamOptions | None = Field(
        None, description="The options of a stream; allowed only with `stream`."
    )
    user: str | None = Field(None, description=USER)
    safety_identifier: str | None = Field(None, description=USER)
    cache_prompt: bool = Field(
        True,
        description="With false, the whole prompt is computed: nothing of earlier requests is reused, and nothing "
        "goes to the prompt cache on disk. The completion is the same either way.",
    )
    prompt_cache_key: str | None = Field(None, description=IGNORED)
    prompt_cache_retention: str | None = Field(None, description=IGNORED)
    service_tier: str | None = Field(None, description=IGNORED)
    store: bool | None = Field(None, description=IGNORED)
    metadata: dict[str, Any] | None = Field(None, description=IGNORED)

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise conflict("stream_options", "only with stream")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Return the sampling options by their names in the message `Generate`."""
        values = {option.name: getattr(self, option.name) for option in SAMPLING_OPTIONS}
        return values | {name: 0 for name in MINUS_ONE_IS_OFF if values[name] == OFF}

    @property
    def candidates(self) -> int:
        """Return the number of sequences that are generated per prompt."""
        return self.n

    @property
    @abstractmethod
    def logprobs_per_token(self) -> int | None:
        """Return the number of likely tokens to list for each token; None if no log-probabilities are requested."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def end_user(self) -> str | None:
        """Return the end user that the request names; None if it names none."""
        return self.safety_identifier or self.user


class CompletionRequest(GenerationRequest):
    """Continue one or several prompts."""

    prompt: Prompts = Field(description=f"A string, its token ids, or a list of up to {MAX_PROMPTS} of either.")
    max_tokens: TokenLimitOrZero = Field(
        16,
        description="The maximum number of tokens to generate. -1 means as many as fit the context; 0 is allowed with "
        "`echo` and returns the prompts alone.",
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Return the log-probability of each token and list this many of the most likely tokens beside "
        "it. The sampled token is listed too.",
    )
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description="The number of completions to generate per prompt. The `n` with the highest mean log-probability "
        "per token are returned, best first; `usage` counts all. It must not be below `n`, nor above it with `stream`.",
    )
    echo: bool = Field(
        False,
        description="Return each prompt before its completion, with log-probabilities of its tokens if `logprobs` "
        "is set.",
    )
    suffix: str = Field(
        "",
        description="The text after the gap that the completion fills, for models with tokens for that (fill in the "
        "middle). It requires prompts that are strings, and no `echo`.",
    )

    @model_validator(mode="after")
    def _suffix_needs_text_prompts(self) -> CompletionRequest:
        if self.suffix and self.echo:
            raise conflict("suffix", "only without echo")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise conflict("suffix", "only after prompts that are strings")
        return self

    @model_validator(mode="after")
    def _no_tokens_needs_echo(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise conflict("max_tokens", f"{EXPECTED_LIMIT}; 0 only with echo")
        return self

    @model_validator(mode="after")
    def _candidates_are_enough(self) -> CompletionRequest:
        if self.candidates < self.n:
            raise conflict("best_of", f"{self.best_of} is less than n, {self.n}")
        if self.stream and self.candidates > self.n:
            raise conflict("best_of", "more than n cannot be streamed, since the best are known only at the end")
        return self

    @property
    def candidates(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def logprobs_per_token(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast(list[str | list[int]], self.prompt)


class ChatRequest(GenerationRequest, ThinkingOptions):
    """Answer a conversation with a completion."""

    messages: list[ChatMessage] = Field(
        min_length=1, max_length=MAX_MESSAGES, description="The messages of the conversation, oldest first."
    )
    max_tokens: TokenLimit | None = Field(
        None,
        description="The maximum number of tokens to generate. By default, and with -1, as many as fit the context.",
    )
    max_completion_tokens: TokenLimit | None = Field(
        None, description="The newer name of `max_tokens`; if both are set they must be equal."
    )
    logprobs: bool = Field(False, description="Return the log-probability of each token.")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="List this many of the most likely tokens beside each token, and the sampled one; requires "
        "`logprobs`.",
    )
    tools: list[Tool] = Field(
        default=[], max_length=MAX_TOOLS, description="The functions that the completion may call."
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="`none`, `auto` (the default), `required`, one function, or `allowed_tools`: whether the "
        "completion calls functions, and which.",
    )
    parallel_tool_calls: bool = Field(
        True,
        description=f"Allow several calls in one completion, up to {MAX_CALLS}. A model without a chat template, or "
        "whose template writes one call only, makes one.",
    )
    continue_final_message: bool = Field(
        False,
        description="Continue the last message, which must be the assistant's, instead of answering. Not allowed with "
        "`tools`.",
    )
    add_generation_prompt: bool | None = Field(
        None, description="With false, omit what the chat template writes before an answer."
    )
    modalities: list[Literal["text"]] = Field(
        default=["text"], min_length=1, description="The only supported modality is `text`."
    )
    prompt_cache_options: dict[str, Any] | None = Field(None, description=IGNORED)
    functions: list[Function] = Field(
        default=[],
        max_length=MAX_TOOLS,
        description="The older form of `tools`. The completion has at most one call, as `function_call`.",
    )
    function_call: FunctionChoice | None = Field(
        None, description="The older form of `tool_choice`, for `functions`: `none`, `auto` or one function."
    )
    prediction: dict[str, Any] | None = Field(None, description=IGNORED)
    verbosity: str | None = Field(None, description=IGNORED)

    @property
    def logprobs_per_token(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @cached_property
    def offer(self) -> Offer | None:
        """Return the functions that the completion may call; None if it is text only."""
        if self.functions or self.function_call is not None:
            return Offer.of(self.functions, self.function_call, several=False, fields=FUNCTIONS)
        functions = [tool.function for tool in self.tools]
        return Offer.of(functions, self.tool_choice, several=self.parallel_tool_calls)

    @property
    def prompt_messages(self) -> list[ChatMessage]:
        """Return the messages without one that the completion continues."""
        return self.messages[:-1] if self.continue_final_message else self.messages

    @property
    def begun_message(self) -> ChatMessage | None:
        """Return the message that the completion continues; None if it continues none."""
        return self.messages[-1] if self.continue_final_message else None

    @model_validator(mode="after")
    def _check_continuation(self) -> ChatRequest:
        if self.continue_final_message and (len(self.messages) < 2 or self.messages[-1].role != "assistant"):
            raise conflict("continue_final_message", "only when the last of several messages is the assistant's")
        if self.continue_final_message and self.add_generation_prompt:
            raise conflict("add_generation_prompt", "continue_final_message contradicts it; give one of the two")
        if self.continue_final_message and self.offer is not None:
            raise conflict("continue_final_message", "only without tools")
        return self

    @model_validator(mode="after")
    def _check_limits(self) -> ChatRequest:
        if self.tools and self.functions:
            raise conflict("functions", "tools is the newer form of functions; give one of the two")
        _ = self.offer  # raises if tools and tool_choice contradict each other
        if self.top_logprobs is not None and not self.logprobs:
            raise conflict("top_logprobs", "only with logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise conflict("max_completion_tokens", "max_tokens has another value; give one of the two")
        return self
