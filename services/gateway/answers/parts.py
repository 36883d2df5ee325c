"""The parts of a completion, in the order in which a parser yields them, and the interface of parsers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

MAX_BLANKS = 64  # white space that is held back because a tag may follow


class Reasoning(NamedTuple):
    """More of what the model thinks before it answers."""

    text: str


class Content(NamedTuple):
    """More text of the completion that is the answer itself."""

    text: str


class CallStart(NamedTuple):
    """The beginning of a call.

    call: its number in the completion, from 0
    """

    call: int
    name: str


class Arguments(NamedTuple):
    """More of a call's arguments, which are a JSON object.

    call: as in `CallStart`
    """

    call: int
    text: str


Part = Reasoning | Content | CallStart | Arguments


class Parser(Protocol):
    """A parser of one completion, which is fed text as it arrives. What it holds back has a bounded size."""

    @property
    def complete(self) -> bool:
        """True if the completion ends with a complete call."""
        ...

    @property
    def thinking(self) -> bool:
        """True while the text that arrives is reasoning."""
        ...

    def push(self, text: str) -> Iterator[Part]:
        """Parse more text; yield the parts that are certain now."""
        ...

    def finish(self) -> Iterator[Part]:
        """Yield what was held back, at the end of the completion."""
        ...


class StateParser:
    """The base of parsers that are state machines: a state parses the beginning of `_buffer`, the text that was not
    parsed yet, and sets the next state.

    state: the first state
    """

    def __init__(self, state: Callable[[], Iterator[Part]]) -> None:
        self._buffer, self._state = "", state

    def push(self, text: str) -> Iterator[Part]:
        """See `Parser`. Text that may begin a tag is held back."""
        self._buffer += text
        while self._buffer:
            before = self._buffer, self._state
            yield from self._state()
            if (self._buffer, self._state) == before:
                return


class TextParser:
    """A parser of a completion that is text and nothing else."""

    complete = False
    thinking = False

    def push(self, text: str) -> Iterator[Part]:
        if text:
            yield Content(text)

    def finish(self) -> Iterator[Part]:
        yield from ()


def held_back(text: str, *marks: str) -> int:
    """Return the length of the longest end of a text that may be the beginning of one of these marks."""
    longest = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:size]):
                longest = size
                break
    return longest


def text_end(text: str) -> int:
    """Return where a text ends before the white space that is held back: as much as is dropped if a tag follows.

    How a text is divided into pieces does not change what is dropped.
    """
    return max(len(text.rstrip()), len(text) - MAX_BLANKS)
