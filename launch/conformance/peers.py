"""Faulty peers around the tested process, and a coordinator that records what it receives and sends.

Witness     a coordinator that records the messages from and to its services
Garbling    sends invalid messages before every message, and adds an unknown field to it
Slow        starts late, and pauses before every message
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from neuronpipe.protocol.channel import Channel
from neuronpipe.protocol.codec import MAGIC, Message, encode
from neuronpipe.protocol.errors import Full, Lost
from neuronpipe.protocol.messages.lifecycle import Beat, Drained, Hello, Ready
from neuronpipe.services.cache.cache_service import CacheService
from neuronpipe.services.coordinator.coordinator_service import CoordinatorService
from neuronpipe.services.loader.loader_service import LoaderService
from neuronpipe.services.runtime.job import Job

RECORD = "NEURONPIPE_CONFORMANCE_RECORD"
LATE_S, PAUSE_S = 1.2, 0.002
GARBAGE = (
    (b"",),
    (MAGIC,),
    (MAGIC, b""),
    (MAGIC, b"\xc1"),  # a byte that msgpack never uses
    (MAGIC, b"\x80", b"\x80"),
    (MAGIC, b"\x81\xa4type\xa8Nonsense"),
    (MAGIC, b"\x81\xa4type\x07"),
    (MAGIC, b"\x82\xa4type\xa4Step\xa4step\xa5seven"),
    (MAGIC, b"\x82\xa4type\xa5Grant\xaageneration\xcf\xff\xff\xff\xff\xff\xff\xff\xff"),
    (MAGIC, b"\xdf\xff\xff\xff\xff"),  # a map with more entries than any message has
    (MAGIC, b"\x81" * 200),
    (b"NP9", b"\x81\xa4type\xa5Drain"),  # of another major version
    (b"XX1", b"\x81\xa4type\xa5Drain"),
)
_UNKNOWN_FIELD = b"\xa8unheard!\x93\x01\x02\xa1x"


def with_unknown_field(message: Message) -> bytes:
    """Encode a message with a field that no version has. A message of 15 or more fields stays as it is."""
    packed = encode(message)
    if 0x80 <= packed[0] < 0x8F:
        return bytes([packed[0] + 1]) + packed[1:] + _UNKNOWN_FIELD
    return packed


class _Garbled:
    """A channel that sends garbage before every message."""

    def __init__(self, channel: Channel) -> None:
        self._channel: Any = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def send(self, *words: Any) -> None:
        *route, message = words
        for frames in GARBAGE:
            self._channel.send_frames(*route, *frames)
        self._channel.send_frames(*route, MAGIC, with_unknown_field(message))


class GarblingCoordinator(CoordinatorService):
    """A coordinator that sends garbage to its services, but not to clients."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._garbled = _Garbled(self._control)

    def _send(self, peer: str, message: Message) -> None:
        if peer not in self._processes:
            super()._send(peer, message)
            return
        try:
            self._garbled.send(peer, message)
        except (Lost, Full):
            super()._send(peer, message)


class GarblingCache(CacheService):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._link: Any = _Garbled(self._link)


class GarblingLoader(LoaderService):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._cache: Any = _Garbled(self._cache)


class SlowCoordinator(CoordinatorService):
    """A coordinator that starts late, ignores the first Hello of each peer, and pauses before it sends a message."""

    def __init__(self, job: Job) -> None:
        time.sleep(LATE_S)
        super().__init__(job)
        self._ignored: set[str] = set()

    def _take(self, peer: str, message: Message) -> None:
        if isinstance(message, Hello) and peer not in self._ignored:
            self._ignored.add(peer)
            return
        super()._take(peer, message)

    def _send(self, peer: str, message: Message) -> None:
        time.sleep(PAUSE_S)
        super()._send(peer, message)


class SlowCache(CacheService):
    """A cache that starts late and pauses before it handles a message."""

    def __init__(self, job: Job) -> None:
        time.sleep(LATE_S)
        super().__init__(job)

    def _take(self, message: Message) -> None:
        time.sleep(PAUSE_S)
        super()._take(message)


class SlowLoader(LoaderService):
    """A loader that starts late and pauses before it handles a message."""

    def __init__(self, job: Job) -> None:
        time.sleep(LATE_S)
        super().__init__(job)

    def _take(self, message: Message) -> None:
        time.sleep(PAUSE_S)
        super()._take(message)


class Witness(CoordinatorService):
    """A coordinator that appends the messages from and to its services to the file in $RECORD, as lines of JSON."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._record = Path(os.environ[RECORD]).open("a", encoding="utf-8")  # noqa: SIM115 - open as long as the process

    def _take_over(self, peer: str, message: Message) -> None:
        content: dict[str, Any] = {"peer": peer, "received": type(message).__name__, "at": time.monotonic()}
        if isinstance(message, Hello):
            content |= {"pid": message.pid, "incarnation": message.incarnation, "slots": message.slots}
            content |= {"role": message.role, "index": message.index, "protocol": message.protocol}
            content["expected_pid"] = self._processes.on_board(*self._processes[peer].name).pid
        elif isinstance(message, Ready | Beat | Drained):
            content |= {"role": message.role, "index": message.index}
        self._write(content)
        super()._take_over(peer, message)

    def _send(self, peer: str, message: Message) -> None:
        if peer in self._processes:
            self._write({"peer": peer, "sent": type(message).__name__, "at": time.monotonic()})
        super()._send(peer, message)

    def _look_around(self, now: float) -> None:
        """Request beats all the time, as in a run that is in use."""
        self._wakefulness.used(now)
        super()._look_around(now)

    def _write(self, content: dict[str, Any]) -> None:
        self._record.write(json.dumps(content) + "\n")
        self._record.flush()
