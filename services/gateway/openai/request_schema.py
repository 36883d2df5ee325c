"""The bodies of requests: what is understood, and within which bounds. Anything else is refused by its name.

A field that is null counts as not given, as in OpenAI's API. What changes nothing here is taken and passed over: a
client sends it to every server alike. The descriptions are those of the served OpenAPI document.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from neuronpipe.protocol.messages.request import MAX_BIAS, MAX_TOKENS, RANGES, SAMPLING_OPTIONS
from neuronpipe.protocol.options import Option
from neuronpipe.services.gateway.http.schema_base import (
    IGNORED,
    NULL_ONLY,
    PARTS,
    TEXT,
    TEXTS,
    TOKEN_LISTS,
    TOKENS,
    RequestModel,
    conflict,
    missing_parameter,
    refuse_with,
    text_or,
    union_of,
)
from neuronpipe.services.gateway.openai.answer_constraints import Constrained
from neuronpipe.services.gateway.openai.tools import MAX_TOOLS, Offer, Tool, ToolCall, ToolChoice
from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, Tag, create_model, model_validator
from pydantic_core import PydanticCustomError

MAX_STOPS = 16
MAX_CHOICES = 128
MAX_PROMPTS = 128
MAX_SEQUENCES = 1024
MAX_LOGPROBS = int(RANGES["logprobs"].most)
MAX_BIASES = 4096
OFF = -1
OLDER_TOOLS = "this is the older form; give tools and tool_choice"
USER = "texts of different users take turns; otherwise without effect"
HTTP_NAMES = {"ignore_end": "ignore_eos"}  # as clients know it from other servers
EXPECTED_LIMIT = "expected 1 or more, or -1 for as many as fit the context"
DEFAULTS = {"temperature": 1.0}  # OpenAI's
MINUS_ONE_IS_OFF = {"top_k"}  # where -1 counts as 0, as on other servers


def _to_the_end(tokens: int) -> int:
    return MAX_TOKENS if tokens == OFF else tokens


def _at_least_one(tokens: int) -> int:
    if tokens == 0:
        raise PydanticCustomError("too_few", EXPECTED_LIMIT)
    return tokens


def _kind_of_prompt(value: Any) -> str | None:
    if not isinstance(value, list):
        return TEXT if isinstance(value, str) else None
    first = value[0] if value else ""
    kinds = ((str, TEXTS), (bool, None), (int, TOKENS), (list, TOKEN_LISTS))
    return next((kind for of, kind in kinds if isinstance(first, of)), None)


OlderTools = Annotated[Any, NULL_ONLY, refuse_with(OLDER_TOOLS)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Stops = Annotated[
    Annotated[StopText, Tag(TEXT)] | Annotated[list[StopText], Field(max_length=MAX_STOPS), Tag(TEXTS)],
    union_of("expected a text, or a list of texts", text_or(TEXTS)),
]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,8}$")]
TokenId = Annotated[int, Field(ge=0, lt=MAX_TOKENS)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[TokenIds, Tag(TOKENS)]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag(TEXTS)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), Tag(TOKEN_LISTS)],
    union_of("expected a text, a list of token ids, or a list of either", _kind_of_prompt),
]
TokenLimitOrZero = Annotated[int, Field(ge=OFF, le=MAX_TOKENS), AfterValidator(_to_the_end)]
TokenLimit = Annotated[TokenLimitOrZero, AfterValidator(_at_least_one)]


class StreamOptions(RequestModel):
    """How a stream is sent. What else it says is passed over."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = Field(False, description="send a last chunk with the token counts")


def _option_field(option: Option) -> tuple[Any, Any]:
    """An option as a field of a body: its type, and its default, range and meaning."""
    meaning, limits = option.meaning, dict[str, Any]()
    if option.range is not None:
        limits = {"gt" if option.range.above else "ge": option.range.least, "le": option.range.most}
    if option.name in MINUS_ONE_IS_OFF:
        meaning, limits = f"{meaning}; {OFF} counts as 0", limits | {"ge": OFF}
    default = DEFAULTS.get(option.name, option.default)
    return option.kind, Field(default, alias=HTTP_NAMES.get(option.name), description=meaning, **limits)


if TYPE_CHECKING:  # which fields these are is only known when this runs
    SamplingOptions = RequestModel
else:
    SamplingOptions = create_model(
        "SamplingOptions", __base__=RequestModel, **{option.name: _option_field(option) for option in SAMPLING_OPTIONS}
    )


class GenerationRequest(Constrained, SamplingOptions):
    """What chat and plain completions share."""

    model: str | None = Field(None, description="name of the model; the one that is served when not given")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="texts per prompt; with a seed, text i uses seed + i")
    logit_bias: dict[TokenKey, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] = Field(
        default={}, max_length=MAX_BIASES, description="token id to what is added to its logit; -100 bans it"
    )
    seed: int | None = Field(
        None, description="any integer, modulo 2^63; the same request with the same seed gives the same text"
    )
    stop: Stops = Field(default=[], description="texts that end the answer; they are not part of it")
    stream: bool = Field(False, description="send the text as it is made, as server-sent events")
    stream_options: StreamOptions | None = Field(None, description="only with `stream`")
    user: str | None = Field(None, description=USER)
    safety_identifier: str | None = Field(None, description=USER)
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
        """The sampling options, as `Generate` has them."""
        values = {option.name: getattr(self, option.name) for option in SAMPLING_OPTIONS}
        return values | {name: 0 for name in MINUS_ONE_IS_OFF if values[name] == OFF}

    @property
    def candidates(self) -> int:
        """Texts made per prompt."""
        return self.n

    @property
    @abstractmethod
    def logprobs_per_token(self) -> int | None:
        """How many likely tokens to name beside each token, None to rate none."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Stop texts as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def end_user(self) -> str | None:
        """For whom it is asked, as far as the client says."""
        return self.safety_identifier or self.user


class CompletionRequest(GenerationRequest):
    """Continue a text."""

    prompt: Prompts = Field(description="a text, its token ids, or a list of either")
    max_tokens: TokenLimitOrZero = Field(
        16, description="most tokens to generate; -1: as many as fit the context; 0: with `echo`, the prompts alone"
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="rate each token, and name this many likely ones beside it, and itself",
    )
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description="texts to make per prompt; the `n` with the highest mean log-probability of a token are sent, best "
        "first; more than `n` not with `stream`",
    )
    echo: bool = Field(False, description="send each prompt before its answer; with `logprobs`, rated too")
    suffix: str = Field("", description="what comes after the gap that the answer fills; for models that fill gaps")

    @model_validator(mode="after")
    def _gaps_are_in_texts(self) -> CompletionRequest:
        if self.suffix and self.echo:
            raise conflict("suffix", "only without echo")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise conflict("suffix", "only after prompts that are texts")
        return self

    @model_validator(mode="after")
    def _nothing_is_asked_for_with_echo_alone(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise conflict("max_tokens", f"{EXPECTED_LIMIT}; 0 only with echo")
        return self

    @model_validator(mode="after")
    def _candidates_are_enough(self) -> CompletionRequest:
        if self.candidates < self.n:
            raise conflict("best_of", f"{self.best_of} is less than n, {self.n}")
        if self.stream and self.candidates > self.n:
            raise conflict("best_of", "more than n cannot be streamed, since the best are known at the end")
        return self

    @property
    def candidates(self) -> int:
        """Texts made per prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def logprobs_per_token(self) -> int | None:
        """How many likely tokens to name beside each token, None to rate none."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt, in order."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast(list[str | list[int]], self.prompt)


class TextPart(RequestModel):
    """A piece of a message's text."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


_CONTENT = {"type": ["string", "array"]}
_NO_CALLS = {"maxItems": 0}
# Which fields go together, for the OpenAPI document; `_whole` checks it.
_MESSAGES = [
    {
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant"]},
            "content": _CONTENT,
            "tool_calls": _NO_CALLS,
        },
        "required": ["content"],
    },
    {
        "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}},
        "required": ["tool_calls"],
    },
    {
        "properties": {
            "role": {"const": "tool"},
            "content": _CONTENT,
            "tool_call_id": {"type": "string"},
            "tool_calls": _NO_CALLS,
        },
        "required": ["content", "tool_call_id"],
    },
]


class ChatMessage(RequestModel):
    """One message of the conversation."""

    model_config = ConfigDict(json_schema_extra={"anyOf": _MESSAGES})  # type: ignore[dict-item]

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], Tag(PARTS)],
            union_of("expected a text, or a list of parts", text_or(PARTS)),
        ]
        | None
    ) = Field(None, description="the text, whole or in parts; only where there are `tool_calls` it need not be given")
    name: str | None = None
    tool_calls: list[ToolCall] = Field(
        default=[], max_length=MAX_TOOLS, description="functions that the assistant called"
    )
    tool_call_id: str | None = Field(None, description="which call this is the result of; only in the role `tool`")
    refusal: str | None = Field(None, description=IGNORED)
    audio: None = None
    function_call: None = None

    @model_validator(mode="before")
    @classmethod
    def _without_notes(cls, value: Any) -> Any:
        """An earlier answer comes back with what the client has noted on it, which is for nobody here."""
        if isinstance(value, dict) and value.get("role") == "assistant":
            return {name: item for name, item in value.items() if name in cls.model_fields}
        return value

    @model_validator(mode="after")
    def _whole(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise missing_parameter("content")
        if self.tool_calls and self.role != "assistant":
            raise conflict("tool_calls", f"the role {self.role} calls no functions")
        if self.role == "tool" and self.tool_call_id is None:
            raise missing_parameter("tool_call_id")
        return self

    @property
    def text(self) -> str:
        """The text, parts joined."""
        if self.content is None:
            return ""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """The functions that it calls: ids, names and arguments."""
        return [(one.id, one.function.name, one.function.arguments) for one in self.tool_calls]


class ChatRequest(GenerationRequest):
    """Answer a conversation."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    max_tokens: TokenLimit | None = Field(
        None, description="most tokens to generate; without it, or with -1, up to the context's end"
    )
    max_completion_tokens: TokenLimit | None = Field(None, description="the same, by its newer name")
    logprobs: bool = Field(False, description="rate each token")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="name this many likely tokens beside each, and itself; only with `logprobs`",
    )
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS, description="functions that the answer may call")
    tool_choice: ToolChoice | None = Field(
        None, description="whether it calls any, and which; without it the model decides"
    )
    parallel_tool_calls: bool = Field(True, description="whether it may call more than one")
    continue_final_message: bool = Field(
        False, description="go on with the last message, which is the assistant's, instead of answering"
    )
    add_generation_prompt: bool | None = Field(
        None, description="false: what the template writes before an answer is left out"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="variables of the chat template's own, such as `enable_thinking`"
    )
    modalities: list[Literal["text"]] = Field(default=["text"], min_length=1, description="answers are texts")
    prompt_cache_options: dict[str, Any] | None = Field(None, description=IGNORED)
    functions: OlderTools = Field(None, description=OLDER_TOOLS)
    function_call: OlderTools = Field(None, description=OLDER_TOOLS)
    reasoning_effort: str | None = Field(None, description=IGNORED)
    verbosity: str | None = Field(None, description=IGNORED)

    @property
    def logprobs_per_token(self) -> int | None:
        """How many likely tokens to name beside each token, None to rate none."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @cached_property
    def offer(self) -> Offer | None:
        """The functions that the answer may call; None: it is a text."""
        return Offer.of(self.tools, self.tool_choice, several=self.parallel_tool_calls)

    @property
    def prompt_messages(self) -> list[ChatMessage]:
        """The messages that are answered."""
        return self.messages[:-1] if self.continue_final_message else self.messages

    @property
    def answer_prefix(self) -> str:
        """What there is of the answer."""
        return self.messages[-1].text if self.continue_final_message else ""

    @model_validator(mode="after")
    def _answer_to_continue(self) -> ChatRequest:
        if self.continue_final_message and (len(self.messages) < 2 or self.messages[-1].role != "assistant"):
            raise conflict("continue_final_message", "only when the last of several messages is the assistant's")
        if self.continue_final_message and self.add_generation_prompt:
            raise conflict("add_generation_prompt", "continue_final_message says otherwise; give one of the two")
        if self.continue_final_message and self.offer is not None:
            raise conflict("continue_final_message", "only without tools")
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        _ = self.offer
        if self.top_logprobs is not None and not self.logprobs:
            raise conflict("top_logprobs", "only with logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise conflict("max_completion_tokens", "max_tokens says otherwise; give one of the two")
        return self
