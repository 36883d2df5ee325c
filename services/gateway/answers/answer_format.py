"""The format of a completion, and its parsing: in pieces by a parser, or whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.gateway.answers.call_parser import CallParser
from neuronpipe.services.gateway.answers.harmony_parser import HarmonyParser
from neuronpipe.services.gateway.answers.parts import (
    Arguments,
    CallStart,
    Content,
    Parser,
    Reasoning,
    TextParser,
)
from neuronpipe.services.gateway.answers.think_parser import ThinkParser
from neuronpipe.services.gateway.answers.thinking_format import Begin, ThinkingFormat
from neuronpipe.services.gateway.templates.call_format import CallFormat


@frozen(kw_only=True)
class AnswerFormat:
    """The format of a completion.

    calls: the call format; None if no functions may be called
    text: True if there may be text before the first call
    schemas: the JSON schemas of arguments by the name of the function
    thinking: the format of reasoning; None if the model does not think
    begins: where the completion begins
    """

    calls: CallFormat | None = None
    text: bool = True
    schemas: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    thinking: ThinkingFormat | None = None
    begins: Begin = "start"

    @property
    def is_text(self) -> bool:
        """True if the whole completion is the text of the answer."""
        return self.calls is None and self.thinking is None

    def parser(self) -> Parser:
        """Return a parser of one completion."""
        if self.thinking is not None and self.thinking.messages:
            return HarmonyParser(self.begins, calls=self.calls is not None)
        following: Parser = TextParser()
        if self.calls is not None:
            following = CallParser(self.calls, text=self.text, schemas=self.schemas)
        return following if self.thinking is None else ThinkParser(self.thinking, self.begins, following)


PLAIN = AnswerFormat()


class Call(NamedTuple):
    """A call in a completion.

    arguments: JSON, which is incomplete if the completion was cut off
    """

    name: str
    arguments: str


class Answer(NamedTuple):
    """A parsed completion.

    complete: True if it ends with a complete call
    """

    reasoning: str
    text: str
    calls: list[Call]
    complete: bool


def parse_answer(text: str, form: AnswerFormat) -> Answer:
    """Parse a whole completion."""
    parser = form.parser()
    reasoning, content, calls = list[str](), list[str](), list[tuple[str, list[str]]]()
    for part in (*parser.push(text), *parser.finish()):
        match part:
            case Reasoning():
                reasoning.append(part.text)
            case Content():
                content.append(part.text)
            case CallStart():
                calls.append((part.name, []))
            case Arguments():
                calls[part.call][1].append(part.text)
    parsed_calls = [Call(name, "".join(arguments)) for name, arguments in calls]
    return Answer("".join(reasoning), "".join(content), parsed_calls, bool(calls) and parser.complete)
