"""The bytes that a KV slot stores for a range of tokens: where they lie in the segment `kv`, in a fixed order.

    SlotRegions.of(layout, ..)  regions of the segment, for example the rows of keys and values
    ranges(slot, first, end)    (offset, bytes) of each piece, the same number and sizes for every slot and context

A file of the prompt cache has these pieces one after the other, so it fits every run of the package, whatever its
number of sequences and its context. Recurrent states lie in slots of their own: `StateSlots`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

from neuronpipe.plans.models.attention_sizes import CachedVectors
from neuronpipe.plans.package.layout import row_bytes
from neuronpipe.plans.plan.document import KvType
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.memory.layout import TYPE_BYTES, Layout

ByteRange = tuple[int, int]
"""(offset in the segment, number of bytes)"""


class Region(Protocol):
    """A part of a KV slot."""

    @property
    def signature(self) -> str:
        """The facts on which the bytes depend, apart from tokens and weights."""

    def ranges(self, slot: int, first: int, end: int) -> Iterator[ByteRange]:
        """Yield the pieces that store the tokens [first, end) of a slot: as many for any range, some of them empty.

        A piece for [first, end) begins with that for [first, middle).
        """


@frozen
class TokenRows:
    """Rows of one item for each token: for every layer and vector, those of a slot are contiguous.

    layers: for each layer the number of vectors of a token, and the bytes of one
    offset_bytes: where the first row of the region lies in the segment
    """

    layers: tuple[tuple[int, int], ...]
    sequences: int
    context_tokens: int
    offset_bytes: int

    @property
    def signature(self) -> str:
        runs = ((len(list(layers)), size) for size, layers in itertools.groupby(self.layers))
        return "rows " + " ".join(f"{layers}x{vectors}x{size_bytes}" for layers, (vectors, size_bytes) in runs)

    def ranges(self, slot: int, first: int, end: int) -> Iterator[ByteRange]:
        """See `Region`. Raises ValueError if the slot or a token lies outside the segment."""
        if not (0 <= slot < self.sequences and 0 <= first <= end <= self.context_tokens):
            raise ValueError(f"tokens {first} to {end} of KV slot {slot} lie outside the segment")
        layer_offset = self.offset_bytes
        for vectors, size_bytes in self.layers:
            vector_bytes = self.context_tokens * size_bytes
            for vector in range(slot * vectors, (slot + 1) * vectors):
                yield layer_offset + vector * vector_bytes + first * size_bytes, (end - first) * size_bytes
            layer_offset += self.sequences * vectors * vector_bytes


@frozen
class StateSlots:
    """The slots of recurrent states in the segment.

    offset_bytes: where the first slot lies
    state_bytes: bytes of a slot
    """

    slots: int
    state_bytes: int
    offset_bytes: int

    @classmethod
    def of(cls, layout: Layout) -> StateSlots | None:
        """Return the state slots of the segment `kv` with this layout; None if it has none."""
        field = layout["states"]
        slots, elements = field.shape
        return cls(slots, elements * TYPE_BYTES[field.type], field.offset_bytes) if slots and elements else None

    def piece(self, content: memoryview, slot: int) -> memoryview:
        """Return the bytes of a slot. Raises ValueError if it lies outside the segment."""
        if not 0 <= slot < self.slots:
            raise ValueError(f"state slot {slot} lies outside the segment")
        first = self.offset_bytes + slot * self.state_bytes
        return content[first : first + self.state_bytes]


@frozen
class SlotRegions:
    """All regions of a KV slot."""

    regions: tuple[Region, ...]

    @classmethod
    def of(cls, layout: Layout, cached_vectors: Sequence[CachedVectors], kv_type: KvType = "f16") -> SlotRegions:
        """Return the regions of the segment `kv` with this layout. cached_vectors: the property of ModelSpec"""
        field = layout["kv"]
        _, sequences, context_tokens = field.shape
        layers = tuple((of.vectors, row_bytes(kv_type, of.width)) for of in cached_vectors)
        return cls((TokenRows(layers, sequences, context_tokens, field.offset_bytes),))

    @property
    def signature(self) -> str:
        """The facts on which the bytes of the same tokens depend, apart from weights and numerics."""
        return "; ".join(region.signature for region in self.regions)

    def ranges(self, slot: int, first: int, end: int) -> list[ByteRange]:
        """Return the pieces that store the tokens [first, end) of a slot, in the order of a file."""
        return [piece for region in self.regions for piece in region.ranges(slot, first, end)]

    def total_bytes(self, tokens: int) -> int:
        """Return the number of bytes that store this many tokens."""
        return sum(size for _, size in self.ranges(0, 0, tokens))
