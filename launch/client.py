"""A client of a live run: what `run`, `ask`, `status` and `perplexity` speak with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from neuronpipe.protocol.channel import Connection, open_context
from neuronpipe.protocol.closing import Closing
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.messages.client import Accepted, Finished, Refused, ScoreFinished, Status
from neuronpipe.protocol.messages.request import AskStatus, Cancel, Generate, Score

POLL_MS = 50
QUIET_MS = 500


class Client(Closing):
    """One client connection. `failed` is asked while waiting: the reason when the run is over."""

    def __init__(self, endpoint: str, failed: Callable[[], str | None]) -> None:
        self._context = open_context()
        self._channel = Connection(self._context, CONTROL, endpoint, f"client-{os.urandom(6).hex()}")
        self._failed = failed

    def close(self) -> None:
        """Close the connection."""
        self._context.close()

    def send(self, message: Message) -> None:
        """Send one message to the coordinator."""
        self._channel.send(message)

    def replies(self) -> Iterator[Message | None]:
        """Messages from the coordinator, as they come; None when there was none for a while. Raises UserError when
        the run ends."""
        quiet_ms = 0
        while True:
            message = self._channel.receive(POLL_MS)
            if message is not None:
                quiet_ms = 0
                yield message
                continue
            if (reason := self._failed()) is not None:
                raise UserError(reason)
            quiet_ms += POLL_MS
            if quiet_ms >= QUIET_MS:
                quiet_ms = 0
                yield None

    def request(
        self, ask: Generate | Score, quiet: Callable[[Status | None], None] = lambda status: None
    ) -> Iterator[Message]:
        """Send a request and yield its answers up to the last. Interrupted, it is cancelled. quiet: called again and
        again while nothing comes, with how the run is, once that is known. Raises UserError when it is refused.

        A coordinator that was restarted does not know the request: a text is asked for again (the same tokens come
        again, `Token.index` tells which), a score has to be started again by the person. Asking twice is harmless.
        """
        self.send(AskStatus())  # so that it is known which coordinator accepts: its process answers in this order
        self.send(ask)
        seen: int | None = None
        home: int | None = None
        asked = False
        status: Status | None = None
        answers = 0  # the first one was on its way before the request: it says nothing about it
        try:
            for message in self.replies():
                if message is None:
                    quiet(status)
                    asked = True
                    self.send(AskStatus())
                elif isinstance(message, Status):
                    status = message
                    seen = next(process.pid for process in message.processes if process.role == "coordinator")
                    answers += 1
                    if asked and answers > 1 and seen != home:
                        if home is not None and isinstance(ask, Score):
                            raise UserError("the coordinator was restarted and has forgotten this text; start again")
                        home = None
                        self.send(ask)
                    asked = False
                if getattr(message, "request", None) != ask.request:
                    continue
                assert message is not None
                if isinstance(message, Refused):
                    if message.code == "draining":
                        continue  # why the run ends is known when it has ended
                    raise UserError(message.message)
                if isinstance(message, Accepted):
                    home = seen
                yield message
                if isinstance(message, Finished | ScoreFinished):
                    return
        except KeyboardInterrupt:
            self.send(Cancel(request=ask.request))
            raise

    def status(self) -> Status:
        """How the run is."""
        self.send(AskStatus())
        for message in self.replies():
            if isinstance(message, Status):
                return message
            if message is None:
                self.send(AskStatus())  # a coordinator that was restarted has lost the question
        raise AssertionError
