"""The user's input as messages of one or several lines, from a terminal with line editing or from a pipe.

a line that ends in a backslash     continues on the next one
\"\"\"                                 begins and ends a block, which is one message
pasted text                         is one message, if the terminal marks it (bracketed paste)
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Mapping

from neuronpipe.launch.formats import ONLY_UTF8
from neuronpipe.launch.generation.conversation import MAX_PROMPT_CHARACTERS
from neuronpipe.protocol.errors import UserError

FENCE = '"""'
PROMPT, CONTINUATION = "> ", ". "


class Lines:
    """Standard input as messages.

    words: words that Tab completes at the beginning of a line
    following: words that Tab completes after such a word
    is_interactive: whether standard input is a terminal
    """

    def __init__(self, words: Iterable[str] = (), following: Mapping[str, Iterable[str]] | None = None) -> None:
        self.is_interactive = sys.stdin.isatty()
        self._edits = self.is_interactive and sys.stdout.isatty()
        if self._edits:
            _prepare_editing(tuple(words), following or {})
        elif isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")

    def message(self) -> str | None:
        """Return the next message; None at the end of the input.

        Raises KeyboardInterrupt, which discards what was typed so far, and UserError for input that is not UTF-8 or too
        long.
        """
        first = self._line(PROMPT)
        if first is None:
            return None
        lines = [first]
        if first.lstrip().startswith(FENCE):
            lines[0] = first.lstrip().removeprefix(FENCE)
            while not lines[-1].rstrip().endswith(FENCE) and (line := self._line(CONTINUATION)) is not None:
                lines.append(line)
            lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
            return _checked("\n".join(lines).strip("\n"))
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            if (line := self._line(CONTINUATION)) is None:
                break
            lines.append(line)
        return _checked("\n".join(lines))

    def _line(self, prompt: str) -> str | None:
        """Return one line without its end, or several that were pasted; None at the end of the input."""
        if self._edits:
            try:
                return input(prompt)
            except EOFError:
                return None
        if self.is_interactive:
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
    """Enable arrow keys, history and Tab. The history is not saved: it ends with the chat."""
    try:
        import readline
    except ImportError:  # a Python without readline: the terminal's own editing remains
        return

    def complete(prefix: str, index: int) -> str | None:
        before = readline.get_line_buffer()[: readline.get_begidx()].split()
        candidates = words if not before and prefix.startswith("/") else following.get(" ".join(before), ())
        matches = [f"{word} " for word in candidates if word.startswith(prefix)]
        return matches[index] if index < len(matches) else None

    readline.set_completer_delims(" \t\n")
    readline.set_completer(complete)
    for setting in ("tab: complete", "set enable-bracketed-paste on", "set bell-style none"):
        readline.parse_and_bind(setting)
