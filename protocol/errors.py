"""Errors that cross a boundary: to the person at the terminal, or between a process and its peers.

UserError     a mistake that the user can correct; shown as one line, without a traceback
  NotRunning  there is no such run
WireError     bytes that are no legal message; channels count and drop them
  UnknownType a message of a type that the link does not carry
Lost          the peer of a message is gone
Full          the queue to the peer is full, and the link's rule is not to wait any longer
"""

from __future__ import annotations

import reprlib

MAX_QUOTED_CHARACTERS = 80


class UserError(ValueError):
    """A mistake that the user can correct: one line naming file and field, and what to do next.

    Names come from foreign files, so control characters are shown as escapes.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(escaped(message))


def quoted(value: object) -> str:
    """Return a value from a foreign file for an error message: its repr, on one line, truncated."""
    text = value[: MAX_QUOTED_CHARACTERS + 1] if isinstance(value, str) else value
    return _cut(_BOUNDED.repr(text))


def safe_name(name: str) -> str:
    """Return a name from a foreign file (a field, a tensor, a key) for an error message: on one line, truncated."""
    return _cut(escaped(name[: MAX_QUOTED_CHARACTERS + 1]))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_QUOTED_CHARACTERS else text[: MAX_QUOTED_CHARACTERS - 3] + "..."


def escaped(text: str) -> str:
    """Return a foreign text for a terminal: on one line, with escapes for characters that are not printable."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


_BOUNDED = reprlib.Repr()  # limits the work for deep and long values, not only the length of the result
_BOUNDED.maxstring = _BOUNDED.maxlong = _BOUNDED.maxother = 2 * MAX_QUOTED_CHARACTERS
_BOUNDED.maxlist = _BOUNDED.maxtuple = _BOUNDED.maxdict = 8
_BOUNDED.maxlevel = 4


class NotRunning(UserError):
    """No run is live at the given place, or anywhere."""

    exit_code = 3


class WireError(ValueError):
    """Bytes that are no legal message. The error's text names the type and the field."""


class UnknownType(WireError):
    """A message whose type this link does not carry: of a newer minor version, or sent to the wrong link."""


class Lost(RuntimeError):
    """The receiver of a message is gone."""


class Full(RuntimeError):
    """The queue to a peer is full and stayed full for as long as the link lets a sender wait."""
