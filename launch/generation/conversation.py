"""A conversation, and the prompt that it makes for a package's model.

A package with a chat template: the template writes the prompt. It is an untrusted program, so it runs in a helper
process with limits. A package without one holds a base model, which knows no roles: the prompt is the messages as text.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, NamedTuple

from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.request import Generate

if TYPE_CHECKING:
    from neuronpipe.services.gateway.answers.answer_format import AnswerFormat

MAX_PROMPT_CHARACTERS = 4 << 20  # each of four bytes at most: they fit into a message
NO_ROLES = "this is a base model: without a chat template there is no place for a system message"


class Prompt(NamedTuple):
    """A prompt.

    frame: whether the tokenizer adds its begin and end tokens, which chat templates write themselves
    form: the format of the completion; None if all of it is text
    """

    text: str
    frame: bool
    form: AnswerFormat | None = None

    def of(self, request: Generate) -> Generate:
        """Return the request with this prompt."""
        shown_tokens = () if self.form is None else self.form.shown_tokens
        return dataclasses.replace(request, prompt=self.text, frame=self.frame, shown_tokens=shown_tokens)


class Conversation:
    """The messages of a conversation, in order. Raises UserError for a system message to a base model."""

    def __init__(self, package: Package, system: str | None = None) -> None:
        self._package = package
        self._system: str | None = None
        self.turns: list[tuple[str, str]] = []  # ("user" or "assistant", text)
        if system is not None:
            self.set_system(system)

    @property
    def model(self) -> str:
        return self._package.manifest.name

    @property
    def has_roles(self) -> bool:
        """True if the package has a chat template; a base model continues the text of the conversation."""
        return self._package.manifest.chat is not None

    @property
    def system(self) -> str | None:
        """The system message; None without one."""
        return self._system

    def set_system(self, system: str) -> None:
        """Set the system message; an empty text removes it. Raises UserError for a base model."""
        if not self.has_roles:
            raise UserError(NO_ROLES)
        self._system = system or None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages as chat templates and OpenAI's API have them."""
        system = [] if self._system is None else [("system", self._system)]
        return [{"role": role, "content": text} for role, text in (*system, *self.turns)]

    def prompt(self, *, may_think: bool = True) -> Prompt:
        """Return the prompt. Raises UserError if it is too long, or the template fails or refuses the conversation.

        may_think: False for an answer that follows a grammar, which reasoning would not
        """
        prompt = self._render(may_think) if self.has_roles else Prompt(self._concatenate(), frame=True)
        if len(prompt.text) > MAX_PROMPT_CHARACTERS:
            raise UserError(f"the prompt has more than {MAX_PROMPT_CHARACTERS:,} characters: give a shorter one")
        return prompt

    def _concatenate(self) -> str:
        """Return the messages of a conversation with a base model as one text."""
        text = ""
        for role, message in self.turns:
            # An answer follows its prompt without a separator, so that the run finds both in its KV cache.
            text += "\n" + message if role == "user" and text and not text.endswith("\n") else message
        return text

    def _render(self, may_think: bool) -> Prompt:
        # Imported here: only packages with a chat template pay for it.
        from neuronpipe.services.gateway.answers.answer_format import AnswerFormat
        from neuronpipe.services.gateway.answers.thinking_format import OFF, thinking_format
        from neuronpipe.services.gateway.templates.single_job import write_prompt
        from neuronpipe.services.gateway.templates.template_jobs import Refused, TemplateError, TemplateSource

        chat, text = self._package.manifest.chat, self._package.chat_template()
        assert chat is not None
        thinking = thinking_format(text)
        variables = OFF if thinking is not None and not may_think else {}
        try:
            prompt = write_prompt(TemplateSource(text, chat.begin, chat.end), self.messages, variables)
        except Refused as refused:
            raise UserError(f"the model's chat template refuses this: {refused}") from None
        except TemplateError as error:
            raise UserError(
                f"{self._package.path}: the chat template fails: {error}; `--raw` does without, and "
                "`neuronpipe convert --chat-template FILE` gives the package another one"
            ) from None
        if thinking is None:
            return Prompt(prompt, frame=False)
        begun, begins = thinking.beginning(prompt, thinks=may_think)
        return Prompt(prompt + begun, frame=False, form=AnswerFormat(thinking=thinking, begins=begins))

    def export(self, as_json: bool) -> str:
        """Return the conversation for a file: JSON as in OpenAI's API, or Markdown."""
        if as_json:
            return json.dumps({"messages": self.messages}, indent=1, ensure_ascii=False) + "\n"
        return "\n".join(f"## {message['role']}\n\n{message['content'].strip()}\n" for message in self.messages)


def with_chat_template(request: Generate, package: Package, system: str | None) -> tuple[Generate, AnswerFormat | None]:
    """Return the request with its prompt as the first message of a conversation, and the format of the completion; the
    request unchanged without a chat template.

    Raises UserError for a system message to a base model, and what `Conversation.prompt` raises.
    """
    conversation = Conversation(package, system)
    if not conversation.has_roles:
        return request, None
    conversation.turns.append(("user", request.prompt or ""))
    prompt = conversation.prompt(may_think=request.grammar is None)
    return prompt.of(request), prompt.form
