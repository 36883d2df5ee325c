"""What a run takes besides neurons: computed alike by the planner and by the check of plan files.

It is the sum of the layouts that segment_sizes.py makes, and of what has none.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from typing import Any

from neuronpipe.plans.package.layout import PAGE_BYTES, Layout
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.borrowed_memory import Lendable, lent_slots
from neuronpipe.plans.plan.document import MemoryBudget, Plan
from neuronpipe.plans.plan.offloaded_blocks import held_matrices_bytes, holding_bytes
from neuronpipe.plans.plan.runtime_memory import GRAPH_TOKENS, holder_bytes, runtime_bytes, runtime_of
from neuronpipe.plans.plan.segment_sizes import (
    RunShape,
    fixed_layouts,
    held_product_blocks,
    own_layouts,
    product_blocks,
    slots_layout,
)

MIB = 1 << 20
# Measured on the demo, with some room: see tests/bench/results/2026-11-23-process-memory.md.
LIBRARIES_BYTES = 15 * MIB  # of the interpreter and of libraries, what is used, as if nobody else had them open
INTERPRETER_BASE_BYTES = 34 * MIB + LIBRARIES_BYTES
INTERPRETER_PER_PROCESS_BYTES = 6 * MIB
GATEWAY_LIBRARIES_BYTES = 14 * MIB  # that no other process uses
REQUESTS_BYTES = 16 * MIB  # of requests in flight: bodies, what they become, answers that wait
GATEWAY_BYTES = 32 * MIB + REQUESTS_BYTES + GATEWAY_LIBRARIES_BYTES  # the HTTP server and what checks requests
# A gateway runs the chat templates of packages, which are strangers' programs, in helper processes.
TEMPLATE_HELPER_BYTES = 20 * MIB  # of one: its interpreter and libraries
MAX_TEMPLATE_HELPERS = 2  # of a gateway that serves several models
# By how much a helper process may grow beyond that, which the kernel enforces, is a share of the limit. The least of
# grammars compiles an enumeration of 6000 values with the demo's vocabulary in 6 MiB.
HELPER_SHARE = 16  # one part in so many
MIN_GRAMMARS_BYTES = 8 * MIB
MIN_TEMPLATES_BYTES = 24 * MIB
MAX_HELPER_GROWTH_BYTES = 64 * MIB
# Reading a tokenizer takes 14 times its file, of which 7 stay (measured with 32,000 and 128,000 tokens).
TOKENIZER_FACTOR = 14
# An OpenCL driver with its compiler: measured with PoCL (services/offload/gpu/README.md).
DRIVER_BYTES = 272 * MIB
# Of the coordinator's helper process for strangers' grammars: what one token of the vocabulary takes while the library
# reads it (measured: 303 and 315 bytes with the tokens of Llama 3 and Llama 2, of which 187 and 267 stay).
GRAMMAR_TOKEN_BYTES = 320
HEADROOM_PERCENT = 2  # of what is accounted for, against what is not
# Of one cluster, besides its two entries (8) in the residency segment: the loader's two checksums (8), its lists of
# free slots (8), bits for what it holds and what it warms up (less than 1); the cache's free slots (2), and what it
# asks to be warmed up, on its way (4).
CLUSTER_BOOKKEEPING_BYTES = 23
OPEN_CLUSTER_BYTES = 13  # its state, where its parts lie, what is asked for
LOADER_QUEUES = 9  # of three kinds and three priorities
MAX_QUEUED_CLUSTERS = 32768  # in one of them: two layers of a 7B model; what comes beyond stays in the workers' rings
NATIVE_BYTES = MIB // 4  # the loader's reads in flight, what allocators round up
# The smallest limit is computed with these; with a larger one there is more of both.
MIN_CHUNK_TOKENS = 8
MIN_DEPTH = 8


def gateway_bytes(chat_models: int, growth_bytes: int) -> int:
    """Return the bytes of a gateway and its helper processes.

    chat_models: how many of its models have a chat template
    growth_bytes: by how much chat templates may make one helper process grow
    """
    return GATEWAY_BYTES + min(chat_models, MAX_TEMPLATE_HELPERS) * (TEMPLATE_HELPER_BYTES + growth_bytes)


def grammars_bytes(limit_bytes: int) -> int:
    """Return by how many bytes grammars may make their helper process grow in a run with this memory limit."""
    return min(max(MIN_GRAMMARS_BYTES, usable_bytes(limit_bytes) // HELPER_SHARE), MAX_HELPER_GROWTH_BYTES)


def templates_bytes(limit_bytes: int) -> int:
    """Return by how many bytes chat templates may make one helper process grow within this memory limit."""
    # Rounded up, as grammars are rounded down: both never grow at the same byte of the limit, so that what is left for
    # all else never shrinks while the limit grows.
    return min(max(MIN_TEMPLATES_BYTES, -(-usable_bytes(limit_bytes) // HELPER_SHARE)), MAX_HELPER_GROWTH_BYTES)


def untrusted_bytes(manifest: Manifest, shape: RunShape, limit_bytes: int) -> dict[str, Any]:
    """Return what a run reserves for programs of strangers, by the fields of `Memory`."""
    has_templates = manifest.chat is not None and shape.gateways > 0
    return {
        "grammars_bytes": grammars_bytes(limit_bytes),
        "templates_bytes": templates_bytes(limit_bytes) if has_templates else 0,
    }


def trusted_bytes(manifest: Manifest, shape: RunShape, limit_bytes: int) -> int:
    """Return what a limit leaves for all but programs of strangers. It never shrinks while the limit grows."""
    reserved_bytes: int = sum(untrusted_bytes(manifest, shape, limit_bytes).values())
    return usable_bytes(limit_bytes) - reserved_bytes


def largest_read_bytes(layout: Layout, *, bundle: bool) -> int:
    """Bytes of the largest read that one cluster makes: of both parts, or of the larger one."""
    return layout.cluster_stride_bytes if bundle else max(layout.trigger_part_bytes, layout.value_part_bytes)


def queue_clusters(manifest: Manifest) -> int:
    """Clusters of one kind and priority that may wait in the loader."""
    return min(manifest.clusters + 64, MAX_QUEUED_CLUSTERS)


def vocabulary_bytes(manifest: Manifest) -> int:
    """By how much the process that follows grammars may grow while it reads the vocabulary."""
    return GRAMMAR_TOKEN_BYTES * manifest.model.vocabulary


def memory_budget(
    manifest: Manifest, shape: RunShape, *, prefill_chunk_tokens: int, staging_bytes: int
) -> MemoryBudget:
    """What this shape takes for this package, with prompts cut into such chunks and such staging buffers."""
    made = fixed_layouts(manifest, shape) | own_layouts(manifest, shape, prefill_chunk_tokens)
    prefill_tokens = shape.prefill_tokens(prefill_chunk_tokens)
    product_neurons = product_blocks(manifest.layout, manifest.layout.blocks) * manifest.layout.block_neurons
    tokenizer = TOKENIZER_FACTOR * manifest.files["tokenizer.json"].bytes
    return MemoryBudget(
        **{f"{name}_bytes": layout.total_bytes for name, layout in made.items()},
        interpreters_bytes=INTERPRETER_BASE_BYTES
        + INTERPRETER_PER_PROCESS_BYTES * shape.processes
        + gateway_bytes(int(manifest.chat is not None), 0) * shape.gateways
        + INTERPRETER_PER_PROCESS_BYTES  # of the helper process for grammars
        + vocabulary_bytes(manifest)
        + _driver_bytes(manifest, shape)
        + tokenizer,
        private_bytes=_engines_bytes(manifest, shape, prefill_tokens)
        + runtime_bytes(manifest, shape.prefill_backend, neurons=product_neurons, tokens=prefill_tokens)
        + 8 * manifest.model.vocabulary,  # the coordinator's scratch for sampling
        bookkeeping_bytes=manifest.clusters * CLUSTER_BOOKKEEPING_BYTES
        + 4 * LOADER_QUEUES * queue_clusters(manifest)
        + NATIVE_BYTES,
        staging_bytes=staging_bytes,
        device_bytes=accelerator_bytes(manifest, shape) if shape.device_shares_memory else 0,
    )


def accelerator_bytes(manifest: Manifest, shape: RunShape) -> int:
    """What the accelerator holds in its device: weights, and what steps need."""
    if not shape.held_blocks:
        return 0
    blocks, texts = shape.held_blocks, shape.sequences
    of_blocks = holding_bytes(manifest, blocks, texts, shape.accelerator_backend)
    return of_blocks + held_matrices_bytes(manifest, shape.held_matrices, texts)


def _driver_bytes(manifest: Manifest, shape: RunShape) -> int:
    """What an accelerator's driver takes besides; or its runtime, with its graphs."""
    if not shape.held_blocks:
        return 0
    if not runtime_of(shape.accelerator_backend):
        return DRIVER_BYTES
    neurons = held_product_blocks(manifest.layout, shape.held_blocks) * manifest.layout.block_neurons
    return holder_bytes(manifest, shape.accelerator_backend, neurons=neurons)


def held_bytes(manifest: Manifest, plan: Plan, *, texts: int, text_tokens: int, prompt_tokens: int) -> int:
    """What a run with this plan holds at most while so many texts of so many tokens, with such prompts, are the longest
    it has had: pages of the KV cache and of a prompt's stage count when they are first written, or lent to slots."""
    lendable = Lendable.of(manifest, plan.compute, plan.memory)
    unlent_bytes = plan.memory.total_bytes() - lendable.total_bytes
    if not plan.memory.lends:
        return unlent_bytes + _used_bytes(manifest, plan, texts, text_tokens, prompt_tokens)
    stage_tokens = lendable.stage_tokens(prompt_tokens)
    reserved_bytes = lendable.reserved_bytes([text_tokens] * min(texts, plan.compute.sequences), stage_tokens)
    return unlent_bytes + max(
        reserved + _lent_bytes(manifest, plan, lendable, reserved) for reserved in (0, reserved_bytes)
    )


def _lent_bytes(manifest: Manifest, plan: Plan, lendable: Lendable, reserved_bytes: int) -> int:
    triggers, values = lent_slots(plan.memory, lendable, reserved_bytes)
    places = manifest.slots(moved=plan.memory.are_scales_moved)
    return triggers * places.trigger_bytes + values * places.value_bytes


def _used_bytes(manifest: Manifest, plan: Plan, texts: int, text_tokens: int, prompt_tokens: int) -> int:
    """Of the KV cache and a prompt's stage."""
    shape, chunk = RunShape.of(plan.compute), plan.compute.prefill_chunk_tokens
    page_tokens = max(1, PAGE_BYTES // (2 * manifest.model.head_width))  # of one head's keys or values
    held_tokens = min(shape.context_tokens, -(-text_tokens // page_tokens) * page_tokens)
    held = dataclasses.replace(shape, sequences=min(texts, shape.sequences), context_tokens=held_tokens)
    (stage,) = own_layouts(manifest, shape, min(chunk, prompt_tokens)).values()
    return fixed_layouts(manifest, held)["kv"].total_bytes + stage.total_bytes


def _engines_bytes(manifest: Manifest, shape: RunShape, prefill_tokens: int) -> int:
    """What participants have to themselves: of each token prepared vectors (in two types, if predictors have another)
    and rows' results; attention scores; of a mixture's clusters that are open at once what is known and asked for."""
    model, layout = manifest.model, manifest.layout
    longest = max(model.width, model.query_width)
    of_token = 2 * 4 * longest + 4 * max(model.head_width, 2 * layout.block_neurons, 64)
    tokens = shape.prefill_threads * prefill_tokens + shape.workers * shape.sequences
    open_experts = shape.workers * min(model.experts, shape.sequences * model.experts_per_token)
    open_experts += shape.prefill_threads * min(model.experts, prefill_tokens * model.experts_per_token)
    of_clusters = OPEN_CLUSTER_BYTES * layout.clusters * open_experts if model.experts > 1 else 0
    return tokens * of_token + of_clusters + 16 * shape.context_tokens * (shape.workers + shape.prefill_threads)


def least_chunk_tokens(shape: RunShape) -> int:
    """The smallest chunk that a plan takes by itself. A runtime's is its shortest graph: fewer tokens would cost as
    much, each."""
    least = GRAPH_TOKENS[0] if runtime_of(shape.prefill_backend) else MIN_CHUNK_TOKENS
    return min(least, shape.context_tokens)


class Budgets:
    """`memory_budget` of one package for a planner that asks again and again: each shape and chunk is laid out once."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._made: dict[tuple[RunShape, int], MemoryBudget] = {}
        self._least: dict[RunShape, MemoryBudget] = {}
        self._least_slots: dict[int, int] = {}
        self._least_limits: dict[RunShape, int] = {}

    def of(self, shape: RunShape, *, prefill_chunk_tokens: int, staging_bytes: int) -> MemoryBudget:
        """As `memory_budget`."""
        key = shape, prefill_chunk_tokens
        if key not in self._made:
            self._made[key] = memory_budget(
                self._manifest, shape, prefill_chunk_tokens=prefill_chunk_tokens, staging_bytes=0
            )
        made = self._made[key]
        return dataclasses.replace(made, staging_bytes=staging_bytes) if staging_bytes else made

    def least(self, shape: RunShape) -> MemoryBudget:
        """With the smallest chunk and the fewest staging buffers: what no limit may go below."""
        if shape not in self._least:
            self._least[shape] = self.of(
                shape,
                prefill_chunk_tokens=least_chunk_tokens(shape),
                staging_bytes=MIN_DEPTH * largest_read_bytes(self._manifest.layout, bundle=True),
            )
        return self._least[shape]

    def least_slots_bytes(self, workers: int) -> int:
        """Of the fewest slots: every decode worker has one block open, and as much again is free or on its way."""
        if workers not in self._least_slots:
            slots = 2 * workers * self._manifest.layout.block_clusters
            self._least_slots[workers] = slots_layout(self._manifest, slots, slots).total_bytes
        return self._least_slots[workers]

    @functools.cached_property
    def ffn_bytes(self) -> int:
        """Of the slots' segment, were everything resident."""
        return slots_layout(self._manifest, self._manifest.clusters, self._manifest.clusters).total_bytes

    def least_limit_bytes(self, shape: RunShape) -> int:
        """The smallest limit whose `trusted_bytes` hold the least budget and the fewest slots."""
        if shape not in self._least_limits:
            needed = self.least(shape).total_bytes() + self.least_slots_bytes(shape.workers)
            enough = -(-(needed + 2 * MAX_HELPER_GROWTH_BYTES) * (100 + HEADROOM_PERCENT) // 100)
            self._least_limits[shape] = bisect.bisect_left(
                range(enough), needed, key=lambda limit_bytes: trusted_bytes(self._manifest, shape, limit_bytes)
            )
        return self._least_limits[shape]


def usable_bytes(limit_bytes: int) -> int:
    """What may be accounted for under a limit. Whole numbers throughout, so that the least limit is exact."""
    return limit_bytes * 100 // (100 + HEADROOM_PERCENT)
