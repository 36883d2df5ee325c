"""Lines of streamed text, broken at blanks where a terminal would break them in the middle of a word.

A word is shown as it comes. When it passes the right margin, the part that is there is wiped and the word begins the
next line. Lines of code stay whole for the terminal to break: those between fences, and those that are indented by four
columns and begin no list item. Nothing here knows a terminal: text goes in, text with control sequences comes out.
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
"""What may not begin a line: it stays with what stands before it, where a text has no blanks."""


class SoftWrap:
    """The text of one answer. columns: tells how wide the terminal is; asked at the beginning of each line."""

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._width = 0  # of the terminal
        self._column = 0  # where the next character goes
        self._line = ""  # how the text's line begins
        self._word: list[str] = []  # what has come of the present word, on the screen already
        self._word_columns = 0
        self._blanks = ""  # came where a line is full: shown only if nothing else follows
        self._fenced = False
        self._before = ""  # the character before

    def feed(self, text: str) -> str:
        """What to write to the terminal for the next piece of the text."""
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
        shown = self._show(character, columns)
        self._before = character
        return shown

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
        # The last column stays free: there a terminal's cursor stands on the character, and moving it back is one off.
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
        shown = ""
        if self._blanks:
            shown, self._blanks, self._column = "\n", "", 0
        elif columns == 2 and character not in NOT_FIRST and not _opens(self._before):
            self._end_word()  # a line may be broken before a wide character, and behind it
        elif columns and columns_of(self._before) == 2 and character not in NOT_FIRST:
            self._end_word()
        if self._column + columns > limit and self._word_columns < self._column:
            shown += self._carried()
        self._word.append(character)
        self._word_columns += columns
        self._advance(columns)
        return shown + character

    def _carried(self) -> str:
        """Take what there is of the word to the next line."""
        wiped = f"\x1b[{self._word_columns}D\x1b[K" if self._word_columns else ""
        self._column = self._word_columns
        return f"{wiped}\n{''.join(self._word)}"

    def _advance(self, columns: int) -> None:
        """As a terminal does that breaks lines itself: a character that does not fit goes to the next line."""
        self._column = columns if self._column + columns > self._width else self._column + columns

    def _is_code(self) -> bool:
        return self._fenced or FENCE.match(self._line) is not None or CODE.match(self._line) is not None


def columns_of(character: str) -> int:
    """How many columns of a terminal a character takes: 0, 1 or 2."""
    if not character or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _opens(character: str) -> bool:
    """True if a line may not be broken behind this character: an opening bracket."""
    return bool(character) and unicodedata.category(character) == "Ps"
