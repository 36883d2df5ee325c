"""What a person types, as messages: a line, or several. From a terminal with its editing, or from a pipe.

a line that ends in a backslash     goes on in the next one
\"\"\"                                 begins a block, and ends it; whatever stands between is one message
a text that is pasted               is one message, where the terminal marks it (bracketed paste)
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Mapping

from neuronpipe.launch.chat.conversation import MAX_PROMPT_CHARACTERS
from neuronpipe.launch.formats import ONLY_UTF8
from neuronpipe.protocol.errors import UserError

FENCE = '"""'
PROMPT, GOES_ON = "> ", ". "


class Lines:
    """Standard input. words: what Tab completes at the beginning of a line. following: what it completes behind such a
    word."""

    def __init__(self, words: Iterable[str] = (), following: Mapping[str, Iterable[str]] | None = None) -> None:
        self.asks = sys.stdin.isatty()
        self._edits = self.asks and sys.stdout.isatty()
        if self._edits:
            _prepare_editing(tuple(words), following or {})
        elif isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")

    def message(self) -> str | None:
        """What is said next; None at the end. Raises KeyboardInterrupt: what was typed so far is void; UserError for
        what is no text."""
        first = self._line(PROMPT)
        if first is None:
            return None
        lines = [first]
        if first.lstrip().startswith(FENCE):
            lines[0] = first.lstrip().removeprefix(FENCE)
            while not lines[-1].rstrip().endswith(FENCE) and (line := self._line(GOES_ON)) is not None:
                lines.append(line)
            lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
            return _checked("\n".join(lines).strip("\n"))
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            if (line := self._line(GOES_ON)) is None:
                break
            lines.append(line)
        return _checked("\n".join(lines))

    def _line(self, prompt: str) -> str | None:
        """One line without its end, or several that were pasted; None at the end of the input."""
        if self._edits:
            try:
                return input(prompt)
            except EOFError:
                return None
        if self.asks:
            sys.stderr.write(prompt)
            sys.stderr.flush()
        line = sys.stdin.readline(MAX_PROMPT_CHARACTERS + 2)
        return line.removesuffix("\n") if line else None


def _checked(text: str) -> str:
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise UserError(f"a message has more than {MAX_PROMPT_CHARACTERS:,} characters: give a shorter one")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"standard input: {ONLY_UTF8}") from None
    return text


def _prepare_editing(words: tuple[str, ...], following: Mapping[str, Iterable[str]]) -> None:
    """Arrow keys, earlier lines, Tab. What was typed is not kept beyond the chat."""
    try:
        import readline
    except ImportError:  # a Python without it: the terminal's own editing remains
        return

    def completed(begun: str, number: int) -> str | None:
        before = readline.get_line_buffer()[: readline.get_begidx()].split()
        known = words if not before and begun.startswith("/") else following.get(" ".join(before), ())
        found = [f"{word} " for word in known if word.startswith(begun)]
        return found[number] if number < len(found) else None

    readline.set_completer_delims(" \t\n")
    readline.set_completer(completed)
    for setting in ("tab: complete", "set enable-bracketed-paste on", "set bell-style none"):
        readline.parse_and_bind(setting)
