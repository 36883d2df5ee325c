"""The run's segments: made once by the supervisor, mapped by each role with the rights it needs and no more."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping as MappingOf
from pathlib import Path
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Plan
from neuronpipe.plans.plan.segment_sizes import WORD_BYTES, run_layouts
from neuronpipe.protocol.layout import LINE_WORDS
from neuronpipe.protocol.segments import Mapping, Segment

READS: dict[str, frozenset[str]] = {
    "supervisor": frozenset({"trace"}),
    "loader": frozenset({"exchange"}),
    "cache": frozenset({"board"}),
    "decode": frozenset({"fixed", "slots", "board"}),
    "prefill": frozenset({"fixed", "slots", "board"}),
    "accelerator": frozenset({"fixed", "residency", "board"}),
}
WRITES: dict[str, frozenset[str]] = {
    "supervisor": frozenset({"exchange", "residency", "board"}),
    "coordinator": frozenset({"exchange", "residency", "board", "trace"}),
    "loader": frozenset({"slots", "residency", "board", "trace"}),
    "cache": frozenset({"residency", "trace"}),
    "decode": frozenset({"residency", "kv", "exchange", "trace"}),
    "prefill": frozenset({"residency", "kv", "exchange", "trace"}),
    "accelerator": frozenset({"kv", "exchange", "trace"}),
}
LOCKS = ("loader", "decode", "prefill")
"""Roles that lock what they map, where they may: `doctor` says whether. A phone swaps out what was not used for a
while, and other kernels unmap it, so that every access to it is a page fault again."""


def create_segments(manifest: Manifest, plan: Plan, fixed: Segment | None = None) -> dict[str, Segment]:
    """All segments, zeroed; or the sealed one of another run of this package for the fixed tensors. Raises UserError
    when memory does not suffice."""
    segments: dict[str, Segment] = {} if fixed is None else {"fixed": fixed}
    try:
        for name, layout in run_layouts(manifest, plan).items():
            if name not in segments:
                segments[name] = Segment.create(layout)
    except BaseException:
        for segment in segments.values():
            segment.close()
        raise
    return segments


@dataclasses.dataclass
class RunMemory:
    """The segments as one role maps them."""

    segments: dict[str, Segment]
    mappings: dict[str, Mapping]

    @classmethod
    def open(cls, role: str, segments: MappingOf[str, Segment]) -> RunMemory:
        """Map what `role` needs. In a forked child: descriptors it may only read are replaced by read-only ones, and
        those it has no business with are closed, so that a bug cannot write where it should not."""
        reads, writes = READS.get(role, frozenset()), WRITES.get(role, frozenset())
        keeps_fixed = role == "loader"  # it writes and seals the fixed tensors once, then lets go
        own: dict[str, Segment] = {}
        for name, segment in segments.items():
            if name in reads:
                own[name] = segment.read_only()
            elif name in writes or (name == "fixed" and keeps_fixed):
                own[name] = segment
            if role != "supervisor" and own.get(name) is not segment:
                segment.close()
        mappings = {name: own[name].map(writable=name in writes) for name in own if name in reads | writes}
        if role in LOCKS:
            for mapping in mappings.values():
                with ffi.from_buffer(mapping.content) as content:
                    lib.np_memory_lock(content, len(content))
        return cls(own, mappings)

    def view(self, segment: str, field: str) -> memoryview:
        """The items of a field, flat."""
        return self.mappings[segment].view(field)


class Epoch:
    """The epoch word, and everything that sleeps under it."""

    def __init__(self, memory: RunMemory) -> None:
        self._word = ffi.from_buffer("uint32_t[]", memory.view("exchange", "epoch"))
        self._barrier = ffi.from_buffer("np_barrier[]", memory.view("exchange", "barriers"))
        self._claims = ffi.from_buffer("uint32_t[]", memory.view("exchange", "claims"))
        self._arrivals = ffi.from_buffer("uint32_t[]", memory.view("residency", "arrivals"))

    def load(self) -> int:
        """The present epoch."""
        return int(lib.np_word_load(self._word))

    def advance(self) -> int:
        """A new epoch: every wait inside a step is abandoned."""
        barrier_word = ffi.cast("uint32_t *", ffi.addressof(self._barrier[0], "phase"))
        words = ffi.new("uint32_t *[]", [barrier_word, self._arrivals])
        return int(lib.np_epoch_advance(self._word, words, 2))

    def reset_barrier(self) -> None:
        """Before a step is sent: nobody waits on the barrier or takes work now."""
        lib.np_barrier_reset(self._barrier)
        ffi.memmove(self._claims, bytes(len(self._claims) * 4), len(self._claims) * 4)


class Rings:
    """The participants' rings of requests, as the native library takes them: one per participant, one doorbell for all.
    Decode and prefill workers write them, the loader reads them. Holds the doorbell open."""

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


class Lanes:
    """The decode workers' lanes as the native library takes them: one for each, in the order of their indices."""

    MOST = 64

    def __init__(self, memory: RunMemory) -> None:
        layout = memory.mappings["exchange"].layout
        self._keep = ffi.from_buffer(memory.view("exchange", "lanes"))
        self._finished = ffi.from_buffer("uint32_t[]", memory.view("exchange", "finished"))
        self.count, lane_words = layout["lanes"].shape
        tokens = layout["residual"].shape[0]
        if lib.np_lane_bytes(tokens) != WORD_BYTES * lane_words:
            raise ValueError(f"lanes: {lane_words} words are no lane of {tokens} tokens")
        self.native: Any = ffi.new(
            "np_lanes *",
            {
                "memory": ffi.cast("uint8_t *", self._keep),
                "count": self.count,
                "tokens": tokens,
                "finished": self._finished,
            },
        )
