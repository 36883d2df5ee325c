"""The reasoning and the text of an answer while it is generated, and what of it is shown.

On a terminal reasoning is dimmed. Into a pipe goes the text alone, so that the next program reads only the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuronpipe.launch.generation.terminal import AnswerOutput

if TYPE_CHECKING:
    from neuronpipe.services.gateway.answers.answer_format import AnswerFormat
    from neuronpipe.services.gateway.answers.parts import Parser, Part


class ShownAnswer:
    """The parts of one answer so far.

    form: the format of the completion; None if all of it is text
    output: where the parts are shown; None if nowhere
    """

    def __init__(self, form: AnswerFormat | None, output: AnswerOutput | None, *, hides_thinking: bool = False) -> None:
        self._output = output
        self._shows_thinking = output is not None and output.is_terminal and not hides_thinking
        self._parser: Parser | None = None if form is None else form.parser()
        self.thinks = form is not None and form.thinking is not None
        self.reasoning = self.text = ""
        self._dimmed = False

    def add(self, text: str) -> None:
        """Add the text of one more token."""
        if self._parser is None:
            self._add_text(text)
            return
        for part in self._parser.push(text):
            self._add(part)

    def finish(self) -> None:
        """Add what was held back, at the end of the answer or where it was stopped."""
        for part in () if self._parser is None else self._parser.finish():
            self._add(part)

    @property
    def shows_anything(self) -> bool:
        """True if the cursor may be behind a part of the answer."""
        return bool(self.text) or self._dimmed

    def _add(self, part: Part) -> None:
        from neuronpipe.services.gateway.answers.parts import Content, Reasoning

        if isinstance(part, Content):
            self._add_text(part.text)
        elif isinstance(part, Reasoning):
            self.reasoning += part.text
            if self._shows_thinking and self._output is not None:
                self._output.write_dimmed(part.text)
                self._dimmed = True

    def _add_text(self, text: str) -> None:
        if self._dimmed and text and not self.text and self._output is not None:
            self._output.write_trusted("\n\n")
        self.text += text
        if self._output is not None:
            self._output.write(text)
