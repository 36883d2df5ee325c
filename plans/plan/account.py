"""What a run takes besides neurons: one account for the planner that makes a plan and the check that believes none."""

from __future__ import annotations

import dataclasses

from neuronpipe.plans.package.layout import PAGE_BYTES, Layout
from neuronpipe.plans.package.manifest import PREDICTOR, Manifest
from neuronpipe.plans.plan.plan import Mode

MIB = 1 << 20
# Measured on the demo, with some room: see plans/README.md, "Interpreters".
LIBRARIES_BYTES = 14 * MIB  # of the interpreter and of libraries, what is used, as if nobody else had them open
INTERPRETER_BASE_BYTES = 34 * MIB + LIBRARIES_BYTES
INTERPRETER_PER_PROCESS_BYTES = 6 * MIB
GATEWAY_LIBRARIES_BYTES = 14 * MIB  # that no other process uses
GATEWAY_BYTES = 32 * MIB + GATEWAY_LIBRARIES_BYTES  # the HTTP server and what checks requests
# Reading a tokenizer takes 14 times its file, of which 7 stay (measured with 32,000 and 128,000 tokens).
TOKENIZER_FACTOR = 14
HEADROOM_PERCENT = 2  # of what is accounted for, against what is not
# Of one cluster: two residency words (8); the loader's two checksums, and the table they come from (16), six queues
# (24, in packages of up to 32,768 clusters; no more in larger ones), what to warm up (1), free slots and their states
# (10); the cache's free slots (10) and one list to warm up (4).
CLUSTER_BOOKKEEPING_BYTES = 73
TRACE_RING_BYTES = MIB // 8  # 4096 spans of 32 bytes, in each process
REQUEST_RING_BYTES = MIB // 16 + 128  # 16384 entries of 4 bytes and two cache lines, of each participant
# The smallest limit is reckoned with these; a larger one buys more.
PARTIAL_TOKENS = 64  # tokens whose block sums a step holds at once; more are summed by turns
MIN_CHUNK_TOKENS = 8
MIN_DEPTH = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seating:
    """What of a plan decides how much memory is taken besides neurons and staging."""

    mode: Mode
    processes: int
    workers: int  # decode
    prefill_threads: int
    sequences: int
    context_tokens: int
    logit_rows: int
    gateways: int = 0  # of the processes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
    """Bytes, by the names of the plan's memory fields."""

    interpreters_bytes: int
    fixed_bytes: int
    kv_bytes: int
    exchange_bytes: int
    residency_bytes: int
    private_bytes: int
    predictor_bytes: int
    trace_bytes: int
    requests_bytes: int
    staging_bytes: int

    def total_bytes(self) -> int:
        """All of it."""
        return sum(dataclasses.astuple(self))


def largest_read_bytes(layout: Layout, *, bundle: bool) -> int:
    """Bytes of the largest read that one cluster makes: of both parts, or of the larger one."""
    return layout.cluster_stride_bytes if bundle else max(layout.trigger_part_bytes, layout.value_part_bytes)


def slot_sizes(manifest: Manifest) -> tuple[int, int]:
    """(gate, rest) bytes of a slot, as services/memory.py lays the segment out."""
    return manifest.trigger_slot_bytes, manifest.value_slot_bytes


def account(manifest: Manifest, seating: Seating, *, prefill_chunk_tokens: int, staging_bytes: int) -> Account:
    """What this seating takes for this package, with prompts cut into such chunks and such staging buffers."""
    model, layout = manifest.model, manifest.layout
    sequences, workers = seating.sequences, seating.workers
    hidden_floats = layout.blocks * layout.block_neurons
    row_floats = 2 * model.width + 2 * model.query_width + hidden_floats
    sum_floats = layout.blocks * model.width
    # Prefill is also asked for the logits of `logit_rows` tokens at once: its buffers hold whichever is more.
    prefill_tokens = max(prefill_chunk_tokens, seating.logit_rows)
    private = 4 * (prefill_tokens * row_floats + min(prefill_tokens, PARTIAL_TOKENS) * sum_floats)
    private += seating.prefill_threads * prefill_tokens * _participant_bytes(manifest)
    private += workers * sequences * _participant_bytes(manifest)
    private += 16 * seating.context_tokens * (workers + seating.prefill_threads)  # attention scores of each participant
    private += 8 * model.vocabulary  # the coordinator's scratch for sampling
    exchange = 4 * (sequences * (row_floats + sum_floats) + seating.logit_rows * model.vocabulary) + MIB // 4
    predictor = 0
    if seating.mode == "predicted" and manifest.predictor is not None:
        predictor = manifest.files[PREDICTOR].bytes + PAGE_BYTES
        exchange += _prediction_bytes(sequences, manifest.predictor.rank, hidden_floats)
        private += _prediction_bytes(prefill_tokens, manifest.predictor.rank, hidden_floats)
    tokenizer = TOKENIZER_FACTOR * manifest.files["tokenizer.json"].bytes
    return Account(
        interpreters_bytes=INTERPRETER_BASE_BYTES
        + INTERPRETER_PER_PROCESS_BYTES * seating.processes
        + GATEWAY_BYTES * seating.gateways
        + tokenizer,
        fixed_bytes=manifest.files["fixed.safetensors"].bytes + PAGE_BYTES,  # and the segment's header page
        kv_bytes=model.layers * sequences * model.key_heads * 2 * seating.context_tokens * model.head_width * 2,
        exchange_bytes=exchange,
        residency_bytes=manifest.clusters * CLUSTER_BOOKKEEPING_BYTES + MIB // 8,
        private_bytes=private,
        predictor_bytes=predictor,
        trace_bytes=TRACE_RING_BYTES * seating.processes,
        requests_bytes=REQUEST_RING_BYTES * (workers + seating.prefill_threads),
        staging_bytes=staging_bytes,
    )


def _participant_bytes(manifest: Manifest) -> int:
    """Of one participant and token: prepared vectors (in two types, if predictors have another), rows' results."""
    model, layout = manifest.model, manifest.layout
    longest = max(model.width, model.query_width)
    return 2 * 4 * longest + 4 * max(model.head_width, 2 * layout.block_neurons, 64)


def _prediction_bytes(tokens: int, rank: int, neurons: int) -> int:
    """Each token's rank-vector, and a bit for each neuron and token."""
    return 4 * tokens * rank + neurons * -(-tokens // 8)


def least_account(manifest: Manifest, seating: Seating) -> Account:
    """The same with the smallest chunk and the fewest staging buffers: what no limit may go below."""
    return account(
        manifest,
        seating,
        prefill_chunk_tokens=min(MIN_CHUNK_TOKENS, seating.context_tokens),
        staging_bytes=MIN_DEPTH * largest_read_bytes(manifest.layout, bundle=True),
    )


def least_slots_bytes(manifest: Manifest, workers: int) -> int:
    """Bytes of the fewest slots: every decode worker has one block open, and as much again is free or on its way."""
    return 2 * workers * manifest.layout.block_clusters * sum(slot_sizes(manifest))


def least_limit_bytes(manifest: Manifest, seating: Seating) -> int:
    """The smallest limit whose `usable_bytes` hold the least account and the fewest slots."""
    needed = least_account(manifest, seating).total_bytes() + least_slots_bytes(manifest, seating.workers)
    return -(-needed * (100 + HEADROOM_PERCENT) // 100)


def usable_bytes(limit_bytes: int) -> int:
    """What may be accounted for under a limit. Whole numbers throughout, so that the least limit is exact."""
    return limit_bytes * 100 // (100 + HEADROOM_PERCENT)
