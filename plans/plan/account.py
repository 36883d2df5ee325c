"""What a run takes besides neurons: one account for the planner that makes a plan and the check that believes none."""

from __future__ import annotations

import dataclasses

from neuronpipe.plans.package.layout import Layout
from neuronpipe.plans.package.manifest import Manifest

MIB = 1 << 20
# Measured on the demo, with some room: see plans/README.md, "Interpreters".
INTERPRETER_BASE_BYTES = 34 * MIB
INTERPRETER_PER_PROCESS_BYTES = 6 * MIB
# A loaded tokenizer takes 6 to 11 times its file (measured with 32,000 and 150,000 tokens).
TOKENIZER_FACTOR = 12
HEADROOM_PERCENT = 2  # of what is accounted for, against what is not
# Of one cluster: two residency words (8); the loader's two checksums, and the table they come from (16), three queues
# for either part (48), free slots and their states (10); the cache's free slots (10) and one list to warm up (4).
CLUSTER_BOOKKEEPING_BYTES = 96


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
    """Bytes, by the names of the plan's memory fields."""

    interpreters_bytes: int
    fixed_bytes: int
    kv_bytes: int
    exchange_bytes: int
    residency_bytes: int
    private_bytes: int

    def total_bytes(self) -> int:
        """All of it."""
        return sum(dataclasses.astuple(self))


def fixed_segment_bytes(manifest: Manifest) -> int:
    """Bytes of the fixed tensors' segment: the file, its header included, and the segment's header page."""
    return manifest.files["fixed.safetensors"].bytes + 4096


def account(
    manifest: Manifest,
    *,
    processes: int,
    workers: int,
    sequences: int,
    context_tokens: int,
    prefill_chunk_tokens: int,
    logit_rows: int,
) -> Account:
    """What these seats, `workers` of them decoding, take for this package."""
    shape, layout = manifest.shape, manifest.layout
    row_floats = 2 * shape.width + 2 * shape.query_width + layout.blocks * shape.width
    hidden_floats = layout.blocks * layout.block_neurons
    # Prefill is also asked for the logits of `logit_rows` tokens at once: its buffers hold whichever is more.
    prefill_tokens = max(prefill_chunk_tokens, logit_rows)
    private = 4 * prefill_tokens * (row_floats + hidden_floats + 4 * shape.width)
    private += 4 * sequences * (hidden_floats + 8 * shape.width) * 2
    private += 4 * context_tokens * (workers + 1)  # attention scores, in each decode worker and prefill
    private += 8 * shape.vocabulary  # the coordinator's scratch for sampling
    tokenizer = TOKENIZER_FACTOR * manifest.files["tokenizer.json"].bytes
    return Account(
        interpreters_bytes=INTERPRETER_BASE_BYTES + INTERPRETER_PER_PROCESS_BYTES * processes + tokenizer,
        fixed_bytes=fixed_segment_bytes(manifest),
        kv_bytes=shape.layers * sequences * shape.key_heads * 2 * context_tokens * shape.head_width * 2,
        exchange_bytes=4 * (sequences * row_floats + logit_rows * shape.vocabulary) + MIB // 4,
        residency_bytes=manifest.words * CLUSTER_BOOKKEEPING_BYTES + MIB // 8,
        private_bytes=private,
    )


def least_slots_bytes(layout: Layout, workers: int) -> int:
    """Bytes of the fewest slots: every decode worker has one block open, and as much again is free or on its way."""
    return 2 * workers * layout.block_clusters * layout.cluster_stride_bytes


def least_limit_bytes(others: Account, layout: Layout, workers: int) -> int:
    """The smallest limit whose `usable_bytes` hold these and the fewest slots."""
    needed = others.total_bytes() + least_slots_bytes(layout, workers)
    return -(-needed * (100 + HEADROOM_PERCENT) // 100)


def usable_bytes(limit_bytes: int) -> int:
    """What may be accounted for under a limit. Whole numbers throughout, so that the least limit is exact."""
    return limit_bytes * 100 // (100 + HEADROOM_PERCENT)
