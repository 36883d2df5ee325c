"""The frames between a service and its helper process: kind, time limit, length and payload."""

from __future__ import annotations

import enum
import struct

HEADER = struct.Struct("<BIQ")


class Kind(enum.IntEnum):
    """The kind of a frame. The helper answers each REQUEST with one of the others."""

    REQUEST = 0
    ANSWER = 1
    FAILED = 2  # the work raised an error; the payload is its text
    OUT_OF_MEMORY = 3


def frame(kind: Kind, payload: bytes, timeout_s: float = 0.0) -> bytes:
    """Return an encoded frame.

    timeout_s: time limit of a request in seconds, rounded up to milliseconds
    """
    return HEADER.pack(kind, min(0xFFFFFFFF, int(1000 * timeout_s) + 1), len(payload)) + payload


class FrameReader:
    """Splits received bytes into frames.

    limit_bytes: maximum length of a payload; ValueError is raised for a longer one, and for an unknown kind
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._received = bytearray()

    def push(self, data: bytes) -> list[tuple[Kind, bytes]]:
        """Append received bytes; return kind and payload of each frame that they complete."""
        self._received += data
        frames = []
        while len(self._received) >= HEADER.size:
            kind, _, length = HEADER.unpack_from(self._received)
            if length > self._limit_bytes:
                raise ValueError(f"a frame of {length} bytes, more than {self._limit_bytes}")
            end = HEADER.size + length
            if len(self._received) < end:
                break
            frames.append((Kind(kind), bytes(self._received[HEADER.size : end])))
            del self._received[:end]
        return frames
