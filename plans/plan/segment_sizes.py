"""The memory that a run lays out: every segment, and what a process maps for itself. Computed here and nowhere else.

The planner budgets with these layouts before there is a run, the supervisor makes the segments from them and states
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
from neuronpipe.protocol.layout import Layout

WORD_BYTES = 4
PARTIAL_TOKENS = 64  # tokens whose block sums a step holds at once; more are summed by turns


@frozen(kw_only=True)
class RunShape:
    """What of a plan decides how much memory is taken besides neurons, a prompt's chunk and staging."""

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
    held_blocks: int = 0  # by the accelerator, at most; 0: there is none
    held_matrices: tuple[str, ...] = ()
    device_shares_memory: bool = False
    accelerator_backend: str = ""

    @classmethod
    def of(cls, compute: Compute) -> RunShape:
        """That of a plan."""
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
            held_blocks=compute.most_held_blocks(),
            held_matrices=compute.held_matrices,
            device_shares_memory=compute.device_shares_memory,
            accelerator_backend=compute.accelerator_backend(),
        )

    @property
    def predicts(self) -> bool:
        """Whether decode steps use a predictor."""
        return self.mode == "predicted" or self.hints

    def prefill_tokens(self, chunk_tokens: int) -> int:
        """Most tokens of one step of prefill: it is also asked for the logits of `logit_rows` tokens at once."""
        return max(chunk_tokens, self.logit_rows)


def product_blocks(layout: ClusterLayout, window_blocks: int) -> int:
    """Blocks of neurons that are handed to another to compute at once: so many that all products of a layer are about
    alike, for their graphs have one size; fewer where a window holds fewer."""
    return min(_alike(layout, layout.blocks), window_blocks)


def held_product_blocks(layout: ClusterLayout, blocks: int) -> int:
    """The same of the first `blocks`, which an accelerator holds and has no window for."""
    return _alike(layout, blocks)


def _alike(layout: ClusterLayout, blocks: int) -> int:
    products = -(-blocks // max(1, MAX_PRODUCT_NEURONS // layout.block_neurons))
    return -(-blocks // products)


def open_clusters(manifest: Manifest, compute: Compute) -> int:
    """How many clusters may be open at once, of either part: all that a step holds in place while it computes."""
    layout, experts = manifest.layout, manifest.model.experts
    return max(
        # Participants meet between layers: block windows of a whole layer are one; of experts, one for each.
        experts * layout.clusters
        if window_blocks == experts * layout.blocks
        else min(manifest.clusters, participants * window_blocks * layout.block_clusters)
        for participants, window_blocks in (
            (len(compute.decode_workers()), compute.decode_window_blocks),
            (compute.prefill_threads, compute.prefill_window_blocks),
        )
    )


def run_layouts(manifest: Manifest, plan: Plan) -> dict[str, Layout]:
    """The layout of every segment of a run, by name. Slots have places for the lent ones, too: pages that nobody uses
    take no memory."""
    others, memory = fixed_layouts(manifest, RunShape.of(plan.compute)), plan.memory
    triggers, values = memory.trigger_slots + memory.lent_trigger_slots, memory.value_slots + memory.lent_value_slots
    return others | {"slots": slots_layout(manifest, triggers, values, moved=memory.are_scales_moved)}


def private_layouts(manifest: Manifest, plan: Plan) -> dict[str, Layout]:
    """The layout of what a process of this run maps for itself, by name."""
    return own_layouts(manifest, RunShape.of(plan.compute), plan.compute.prefill_chunk_tokens)


def slots_layout(manifest: Manifest, trigger_slots: int, value_slots: int, *, moved: bool = False) -> Layout:
    """The segment of the neurons, with so many slots of either part. moved: as in `Layout.slots`."""
    places = manifest.slots(moved=moved)
    return layouts.slots(
        trigger_slots=trigger_slots,
        trigger_slot_bytes=places.trigger_bytes,
        value_slots=value_slots,
        value_slot_bytes=places.value_bytes,
    )


def fixed_layouts(manifest: Manifest, shape: RunShape) -> dict[str, Layout]:
    """The segments whose size depends on neither slots nor chunks: all but that of the neurons."""
    model = manifest.model
    made = (
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
    return {one.name: one for one in made}


def own_layouts(manifest: Manifest, shape: RunShape, prefill_chunk_tokens: int) -> dict[str, Layout]:
    """What processes map for themselves: the stages of prefill's steps, which its threads do alone."""
    tokens, partial_tokens = shape.prefill_tokens(prefill_chunk_tokens), PARTIAL_TOKENS
    lengths = _stage_lengths(manifest, tokens, predicts=shape.mode == "predicted")
    if runtime_of(shape.prefill_backend):  # what lies inside a feed-forward is the runtime's
        lengths |= {"neurons": 0, "rank": 0}
        partial_tokens = 0
    stage = layouts.prefill_stage(tokens=tokens, partial_tokens=min(tokens, partial_tokens), **lengths)
    return {stage.name: stage}


def _stage_lengths(manifest: Manifest, tokens: int, *, predicts: bool) -> dict[str, int]:
    """What stages of steps of so many tokens have alike. predicts: by a predictor, which may give hints only."""
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
