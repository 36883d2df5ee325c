"""Memory that is set aside and not needed yet, lent to slots until it is: keys and values of texts that are not that
long, and a prompt's stage while there is no prompt. PowerInfer-2 resizes its cache with the batch; here it follows the
texts.

    reserved  keys and values of every KV slot, in whole grants of tokens, and the stage of the prompt under way
    lent      slots of the plan's lent ones that may be used: those that fit into what is lendable and not reserved

The coordinator reserves memory before a step needs it, and the cache takes slots back for that; see services/cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from neuronpipe.plans.package.layout import PAGE_BYTES
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Compute, Memory, MemoryBudget
from neuronpipe.plans.plan.segment_sizes import RunShape, own_layouts
from neuronpipe.protocol.frozen import frozen

GRANTS = 16  # a text that fills its context asks so often at most
SHORT_PROMPT_TOKENS = 64  # prompts beside other texts come in steps of so many; more take the whole stage
UNLENT_BYTES = 1 << 20
KV_BYTES = 2  # of a key's or a value's component

Slots = tuple[int, int]
"""Triggers and values."""


@frozen(kw_only=True)
class Lendable:
    """How much of a run's memory is reserved for which texts and prompts.

    chunk_tokens: of a prompt's step, at most
    kv_bytes, stage_bytes: of all KV slots at full length, and of the stage of the largest prompt's step
    """

    manifest: Manifest
    shape: RunShape
    chunk_tokens: int
    kv_bytes: int
    stage_bytes: int

    @classmethod
    def of(cls, manifest: Manifest, compute: Compute, memory: Memory) -> Lendable:
        """That of a plan's run."""
        return cls(
            manifest=manifest,
            shape=RunShape.of(compute),
            chunk_tokens=compute.prefill_chunk_tokens,
            kv_bytes=memory.kv_bytes,
            stage_bytes=memory.prefill_stage_bytes,
        )

    @property
    def total_bytes(self) -> int:
        """What all slots at full length and the largest prompt need."""
        return self.kv_bytes + self.stage_bytes

    @functools.cached_property
    def grant_tokens(self) -> int:
        """Keys and values are reserved for so many tokens of a slot at once: whole pages."""
        page_tokens = max(1, PAGE_BYTES // self._row_bytes)
        return max(1, -(-self.shape.context_tokens // GRANTS // page_tokens)) * page_tokens

    def granted_tokens(self, tokens: int) -> int:
        """The tokens of whole grants that hold so many."""
        return min(self.shape.context_tokens, -(-tokens // self.grant_tokens) * self.grant_tokens)

    def stage_tokens(self, tokens: int) -> int:
        """The tokens of the stage that is reserved for a prompt's step of so many: a short one, or the whole."""
        return SHORT_PROMPT_TOKENS if tokens <= SHORT_PROMPT_TOKENS < self.chunk_tokens else self.chunk_tokens

    def reserved_bytes(self, kv_tokens: Sequence[int], stage_tokens: int) -> int:
        """kv_tokens: of every KV slot; stage_tokens: of the stage, 0 without a prompt."""
        kv_bytes = min(self.kv_bytes, sum(map(self._slot_bytes, kv_tokens)))
        if stage_tokens == SHORT_PROMPT_TOKENS < self.chunk_tokens:
            return kv_bytes + self._short_stage_bytes
        return kv_bytes + (self.stage_bytes if stage_tokens else 0)

    @functools.cached_property
    def _short_stage_bytes(self) -> int:
        (short,) = own_layouts(self.manifest, self.shape, SHORT_PROMPT_TOKENS).values()
        shared = PAGE_BYTES * len(short.fields)  # arrays of the whole stage lie further apart
        return min(self.stage_bytes, short.total_bytes + shared)

    @property
    def _row_bytes(self) -> int:
        """Of one token's keys in one head of one layer."""
        return self.manifest.model.head_width * KV_BYTES

    def _slot_bytes(self, tokens: int) -> int:
        """Keys of a head, and values, have pages of their own; they share one where they do not end with a page."""
        if not tokens:
            return 0
        used_bytes, all_bytes = (
            self.granted_tokens(tokens) * self._row_bytes,
            self.shape.context_tokens * self._row_bytes,
        )
        shared_bytes = PAGE_BYTES if all_bytes % PAGE_BYTES else 0
        heads = self.manifest.model.layers * self.manifest.model.key_heads * 2
        return heads * (-(-used_bytes // PAGE_BYTES) * PAGE_BYTES + shared_bytes)


def lent_at_most(budget: MemoryBudget) -> int:
    """Bytes of lent slots. Not all of it: what processes take was measured with some of it unused."""
    return max(0, budget.kv_bytes + budget.prefill_stage_bytes - UNLENT_BYTES)


def lent_slots(memory: Memory, lendable: Lendable, reserved_bytes: int) -> Slots:
    """Of the plan's lent slots, those that may be used while so much is reserved: of their memory the same share less,
    and of its slots those first that cost tokens least."""
    lent = memory.lent_trigger_slots, memory.lent_value_slots
    places = lendable.manifest.slots(moved=memory.are_scales_moved)
    slot_bytes = places.trigger_bytes, places.value_bytes
    lent_bytes = sum(count * each for count, each in zip(lent, slot_bytes, strict=True))
    gone_pages = -(-lent_bytes * reserved_bytes // (lendable.total_bytes * PAGE_BYTES))
    alike = memory.trigger_slots == memory.value_slots
    return without(lent, gone_pages * PAGE_BYTES, slot_bytes, least=(0, 0), alike=alike)


def without(slots: Slots, gone_bytes: int, slot_bytes: Slots, *, least: Slots, alike: bool) -> Slots:
    """The slots that are left when so much is given back, `least` of either part at least. alike: a neuron is wanted
    whole or not at all, so that as many of both go; else values first, since every token reads all triggers, by turns:
    each that has no slot pushes others out."""
    if alike:
        count = -(-gone_bytes // sum(slot_bytes))
        return max(least[0], slots[0] - count), max(least[1], slots[1] - count)
    values = min(slots[1] - least[1], -(-gone_bytes // slot_bytes[1]))
    left_bytes = max(0, gone_bytes - values * slot_bytes[1])
    return max(least[0], slots[0] - -(-left_bytes // slot_bytes[0])), slots[1] - values


def with_lent_slots(manifest: Manifest, compute: Compute, memory: Memory, *, tokens: int) -> Memory:
    """The memory of a plan while it decodes texts of so many tokens: its slots with the lent ones in use. Every KV slot
    holds as many, since it keeps what it has of a text that has ended."""
    if not memory.lends:
        return memory
    lendable = Lendable.of(manifest, compute, memory)
    triggers, values = lent_slots(memory, lendable, lendable.reserved_bytes([tokens] * compute.sequences, 0))
    return dataclasses.replace(
        memory,
        trigger_slots=memory.trigger_slots + triggers,
        value_slots=memory.value_slots + values,
        lent_trigger_slots=0,
        lent_value_slots=0,
    )
