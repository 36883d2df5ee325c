"""KV and prefill memory borrowed for weight slots until sequences need it.

Keys and values of sequences that are shorter than the context, and a prompt's stage while there is no prompt, leave
reserved memory unused. PowerInfer-2 resizes its cache with the batch; here the cache follows the sequences.

    reserved  keys and values of every KV slot, in whole grants of tokens, and the stage of the prompt under way
    borrowed  those of the plan's borrowed slots that fit into borrowable memory that is not reserved

The coordinator reserves memory before a step needs it, and the cache reclaims slots for that; see services/cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from neuronpipe.plans.package.layout import PAGE_BYTES
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Compute, Memory, MemoryBudget
from neuronpipe.plans.plan.segment_sizes import RunShape, prefill_layouts
from neuronpipe.protocol.frozen import frozen

GRANTS = 16  # maximum of reservations for a sequence that fills its context
SHORT_PROMPT_TOKENS = 64  # step of a prompt while other sequences decode; longer steps take the whole stage
NEVER_BORROWED_BYTES = 1 << 20
KV_BYTES = 2  # of one component of a key or value

PartCounts = tuple[int, int]
"""Numbers of trigger slots and of value slots."""


@frozen(kw_only=True)
class BorrowableMemory:
    """The memory of a run that slots may borrow, and how much of it sequences and prompts reserve.

    chunk_tokens: maximum of a prompt's step
    kv_bytes: bytes of all KV slots at full length
    stage_bytes: bytes of the stage of the largest prompt step
    """

    manifest: Manifest
    shape: RunShape
    chunk_tokens: int
    kv_bytes: int
    stage_bytes: int

    @classmethod
    def of(cls, manifest: Manifest, compute: Compute, memory: Memory) -> BorrowableMemory:
        return cls(
            manifest=manifest,
            shape=RunShape.of(compute),
            chunk_tokens=compute.prefill_chunk_tokens,
            kv_bytes=memory.kv_bytes,
            stage_bytes=memory.prefill_stage_bytes,
        )

    @property
    def total_bytes(self) -> int:
        """Bytes that all slots at full length and the largest prompt need."""
        return self.kv_bytes + self.stage_bytes

    @functools.cached_property
    def grant_tokens(self) -> int:
        """Tokens of a KV slot that are reserved at once: whole pages."""
        page_tokens = max(1, PAGE_BYTES // self._row_bytes)
        return max(1, -(-self.shape.context_tokens // GRANTS // page_tokens)) * page_tokens

    def granted_tokens(self, tokens: int) -> int:
        """Return the tokens of the whole grants that store `tokens` tokens."""
        return min(self.shape.context_tokens, -(-tokens // self.grant_tokens) * self.grant_tokens)

    def stage_tokens(self, tokens: int) -> int:
        """Return the tokens of the stage reserved for a prompt step: a short stage, or the whole."""
        return SHORT_PROMPT_TOKENS if tokens <= SHORT_PROMPT_TOKENS < self.chunk_tokens else self.chunk_tokens

    def reserved_bytes(self, kv_tokens: Sequence[int], stage_tokens: int) -> int:
        """Return the bytes reserved for keys and values of these lengths, and for a prompt's stage.

        kv_tokens: one length for every KV slot
        stage_tokens: result of the method `stage_tokens`; 0 without a prompt
        """
        kv_bytes = min(self.kv_bytes, sum(map(self._slot_bytes, kv_tokens)))
        if stage_tokens == SHORT_PROMPT_TOKENS < self.chunk_tokens:
            return kv_bytes + self._short_stage_bytes
        return kv_bytes + (self.stage_bytes if stage_tokens else 0)

    @functools.cached_property
    def _short_stage_bytes(self) -> int:
        (short,) = prefill_layouts(self.manifest, self.shape, SHORT_PROMPT_TOKENS).values()
        # Arrays of the whole stage lie further apart, so each may touch one more page.
        return min(self.stage_bytes, short.total_bytes + PAGE_BYTES * len(short.fields))

    @property
    def _row_bytes(self) -> int:
        """Bytes of one token's keys in one head of one layer."""
        return self.manifest.model.head_width * KV_BYTES

    def _slot_bytes(self, tokens: int) -> int:
        """Return the bytes of one KV slot with `tokens` tokens.

        Keys and values of a head have pages of their own; two neighbours share a page where they do not end with a
        page.
        """
        if not tokens:
            return 0
        used_bytes, all_bytes = (
            self.granted_tokens(tokens) * self._row_bytes,
            self.shape.context_tokens * self._row_bytes,
        )
        shared_bytes = PAGE_BYTES if all_bytes % PAGE_BYTES else 0
        heads = self.manifest.model.layers * self.manifest.model.key_heads * 2
        return heads * (-(-used_bytes // PAGE_BYTES) * PAGE_BYTES + shared_bytes)


def max_borrowed_bytes(budget: MemoryBudget) -> int:
    """Return the bytes of borrowed slots.

    A part is never borrowed: what processes take was measured with some of this memory unused.
    """
    return max(0, budget.kv_bytes + budget.prefill_stage_bytes - NEVER_BORROWED_BYTES)


def usable_borrowed_slots(memory: Memory, borrowable: BorrowableMemory, reserved_bytes: int) -> PartCounts:
    """Return those of the plan's borrowed slots that may be used while `reserved_bytes` are reserved.

    Borrowed slots lose the same share of their memory as is reserved, and first those slots that cost tokens least.
    """
    borrowed = memory.lent_trigger_slots, memory.lent_value_slots
    places = borrowable.manifest.slots(moved=memory.are_scales_moved)
    slot_bytes = places.trigger_bytes, places.value_bytes
    borrowed_bytes = sum(count * size for count, size in zip(borrowed, slot_bytes, strict=True))
    reclaimed_pages = -(-borrowed_bytes * reserved_bytes // (borrowable.total_bytes * PAGE_BYTES))
    alike = memory.trigger_slots == memory.value_slots
    return reclaim_slots(borrowed, reclaimed_pages * PAGE_BYTES, slot_bytes, min_slots=(0, 0), in_pairs=alike)


def reclaim_slots(
    slots: PartCounts, reclaimed_bytes: int, slot_bytes: PartCounts, *, min_slots: PartCounts, in_pairs: bool
) -> PartCounts:
    """Return the slots that remain after `reclaimed_bytes` are given back.

    If every token reads all triggers in turn, a trigger without a slot evicts another one, so value slots are reclaimed
    first. Otherwise neurons are used whole or not at all, and equal numbers of both parts are reclaimed.

    min_slots: slots of either part that always remain
    in_pairs: reclaim equal numbers of both parts
    """
    if in_pairs:
        count = -(-reclaimed_bytes // sum(slot_bytes))
        return max(min_slots[0], slots[0] - count), max(min_slots[1], slots[1] - count)
    values = min(slots[1] - min_slots[1], -(-reclaimed_bytes // slot_bytes[1]))
    remaining_bytes = max(0, reclaimed_bytes - values * slot_bytes[1])
    return max(min_slots[0], slots[0] - -(-remaining_bytes // slot_bytes[0])), slots[1] - values


def with_borrowed_slots(manifest: Manifest, compute: Compute, memory: Memory, *, tokens: int) -> Memory:
    """Return the memory of a plan while it decodes sequences of `tokens` tokens, with borrowed slots as ordinary ones.

    Every KV slot counts with this length, since a KV slot keeps the memory of a sequence that has ended.
    """
    if not memory.has_borrowed_slots:
        return memory
    borrowable = BorrowableMemory.of(manifest, compute, memory)
    triggers, values = usable_borrowed_slots(
        memory, borrowable, borrowable.reserved_bytes([tokens] * compute.sequences, 0)
    )
    return dataclasses.replace(
        memory,
        trigger_slots=memory.trigger_slots + triggers,
        value_slots=memory.value_slots + values,
        lent_trigger_slots=0,
        lent_value_slots=0,
    )
