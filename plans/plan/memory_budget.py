"""Memory that a run takes besides neurons, computed in the same way by the planner and by the validation of plan files.

It consists of the layouts of segment_sizes.py and of memory without a layout, which was measured.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from typing import Any

from neuronpipe.native import lib
from neuronpipe.plans.activity.eviction_rule import whole_experts_of_token
from neuronpipe.plans.package.byte_pair_tokens import tokenizer_bytes
from neuronpipe.plans.package.layout import PAGE_BYTES, Layout, row_bytes
from neuronpipe.plans.package.manifest import TOKENIZER, Manifest
from neuronpipe.plans.plan.borrowed_memory import BorrowableMemory, usable_borrowed_slots
from neuronpipe.plans.plan.document import MemoryBudget, Plan
from neuronpipe.plans.plan.offloaded_blocks import offload_bytes, offloaded_matrices_bytes
from neuronpipe.plans.plan.runtime_memory import GRAPH_TOKENS, offload_runtime_bytes, runtime_bytes, runtime_of
from neuronpipe.plans.plan.segment_sizes import (
    RunShape,
    embedding_flash_bytes,
    embedding_row_bytes,
    fixed_layouts,
    offloaded_product_blocks,
    prefill_layouts,
    product_blocks,
    slots_layout,
)

MIB = 1 << 20
# Measured with the demo model and rounded up: see tests/bench/results/2026-11-23-process-memory.md.
# Touched pages of the interpreter and its libraries. They are counted in full, though other programs often share them:
# in a container no other program may use them, and a run would exceed its limit.
LIBRARIES_BYTES = 15 * MIB
INTERPRETER_BASE_BYTES = 34 * MIB + LIBRARIES_BYTES
INTERPRETER_PER_PROCESS_BYTES = 6 * MIB
GATEWAY_LIBRARIES_BYTES = 14 * MIB  # libraries that only the gateway uses
REQUESTS_BYTES = 16 * MIB  # requests in flight: bodies, decoded requests, queued responses
GATEWAY_BYTES = 32 * MIB + REQUESTS_BYTES + GATEWAY_LIBRARIES_BYTES  # the HTTP server and request validation
# A gateway runs the chat templates of packages, which are untrusted programs, in helper processes.
TEMPLATE_HELPER_BYTES = 20 * MIB  # interpreter and libraries of a helper process
MAX_TEMPLATE_HELPERS = 2  # of a gateway that serves several models
# The kernel enforces a maximum by which a helper process may grow beyond its interpreter. It is a share of the memory
# limit, since a constant would dominate small limits. The minimum for grammars suffices: an enumeration of 6000 values
# is compiled with the demo's vocabulary in 6 MiB.
HELPER_SHARE = 16  # one part in 16
MIN_GRAMMARS_BYTES = 8 * MIB
MIN_TEMPLATES_BYTES = 24 * MIB
MAX_HELPER_GROWTH_BYTES = 64 * MIB
# An OpenCL driver with its compiler: 236 to 253 MiB measured with PoCL 3.1.
DRIVER_BYTES = 272 * MIB
# Growth of the coordinator's helper process for grammars, for each token of the vocabulary that its library reads
# (measured: 303 and 315 bytes with the tokens of Llama 3 and Llama 2, of which 187 and 267 remain).
GRAMMAR_TOKEN_BYTES = 320
HEADROOM_PERCENT = 2  # added to the budget for memory that has no item in it
# State of a cluster in loader and cache, besides its two entries in the residency segment. Loader: two checksums (8),
# lists of free slots (8), bits for resident and warming clusters (less than 1). Cache: free slots (2), requests of
# warm-up in flight (4).
CLUSTER_BOOKKEEPING_BYTES = 23
EXPERT_USES_BYTES = 18  # of an expert that is used as a whole, for both parts (plans/activity/eviction_rule.py)
# Tokens that an engine multiplies with Down by output at once (NP_OUTPUT_TOKENS), and its memory for each of their
# values: prepared for the kernels, and in a panel.
OUTPUT_TOKENS, OUTPUT_VALUE_BYTES = 64, 4
ATTEND_QUERIES = 8  # whose attention scores a participant computes together (NP_ATTEND_QUERIES)
SLICE_BYTES = 70  # of a slice in a participant: its group, its cluster's state, pieces of its neurons
PAIR_BYTES = 16  # of a token's expert or slice in a participant: numbers and weights, by token and by expert
OPEN_CLUSTER_BYTES = 13  # of a mixture's open cluster in a participant: state, slots of its parts, requests
LOADER_QUEUES = 9  # three kinds of requests with three priorities
MAX_QUEUED_CLUSTERS = 32768  # of each queue: two layers of a 7B model; further requests stay in the workers' rings
NATIVE_BYTES = MIB // 4  # the loader's reads in flight, and rounding by allocators
# What the ends of segments add to the peak of a run if they lie in huge pages: with a 100M, 1 to 6 MiB more than the
# items above were measured.
HUGE_PAGES_BYTES = 8 * MIB
# The smallest limit is computed with these. With a larger limit, plans have more of both.
MIN_CHUNK_TOKENS = 8
MIN_DEPTH = 8


def gateway_bytes(chat_models: int, growth_bytes: int) -> int:
    """Return the bytes of a gateway and its helper processes.

    chat_models: number of its models that have a chat template
    growth_bytes: maximum of bytes by which chat templates may make one helper process grow
    """
    return GATEWAY_BYTES + min(chat_models, MAX_TEMPLATE_HELPERS) * (TEMPLATE_HELPER_BYTES + growth_bytes)


def grammars_bytes(limit_bytes: int) -> int:
    """Return the bytes by which grammars may make their helper process grow in a run with this memory limit."""
    return min(max(MIN_GRAMMARS_BYTES, usable_bytes(limit_bytes) // HELPER_SHARE), MAX_HELPER_GROWTH_BYTES)


def templates_bytes(limit_bytes: int) -> int:
    """Return the bytes by which chat templates may make one helper process grow within this memory limit."""
    # This is rounded up, and the bytes for grammars are rounded down. So the two never grow at the same byte of the
    # limit, and the remaining memory never shrinks while the limit grows.
    return min(max(MIN_TEMPLATES_BYTES, -(-usable_bytes(limit_bytes) // HELPER_SHARE)), MAX_HELPER_GROWTH_BYTES)


def untrusted_bytes(manifest: Manifest, shape: RunShape, limit_bytes: int) -> dict[str, Any]:
    """Return the bytes reserved for untrusted programs (grammars, chat templates), by the fields' names in `Memory`."""
    has_templates = manifest.chat is not None and shape.gateways > 0
    return {
        "grammars_bytes": grammars_bytes(limit_bytes),
        "templates_bytes": templates_bytes(limit_bytes) if has_templates else 0,
    }


def trusted_bytes(manifest: Manifest, shape: RunShape, limit_bytes: int) -> int:
    """Return the bytes of a limit less headroom and untrusted programs. They never shrink while the limit grows."""
    reserved_bytes: int = sum(untrusted_bytes(manifest, shape, limit_bytes).values())
    return usable_bytes(limit_bytes) - reserved_bytes


def largest_read_bytes(layout: Layout, *, bundle: bool) -> int:
    """Return the bytes of the largest read of one cluster: of both parts (`bundle`), or of the larger part."""
    return layout.cluster_stride_bytes if bundle else max(layout.trigger_part_bytes, layout.value_part_bytes)


def queue_clusters(manifest: Manifest) -> int:
    """Return the capacity, in clusters, of each of the loader's queues."""
    return min(manifest.clusters + 64, MAX_QUEUED_CLUSTERS)


def vocabulary_bytes(manifest: Manifest) -> int:
    """Return the bytes by which the helper process for grammars grows while it reads the vocabulary."""
    return GRAMMAR_TOKEN_BYTES * manifest.model.vocabulary


def memory_budget(
    manifest: Manifest, shape: RunShape, *, prefill_chunk_tokens: int, staging_bytes: int
) -> MemoryBudget:
    """Return the memory budget of a run with this shape, this prefill chunk and staging buffers of this size."""
    layouts = fixed_layouts(manifest, shape) | prefill_layouts(manifest, shape, prefill_chunk_tokens)
    prefill_tokens = shape.prefill_tokens(prefill_chunk_tokens)
    product_neurons = product_blocks(manifest.layout, manifest.layout.blocks) * manifest.layout.block_neurons
    segments_bytes = {f"{name}_bytes": layout.total_bytes for name, layout in layouts.items()}
    if shape.embedding_on_flash:
        segments_bytes["fixed_bytes"] -= embedding_flash_bytes(manifest)
    return MemoryBudget(
        **segments_bytes,
        interpreters_bytes=INTERPRETER_BASE_BYTES
        + INTERPRETER_PER_PROCESS_BYTES * shape.processes
        + gateway_bytes(int(manifest.chat is not None), 0) * shape.gateways
        + INTERPRETER_PER_PROCESS_BYTES  # of the helper process for grammars
        + _driver_bytes(manifest, shape)
        + tokenizer_bytes(manifest.files[TOKENIZER].bytes, compact=manifest.compact_tokenizer),
        vocabulary_bytes=vocabulary_bytes(manifest),
        private_bytes=_engines_bytes(manifest, shape, prefill_tokens)
        + runtime_bytes(manifest, shape.prefill_backend, neurons=product_neurons, tokens=prefill_tokens)
        + 8 * manifest.model.vocabulary,  # the coordinator's scratch for sampling
        bookkeeping_bytes=manifest.clusters * CLUSTER_BOOKKEEPING_BYTES
        + _expert_uses_bytes(manifest, shape)
        + 4 * LOADER_QUEUES * queue_clusters(manifest)
        + NATIVE_BYTES,
        staging_bytes=staging_bytes,
        device_bytes=accelerator_bytes(manifest, shape) if shape.device_shares_memory else 0,
    )


def accelerator_bytes(manifest: Manifest, shape: RunShape) -> int:
    """Return the bytes that offloaded weights, and steps with them, take of the device's memory; 0 without one."""
    if not shape.max_offloaded_blocks:
        return 0
    blocks, batch = shape.max_offloaded_blocks, shape.sequences
    blocks_bytes = offload_bytes(manifest, blocks, batch, shape.accelerator_backend)
    return blocks_bytes + offloaded_matrices_bytes(manifest, shape.offloaded_matrices, batch)


def _expert_uses_bytes(manifest: Manifest, shape: RunShape) -> int:
    """Return the bytes with which the cache counts the uses of experts; 0 if it counts none."""
    if not whole_experts_of_token(manifest, shape.mode):
        return 0
    return EXPERT_USES_BYTES * (manifest.clusters // manifest.layout.clusters)


def _driver_bytes(manifest: Manifest, shape: RunShape) -> int:
    """Return the bytes of the accelerator's driver, or of its runtime with its graphs; 0 without an accelerator."""
    if not shape.max_offloaded_blocks:
        return 0
    if not runtime_of(shape.accelerator_backend):
        return DRIVER_BYTES
    neurons = offloaded_product_blocks(manifest.layout, shape.max_offloaded_blocks) * manifest.layout.block_neurons
    return offload_runtime_bytes(manifest, shape.accelerator_backend, neurons=neurons)


def peak_bytes(manifest: Manifest, plan: Plan, *, sequences: int, sequence_tokens: int, prompt_tokens: int) -> int:
    """Return the expected peak memory, in bytes, of a run with this plan.

    Pages of the KV cache and of a prompt's stage count if they were written, or borrowed for slots. Growth by grammars
    counts if slots borrow it.

    sequences: maximum of sequences at the same time
    sequence_tokens: length of the longest sequence
    prompt_tokens: length of the longest prompt
    """
    borrowable = BorrowableMemory.of(manifest, plan.compute, plan.memory)
    unborrowable_bytes = plan.memory.total_bytes() - borrowable.total_bytes
    if not plan.memory.has_borrowed_slots:
        unborrowable_bytes += HUGE_PAGES_BYTES
        return unborrowable_bytes + _used_bytes(manifest, plan, sequences, sequence_tokens, prompt_tokens)
    stage_tokens = borrowable.stage_tokens(prompt_tokens)
    reserved_bytes = borrowable.reserved_bytes([sequence_tokens] * min(sequences, plan.compute.sequences), stage_tokens)
    return unborrowable_bytes + max(
        reserved + _borrowed_bytes(manifest, plan, borrowable, reserved) for reserved in (0, reserved_bytes)
    )


def _borrowed_bytes(manifest: Manifest, plan: Plan, borrowable: BorrowableMemory, reserved_bytes: int) -> int:
    triggers, values = usable_borrowed_slots(plan.memory, borrowable, reserved_bytes)
    places = manifest.slots(moved=plan.memory.are_scales_moved)
    return triggers * places.trigger_bytes + values * places.value_bytes


def _used_bytes(manifest: Manifest, plan: Plan, sequences: int, sequence_tokens: int, prompt_tokens: int) -> int:
    """Return the bytes of the KV cache and of a prompt's stage that were written. Parameters are as in `peak_bytes`."""
    shape, chunk = RunShape.of(plan.compute), plan.compute.prefill_chunk_tokens
    least_width = min(vectors.width for vectors in manifest.model.cached_vectors)
    vector_bytes = row_bytes(shape.kv_type, least_width)  # of one head's key or value, or a latent
    page_tokens = max(1, PAGE_BYTES // vector_bytes)
    if shape.kv_type != "f16":  # a head's rows may begin and end within a page
        sequence_tokens += 2 * page_tokens
    used_tokens = min(shape.context_tokens, -(-sequence_tokens // page_tokens) * page_tokens)
    used_shape = dataclasses.replace(shape, sequences=min(sequences, shape.sequences), context_tokens=used_tokens)
    (stage,) = prefill_layouts(manifest, shape, min(chunk, prompt_tokens)).values()
    return fixed_layouts(manifest, used_shape)["kv"].total_bytes + stage.total_bytes


def _engines_bytes(manifest: Manifest, shape: RunShape, prefill_tokens: int) -> int:
    """Return the bytes of the participants' private memory.

    It has each token's vectors as kernels need them (in two types, since a predictor may need another one), its experts
    or slices, results of rows, attention scores, the state of a mixture's open clusters, the values that Down by output
    reads, and rows of an embedding on flash.
    """
    model, layout = manifest.model, manifest.layout
    max_width = max(
        model.width,
        model.query_width,
        model.heads_width if model.latent_width else 0,
        model.state_values_width,
        model.state_rank,
        2 * model.width if model.draft_layers else 0,
    )
    token_bytes = 2 * 4 * max_width + (4 * model.width if model.branch_norms else 0)
    state_rows = (3 if model.state_rank else 2) * model.state_key_width + 2
    token_bytes += 4 * max(model.max_head_width, state_rows, 2 * layout.block_neurons, 64)
    token_bytes += PAIR_BYTES * model.most_active_experts * layout.slices
    tokens = shape.prefill_threads * prefill_tokens + shape.workers * shape.step_tokens
    open_experts = shape.workers * min(model.most_experts, shape.step_tokens * model.most_active_experts)
    open_experts += shape.prefill_threads * min(model.most_experts, prefill_tokens * model.most_active_experts)
    clusters_bytes = OPEN_CLUSTER_BYTES * layout.clusters * open_experts if model.experts > 1 else 0
    if layout.down_by_output:
        clusters_bytes += SLICE_BYTES * layout.slices * (shape.workers + shape.prefill_threads)
        at_once = shape.prefill_threads * min(prefill_tokens, OUTPUT_TOKENS)
        at_once += shape.workers * min(shape.step_tokens, OUTPUT_TOKENS)
        clusters_bytes += OUTPUT_VALUE_BYTES * layout.cluster_neurons * at_once
    participants = shape.workers + shape.prefill_threads
    flash_rows = lib.NP_KEPT_ROWS if shape.embedding_on_flash else 0
    flash_row_bytes = flash_rows * (embedding_row_bytes(manifest) + 2 * PAGE_BYTES)
    scores_bytes = 4 * ATTEND_QUERIES * shape.context_tokens
    return tokens * token_bytes + clusters_bytes + participants * (flash_row_bytes + scores_bytes)


def min_chunk_tokens(shape: RunShape) -> int:
    """Return the smallest prefill chunk, unless a smaller one is requested.

    For a runtime it is the shortest graph, since a smaller chunk would only be padded.
    """
    min_tokens = GRAPH_TOKENS[0] if runtime_of(shape.prefill_backend) else MIN_CHUNK_TOKENS
    return min(min_tokens, shape.context_tokens)


class Budgets:
    """A cache of the memory budgets of one package, for a planner that makes many plans.

    Layouts are computed once for each shape and chunk.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._budgets: dict[tuple[RunShape, int], MemoryBudget] = {}
        self._min_budgets: dict[RunShape, MemoryBudget] = {}
        self._min_slots: dict[int, int] = {}
        self._min_limits: dict[RunShape, int] = {}

    def of(self, shape: RunShape, *, prefill_chunk_tokens: int, staging_bytes: int) -> MemoryBudget:
        key = shape, prefill_chunk_tokens
        if key not in self._budgets:
            self._budgets[key] = memory_budget(
                self._manifest, shape, prefill_chunk_tokens=prefill_chunk_tokens, staging_bytes=0
            )
        budget = self._budgets[key]
        return dataclasses.replace(budget, staging_bytes=staging_bytes) if staging_bytes else budget

    def min_budget(self, shape: RunShape) -> MemoryBudget:
        """Return the budget with the smallest chunk and the fewest staging buffers."""
        if shape not in self._min_budgets:
            self._min_budgets[shape] = self.of(
                shape,
                prefill_chunk_tokens=min_chunk_tokens(shape),
                staging_bytes=MIN_DEPTH * largest_read_bytes(self._manifest.layout, bundle=True),
            )
        return self._min_budgets[shape]

    def min_slots_bytes(self, workers: int) -> int:
        """Return the bytes of the fewest slots: each worker has a block open, and as many are free or being read.

        workers: decode workers
        """
        if workers not in self._min_slots:
            slots = 2 * workers * self._manifest.layout.block_clusters
            self._min_slots[workers] = slots_layout(self._manifest, slots, slots).total_bytes
        return self._min_slots[workers]

    @functools.cached_property
    def ffn_bytes(self) -> int:
        """Bytes of the slots' segment with slots for all clusters."""
        return slots_layout(self._manifest, self._manifest.clusters, self._manifest.clusters).total_bytes

    def min_limit_bytes(self, shape: RunShape) -> int:
        """Return the smallest memory limit whose `trusted_bytes` fit the smallest budget and the fewest slots. The
        embedding stays on flash if it may."""
        shape = dataclasses.replace(shape, embedding_on_flash=embedding_flash_bytes(self._manifest) > 0)
        if shape not in self._min_limits:
            needed_bytes = self.min_budget(shape).total_bytes() + self.min_slots_bytes(shape.workers)
            sufficient_bytes = -(-(needed_bytes + 2 * MAX_HELPER_GROWTH_BYTES) * (100 + HEADROOM_PERCENT) // 100)
            self._min_limits[shape] = bisect.bisect_left(
                range(sufficient_bytes),
                needed_bytes,
                key=lambda limit_bytes: trusted_bytes(self._manifest, shape, limit_bytes),
            )
        return self._min_limits[shape]


def usable_bytes(limit_bytes: int) -> int:
    """Return the bytes of a memory limit without headroom.

    Integer arithmetic makes the smallest limit exact.
    """
    return limit_bytes * 100 // (100 + HEADROOM_PERCENT)
