"""A client of a live run: what `run`, `ask`, `status` and `perplexity` speak with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from neuronpipe.protocol.channel import Connection, open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.messages.client import Finished, Refused, ScoreFinished, Status
from neuronpipe.protocol.messages.request import AskStatus, Cancel

POLL_MS = 50


class Client:
    """One client connection. `failed` is asked while waiting: the reason when the run is over."""

    def __init__(self, endpoint: str, failed: Callable[[], str | None]) -> None:
        self._context = open_context()
        self._channel = Connection(self._context, CONTROL, endpoint, f"client-{os.urandom(6).hex()}")
        self._failed = failed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.close()

    def send(self, message: Message) -> None:
        """Send one message to the coordinator."""
        self._channel.send(message)

    def replies(self) -> Iterator[Message]:
        """Messages from the coordinator, as they come. Raises UserError when the run ends."""
        while True:
            message = self._channel.receive(POLL_MS)
            if message is not None:
                yield message
            elif (reason := self._failed()) is not None:
                raise UserError(reason)

    def request(self, ask: Any) -> Iterator[Message]:
        """Send a request and yield its answers up to the last. Interrupted, it is cancelled. Raises UserError when it
        is refused."""
        self.send(ask)
        try:
            for message in self.replies():
                if getattr(message, "request", None) != ask.request:
                    continue
                if isinstance(message, Refused):
                    raise UserError(message.message)
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
        raise AssertionError
