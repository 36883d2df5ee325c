"""From a conversation to the text that the model continues.

A package without a chat template holds a base model, which knows no roles: the messages are written one below the
other, and the model goes on where the last one ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from neuronpipe.plans.package.reader import Package
from neuronpipe.services.gateway.problems import Problem
from neuronpipe.services.gateway.requests import ChatMessage
from neuronpipe.services.gateway.templates import Refused, Template, TemplateError


class Prompt(NamedTuple):
    """A text, and whether the tokenizer is to put its own tokens round it: a template has written them already."""

    text: str
    frame: bool


class Chat:
    """How conversations become prompts with one package."""

    def __init__(self, package: Package) -> None:
        self._package = package
        self._template: Template | None = None

    def prompt(self, messages: Sequence[ChatMessage]) -> Prompt:
        """The prompt of a conversation. Raises Problem when the template refuses it, or fails."""
        chat = self._package.manifest.chat
        if chat is None:
            return Prompt("\n".join(message.text for message in messages), frame=True)
        try:
            if self._template is None:
                self._template = Template(self._package.chat_template(), chat.begin, chat.end)
            return Prompt(self._template.render([_as_dict(message) for message in messages]), frame=False)
        except Refused as refused:
            raise Problem(
                400, "messages_refused", f"the model's chat template refuses this: {refused}", param="messages"
            ) from None
        except TemplateError as error:
            message = f"the package's chat template fails: {error}; correct it and convert the model again"
            raise Problem(500, "chat_template_failed", message, kind="server_error") from None


def _as_dict(message: ChatMessage) -> dict[str, str]:
    """What templates know: "developer" is the newer name of "system"."""
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": message.text} | ({"name": message.name} if message.name is not None else {})
