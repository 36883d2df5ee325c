"""Memory layouts of a run: every segment, and the private memory of processes. They are computed in no other place.

The planner budgets with these layouts before a run exists, the supervisor creates the segments from them and states
them in run.json, and every process that attaches maps the layouts stated there.
"""

from __future__ import annotations

from neuronpipe.native import lib
from neuronpipe.plans.package.layout import Layout as ClusterLayout
from neuronpipe.plans.package.manifest import FIXED, PREDICTOR, Manifest
from neuronpipe.plans.plan.document import DEFAULT_BACKEND, GATEWAY, Compute, Mode, Plan, backend_of
from neuronpipe.plans.plan.runtime_memory import MAX_PRODUCT_NEURONS, runtime_of
from neuronpipe.protocol import layouts
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.memory.layout import Layout

WORD_BYTES = 4
PARTIAL_TOKENS = 64  # tokens whose block sums a step stores at once; more are summed in turns


@frozen(kw_only=True)
class RunShape:
    """The choices of a plan that size its memory, without neurons, prefill chunk and staging."""

    mode: Mode
    processes: int
    workers: int  # decode
    prefill_threads: int
    sequences: int
    context_tokens: int
    logit_rows: int
    gateways: int = 0  # of the processes
    hints: bool = False
    prefill_backend: str = DEFAULT_BACKEND
    max_offloaded_blocks: int = 0  # of each feed-forward; 0: there is no accelerator
    offloaded_matrices: tuple[str, ...] = ()
    device_shares_memory: bool = False
    accelerator_backend: str = ""

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
        )

    @property
    def predicts(self) -> bool:
        """True if decode steps use a predictor."""
        return self.mode == "predicted" or self.hints

    def prefill_tokens(self, chunk_tokens: int) -> int:
        """Return the maximum of tokens in one prefill step, which may also compute logits of `logit_rows` tokens at
        once."""
        return max(chunk_tokens, self.logit_rows)


def product_blocks(layout: ClusterLayout, window_blocks: int) -> int:
    """Return the blocks of neurons in one external matrix product.

    All products of a layer have nearly the same size, since their graphs have one size. A small block window limits it.
    """
    return min(_even_blocks(layout, layout.blocks), window_blocks)


def offloaded_product_blocks(layout: ClusterLayout, blocks: int) -> int:
    """Return the blocks in one product of an accelerator that computes the first `blocks`, for which it needs no
    window."""
    return _even_blocks(layout, blocks)


def _even_blocks(layout: ClusterLayout, blocks: int) -> int:
    products = -(-blocks // max(1, MAX_PRODUCT_NEURONS // layout.block_neurons))
    return -(-blocks // products)


def open_clusters(manifest: Manifest, compute: Compute) -> int:
    """Return how many clusters of either part may be open at once, that is in use by a step that is being computed."""
    layout, experts = manifest.layout, manifest.model.experts
    return max(
        # A barrier separates layers, so windows of a whole layer are the same window; windows of experts are not.
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

    Slots include the borrowed ones: pages that nobody touches take no memory.
    """
    fixed, memory = fixed_layouts(manifest, RunShape.of(plan.compute)), plan.memory
    triggers, values = memory.trigger_slots + memory.lent_trigger_slots, memory.value_slots + memory.lent_value_slots
    return fixed | {"slots": slots_layout(manifest, triggers, values, moved=memory.are_scales_moved)}


def private_layouts(manifest: Manifest, plan: Plan) -> dict[str, Layout]:
    """Return the private layouts of this run's processes, by name."""
    return prefill_layouts(manifest, RunShape.of(plan.compute), plan.compute.prefill_chunk_tokens)


def slots_layout(manifest: Manifest, trigger_slots: int, value_slots: int, *, moved: bool = False) -> Layout:
    """Return the segment of the neurons with these numbers of slots.

    moved: True if scales are co-located, as in `Layout.slots`
    """
    places = manifest.slots(moved=moved)
    return layouts.slots(
        trigger_slots=trigger_slots,
        trigger_slot_bytes=places.trigger_bytes,
        value_slots=value_slots,
        value_slot_bytes=places.value_bytes,
    )


def fixed_layouts(manifest: Manifest, shape: RunShape) -> dict[str, Layout]:
    """Return the segments whose size depends on neither slots nor chunks: all but that of the neurons."""
    model = manifest.model
    segments = (
        layouts.fixed(
            file_bytes=manifest.files[FIXED].bytes,
            predictor_bytes=manifest.files[PREDICTOR].bytes if shape.predicts and manifest.predictor else 0,
        ),
        layouts.residency(clusters=manifest.clusters, participants=shape.workers + shape.prefill_threads),
        layouts.kv(
            layers=model.layers,
            sequences=shape.sequences,
            key_heads=model.key_heads,
            context_tokens=shape.context_tokens,
            head_width=model.head_width,
        ),
        layouts.exchange(
            tokens=shape.sequences,
            logit_rows=shape.logit_rows,
            vocabulary=model.vocabulary,
            workers=shape.workers,
            lane_words=lib.np_channel_bytes(shape.sequences) // WORD_BYTES,
            **_stage_lengths(manifest, shape.sequences, predicts=shape.predicts),
        ),
        layouts.board(processes=shape.processes, sequences=shape.sequences),
        layouts.trace(rings=shape.processes),
    )
    return {segment.name: segment for segment in segments}


def prefill_layouts(manifest: Manifest, shape: RunShape, prefill_chunk_tokens: int) -> dict[str, Layout]:
    """Return the private layouts of the prefill process: the stage of its steps, which only its threads use."""
    tokens, partial_tokens = shape.prefill_tokens(prefill_chunk_tokens), PARTIAL_TOKENS
    lengths = _stage_lengths(manifest, tokens, predicts=shape.mode == "predicted")
    if runtime_of(shape.prefill_backend):  # the runtime stores the values inside a feed-forward
        lengths |= {"neurons": 0, "rank": 0}
        partial_tokens = 0
    stage = layouts.prefill_stage(tokens=tokens, partial_tokens=min(tokens, partial_tokens), **lengths)
    return {stage.name: stage}


def _stage_lengths(manifest: Manifest, tokens: int, *, predicts: bool) -> dict[str, int]:
    """Return the lengths that all stages of steps with this number of tokens have in common.

    predicts: True if a predictor is used, for hints or to decide
    """
    model, layout = manifest.model, manifest.layout
    return {
        "width": model.width,
        "query_width": model.query_width,
        "neurons": layout.blocks * layout.block_neurons,
        "blocks": layout.blocks,
        "rank": manifest.predictor.rank if predicts and manifest.predictor is not None else 0,
        "claims": lib.np_engine_claims(model.layers),
        "experts_per_token": model.experts_per_token,
        "groups": min(model.experts, tokens * model.experts_per_token),
    }
