"""The format of a completion, and its parsing: in pieces by a parser, or whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.gateway.answers.call_parser import CallParser
from neuronpipe.services.gateway.answers.harmony_parser import HarmonyParser
from neuronpipe.services.gateway.answers.parts import (
    Arguments,
    CallStart,
    Content,
    Parser,
    Part,
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

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """The names of the special tokens that must be part of the completion's text."""
        return () if self.thinking is None else self.thinking.tokens

    def parser(self) -> Parser:
        """Return a parser of one completion."""
        if self.thinking is not None and self.thinking.messages:
            return HarmonyParser(self.begins, calls=self.calls is not None)
        following: Parser = TextParser()
        if self.calls is not None:
            following = CallParser(self.calls, text=self.text, schemas=self.schemas)
        return following if self.thinking is None else ThinkParser(self.thinking, self.begins, following)


PLAIN = AnswerFormat()
PIECE_CHARACTERS = 256


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


def parts_of(text: str, form: AnswerFormat) -> tuple[list[Part], bool]:
    """Parse a whole completion; return its parts, each in one piece, and True if it ends with a complete call."""
    parser = form.parser()
    pieces: list[tuple[Part, list[str]]] = []
    for part in (*_pushed(text, parser), *parser.finish()):
        if isinstance(part, CallStart):
            pieces.append((part, []))
        elif pieces and type(pieces[-1][0]) is type(part):
            pieces[-1][1].append(part.text)
        else:
            pieces.append((part, [part.text]))
    joined = [part if isinstance(part, CallStart) else part._replace(text="".join(texts)) for part, texts in pieces]
    return joined, parser.complete


def _pushed(text: str, parser: Parser) -> Iterator[Part]:
    """Push a whole completion in pieces: a parser searches what it was given from the start for each tag in it."""
    for at in range(0, len(text), PIECE_CHARACTERS):
        yield from parser.push(text[at : at + PIECE_CHARACTERS])


def parse_answer(text: str, form: AnswerFormat) -> Answer:
    """Parse a whole completion into its reasoning, its text and its calls."""
    parts, complete = parts_of(text, form)
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content = "".join(part.text for part in parts if isinstance(part, Content))
    arguments = {part.call: part.text for part in parts if isinstance(part, Arguments)}
    calls = [Call(part.name, arguments.get(part.call, "")) for part in parts if isinstance(part, CallStart)]
    return Answer(reasoning, content, calls, bool(calls) and complete)
