"""Completions whose reasoning is between tags, such as <think> and </think>. White space around tags is dropped."""

from __future__ import annotations

from collections.abc import Iterator

from neuronpipe.services.gateway.answers.parts import (
    MAX_BLANKS,
    Parser,
    Part,
    Reasoning,
    StateParser,
    held_back,
    text_end,
)
from neuronpipe.services.gateway.answers.thinking_format import Begin, ThinkingFormat


class ThinkParser(StateParser):
    """A parser of one completion, which passes what follows the reasoning to another parser.

    The opening tag counts only at the beginning, so that an answer may mention tags. It may be missing, because the
    prompt has it. A closing tag without reasoning before it is dropped. Reasoning that is never closed stays reasoning.

    following: the parser of the text after the reasoning
    """

    def __init__(self, form: ThinkingFormat, begins: Begin, following: Parser) -> None:
        super().__init__(self._answer if begins == "content" else self._beginning)
        self._open, self._close = form.open_tag, form.close_tag
        self._following = following
        self.thinking = begins == "reasoning"

    @property
    def complete(self) -> bool:
        return self._following.complete

    def finish(self) -> Iterator[Part]:
        text = self._buffer.lstrip() if self._state == self._beginning and self.thinking else self._buffer
        self._buffer = ""
        if self.thinking and (text := text[: text_end(text)]):
            yield Reasoning(text)
        elif not self.thinking and self._state != self._gap:
            yield from self._following.push(text)
        yield from self._following.finish()

    # ---- states: each parses the beginning of the buffer and sets the next state ----------------------------
    def _beginning(self) -> Iterator[Part]:
        """Look for the opening tag, which may also repeat the one in the prompt."""
        text = self._buffer.lstrip()
        if len(self._buffer) - len(text) > MAX_BLANKS:
            self._state = self._margin if self.thinking else self._answer
        elif text.startswith(self._open):
            self._buffer, self._state, self.thinking = text[len(self._open) :], self._margin, True
        elif not self.thinking and text.startswith(self._close):
            self._buffer, self._state = text[len(self._close) :], self._gap
        elif not self._may_be_tag(text):
            self._state = self._margin if self.thinking else self._answer
        yield from ()

    def _may_be_tag(self, text: str) -> bool:
        return self._open.startswith(text) or (not self.thinking and self._close.startswith(text))

    def _margin(self) -> Iterator[Part]:
        """Drop white space before the reasoning."""
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._reasoning
        yield from ()

    def _reasoning(self) -> Iterator[Part]:
        at = self._buffer.find(self._close)
        if at >= 0:
            if text := self._buffer[: text_end(self._buffer[:at])]:
                yield Reasoning(text)
            self._buffer, self._state, self.thinking = self._buffer[at + len(self._close) :], self._gap, False
            return
        text = self._buffer[: len(self._buffer) - held_back(self._buffer, self._close)]
        if text := text[: text_end(text)]:
            yield Reasoning(text)
        self._buffer = self._buffer[len(text) :]

    def _gap(self) -> Iterator[Part]:
        """Drop white space between the reasoning and the answer."""
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._answer
        yield from ()

    def _answer(self) -> Iterator[Part]:
        text, self._buffer = self._buffer, ""
        yield from self._following.push(text)
