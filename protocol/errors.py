"""The errors that cross a boundary: to the person at the terminal, or between a process and its peers.

UserError     a person can put it right; shown as one line, without a traceback
  NotRunning  there is no such run
WireError     bytes that are no legal message; counted and dropped by channels, never fatal
  UnknownType a well-formed message of a type that this link does not carry
Lost          the peer of a message is gone
Full          the peer does not keep up and the link's rule is not to wait any longer
"""

from __future__ import annotations


class UserError(ValueError):
    """What a person caused and can put right: one line naming file and field, and what to do next.

    Names come from files that somebody else wrote, so whatever a terminal would obey is shown as its escape.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))


class NotRunning(UserError):
    """No live run is where the person said, or anywhere."""

    exit_code = 3


class WireError(ValueError):
    """Bytes that do not make a legal message; the text names the type and the field."""


class UnknownType(WireError):
    """A message whose type this link does not carry: of a newer minor version, or sent to the wrong link."""


class Lost(RuntimeError):
    """The peer a message was meant for has vanished."""


class Full(RuntimeError):
    """The queue to a peer is full and stayed so for as long as the link lets a sender wait."""
