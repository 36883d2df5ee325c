"""Word wrap for streamed text: lines are broken at blanks, where a terminal would break them inside a word.

A word is output as it comes. When it passes the right margin, its beginning is erased and the word moves to the next
line. Waiting for the end of a word instead would make a slow model's output stall. Lines of code are left to the
terminal, so that copied code is what the model wrote: lines between fences, and lines that are indented by four columns
and are not list items. This module does no output: it maps text to text with control sequences.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

FENCE = re.compile(r" {0,3}(```|~~~)")
CODE = re.compile(r"(?: {4}|\t)\s*(?![-*+] |\d{1,9}[.)] )\S")
TAB_COLUMNS = 8
MIN_COLUMNS = 10  # narrower, nearly every word is broken anyway
MAX_BEGINNING = 64  # characters of a line that tell whether it is code
KEPT_TOGETHER = "\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}"
JOINER = "\N{ZERO WIDTH JOINER}"
NOT_FIRST = frozenset("、。，．：；？！）］｝」』】》〉…ー々" + ",.:;?!)]}")
"""Characters that must not begin a line, in scripts without blanks."""


class SoftWrap:
    """Word wrap of one answer.

    columns: returns the terminal's width; called at the beginning of each line
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._width = 0  # of the terminal
        self._column = 0  # column of the next character
        self._line = ""  # beginning of the line of text
        self._word: list[str] = []  # characters of the current word, already on the screen
        self._word_columns = 0
        self._blanks = ""  # blanks at the right margin, dropped if a word follows
        self._fenced = False
        self._before = ""  # previous character

    def feed(self, text: str) -> str:
        """Return what to write to the terminal for the next piece of the text."""
        return "".join(map(self._character, text))

    def _character(self, character: str) -> str:
        if character == "\n":
            return self._newline()
        if not self._line:
            self._width = self._columns()
        columns = columns_of(character) if self._before != JOINER else 0
        if character == "\t":
            columns = TAB_COLUMNS - self._column % TAB_COLUMNS
        if len(self._line) < MAX_BEGINNING:
            self._line += character
        output = self._show(character, columns)
        self._before = character
        return output

    def _newline(self) -> str:
        if FENCE.match(self._line):
            self._fenced = not self._fenced
        self._line, self._column, self._blanks, self._before = "", 0, "", ""
        self._end_word()
        return "\n"

    def _end_word(self) -> None:
        self._word.clear()
        self._word_columns = 0

    def _show(self, character: str, columns: int) -> str:
        # The last column stays free: after writing it a terminal leaves the cursor on it, so moving back is one off.
        limit = self._width - 1
        if limit < MIN_COLUMNS or self._is_code():
            self._advance(columns)
            self._end_word()
            return character
        if character.isspace() and character not in KEPT_TOGETHER:
            self._end_word()
            if self._blanks or self._column + columns > limit:
                self._blanks += character
                return ""
            self._column += columns
            return character
        output = ""
        if self._blanks:
            output, self._blanks, self._column = "\n", "", 0
        elif columns == 2 and character not in NOT_FIRST and not _opens(self._before):
            self._end_word()  # a line may be broken before and after a wide character
        elif columns and columns_of(self._before) == 2 and character not in NOT_FIRST:
            self._end_word()
        if self._column + columns > limit and self._word_columns < self._column:
            output += self._move_word()
        self._word.append(character)
        self._word_columns += columns
        self._advance(columns)
        return output + character

    def _move_word(self) -> str:
        """Return what moves the beginning of the current word to the next line."""
        erase = f"\x1b[{self._word_columns}D\x1b[K" if self._word_columns else ""
        self._column = self._word_columns
        return f"{erase}\n{''.join(self._word)}"

    def _advance(self, columns: int) -> None:
        """Move the column as the terminal does, which puts a character that does not fit on the next line."""
        self._column = columns if self._column + columns > self._width else self._column + columns

    def _is_code(self) -> bool:
        return self._fenced or FENCE.match(self._line) is not None or CODE.match(self._line) is not None


def columns_of(character: str) -> int:
    """Return the number of terminal columns of a character: 0, 1 or 2."""
    if not character or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _opens(character: str) -> bool:
    """Return True for an opening bracket, after which a line must not be broken."""
    return bool(character) and unicodedata.category(character) == "Ps"
