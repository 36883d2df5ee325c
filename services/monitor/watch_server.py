"""Watching from another machine: a server that publishes events and snapshots of one run over TCP.

Only clients with the key receive them. The link carries nothing towards the run: watchers can neither send nor cancel
requests. Snapshots are taken only while someone watches.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from neuronpipe.protocol.channel import open_context
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.guarded import GuardedPublisher, WatchKeys, endpoint
from neuronpipe.protocol.messages.event import Life, StepEvent
from neuronpipe.services.monitor.observer import Observer
from neuronpipe.services.runtime.reachable_addresses import reached_at

POLL_S = 0.05
SNAPSHOT_EVERY_S = 0.25
ENDED = Life(role="run", index=0, state="stopped", detail="the run has ended")
"""The event that is sent last, when the run has ended."""


class WatchServer:
    """A server that listens for watchers from its creation on.

    Its keys are in the run directory until `close`. After a kill, the next server on the same port uses them, so that
    the invitation stays valid.

    port: 0 for any free port, with new keys
    """

    def __init__(self, observer: Observer, host: str, port: int) -> None:
        self._observer, self._host = observer, host
        self._context = open_context()
        keys = (_read_keys(_key_file(observer, port)) if port else None) or WatchKeys.fresh()
        self._publisher = GuardedPublisher(self._context, host, port, keys)
        self._file = _key_file(observer, self._publisher.port)
        _write_keys(self._file, keys)
        self._invitation = keys.invitation

    @property
    def address(self) -> str:
        """Return the invitation for watchers: address and key."""
        return f"{endpoint(reached_at(self._host)[0], self._publisher.port)}?key={self._invitation}"

    def serve(self, stopped: Callable[[], bool]) -> None:
        """Publish until `stopped` returns True or the run ends."""
        due_at = 0.0
        try:
            while not stopped():
                time.sleep(POLL_S)
                events = self._observer.poll()
                if not self._publisher.watched:
                    continue
                for event in events:
                    if isinstance(event, StepEvent | Life):
                        self._publisher.send(event)
                if time.monotonic() >= due_at:
                    self._publisher.send(self._observer.snapshot())
                    due_at = time.monotonic() + SNAPSHOT_EVERY_S
        except NotRunning:
            self._publisher.send(ENDED)

    def close(self) -> None:
        """Stop listening; the invitation becomes invalid."""
        self._file.unlink(missing_ok=True)
        self._publisher.close()
        self._context.close()


def _key_file(observer: Observer, port: int) -> Path:
    return observer.directory.path / f"watch-{port}.json"


def _write_keys(file: Path, keys: WatchKeys) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        json.dump([key.decode() for key in (keys.public, keys.secret, keys.guest_public, keys.guest_secret)], stream)


def _read_keys(file: Path) -> WatchKeys | None:
    try:
        return WatchKeys(*(key.encode() for key in json.loads(file.read_text(encoding="utf-8"))))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError):
        raise UserError(f"{file}: no keys; remove it, or name another --port") from None
