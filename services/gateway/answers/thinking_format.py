"""The formats of reasoning before an answer, in one table, and their recognition by the tags in a chat template.

A format consists of the strings around reasoning. They also write a prompt that ends inside of an answer: to continue
one, or to have no reasoning in it.
"""

from __future__ import annotations

import re
from typing import Literal

from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.messages.request import Thought
from neuronpipe.services.gateway.templates.call_format import CallFormat

Begin = Literal["start", "reasoning", "answer", "content"]
"""Where a completion begins: where reasoning may begin, or inside of it, because the prompt has begun it; or where the
answer begins, because reasoning is turned off, or inside of its text, because the prompt has begun that."""

OFF = {"enable_thinking": False, "thinking": False}
ON = dict.fromkeys(OFF, True)
"""Variables of chat templates that turn thinking off or on, by the names that templates have for it."""


@frozen(kw_only=True)
class ThinkingFormat:
    """The strings around the reasoning of a model.

    open, close: the strings before and after the reasoning; the names of special tokens stand for these tokens
    answer: the string before the text of the answer
    prefaces: strings before other messages that precede the answer and end like reasoning; they are shown as text
    tokens: names of the tokens that structure a completion; those that are special must be part of its text
    template_has: strings by which a chat template is recognized
    calls: the call format of all these models; None if the chat template decides
    messages: True if the completion is a sequence of messages with headers, as in OpenAI's harmony
    """

    open: str
    close: str
    answer: str = ""
    prefaces: tuple[str, ...] = ()
    tokens: tuple[str, ...]
    template_has: tuple[str, ...]
    calls: CallFormat | None = None
    messages: bool = False

    @property
    def open_tag(self) -> str:
        return self.open.strip()

    @property
    def close_tag(self) -> str:
        return self.close.strip()

    def thoughts(self, begins: Begin) -> tuple[Thought, ...]:
        """Return what may come before the answer, for the message `Calls`."""
        befores = (self.open_tag, *self.prefaces) if begins in ("start", "reasoning") else ()
        return tuple(Thought(before=before, after=self.close_tag) for before in befores)

    @property
    def empty_pattern(self) -> str:
        """A regular expression of reasoning without content, with the white space around it."""
        return rf"\s*{re.escape(self.open_tag)}\s*{re.escape(self.close_tag)}\s*"

    def has_begun(self, prompt: str, reasoning: str) -> bool:
        """Return True if a prompt ends with this reasoning, behind the text that opens reasoning."""
        return prompt.rstrip().removesuffix(reasoning.strip()).rstrip().endswith(self.open_tag)

    def beginning(
        self, prompt: str, *, reasoning: str = "", content: str | None = None, thinks: bool = True, calls: bool = False
    ) -> tuple[str, Begin]:
        """Return what to add to a prompt that a template has written, and where the completion then begins.

        reasoning, content: those of the message that the completion continues; the content is None if there is none
        thinks: False keeps the completion from beginning with reasoning
        calls: True if it may call functions
        """
        is_open = not self.messages and prompt.rstrip().endswith(self.open_tag)  # the template has begun the reasoning
        if content is None and thinks:
            return "", "reasoning" if is_open else "start"
        closing = self.close if is_open else ""
        if content is None:
            begun = self.messages and not calls
            return (closing + self.answer, "content") if begun else (closing, "answer")
        if not reasoning:
            return closing + self.answer + content, "content"
        thought = ("" if is_open else self.open) + reasoning
        return (thought + self.close + self.answer + content, "content") if content else (thought, "reasoning")


def _tags(name: str, before: str = "<{}>", after: str = "</{}>") -> ThinkingFormat:
    tags = before.format(name), after.format(name)
    return ThinkingFormat(open=f"{tags[0]}\n", close=f"\n{tags[1]}\n\n", tokens=tags, template_has=tags)


HARMONY = ThinkingFormat(
    open="<|channel|>analysis<|message|>",
    close="<|end|><|start|>assistant",
    answer="<|channel|>final<|message|>",
    prefaces=("<|channel|>commentary<|message|>",),
    tokens=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    template_has=("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    # The template writes the recipient before the channel, while the model mostly writes it after.
    calls=CallFormat(
        before="<|channel|>commentary to=functions.",
        between=" <|constrain|>json<|message|>",
        next="",
        after="",
        marker="<|channel|>commentary to=functions.",
        by_template=True,
    ),
    messages=True,
)

THINKING_FORMATS = (
    HARMONY,  # gpt-oss
    _tags("think"),  # Qwen3, DeepSeek-R1, GLM-4.5, SmolLM3, Nemotron, Kimi K2, MiniMax M2
    _tags("seed:think"),  # Seed-OSS
    _tags("THINK", "[{}]", "[/{}]"),  # Magistral, Ministral 3
    ThinkingFormat(  # Command A, Command R7B
        open="<|START_THINKING|>",
        close="<|END_THINKING|>",
        tokens=("<|START_THINKING|>", "<|END_THINKING|>"),
        template_has=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    ThinkingFormat(  # Gemma 4
        open="<|channel>thought\n",
        close="\n<channel|>",
        tokens=("<|channel>", "<channel|>"),
        template_has=("<|channel>thought", "<channel|>"),
    ),
)


def thinking_format(template: str) -> ThinkingFormat | None:
    """Return the format of the models that a chat template is for; None if they do not think.

    template: the source of the chat template
    """
    for form in THINKING_FORMATS:
        if all(mark in template for mark in form.template_has):
            return form
    return None
