"""The run's shared segments: the supervisor creates them, and each role maps only what it needs, read-only if it
can."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping as MappingOf
from pathlib import Path
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.native.huge_mapping import HugeMapping
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Plan
from neuronpipe.plans.plan.segment_sizes import WORD_BYTES, run_layouts
from neuronpipe.protocol.layouts.weights import sampling_stride
from neuronpipe.protocol.memory.layout import LINE_WORDS
from neuronpipe.protocol.memory.segments import Mapping, Segment

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
    "loader": frozenset({"slots", "residency", "kv", "board", "trace"}),
    "cache": frozenset({"residency", "trace"}),
    "decode": frozenset({"residency", "kv", "exchange", "trace"}),
    "prefill": frozenset({"residency", "kv", "exchange", "trace"}),
    "accelerator": frozenset({"kv", "exchange", "trace"}),
}
HUGE = frozenset({"fixed", "slots"})
"""Segments with weights, which the loader puts into huge pages: all processes map them at addresses that suit these."""

LOCKS = ("loader", "decode", "prefill")
"""Roles that lock the memory they map, where the system allows it (`doctor` says whether). Otherwise systems swap out
or unmap pages that were not used for a while, so that the next access is a page fault."""


def create_segments(manifest: Manifest, plan: Plan, fixed: Segment | None = None) -> dict[str, Segment]:
    """Create all segments, zeroed. Raises UserError if there is not enough memory.

    fixed: the sealed segment of another run of this package, to be shared
    """
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
    """The segments of a run as one role maps them."""

    segments: dict[str, Segment]
    mappings: dict[str, Mapping]

    @classmethod
    def open(cls, role: str, segments: MappingOf[str, Segment]) -> RunMemory:
        """Map what `role` needs.

        In a forked child, descriptors of segments that the role only reads are replaced by read-only ones, and all
        others are closed, so that a bug cannot write to them.
        """
        reads, writes = READS.get(role, frozenset()), WRITES.get(role, frozenset())
        keeps_fixed = role == "loader"  # it writes and seals the fixed tensors once, then closes them
        opened: dict[str, Segment] = {}
        for name, segment in segments.items():
            if name in reads:
                opened[name] = segment.read_only()
            elif name in writes or (name == "fixed" and keeps_fixed):
                opened[name] = segment
            if role != "supervisor" and opened.get(name) is not segment:
                segment.close()
        mappings = {
            name: segment.map(writable=name in writes, mapper=HugeMapping if name in HUGE else None)
            for name, segment in opened.items()
            if name in reads | writes
        }
        if role in LOCKS:
            for mapping in mappings.values():
                with ffi.from_buffer(mapping.content) as content:
                    lib.np_memory_lock(content, len(content))
        return cls(opened, mappings)

    def view(self, segment: str, field: str) -> memoryview:
        """Return the items of a field as a flat view."""
        return self.mappings[segment].view(field)


class Epoch:
    """The epoch word, and the waits that end when it changes."""

    def __init__(self, memory: RunMemory) -> None:
        self._word = ffi.from_buffer("uint32_t[]", memory.view("exchange", "epoch"))
        self._barrier = ffi.from_buffer("np_barrier[]", memory.view("exchange", "barriers"))
        self._claims = ffi.from_buffer("uint32_t[]", memory.view("exchange", "claims"))
        self._arrivals = ffi.from_buffer("uint32_t[]", memory.view("residency", "arrivals"))

    def load(self) -> int:
        return int(lib.np_word_load(self._word))

    def advance(self) -> int:
        """Begin a new epoch and return it. Every wait inside a step is abandoned."""
        barrier_word = ffi.cast("uint32_t *", ffi.addressof(self._barrier[0], "phase"))
        words = ffi.new("uint32_t *[]", [barrier_word, self._arrivals])
        return int(lib.np_epoch_advance(self._word, words, 2))

    def reset_barrier(self) -> None:
        """Reset barrier and claims. Call it before a step is sent, while no participant waits or claims work."""
        lib.np_barrier_reset(self._barrier)
        ffi.memmove(self._claims, bytes(len(self._claims) * 4), len(self._claims) * 4)


def native_reuse(manifest: Manifest, memory: RunMemory) -> Any:
    """Return the `np_reuse *` of a run, for the clusters of a package. It is valid while the segments are mapped."""
    last_uses = ffi.from_buffer("uint32_t[]", memory.view("residency", "last_uses"))
    return ffi.new(
        "np_reuse *",
        {
            "last_uses": last_uses,
            "gaps": ffi.from_buffer("uint64_t[]", memory.view("residency", "use_gaps")),
            "steps": ffi.from_buffer("uint64_t[]", memory.view("residency", "used_steps")),
            "sampled": len(last_uses) // 2,
            "stride": sampling_stride(manifest.clusters, manifest.model.ffns),
        },
    )


class Rings:
    """The request rings of the participants as native structures: a ring per participant, one doorbell for all.

    Decode and prefill workers write the rings, the loader reads them. The object holds the doorbell open.
    """

    def __init__(self, memory: RunMemory, doorbell: Path) -> None:
        # Open for reading too: a FIFO without a reader would refuse bytes while the loader is being restarted.
        self._doorbell = os.open(doorbell, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        names = ("request_tails", "request_heads", "requests", "asleep")
        self._tails, self._heads, self._entries, self._asleep = (
            ffi.from_buffer("uint32_t[]", memory.view("residency", name)) for name in names
        )
        self.participants = len(self._tails) // LINE_WORDS

    def of(self, participant: int) -> Any:
        """Return the `np_requests *` of one participant. It is valid as long as this object."""
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
    """The step channels of the decode workers as native structures, in the order of the workers' indices."""

    MAX_COUNT = 64

    def __init__(self, memory: RunMemory) -> None:
        layout = memory.mappings["exchange"].layout
        self._keep = ffi.from_buffer(memory.view("exchange", "lanes"))
        self._finished = ffi.from_buffer("uint32_t[]", memory.view("exchange", "finished"))
        self.count, lane_words = layout["lanes"].shape
        tokens = layout["residual"].shape[0]
        if lib.np_channel_bytes(tokens) != WORD_BYTES * lane_words:
            raise ValueError(f"lanes: {lane_words} words are no lane of {tokens} tokens")
        self.native: Any = ffi.new(
            "np_step_channels *",
            {
                "memory": ffi.cast("uint8_t *", self._keep),
                "count": self.count,
                "tokens": tokens,
                "finished": self._finished,
            },
        )
