"""A conversation, and the text by which a package's model is asked to go on with it.

A package with a chat template has it written by that; the template is a stranger's program, so it runs in a helper
process with limits. A package without one holds a base model, which knows no roles: its answers continue what is there.
"""

from __future__ import annotations

import dataclasses
import json
from typing import NamedTuple

from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.request import Generate

MAX_PROMPT_CHARACTERS = 4 << 20  # each of four bytes at most: they fit into a message
NO_ROLES = "this is a base model: without a chat template there is no place for a system message"


class Prompt(NamedTuple):
    """A text, and whether the tokenizer is to put its own tokens round it: a template has written them already."""

    text: str
    frame: bool


class Conversation:
    """What was said, in order. system: what the model is told before; None: nothing. Raises UserError where there is
    no place for it."""

    def __init__(self, package: Package, system: str | None = None) -> None:
        self._package = package
        self._system: str | None = None
        self.turns: list[tuple[str, str]] = []  # ("user" or "assistant", text)
        if system is not None:
            self.instruct(system)

    @property
    def model(self) -> str:
        """The name of the model in the package."""
        return self._package.manifest.name

    @property
    def has_roles(self) -> bool:
        """Whether the package has a chat template; else whatever is said is continued."""
        return self._package.manifest.chat is not None

    @property
    def system(self) -> str | None:
        """What the model is told before the conversation."""
        return self._system

    def instruct(self, system: str) -> None:
        """Tell the model this before the conversation; an empty text: nothing. Raises UserError for a base model."""
        if not self.has_roles:
            raise UserError(NO_ROLES)
        self._system = system or None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as templates know it, and as OpenAI's API has it."""
        before = [] if self._system is None else [("system", self._system)]
        return [{"role": role, "content": text} for role, text in (*before, *self.turns)]

    def prompt(self) -> Prompt:
        """The text that the model is to continue. Raises UserError when the template refuses this, or fails."""
        prompt = Prompt(self._written(), frame=False) if self.has_roles else Prompt(self._continued(), frame=True)
        if len(prompt.text) > MAX_PROMPT_CHARACTERS:
            raise UserError(f"the prompt has more than {MAX_PROMPT_CHARACTERS:,} characters: give a shorter one")
        return prompt

    def _continued(self) -> str:
        """Answers stand right behind what they continue, so that the run finds them among what it has computed."""
        text = ""
        for role, said in self.turns:
            text += "\n" + said if role == "user" and text and not text.endswith("\n") else said
        return text

    def _written(self) -> str:
        # Only packages with a template pay for the import.
        from neuronpipe.services.gateway.templates.single_job import write_prompt
        from neuronpipe.services.gateway.templates.template_jobs import Refused, TemplateError, TemplateSource

        chat, text = self._package.manifest.chat, self._package.chat_template()
        assert chat is not None
        try:
            return write_prompt(TemplateSource(text, chat.begin, chat.end), self.messages)
        except Refused as refused:
            raise UserError(f"the model's chat template refuses this: {refused}") from None
        except TemplateError as error:
            raise UserError(
                f"{self._package.path}: the chat template fails: {error}; `--raw` does without, and "
                "`neuronpipe convert --chat-template FILE` gives the package another one"
            ) from None

    def saved(self, as_json: bool) -> str:
        """The conversation for a file: JSON as in OpenAI's API, or Markdown."""
        if as_json:
            return json.dumps({"messages": self.messages}, indent=1, ensure_ascii=False) + "\n"
        return "\n".join(f"## {message['role']}\n\n{message['content'].strip()}\n" for message in self.messages)


def asked_in_conversation(ask: Generate, package: Package, system: str | None) -> Generate:
    """The request with its prompt as the first message of a conversation, where the package has a chat template; else
    as it stands. Raises UserError."""
    conversation = Conversation(package, system)
    if not conversation.has_roles:
        return ask
    conversation.turns.append(("user", ask.prompt or ""))
    written = conversation.prompt()
    return dataclasses.replace(ask, prompt=written.text, frame=written.frame)
