"""One participant of a step: the native engine over this process's view of shared memory.

Decode workers are the participants of one step together; the threads of the prefill worker are those of its own. All
run `compute`, which is one native call; or, where another computes the products of layers, one for each product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.plans.models.spec import SCALES
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.tensors import predictor_name
from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.steps.backend import Abandoned, Damaged, StepWork
from neuronpipe.services.steps.step_counters import PARTS, counters_by_name
from neuronpipe.services.worker.external_products import ComputeBlocks, ComputeRows, Multiply
from neuronpipe.services.worker.step_channel import Lane

TYPES = {"f16": lib.NP_F16, "q8": lib.NP_Q8, "q4": lib.NP_Q4, "q3": lib.NP_Q3}
ACTIVATIONS = {"relu": lib.NP_RELU, "drelu": lib.NP_DRELU, "relu2": lib.NP_RELU2, "silu": lib.NP_SILU}
ROUTERS = {"softmax": lib.NP_ROUTER_SOFTMAX, "sigmoid": lib.NP_ROUTER_SIGMOID}
NORMS = {"rms": lib.NP_NORM_RMS, "layer": lib.NP_NORM_LAYER}
READS = {
    "feed_forward": lib.NP_READS_FEED_FORWARD,
    "attention": lib.NP_READS_ATTENTION,
    "layer": lib.NP_READS_LAYER,
    "residual": lib.NP_READS_RESIDUAL,
}


HELD_MATRICES = {"qkv": lib.NP_HELD_QKV, "attention_output": lib.NP_HELD_ATTENTION_OUTPUT, "output": lib.NP_HELD_OUTPUT}
"""Matrices that a participant may hold besides blocks, by their names in a plan; the engine refuses any other bit."""


@frozen(kw_only=True)
class View:
    """Buffers of memory that participants share, each at least as long as native/neuronpipe.h says of the field of
    np_shared by the same name. slots, entries: by part. ranks, predicted: None in exact mode; activity: None where
    nobody records what neurons do."""

    fixed: Mapping[str, Any]  # tensor name -> buffer; in predicted mode the predictor's as well
    residual: Any
    queries: Any
    attention: Any
    hidden: Any
    partials: Any
    ranks: Any
    predicted: Any
    claims: Any
    logits: Any
    kv: Any
    slots: tuple[Any, Any]
    entries: tuple[Any, Any]
    window: Any
    arrivals: Any
    in_flight: Any
    epoch: Any
    barrier: Any
    requests: Any  # np_requests
    trace: Any  # np_trace
    activity: Any
    inputs: Any = None  # this and the next: where another computes the products of layers
    outputs: Any = None  # also where this participant holds matrices


@frozen(kw_only=True)
class EngineConfig:
    """How this participant computes: the fields of np_engine_config in native/neuronpipe.h."""

    sequences: int
    context_tokens: int
    max_tokens: int
    logit_rows: int
    window_blocks: int
    partial_tokens: int
    spin_us: int
    predicts: bool  # there is a predictor: in predicted mode, or for hints
    thresholded: bool  # mode thresholded
    bundle: bool
    prefetch: bool
    pipeline: bool
    hints: bool = False
    moved_scales: bool = False  # value slots hold the scales of their rows
    outside: bool = False  # another computes the products of layers,
    product_blocks: int = 0  # each of so many blocks
    held: bool = False  # another, who holds their weights, computes this participant's blocks


def native_shape(manifest: Manifest, context_tokens: int, *, predicts: bool, moved_scales: bool = False) -> Any:
    """The package's shape and layout as the native library wants them. moved_scales: as the plan's memory says."""
    s, layout, slots = manifest.model, manifest.layout, manifest.slots(moved=moved_scales)
    predictor = manifest.predictor if predicts else None
    places = {
        matrix.name: {
            "part": PARTS[matrix.part],
            "quants": matrix.quants,
            "scales_part": PARTS[matrix.scales_part],
            "scales": matrix.scales,
        }
        for matrix in slots.matrices
    }
    return ffi.new(
        "np_shape *",
        {
            "width": s.width,
            "neurons": s.neurons,
            "layers": s.layers,
            "query_heads": s.query_heads,
            "key_heads": s.key_heads,
            "head_width": s.head_width,
            "vocabulary": s.vocabulary,
            "context_tokens": context_tokens,
            "experts": s.experts,
            "experts_per_token": s.experts_per_token,
            "router": ROUTERS[s.router],
            "router_reads": READS[s.router_reads],
            "norm": NORMS[s.norm],
            "norm_epsilon": s.norm_epsilon,
            "head_norm": s.head_norm,
            "rotary": s.positions == "rotary",
            "type": TYPES[manifest.quantization],
            "trigger_type": TYPES[manifest.trigger_quantization],
            "embedding_type": TYPES[manifest.quantization_of("embedding")],
            "activation": ACTIVATIONS[s.activation],
            "activation_threshold": s.activation_threshold,
            **{name: getattr(s, name) for name in SCALES},
            "parallel": s.parallel,
            "gated": s.gated,
            "cluster_neurons": layout.cluster_neurons,
            "clusters": layout.clusters,
            "block_neurons": layout.block_neurons,
            "blocks": layout.blocks,
            "slot_bytes": (slots.trigger_bytes, slots.value_bytes),
            **places,
            "predictor_rank": predictor.rank if predictor else 0,
            "predictor_type": TYPES[predictor.quantization] if predictor else 0,
            "predictor_relu": predictor is not None and predictor.hidden == "relu",
            "predictor_reads": READS[predictor.reads] if predictor else 0,
        },
    )


def create_engine(shape: Any, fixed: Any, shared: Any, config: Any) -> Any:
    """The native engine. Raises ValueError naming the field that is wrong, MemoryError when memory is short."""
    wrong = ffi.new("const char **")
    engine = lib.np_engine_create(shape, fixed, shared, config, wrong)
    if engine != ffi.NULL:
        return engine
    if wrong[0] == ffi.NULL:
        raise MemoryError("the engine's private memory could not be allocated")
    field = ffi.string(wrong[0]).decode()
    raise ValueError(f"the engine refuses `{field}`: it is out of its range, or contradicts another field")


class Participant:
    """The engine of one participant. One thread uses it; `close` before the segments are unmapped."""

    def __init__(self, manifest: Manifest, view: View, config: EngineConfig) -> None:
        self._manifest = manifest
        self._config = config
        self._keep: list[Any] = []  # cffi frees what nobody holds
        neurons = manifest.model.ffns * manifest.layout.blocks * manifest.layout.block_neurons
        if view.activity is not None and len(view.activity) != neurons:
            raise ValueError(
                f"activity: {len(view.activity)} bytes, but the model has {neurons} neurons, padding included"
            )
        shape = native_shape(
            manifest, config.context_tokens, predicts=config.predicts, moved_scales=config.moved_scales
        )
        fixed = self._native_fixed(view.fixed)
        shared = self._native_shared(view)
        native_config = ffi.new(
            "np_engine_config *",
            {
                field.name: getattr(config, field.name)
                for field in dataclasses.fields(EngineConfig)
                if field.name not in ("context_tokens", "predicts", "thresholded", "moved_scales")
            },
        )
        self._engine = create_engine(shape, fixed, shared, native_config)
        self._step = ffi.new("np_step *")

    def close(self) -> None:
        """Free the engine."""
        lib.np_engine_destroy(self._engine)
        self._engine = ffi.NULL
        self._keep.clear()

    def compute(self, work: StepWork, multiply: Multiply | None = None) -> None:
        """This participant's share of a step. multiply: computes each product of the layers, where the config says that
        another does; the first participant's is called.

        Raises Abandoned when the epoch changed, Damaged when a cluster failed, ValueError for arguments out of range.
        """
        step = self._take(work)
        if multiply is None:
            self._check(lib.np_engine_step(self._engine, step))
            return
        self._check(lib.np_engine_begin(self._engine, step))
        if work.share.participant:
            self._check(lib.np_engine_next(self._engine, ffi.new("np_product *")))
            return
        multiply.begin(self)
        try:
            while self._check(lib.np_engine_next(self._engine, wanted := ffi.new("np_product *"))):
                multiply(self, wanted)
        finally:
            multiply.end()

    def compute_held(self, work: StepWork, blocks: ComputeBlocks, rows: ComputeRows | None = None) -> None:
        """The same where another holds the weights of this participant's blocks, the step's `held_blocks`: `blocks`
        computes them, layer after layer; and `rows` those of the matrices that the step says are held."""
        if work.share.held_matrices and rows is None:
            raise ValueError(f"held_matrices: {', '.join(work.share.held_matrices)}, but nobody computes their rows")
        engine = self._engine
        self._check(lib.np_engine_begin_held(engine, self._take(work)))
        wanted, wanted_rows = ffi.new("np_wanted_blocks *"), ffi.new("np_wanted_rows *")
        while what := self._check(lib.np_engine_next_blocks(engine, wanted)):
            if what == lib.NP_WANTED_ROWS and rows is not None:
                lib.np_engine_wanted_rows(engine, wanted_rows)
                rows(wanted_rows)
            else:
                sums = blocks(wanted)
                self._check(lib.np_engine_put_sums(engine, ffi.from_buffer("float[]", sums), sums.size))

    def serve_lane(self, lane: Lane) -> None:
        """Compute the steps that come by the lane, until `lane.listens` says that none do, or for a moment. Raises as
        `compute` of the step that `lane` names."""
        if (done := lane.serve(self._engine)) != lib.NP_E_TIMEOUT:
            self._check(done)

    def _take(self, work: StepWork) -> Any:
        """The step as the native library wants it."""
        self._read_counters()  # a step that was abandoned left its own
        self._step_arrays = [
            ffi.new("int32_t[]", list(values)) for values in (work.sequences, work.positions, work.tokens)
        ]
        step = self._step
        step.number, step.epoch = work.number, work.epoch
        share = work.share
        step.participants, step.participant = share.participants, share.participant
        step.first_block, step.end_block = share.first_block, share.end_block
        step.sharers, step.sharer = share.sharers, share.sharer
        step.held_blocks = share.held_blocks
        step.held_matrices = sum(HELD_MATRICES.get(name, 1 << 31) for name in set(share.held_matrices))
        step.count, step.logits_first, step.logits_count = len(work.tokens), work.logits_first, work.logits_count
        step.sequences, step.positions, step.tokens = self._step_arrays
        step.ratings = ffi.NULL if work.ratings is None else work.ratings.native
        return step

    def next_rows(self) -> Any | None:
        """np_product_rows: those that come next in this step; None after the last. Where they are not known yet their
        `kind` is 0. This, `open_rows` and `product` may be called in another thread than `compute`, between `begin` and
        `end` of Multiply."""
        rows = ffi.new("np_product_rows *")
        return rows if self._check(lib.np_engine_next_rows(self._engine, rows)) else None

    def open_rows(self, rows: Any) -> None:
        """Set where they lie, once they are there; good until others are opened. Raises as `compute`."""
        self._check(lib.np_engine_open_rows(self._engine, rows))

    def close_rows(self) -> None:
        """None is read any more."""
        lib.np_engine_close_rows(self._engine)

    def product(self, product: Any, rows: Any, tokens: Any, out: Any) -> None:
        """A product by the engine's own kernels. rows: open. tokens: which, a uint32 buffer; out: float32
        [len(tokens)][product.outputs_stride], for what it is of each of them alone."""
        stride = product.outputs_stride
        number, room = ffi.from_buffer("uint32_t[]", tokens), ffi.from_buffer("float[]", out, require_writable=True)
        if len(room) < len(number) * stride:
            raise ValueError(f"out: {len(room)} elements for {len(number)} tokens of {stride}")
        self._check(lib.np_engine_product(self._engine, product, rows, number, len(number), room, stride))

    def counters(self) -> dict[str, float]:
        """What happened in the last `compute`; the fields of np_engine_counters, times in ms."""
        return counters_by_name(self._read_counters())

    def _check(self, result: int) -> int:
        if result >= 0:
            return result
        if result == lib.NP_E_EPOCH:
            raise Abandoned
        if result == lib.NP_E_DAMAGED:
            raise Damaged(self._describe_damage())
        raise ValueError(f"the engine refused its arguments ({result})")

    def _describe_damage(self) -> str:
        counters = self._read_counters()
        ffn, cluster = divmod(counters.damaged_word, self._manifest.layout.clusters)
        layer, expert = divmod(ffn, self._manifest.model.experts)
        where = f"layer {layer}" if self._manifest.model.experts == 1 else f"layer {layer}, expert {expert}"
        part = next(name for name, number in PARTS.items() if number == counters.damaged_part)
        n = self._manifest.layout.cluster_neurons
        return (
            f"bundles.bin: {where}, neurons {cluster * n} to {cluster * n + n - 1}: the {part} part "
            "cannot be read or does not match its checksum; convert the model again or copy the package again"
        )

    def _read_counters(self) -> Any:
        counters = ffi.new("np_engine_counters *")
        lib.np_engine_read_counters(self._engine, counters)
        return counters

    def _pointer(self, kind: str, buffer: Any) -> Any:
        if buffer is None:
            return ffi.NULL
        pinned = ffi.from_buffer(buffer)
        self._keep.append(pinned)
        return ffi.cast(kind, pinned)

    def _pointers(self, kind: str, buffers: Any) -> Any:
        """A buffer's pointer; those of both parts where there are two."""
        if isinstance(buffers, tuple):
            return [self._pointer(kind, buffer) for buffer in buffers]
        return self._pointer(kind, buffers)

    def _native_shared(self, view: View) -> Any:
        kinds = {
            "predicted": "uint8_t *",
            "claims": "uint32_t *",
            "kv": "uint16_t *",
            "slots": "uint8_t *",
            "entries": "uint32_t *",
            "window": "uint64_t *",
            "arrivals": "uint32_t *",
            "in_flight": "uint32_t *",
            "epoch": "uint32_t *",
            "activity": "uint8_t *",
            "barrier": "np_barrier *",
        }
        structures = {"requests": view.requests[0], "trace": view.trace[0]}
        names = [field.name for field in dataclasses.fields(View) if field.name not in ("fixed", *structures)]
        pointers = {name: self._pointers(kinds.get(name, "float *"), getattr(view, name)) for name in names}
        shared = ffi.new("np_shared *", pointers | structures)
        self._keep += [shared, view.requests, view.trace]
        return shared

    def _predictors(self, layer: int, matrix: Callable[[str], Any], vector: Callable[[str], Any]) -> dict[str, Any]:
        """Those of a layer's feed-forwards, where this run predicts."""
        predictor, model = self._manifest.predictor, self._manifest.model
        if not self._config.predicts or predictor is None:
            return {}
        names = [predictor_name(model, layer, expert) for expert in range(model.experts)]
        native = ffi.new(
            "np_predictor[]",
            [
                {
                    "input": matrix(f"{name}.input"),
                    "sides": [matrix(f"{name}.{side}") for side in predictor.sides],
                    "biases": [vector(f"{name}.{side}.bias") for side in predictor.sides],
                    "rank": predictor.rank_of(layer * model.experts + expert),
                }
                for expert, name in enumerate(names)
            ],
        )
        self._keep.append(native)
        return {"predictors": native}

    def _silent_below(self, layer: int) -> float:
        """The layer's threshold, where this run has any."""
        silent = self._manifest.silent
        return silent.by_layer[layer].threshold if self._config.thresholded and silent is not None else 0.0

    def _native_fixed(self, tensors: Mapping[str, Any]) -> Any:
        def matrix(name: str) -> dict[str, Any]:
            return {
                "quants": self._pointer("void *", tensors[f"{name}.quants"]),
                "scales": self._pointer("void *", tensors.get(f"{name}.scales")),
            }

        def vector(name: str) -> Any:
            return self._pointer("float *", tensors.get(name))

        def norm(name: str) -> dict[str, Any]:
            return {"weight": vector(name), "bias": vector(f"{name}.bias")}

        model = self._manifest.model
        layers = ffi.new(
            "np_layer[]",
            [
                {
                    "window_tokens": window_tokens,
                    "rotary": rotary,
                    "silent_below": self._silent_below(n),
                    "router": vector(f"layers.{n}.router"),
                    "qkv": matrix(f"layers.{n}.qkv"),
                    "attention_output": matrix(f"layers.{n}.attention_output"),
                    "attention_norm": norm(f"layers.{n}.attention_norm"),
                    "ffn_norm": norm(f"layers.{n}.ffn_norm"),
                    "qkv_bias": vector(f"layers.{n}.qkv.bias"),
                    "attention_output_bias": vector(f"layers.{n}.attention_output.bias"),
                    "query_norm": vector(f"layers.{n}.query_norm"),
                    "key_norm": vector(f"layers.{n}.key_norm"),
                    "up_bias": vector(f"layers.{n}.up.bias"),
                    "down_bias": vector(f"layers.{n}.down.bias"),
                    **self._predictors(n, matrix, vector),
                }
                for n, (window_tokens, rotary) in enumerate(zip(model.windows_tokens, model.rotary_layers, strict=True))
            ],
        )
        embedding = matrix("embedding")
        fixed = ffi.new(
            "np_fixed *",
            {
                "embedding": embedding,
                "output": embedding if model.tied_embeddings else matrix("output"),
                "output_norm": norm("output_norm"),
                "inverse_frequency": vector("rope.inverse_frequency"),
                "position_embedding": vector("position_embedding"),
                "layers": layers,
            },
        )
        self._keep += [layers, fixed]
        return fixed
