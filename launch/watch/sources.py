"""The sources of snapshots: a run on this machine, or a watch server elsewhere; and what they wait for."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from neuronpipe.protocol.channel import open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.guarded import GuardedSubscriber, Standing
from neuronpipe.protocol.messages.event import Life
from neuronpipe.protocol.messages.snapshot import Snapshot
from neuronpipe.services.monitor.observer import Observer

QUIET_S = 10.0  # a watch server publishes four times a second
PATIENT_S = 1.0
AWAITED: dict[Standing, str] = {
    "alone": "no watch server answers there; is it running, and can it be reached from here?",
    "stranger": "what answers there is not the server of this invitation; was it started anew?",
    "refused": "the watch server refuses this key; ask who started it for the line that was printed",
    "let in": "the watch server answers, but sends nothing",
}


class Source(Protocol):
    """One run that is watched.

    latest: the newest snapshot
    ended: why there will be no more
    """

    name: str
    latest: Snapshot | None
    ended: str | None

    @property
    def has_answer(self) -> bool:
        """True if the newest snapshot contains an answer of the coordinator; without one the run looks as if it had
        just begun."""
        return self.latest is not None and self.latest.uptime_s > 0

    @property
    def awaits(self) -> str:
        """Return what is missing if there was nothing to show for PATIENT_S; else an empty string."""

    def poll(self, fresh: bool) -> list[Message]:
        """Return the events since the last call.

        fresh: take a new snapshot, if this source takes them
        """

    def close(self) -> None:
        """Close the connection to the run; the source cannot be used any more."""


class LocalSource(Source):
    """A run on this machine."""

    def __init__(self, path: Path | None) -> None:
        self._observer = Observer(path)
        self.name = str(self._observer.directory.path)
        self.latest: Snapshot | None = None
        self.ended: str | None = None
        self._opened_at = time.monotonic()

    @property
    def awaits(self) -> str:
        if self.has_answer or time.monotonic() - self._opened_at < PATIENT_S:
            return ""
        return "the coordinator has not answered yet"

    def poll(self, fresh: bool) -> list[Message]:
        try:
            events = self._observer.poll()
            if fresh:
                self.latest = self._observer.snapshot()
        except NotRunning:
            self.ended = "the run has ended"
            return []
        return events

    def close(self) -> None:
        self._observer.close()


class RemoteSource(Source):
    """A run behind a watch server.

    address: the invitation
    """

    def __init__(self, address: str) -> None:
        self._context = open_context()
        try:
            self._subscriber = GuardedSubscriber(self._context, address)
        except UserError:
            self._context.close()
            raise
        self.name = address.partition("?")[0]
        self.latest: Snapshot | None = None
        self.ended: str | None = None
        self._heard_at = time.monotonic()

    @property
    def awaits(self) -> str:
        if time.monotonic() - self._heard_at < PATIENT_S:
            return ""
        return AWAITED[self._subscriber.standing]

    def poll(self, fresh: bool) -> list[Message]:
        events: list[Message] = []
        while (message := self._subscriber.receive()) is not None:
            self._heard_at = time.monotonic()
            if isinstance(message, Snapshot):
                self.latest = message
            elif isinstance(message, Life) and message.role == "run":
                self.ended = message.detail
            else:
                events.append(message)
        standing = self._subscriber.standing
        if standing == "refused":
            self.ended = AWAITED[standing]
        elif time.monotonic() - self._heard_at > QUIET_S:
            self.ended = f"nothing heard for {QUIET_S:.0f} s: {AWAITED[standing]}"
        return events

    def close(self) -> None:
        self._context.close()


def open_source(place: str | None) -> Source:
    """Open the run at a path, or behind an invitation."""
    if place is not None and place.startswith("tcp://"):
        return RemoteSource(place)
    return LocalSource(None if place is None else Path(place))


class WaitReport:
    """Reports on standard error, if there is no screen, what sources wait for; each message once."""

    def __init__(self) -> None:
        self._printed: set[tuple[str, str]] = set()

    def say(self, sources: Iterable[Source]) -> None:
        for source in sources:
            awaits = source.awaits
            if awaits and (source.name, awaits) not in self._printed:
                self._printed.add((source.name, awaits))
                print(f"neuronpipe: {source.name}: {awaits}", file=sys.stderr, flush=True)
