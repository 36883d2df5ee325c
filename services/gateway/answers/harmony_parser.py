"""Completions of gpt-oss in OpenAI's harmony format: a sequence of messages, each with a header and a channel.

    <|channel|>analysis<|message|>...<|end|>                                 reasoning
    <|start|>assistant<|channel|>commentary<|message|>...<|end|>             text before a call
    <|start|>assistant<|channel|>final<|message|>...<|return|>               the answer
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The prompt ends with the first `<|start|>assistant`, and the last token is an end token that is no text. The recipient
may also stand before the channel. See the format's description, https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from neuronpipe.services.gateway.answers.json_scan import JsonScan
from neuronpipe.services.gateway.answers.parts import (
    Arguments,
    CallStart,
    Content,
    Part,
    Reasoning,
    StateParser,
    held_back,
)
from neuronpipe.services.gateway.answers.thinking_format import Begin

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
STRAY = (MESSAGE, "<|constrain|>")  # without a meaning in the text of a message
FUNCTIONS = "functions."
MAX_HEADER_CHARACTERS = 1024
SEPARATOR = "\n\n"  # between the texts of several messages

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser(StateParser):
    """A parser of one completion.

    calls: True if functions may be called; otherwise a call counts as reasoning
    """

    def __init__(self, begins: Begin, *, calls: bool) -> None:
        super().__init__(self._header if begins in ("start", "answer") else self._body)
        self._may_call = calls
        self._first = True  # no message has begun yet
        self._count = 0
        self._arguments: JsonScan | None = None
        self._shown = set[type[Part]]()  # the kinds of parts so far
        self._separator = ""  # before the text of a further message of a kind
        self.thinking = begins == "reasoning"

    @property
    def complete(self) -> bool:
        return self._arguments is not None and self._arguments.complete

    def finish(self) -> Iterator[Part]:
        """Yield the text that was held back. A header that is not complete is dropped."""
        if self._state == self._body or self._is_plain():
            yield from self._part(self._buffer)
        self._buffer = ""

    # ---- states: each parses the beginning of the buffer and sets the next state ----------------------------
    def _header(self) -> Iterator[Part]:
        if self._first and not self._is_header():
            self._state = self._body  # a model that does not keep to the format: all of it is text
        elif (at := self._buffer.find(MESSAGE)) >= 0:
            header, self._buffer = self._buffer[:at], self._buffer[at + len(MESSAGE) :]
            yield from self._begin(header)
            self._state = self._body
        elif len(self._buffer) > MAX_HEADER_CHARACTERS:
            self._buffer, self._state = self._buffer if self._is_plain() else "", self._body
        self._first = self._first and self._state == self._header

    def _is_header(self) -> bool:
        text = self._buffer.lstrip()
        return any(text.startswith(mark[: len(text)]) for mark in (CHANNEL, START, MESSAGE, "to=", "assistant"))

    def _is_plain(self) -> bool:
        """Return True if the beginning of the completion is text, although a header might begin with its words."""
        return self._first and "<|" not in self._buffer and not self._buffer.lstrip().startswith("to=")

    def _begin(self, header: str) -> Iterator[Part]:
        """Begin the message after a header."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1] if recipient is not None else ""
        self._arguments, self._separator = None, SEPARATOR
        self.thinking = bool(name) or (channel is not None and channel[1] == "analysis")
        if self._may_call and name.startswith(FUNCTIONS):
            yield CallStart(self._count, name.removeprefix(FUNCTIONS))
            self._count, self._arguments, self.thinking = self._count + 1, JsonScan(), False

    def _body(self) -> Iterator[Part]:
        marks = (*ENDS, START, CHANNEL, *STRAY)
        hits = [(at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
        end = min(hits)[0] if hits else len(self._buffer) - held_back(self._buffer, *marks)
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        yield from self._part(text)
        if hits and (mark := min(hits)[1]) in STRAY:
            self._buffer = self._buffer[len(mark) :]
        elif hits:
            self.thinking, self._state = False, self._between

    def _part(self, text: str) -> Iterator[Part]:
        if self._arguments is not None:
            was_complete = self._arguments.complete
            text = "" if was_complete else text[: self._arguments.push(text)]
            if text:
                yield Arguments(self._count - 1, text)
        elif text:
            kind = Reasoning if self.thinking else Content
            yield kind(self._separator + text if kind in self._shown else text)
            self._shown.add(kind)
            self._separator = ""

    def _between(self) -> Iterator[Part]:
        """Skip the end of a message, up to the next header."""
        marks = (START, CHANNEL)
        hits = [(at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
        if not hits:
            size = held_back(self._buffer, *marks)
            self._buffer = self._buffer[len(self._buffer) - size :]
            return
        at, mark = min(hits)
        self._buffer = self._buffer[at + (len(START) if mark == START else 0) :]
        self._state = self._header
        yield from ()
