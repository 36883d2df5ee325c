"""Memory of the KV cache, of prefill and of grammars, borrowed for weight slots until sequences need it.

The KV cache has unused memory while sequences are shorter than the context, the stage of prompts is unused while there
is no prompt, and few requests have a grammar. PowerInfer-2 resizes its cache with the batch; here the cache grows and
shrinks with the sequences.

    reserved  keys and values of every KV slot, in whole grants of tokens, the stage of the prompt under way, all
              recurrent states, and the helper process for grammars while it runs
    borrowed  those of the plan's borrowed slots that fit into borrowable memory that is not reserved

The coordinator reserves memory before a step needs it, and the cache reclaims slots for that (services/cache).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence

from neuronpipe.plans.package.layout import PAGE_BYTES, row_bytes
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Compute, Memory, MemoryBudget
from neuronpipe.plans.plan.segment_sizes import STATE_ELEMENT_BYTES, RunShape, prefill_layouts
from neuronpipe.protocol.frozen import frozen

GRANTS = 16  # maximum of reservations until a sequence fills its context
SHORT_PROMPT_TOKENS = 64  # a prompt's step while other sequences decode; longer steps reserve the whole stage
NEVER_BORROWED_BYTES = 1 << 20

PartCounts = tuple[int, int]
"""Numbers of trigger slots and of value slots."""


@frozen(kw_only=True)
class BorrowableMemory:
    """The memory of a run that slots may borrow, and how much of it sequences and prompts reserve.

    chunk_tokens: maximum of tokens in a prompt's step
    kv_bytes: bytes of all KV slots with full contexts
    stage_bytes: bytes of the stage for a prompt's largest step
    grammars_bytes: growth of the helper process for grammars, with the vocabulary
    """

    manifest: Manifest
    shape: RunShape
    chunk_tokens: int
    kv_bytes: int
    stage_bytes: int
    grammars_bytes: int

    @classmethod
    def of(cls, manifest: Manifest, compute: Compute, memory: Memory) -> BorrowableMemory:
        return cls(
            manifest=manifest,
            shape=RunShape.of(compute),
            chunk_tokens=compute.prefill_chunk_tokens,
            kv_bytes=memory.kv_bytes,
            stage_bytes=memory.prefill_stage_bytes,
            grammars_bytes=memory.vocabulary_bytes + memory.grammars_bytes,
        )

    @property
    def total_bytes(self) -> int:
        """All borrowable bytes: those that full contexts, a prompt's largest step and grammars need."""
        return self.kv_bytes + self.stage_bytes + self.grammars_bytes

    @functools.cached_property
    def grant_tokens(self) -> int:
        """Tokens of a grant, which are reserved together. Their keys fill whole pages, or with q8 nearly so."""
        least_width = min(vectors.width for vectors in self.manifest.model.cached_vectors)
        page_tokens = max(1, PAGE_BYTES // row_bytes(self.shape.kv_type, least_width))
        return max(1, -(-self.shape.context_tokens // GRANTS // page_tokens)) * page_tokens

    def granted_tokens(self, tokens: int) -> int:
        """Return the number of tokens that are reserved for a sequence of `tokens` tokens, in whole grants."""
        return min(self.shape.context_tokens, -(-tokens // self.grant_tokens) * self.grant_tokens)

    def stage_tokens(self, tokens: int) -> int:
        """Return for how many tokens the stage is reserved if a prompt's step has `tokens`: a short stage, or all."""
        return SHORT_PROMPT_TOKENS if tokens <= SHORT_PROMPT_TOKENS < self.chunk_tokens else self.chunk_tokens

    def reserved_bytes(self, kv_tokens: Sequence[int], stage_tokens: int, *, has_grammars: bool = False) -> int:
        """Return the bytes that are reserved for sequences, for a prompt's stage and for grammars.

        kv_tokens: for each KV slot, the tokens that it stores
        stage_tokens: result of the method `stage_tokens`; 0 without a prompt
        has_grammars: whether a helper process compiles grammars or follows answers through them
        """
        kv_bytes = min(self.kv_bytes, self._state_bytes + self._slots_bytes(kv_tokens))
        return kv_bytes + self._stage_bytes(stage_tokens) + (self.grammars_bytes if has_grammars else 0)

    def _stage_bytes(self, tokens: int) -> int:
        if tokens == SHORT_PROMPT_TOKENS < self.chunk_tokens:
            return self._short_stage_bytes
        return self.stage_bytes if tokens else 0

    @property
    def _state_bytes(self) -> int:
        """Bytes of recurrent states, which no slot borrows."""
        return STATE_ELEMENT_BYTES * self.shape.state_slots * self.manifest.model.all_state_elements

    @functools.cached_property
    def _short_stage_bytes(self) -> int:
        (short,) = prefill_layouts(self.manifest, self.shape, SHORT_PROMPT_TOKENS).values()
        # In memory the arrays lie as in the whole stage, further apart, so each may touch one more page.
        return min(self.stage_bytes, short.total_bytes + PAGE_BYTES * len(short.fields))

    def _slots_bytes(self, kv_tokens: Sequence[int]) -> int:
        return sum(self._slot_bytes(tokens) * slots for tokens, slots in Counter(kv_tokens).items())

    def _slot_bytes(self, tokens: int) -> int:
        """Return the bytes of the pages that a KV slot with `tokens` tokens touches.

        Keys of a head are contiguous, and so are its values. Each may share a page with its neighbour, unless all have
        whole pages.
        """
        if not tokens:
            return 0
        total_bytes, used_tokens = 0, self.granted_tokens(tokens)
        for vectors in self.manifest.model.cached_vectors:
            vector_bytes = row_bytes(self.shape.kv_type, vectors.width)
            used_bytes = used_tokens * vector_bytes
            shared_bytes = PAGE_BYTES if self.shape.context_tokens * vector_bytes % PAGE_BYTES else 0
            total_bytes += vectors.vectors * (-(-used_bytes // PAGE_BYTES) * PAGE_BYTES + shared_bytes)
        return total_bytes


def max_borrowed_bytes(budget: MemoryBudget, grammars_bytes: int) -> int:
    """Return the maximum of bytes that slots may borrow in a run with this budget.

    NEVER_BORROWED_BYTES are left out, since the memory of processes was measured while a part of it was unused.

    grammars_bytes: the field of `Memory`
    """
    borrowable_bytes = budget.kv_bytes + budget.prefill_stage_bytes + budget.vocabulary_bytes + grammars_bytes
    return max(0, borrowable_bytes - NEVER_BORROWED_BYTES)


def usable_borrowed_slots(memory: Memory, borrowable: BorrowableMemory, reserved_bytes: int) -> PartCounts:
    """Return how many of the plan's borrowed slots of either part may be used while `reserved_bytes` are reserved.

    The share of borrowed bytes that is reclaimed is the reserved share of all borrowable memory; see `reclaim_slots`
    for the order.
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
    """Return the slots of either part that remain after slots of `reclaimed_bytes` are given back.

    Value slots go first if every token reads all triggers in turn, since each missing trigger slot then causes a miss
    for every token. If neurons are used whole or not at all, equal numbers of both parts go (`in_pairs`).

    slot_bytes: size of a slot of either part
    min_slots: slots of either part that always remain
    """
    if in_pairs:
        count = -(-reclaimed_bytes // sum(slot_bytes))
        return max(min_slots[0], slots[0] - count), max(min_slots[1], slots[1] - count)
    values = min(slots[1] - min_slots[1], -(-reclaimed_bytes // slot_bytes[1]))
    remaining_bytes = max(0, reclaimed_bytes - values * slot_bytes[1])
    return max(min_slots[0], slots[0] - -(-remaining_bytes // slot_bytes[0])), slots[1] - values


def with_borrowed_slots(manifest: Manifest, compute: Compute, memory: Memory, *, tokens: int) -> Memory:
    """Return the plan's memory while sequences have `tokens` tokens, with usable borrowed slots as ordinary ones.

    Every KV slot counts with this length, since memory stays reserved for a sequence that has ended.
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
