"""From a conversation to the text that the model continues.

A package without a chat template holds a base model, which knows no roles: the messages are written one below the
other, and the model goes on where the last one ends.

Functions that the answer may call, calls and their results are written by a template that knows them. For all others
they become texts of messages: what can be called is said at the beginning, calls stand in the assistant's messages,
results in the user's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from neuronpipe.plans.package.reader import Package
from neuronpipe.services.gateway.call_format import (
    DEFAULT,
    ONE_CALL,
    RESULT,
    CallFormat,
    Message,
    format_of,
    instruction,
)
from neuronpipe.services.gateway.problems import Problem
from neuronpipe.services.gateway.requests import ChatMessage, ChatRequest
from neuronpipe.services.gateway.templates import Refused, Template, TemplateError
from neuronpipe.services.gateway.tools import Offer

NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


class Prompt(NamedTuple):
    """A text, and whether the tokenizer is to put its own tokens round it: a template has written them already. calls:
    how the answer calls functions."""

    text: str
    frame: bool
    calls: CallFormat


class Chat:
    """How conversations become prompts with one package."""

    def __init__(self, package: Package) -> None:
        self._package = package
        self._template: Template | None = None
        self._format: CallFormat | None = None

    def prompt_of(self, request: ChatRequest) -> Prompt:
        """What a request's conversation becomes, without what there is of the answer. Raises Problem."""
        return self.prompt(
            request.asked,
            request.offer,
            marked=request.constraint is not None,
            settings=request.chat_template_kwargs,
            answers=request.continue_final_message or request.add_generation_prompt is not False,
        )

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        offer: Offer | None = None,
        *,
        marked: bool = False,
        settings: Mapping[str, Any] = NO_SETTINGS,
        answers: bool = True,
    ) -> Prompt:
        """The prompt of a conversation. offer: the functions that the answer may call; marked: they must be told from
        text that is JSON as well; settings: the template's own variables; answers: whether the assistant's turn is
        begun. Raises Problem when the template refuses it, or fails."""
        chat = self._package.manifest.chat
        if chat is None:
            told = _told(messages, offer, ONE_CALL)
            return Prompt("\n".join(message["content"] for message in told), frame=True, calls=ONE_CALL)
        try:
            if self._template is None:
                self._template = Template(self._package.chat_template(), chat.begin, chat.end)
            calling = offer is not None or any(message.tool_calls or message.role == "tool" for message in messages)
            form = self._format_of(self._template) if calling else DEFAULT
            if marked and not form.marker:
                form = DEFAULT
            template = self._template.with_settings(settings, answers=answers)
            return Prompt(_rendered(template, form, messages, offer), frame=False, calls=form)
        except Refused as refused:
            raise Problem(
                400, "messages_refused", f"the model's chat template refuses this: {refused}", param="messages"
            ) from None
        except TemplateError as error:
            message = f"the package's chat template fails: {error}; correct it and convert the model again"
            raise Problem(500, "chat_template_failed", message, kind="server_error") from None

    def _format_of(self, template: Template) -> CallFormat:
        if self._format is None:
            self._format = format_of(template)
        return self._format


def _rendered(template: Template, form: CallFormat, messages: Sequence[ChatMessage], offer: Offer | None) -> str:
    """What the template makes of it. Raises Refused, TemplateError."""
    by_template = form.by_template
    written = [_as_message(one, form, messages) for one in messages] if by_template else _told(messages, offer)
    if by_template and offer is not None:
        return template.render(written, tools=offer.descriptions())
    if offer is None:
        return _without_tools(template, written)
    try:
        text = _without_tools(template, written)
        if json.dumps(offer.functions[0].name) in text:
            return text
    except Refused:
        pass  # it may know no system messages
    return _without_tools(template, _told(messages, offer, by="user"))


def _without_tools(template: Template, messages: Sequence[Message]) -> str:
    """What the template makes of messages alone. Raises Refused, TemplateError."""
    try:
        return template.render(messages)
    except TemplateError:
        return template.render(messages, tools=[])  # it may count on a list


def _as_message(message: ChatMessage, form: CallFormat, messages: Sequence[ChatMessage]) -> Message:
    """What templates know: "developer" is the newer name of "system", and results have the name of their function."""
    if message.tool_calls:
        return form.message(message.text, message.calls)
    role = "system" if message.role == "developer" else message.role
    made: Message = {"role": role, "content": message.text}
    if message.name is not None:
        made["name"] = message.name
    if message.role == "tool" and message.tool_call_id is not None:
        made["tool_call_id"] = form.id_of(message.tool_call_id)
        names = {id_: name for one in messages for id_, name, _ in one.calls}
        if message.tool_call_id in names:
            made.setdefault("name", names[message.tool_call_id])
    return made


def _told(
    messages: Sequence[ChatMessage], offer: Offer | None, form: CallFormat = DEFAULT, by: str = "system"
) -> list[Message]:
    """The conversation in texts alone. by: whose message says what can be called: the first of this role, or a new one
    at the beginning."""
    told: list[Message] = []
    after_result = False
    for message in messages:
        made = _as_message(message, DEFAULT, messages) if not message.tool_calls else {"role": "assistant"}
        if message.tool_calls:
            calls = DEFAULT.written([(name, arguments) for _, name, arguments in message.calls])
            made["content"] = f"{message.text}\n{calls}" if message.text else calls
        result = message.role == "tool"
        if result:
            made = {"role": "user", "content": RESULT.format(message.text)}
        if told and made["role"] == told[-1]["role"] == "user" and (result or after_result):
            told[-1]["content"] += "\n" + made["content"]  # templates want the roles to alternate
        else:
            told.append(made)
        after_result = result
    if offer is not None:
        text = instruction(offer.descriptions(), form)
        place = next((one for one in told if one["role"] == by), None)
        if by == "system" and told[0] is not place:
            place = None
        if place is None:
            told.insert(0, {"role": by, "content": text})
        elif by == "system":
            place["content"] += f"\n\n{text}"
        else:
            place["content"] = f"{text}\n\n{place['content']}"
    return told
