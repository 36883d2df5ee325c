"""Memory layouts of a run: every segment, and the private memory of processes. They are computed only here.

The planner budgets memory with these layouts. The supervisor creates the segments from them and states them in
run.json; every process that attaches maps the layouts stated there.
"""

from __future__ import annotations

import dataclasses

from neuronpipe.native import lib
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import GROUP_WEIGHTS, PAGE_BYTES, quant_bytes, row_bytes
from neuronpipe.plans.package.layout import Layout as ClusterLayout
from neuronpipe.plans.package.manifest import FIXED, PREDICTOR, Manifest
from neuronpipe.plans.plan.document import DEFAULT_BACKEND, GATEWAY, Compute, KvType, Mode, Plan, backend_of
from neuronpipe.plans.plan.runtime_memory import MAX_PRODUCT_NEURONS, runtime_of
from neuronpipe.protocol import layouts
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.memory.layout import Layout

WORD_BYTES = 4
KV_WORD_BYTES = 2  # of the segment of keys and values
STATE_ELEMENT_BYTES = 4
STATES_PER_SEQUENCE = 2  # recurrent states: a step reads one and writes the other
MIN_SNAPSHOTS, MAX_SNAPSHOTS = 3, 8  # of recurrent states; with fewer there are no drafted tokens
FURTHER_STATES_SHARE = 1 / 16  # of the memory limit, for states besides two of each sequence: of drafts, and snapshots
PARTIAL_TOKENS = 64  # maximum of tokens whose block sums a prefill step stores at once; more are computed in turns


@frozen(kw_only=True)
class RunShape:
    """The choices of a plan that determine the size of its memory, except neurons, prefill chunk and staging.

    Fields that `Compute` has, too, are explained there.
    """

    mode: Mode
    processes: int  # number of all processes
    workers: int  # number of decode workers
    prefill_threads: int
    sequences: int
    context_tokens: int
    logit_rows: int
    gateways: int = 0  # number of gateways among the processes
    hints: bool = False
    prefill_backend: str = DEFAULT_BACKEND
    max_offloaded_blocks: int = 0  # of each feed-forward; 0: there is no accelerator
    offloaded_matrices: tuple[str, ...] = ()
    device_shares_memory: bool = False
    accelerator_backend: str = ""
    state_slots: int = 0
    draft_tokens: int = 0
    kv_type: KvType = "f16"
    embedding_on_flash: bool = False

    @classmethod
    def of(cls, compute: Compute) -> RunShape:
        return cls(
            mode=compute.mode,
            processes=len(compute.processes),
            workers=len(compute.decode_workers()),
            prefill_threads=compute.prefill_threads,
            sequences=compute.sequences,
            context_tokens=compute.context_tokens,
            logit_rows=compute.logit_rows,
            gateways=sum(process.role == GATEWAY for process in compute.processes),
            hints=compute.hints,
            prefill_backend=backend_of("prefill", compute.processes),
            max_offloaded_blocks=compute.max_offloaded_blocks(),
            offloaded_matrices=compute.held_matrices,
            device_shares_memory=compute.device_shares_memory,
            accelerator_backend=compute.accelerator_backend(),
            state_slots=compute.state_slots,
            draft_tokens=compute.draft_tokens,
            kv_type=compute.kv_type,
            embedding_on_flash=compute.embedding_on_flash,
        )

    @property
    def step_tokens(self) -> int:
        """Maximum of tokens in a decode step."""
        return max(self.sequences, 1 + self.draft_tokens)

    @property
    def predicts(self) -> bool:
        """True if decode steps may use a predictor, to decide or for hints."""
        return self.mode == "predicted" or self.hints

    def prefill_tokens(self, chunk_tokens: int) -> int:
        """Return the maximum of tokens in one prefill step: a chunk, or `logit_rows` tokens if that is more."""
        return max(chunk_tokens, self.logit_rows)


def with_drafts(manifest: Manifest, shape: RunShape, draft_tokens: int, limit_bytes: int) -> RunShape:
    """Return the shape with this many drafted tokens in a step.

    If layers have states, it gets the slots of these, and drafts only if the limit has room for theirs.
    """
    if not manifest.model.all_state_elements:
        return dataclasses.replace(shape, draft_tokens=draft_tokens)
    state_bytes = STATE_ELEMENT_BYTES * manifest.model.all_state_elements
    room = int(FURTHER_STATES_SHARE * limit_bytes // state_bytes)
    draft_tokens = draft_tokens if room >= draft_tokens + MIN_SNAPSHOTS else 0
    slots = STATES_PER_SEQUENCE * shape.sequences + draft_tokens + min(MAX_SNAPSHOTS, room - draft_tokens)
    return dataclasses.replace(shape, state_slots=slots, draft_tokens=draft_tokens)


def kv_type_fault(model: ModelSpec, kv_type: KvType) -> str | None:
    """Return why the KV cache of a model cannot have elements of this type; None if it can."""
    widths = {vectors.width for vectors in model.cached_vectors if vectors.vectors}
    odd = [width for width in sorted(widths) if width % GROUP_WEIGHTS]
    if kv_type == "f16" or not odd:
        return None
    return f"keys have groups of {GROUP_WEIGHTS} elements, and this model's have {odd[0]} elements"


def embedding_row_bytes(manifest: Manifest) -> int:
    """Return the bytes of a row of the embedding without its scales, which stay in memory."""
    return quant_bytes(manifest.quantization_of("embedding"), manifest.model.width)


def embedding_flash_bytes(manifest: Manifest) -> int:
    """Return the bytes of memory that an embedding on flash does not take: whole pages of the segment that are never
    written. 0 if it cannot stay there, because it is the output matrix as well, which every step reads."""
    if manifest.model.tied_embeddings:
        return 0
    return max(0, manifest.model.vocabulary * embedding_row_bytes(manifest) // PAGE_BYTES - 1) * PAGE_BYTES


def product_blocks(layout: ClusterLayout, window_blocks: int) -> int:
    """Return the number of blocks in one external matrix product of prefill.

    Products of a layer share a graph, whose size is fixed, so they have nearly the same size. A small block window
    limits it.
    """
    return min(_even_blocks(layout, layout.blocks), window_blocks)


def offloaded_product_blocks(layout: ClusterLayout, blocks: int) -> int:
    """Return the number of blocks in one product of an accelerator that computes the first `blocks` blocks.

    No block window limits it.
    """
    return _even_blocks(layout, blocks)


def _even_blocks(layout: ClusterLayout, blocks: int) -> int:
    products = -(-blocks // max(1, MAX_PRODUCT_NEURONS // layout.block_neurons))
    return -(-blocks // products)


def open_clusters(manifest: Manifest, compute: Compute) -> int:
    """Return how many clusters of either part may be open, that is in use by the step being computed, at once."""
    layout, experts = manifest.layout, manifest.model.most_experts
    return max(
        # A barrier separates layers, so participants with windows of a whole layer all have the same one open. Windows
        # of feed-forwards may differ.
        experts * layout.clusters
        if window_blocks == experts * layout.blocks
        else min(manifest.clusters, participants * window_blocks * layout.block_clusters)
        for participants, window_blocks in (
            (len(compute.decode_workers()), compute.decode_window_blocks),
            (compute.prefill_threads, compute.prefill_window_blocks),
        )
    )


def run_layouts(manifest: Manifest, plan: Plan) -> dict[str, Layout]:
    """Return the layout of every segment of a run, by name.

    The slots' segment includes borrowed slots: pages that are not touched take no memory.
    """
    fixed, memory = fixed_layouts(manifest, RunShape.of(plan.compute)), plan.memory
    triggers, values = memory.trigger_slots + memory.lent_trigger_slots, memory.value_slots + memory.lent_value_slots
    return fixed | {"slots": slots_layout(manifest, triggers, values, moved=memory.are_scales_moved)}


def private_layouts(manifest: Manifest, plan: Plan) -> dict[str, Layout]:
    """Return the layouts of private memory of a run's processes, by name."""
    return prefill_layouts(manifest, RunShape.of(plan.compute), plan.compute.prefill_chunk_tokens)


def slots_layout(manifest: Manifest, trigger_slots: int, value_slots: int, *, moved: bool = False) -> Layout:
    """Return the layout of the segment with these numbers of slots.

    moved: scales are co-located
    """
    places = manifest.slots(moved=moved)
    return layouts.slots(
        trigger_slots=trigger_slots,
        trigger_slot_bytes=places.trigger_bytes,
        value_slots=value_slots,
        value_slot_bytes=places.value_bytes,
    )


def fixed_layouts(manifest: Manifest, shape: RunShape) -> dict[str, Layout]:
    """Return the layouts of all segments but that of the slots, by name. They depend on neither slots nor chunk."""
    model = manifest.model
    segments = (
        layouts.fixed(
            file_bytes=manifest.files[FIXED].bytes,
            predictor_bytes=manifest.files[PREDICTOR].bytes if shape.predicts and manifest.predictor else 0,
            embedding_rows=model.vocabulary if shape.embedding_on_flash else 0,
        ),
        layouts.residency(
            clusters=manifest.clusters, ffns=model.ffns, participants=shape.workers + shape.prefill_threads
        ),
        layouts.kv(
            position_words=row_bytes(shape.kv_type, model.position_elements) // KV_WORD_BYTES,
            sequences=shape.sequences,
            context_tokens=shape.context_tokens,
            state_slots=shape.state_slots,
            state_elements=model.all_state_elements,
        ),
        layouts.exchange(
            tokens=shape.step_tokens,
            logit_rows=shape.logit_rows,
            vocabulary=model.vocabulary,
            workers=shape.workers,
            lane_words=lib.np_channel_bytes(shape.step_tokens) // WORD_BYTES,
            drafts=model.draft_layers > 0,
            **_stage_lengths(manifest, shape.step_tokens, predicts=shape.predicts),
        ),
        layouts.board(processes=shape.processes, sequences=shape.sequences),
        layouts.trace(rings=shape.processes),
    )
    return {segment.name: segment for segment in segments}


def prefill_layouts(manifest: Manifest, shape: RunShape, prefill_chunk_tokens: int) -> dict[str, Layout]:
    """Return the layout of the prefill process's private memory, by name: the stage of its steps."""
    tokens, partial_tokens = shape.prefill_tokens(prefill_chunk_tokens), PARTIAL_TOKENS
    lengths = _stage_lengths(manifest, tokens, predicts=shape.mode == "predicted")
    if runtime_of(shape.prefill_backend):  # the runtime has memory of its own for values inside a feed-forward
        lengths |= {"neurons": 0, "rank": 0}
        partial_tokens = 0
    stage = layouts.prefill_stage(tokens=tokens, partial_tokens=min(tokens, partial_tokens), **lengths)
    return {stage.name: stage}


def _stage_lengths(manifest: Manifest, tokens: int, *, predicts: bool) -> dict[str, int]:
    """Return the lengths of arrays in the stage of a step with `tokens` tokens, in decode as in prefill.

    predicts: a predictor is used, to decide or for hints
    """
    model, layout = manifest.model, manifest.layout
    return {
        "width": model.width,
        "output_width": model.change_width,
        "query_width": model.heads_width,
        "neurons": layout.blocks * layout.block_neurons,
        "blocks": layout.blocks,
        "rank": manifest.predictor.rank if predicts and manifest.predictor is not None else 0,
        "claims": lib.np_engine_claims(model.layers),
        "experts_per_token": model.most_active_experts,
        "groups": min(model.most_experts, tokens * model.most_active_experts),
    }
