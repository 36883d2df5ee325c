"""The participants' rings of requests, as the native library takes them: one per participant, one doorbell for all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from neuronpipe.native import ffi
from neuronpipe.protocol.layout import LINE_WORDS
from neuronpipe.services.memory import RunMemory


class Rings:
    """What decode and prefill workers write and the loader reads. Holds the doorbell open."""

    def __init__(self, memory: RunMemory, doorbell: Path) -> None:
        # For both: a FIFO that is open for writing only has no reader while the loader is being restarted.
        self._doorbell = os.open(doorbell, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        names = ("request_tails", "request_heads", "requests", "asleep")
        self._tails, self._heads, self._entries, self._asleep = (
            ffi.from_buffer("uint32_t[]", memory.view("residency", name)) for name in names
        )
        self.participants = len(self._tails) // LINE_WORDS

    def of(self, participant: int) -> Any:
        """The `np_requests *` of one participant, alive as long as this object."""
        capacity = len(self._entries) // self.participants
        return ffi.new(
            "np_requests *",
            {
                "tail": self._tails + participant * LINE_WORDS,
                "head": self._heads + participant * LINE_WORDS,
                "entries": self._entries + participant * capacity,
                "capacity": capacity,
                "asleep": self._asleep,
                "doorbell": self._doorbell,
            },
        )
