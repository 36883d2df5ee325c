"""`POST /v1/responses`: OpenAI's newer way to ask. A request becomes one of chat, and its answer has another form.

Nothing is stored: every request carries the whole conversation, and what refers to an earlier response is refused.
Tools have one place here, `_tools` and the items of a call among `REFUSED_ITEMS`: a chat request takes them from there.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from neuronpipe.protocol.messages.request import MAX_TOKENS, SAMPLING_OPTIONS
from neuronpipe.services.gateway.bases import IGNORED, ITEMS, PARTS, TEXT, Body, kind_or, not_served, one_of
from neuronpipe.services.gateway.bodies import checked
from neuronpipe.services.gateway.constraints import JsonFormat, TextFormat
from neuronpipe.services.gateway.problems import Problem
from neuronpipe.services.gateway.requests import (
    MAX_LOGPROBS,
    NAMES,
    USER,
    ChatRequest,
    SamplingOptions,
)
from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema

RATED = "message.output_text.logprobs"  # of `include`
NO_TEMPLATE = "prompt templates are not stored here"
NO_TOOLS = "responses call no tools here; /v1/chat/completions does"
NOT_LATER = "there is nowhere to fetch a response later"
NOT_STORED = "responses are not stored here; send the whole conversation in input"


def _refusing(said: str) -> AfterValidator:
    """Whatever is given is refused for this reason; what says nothing is not given."""

    def refuse(value: Any) -> Any:
        if value:
            raise not_served(said)
        return value

    return AfterValidator(refuse)


Never = Field(json_schema_extra={"type": "null"})
NoTools = Annotated[list[Any], Field(json_schema_extra={"maxItems": 0}), _refusing(NO_TOOLS)]
NotStored = Annotated[Any, Never, _refusing(NOT_STORED)]
NoTemplate = Annotated[Any, Never, _refusing(NO_TEMPLATE)]
NotLater = Annotated[bool, Field(json_schema_extra={"const": False}), _refusing(NOT_LATER)]


class Lenient(Body):
    """What clients send back as they got it: what is not read is passed over."""

    model_config = ConfigDict(extra="ignore")


class ContentPart(Lenient):
    """A piece of a message's text."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(Lenient):
    """Why an earlier answer was refused; it is passed on as that answer's text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """As any part has it."""
        return self.refusal


Part = Annotated[ContentPart | RefusalPart, Field(discriminator="type")]
Content = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[Part], Tag(PARTS)],
    one_of("expected a text, or a list of parts", kind_or(PARTS)),
]


class MessageItem(Lenient):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content = Field(description="the text, whole or in parts")

    def messages(self) -> list[dict[str, Any]]:
        """As a chat request has it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return [{"role": self.role, "content": text}]


class ReasoningItem(Lenient):
    """What another model thought. It is passed over: no model here was trained to read it."""

    type: Literal["reasoning"]

    def messages(self) -> list[dict[str, Any]]:
        """None."""
        return []


READ_ITEMS = ("message", "reasoning")
REFUSED_ITEMS = {
    "item_reference": NOT_STORED,
    "function_call": NO_TOOLS,
    "function_call_output": NO_TOOLS,
}


def _kind_of_item(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) and (kind in READ_ITEMS or kind in REFUSED_ITEMS) else None


class RefusedItem(Lenient):
    """An item that is understood, and not served."""

    type: str

    def messages(self) -> list[dict[str, Any]]:
        """There are none."""
        return []


def _refuse_item(item: RefusedItem) -> RefusedItem:
    raise not_served(REFUSED_ITEMS[item.type])


Refusable = Annotated[RefusedItem, AfterValidator(_refuse_item)]
Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[SkipJsonSchema[Refusable], Tag("item_reference")]
    | Annotated[SkipJsonSchema[Refusable], Tag("function_call")]
    | Annotated[SkipJsonSchema[Refusable], Tag("function_call_output")],
    Discriminator(
        _kind_of_item,
        custom_error_type="kind",
        custom_error_message="expected an item of type message; images, files and items of tools are not read here",
    ),
]


class NamedSchema(Body):
    """What a JSON schema describes."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="a JSON schema; what it cannot express is refused")
    name: str | None = Field(None, description=IGNORED)
    description: str | None = Field(None, description=IGNORED)
    strict: bool | None = Field(None, description="without effect: an answer always follows its schema")


class TextOptions(Body):
    """How the text is to be."""

    format: Annotated[TextFormat | JsonFormat | NamedSchema, Field(discriminator="type")] | None = Field(
        None, description="what the answer is to be"
    )
    verbosity: str | None = Field(None, description=IGNORED)


class ResponsesRequest(SamplingOptions):
    """Answer a conversation, as the Responses API asks."""

    input: Annotated[
        Annotated[str, Tag(TEXT)] | Annotated[list[Item], Field(min_length=1, max_length=4096), Tag(ITEMS)],
        one_of("expected a text, or a list of items", kind_or(ITEMS)),
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
    include: list[str] = Field(default=[], description=f"`{RATED}` rates each token; others are without effect")
    seed: int | None = Field(None, description="any integer, modulo 2^63; the same seed gives the same text")
    stream: bool = Field(False, description="send the text as it is made, as server-sent events")
    tools: NoTools = Field(default=[], description="only none")
    tool_choice: Literal["none", "auto"] = Field("auto", description="there are no tools to choose")
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="without effect: a conversation that does not fit is refused, whatever this says"
    )
    store: bool | None = Field(None, description="without effect: nothing is stored, and the response says so")
    user: str | None = Field(None, description=USER)
    safety_identifier: str | None = Field(None, description=USER)
    parallel_tool_calls: bool | None = Field(None, description=IGNORED)
    max_tool_calls: int | None = Field(None, description=IGNORED)
    reasoning: dict[str, Any] | None = Field(None, description=IGNORED)
    metadata: dict[str, Any] | None = Field(None, description="sent back with the response")
    service_tier: str | None = Field(None, description=IGNORED)
    prompt_cache_key: str | None = Field(None, description=IGNORED)
    prompt_cache_retention: str | None = Field(None, description=IGNORED)
    prompt_cache_options: dict[str, Any] | None = Field(None, description=IGNORED)
    stream_options: dict[str, Any] | None = Field(None, description=IGNORED)
    background: NotLater = Field(False, description=NOT_LATER)
    previous_response_id: NotStored = Field(None, description=NOT_STORED)
    conversation: NotStored = Field(None, description=NOT_STORED)
    prompt: NoTemplate = Field(None, description=NO_TEMPLATE)

    @property
    def rated(self) -> int | None:
        """How many likely tokens to name beside each token, None to rate none."""
        return (self.top_logprobs or 0) if self.top_logprobs is not None or RATED in self.include else None

    def as_chat(self) -> ChatRequest:
        """The same as a chat request. Raises Problem where that would be refused."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            said = [{"role": "user", "content": self.input}]
        else:
            said = [message for item in self.input for message in item.messages()]
            if not said:
                raise Problem(400, "invalid_value", "input: expected a message in it", param="input")
        options = {NAMES.get(option.name, option.name): getattr(self, option.name) for option in SAMPLING_OPTIONS}
        rated = {} if self.rated is None else {"logprobs": True, "top_logprobs": self.rated}
        same = {name: getattr(self, name) for name in ("model", "seed", "stream", "user", "safety_identifier")}
        return checked(
            {
                "messages": system + said,
                "max_completion_tokens": self.max_output_tokens,
                "response_format": self._response_format(),
                **options,
                **rated,
                **same,
                **self._tools(),
            },
            ChatRequest,
        )

    def _tools(self) -> dict[str, Any]:
        """Of the chat request; none are taken yet."""
        return {}

    def _response_format(self) -> dict[str, Any] | None:
        asked = self.text.format if self.text is not None else None
        if isinstance(asked, NamedSchema):
            return {"type": "json_schema", "json_schema": {"schema": asked.schema_}}
        return None if asked is None else {"type": asked.type}

    def echoed(self) -> dict[str, Any]:
        """What a response says of the request that it answers."""
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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": getattr(self, "temperature"),  # noqa: B009
            "text": {"format": shown},
            "tool_choice": self.tool_choice,
            "tools": [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": getattr(self, "top_p"),  # noqa: B009
            "truncation": "disabled",
            "user": self.user,
        }
