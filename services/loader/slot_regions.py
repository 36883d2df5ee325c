"""The bytes that a KV slot stores for a range of tokens: where they lie in the segment `kv`, in a fixed order.

    SlotRegions.of(layout)      regions of the segment, for example the rows of keys and values
    ranges(slot, first, end)    (offset, bytes) of each piece, the same number and sizes for every slot and context

A file of the prompt cache has these pieces one after the other, so it fits every run of the package, whatever its
number of sequences and its context. A model with a state adds a region whose pieces are the state after `end` tokens.
This module touches no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

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

    offset_bytes: where the first row of the region lies in the segment
    """

    layers: int
    sequences: int
    vectors: int
    context_tokens: int
    row_bytes: int
    offset_bytes: int

    @property
    def signature(self) -> str:
        return f"rows {self.layers}x{self.vectors}x{self.row_bytes}"

    def ranges(self, slot: int, first: int, end: int) -> Iterator[ByteRange]:
        """See `Region`. Raises ValueError if the slot or a token lies outside the segment."""
        if not (0 <= slot < self.sequences and 0 <= first <= end <= self.context_tokens):
            raise ValueError(f"tokens {first} to {end} of KV slot {slot} lie outside the segment")
        vector_bytes = self.context_tokens * self.row_bytes
        for layer in range(self.layers):
            slot_offset = self.offset_bytes + (layer * self.sequences + slot) * self.vectors * vector_bytes
            for vector in range(self.vectors):
                yield slot_offset + vector * vector_bytes + first * self.row_bytes, (end - first) * self.row_bytes


@frozen
class SlotRegions:
    """All regions of a KV slot."""

    regions: tuple[Region, ...]

    @classmethod
    def of(cls, layout: Layout) -> SlotRegions:
        """Return the regions of the segment `kv` with this layout."""
        field = layout["kv"]
        layers, sequences, vectors, context_tokens, width = field.shape
        row_bytes = width * TYPE_BYTES[field.type]
        return cls((TokenRows(layers, sequences, vectors, context_tokens, row_bytes, field.offset_bytes),))

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
