"""One participant of a step: the native engine over the process's mappings of shared memory.

The decode workers, or the threads of a prefill worker, are the participants of a step. `compute` is one native call, or
one per matrix product where those are computed externally.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.steps.backend import Abandoned, Damaged, StepWork
from neuronpipe.services.steps.step_counters import PARTS, counters_by_name
from neuronpipe.services.worker.external_products import ComputeBlocks, ComputeRows, Multiply
from neuronpipe.services.worker.native_model import NativeTensors, native_shape
from neuronpipe.services.worker.step_channel import Lane

OFFLOADED_MATRICES = {
    "qkv": lib.NP_OFFLOAD_QKV,
    "attention_output": lib.NP_OFFLOAD_ATTENTION_OUTPUT,
    "output": lib.NP_OFFLOAD_OUTPUT,
}
"""Matrices that can be offloaded besides blocks, by their names in a plan. The engine refuses other bits."""


@frozen(kw_only=True)
class EmbeddingRows:
    """The embedding's quants that stay on flash: their file, the offset of row 0, and a CRC-32C of each row."""

    path: Path
    offset_bytes: int
    row_bytes: int
    checksums: Any  # [vocabulary]

    @classmethod
    def of(cls, package: Package, checksums: Any) -> EmbeddingRows | None:
        """Return the rows of a package's embedding; None if there are no checksums: the embedding is in memory."""
        if not len(checksums):
            return None
        entry = package.embedding_quants
        return cls(path=package.fixed_path, offset_bytes=entry.start, row_bytes=entry.row_bytes, checksums=checksums)


@frozen(kw_only=True)
class View:
    """The buffers of a participant, each at least as long as native/neuronpipe.h says of np_shared's field of that
    name.

    slots, entries: a buffer for each part
    changes: None unless the model norms outputs
    drafted: None or empty unless the model has a draft layer
    states: None unless layers have a state
    ranks, predicted: None in exact mode
    activity: None unless neurons are recorded
    reuse: None unless uses of clusters are counted
    """

    fixed: Mapping[str, Any]  # tensor name -> buffer; in predicted mode the predictor's as well
    residual: Any
    queries: Any
    attention: Any
    hidden: Any
    partials: Any
    changes: Any
    ranks: Any
    predicted: Any
    claims: Any
    logits: Any
    kv: Any
    states: Any
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
    reuse: Any = None  # np_reuse
    inputs: Any = None  # with external matrix products
    outputs: Any = None  # with external matrix products, or with offloaded matrices
    drafted: Any = None
    embedding_rows: EmbeddingRows | None = None  # None: the embedding is in memory


@frozen(kw_only=True)
class EngineConfig:
    """The engine's configuration: the fields of np_engine_config in native/neuronpipe.h."""

    sequences: int
    context_tokens: int
    max_tokens: int
    logit_rows: int
    window_blocks: int
    partial_tokens: int
    spin_us: int
    predicts: bool  # a predictor is used, in predicted mode or for hints
    thresholded: bool  # the mode is thresholded
    bundle: bool
    prefetch: bool
    pipeline: bool
    hints: bool = False
    kv_type: int = lib.NP_F16
    moved_scales: bool = False  # value slots hold the scales of their rows
    external_products: bool = False  # matrix products of layers are external
    product_blocks: int = 0  # blocks per external product
    state_slots: int = 0  # of layers that have a state
    offload_blocks: bool = False  # this participant's blocks are offloaded


def create_engine(shape: Any, fixed: Any, shared: Any, config: Any) -> Any:
    """Create a native engine. Raises ValueError, which names the wrong field, and MemoryError."""
    wrong = ffi.new("const char **")
    engine = lib.np_engine_create(shape, fixed, shared, config, wrong)
    if engine != ffi.NULL:
        return engine
    if wrong[0] == ffi.NULL:
        raise MemoryError("the engine's private memory could not be allocated")
    field = ffi.string(wrong[0]).decode()
    raise ValueError(f"the engine refuses `{field}`: it is out of its range, or contradicts another field")


def _open_rows(rows: EmbeddingRows | None, keep: list[Any]) -> Any:
    """Return the np_row_file of an embedding on flash, NULL for one in memory. Raises UserError."""
    if rows is None:
        return ffi.NULL
    checksums, error = ffi.from_buffer("uint32_t[]", rows.checksums), ffi.new("int *")
    keep.append(checksums)
    path, place = os.fsencode(rows.path), (rows.offset_bytes, rows.row_bytes, len(checksums))
    opened = lib.np_row_file_open(path, *place, checksums, error)
    if opened == ffi.NULL:
        raise UserError(f"{rows.path}: cannot be opened for reading (errno {error[0]})")
    return opened


class Participant:
    """The engine of one participant, used by one thread. Close it before the segments are unmapped."""

    def __init__(self, manifest: Manifest, view: View, config: EngineConfig) -> None:
        self._manifest = manifest
        self._config = config
        self._keep: list[Any] = []  # references that keep cffi from freeing native memory
        neurons = manifest.model.ffns * manifest.layout.blocks * manifest.layout.block_neurons
        if view.activity is not None and len(view.activity) != neurons:
            raise ValueError(
                f"activity: {len(view.activity)} bytes, but the model has {neurons} neurons, padding included"
            )
        shape = native_shape(
            manifest, config.context_tokens, predicts=config.predicts, moved_scales=config.moved_scales
        )
        tensors = NativeTensors(manifest, view.fixed, self._pointer, self._keep)
        fixed = tensors.fixed(predicts=config.predicts, thresholded=config.thresholded)
        fixed.embedding_rows = self._embedding_rows = _open_rows(view.embedding_rows, self._keep)
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
        """Free the engine. It cannot be used afterwards."""
        lib.np_engine_destroy(self._engine)
        lib.np_row_file_close(self._embedding_rows)
        self._engine = self._embedding_rows = ffi.NULL
        self._keep.clear()

    def compute(self, work: StepWork, multiply: Multiply | None = None) -> None:
        """Compute this participant's share of a step.

        multiply: computes the external matrix products, for the first participant; None if there are none

        Raises Abandoned if the epoch changed, Damaged if a cluster cannot be read, ValueError for arguments out of
        range.
        """
        step = self._take(work)
        if multiply is None:
            self._check(lib.np_engine_step(self._engine, step))
            return
        self._check(lib.np_engine_begin_external(self._engine, step))
        if work.share.participant:
            self._check(lib.np_engine_next_product(self._engine, ffi.new("np_product *")))
            return
        multiply.begin(self)
        try:
            while self._check(lib.np_engine_next_product(self._engine, product := ffi.new("np_product *"))):
                multiply(self, product)
        finally:
            multiply.end()

    def compute_offloaded(self, work: StepWork, blocks: ComputeBlocks, rows: ComputeRows | None = None) -> None:
        """Take part in a step whose offloaded blocks and matrices `blocks` and `rows` compute, layer after layer.

        Raises as `compute`, and ValueError if the step has offloaded matrices and `rows` is None.
        """
        names = work.share.offloaded_matrices
        if names and rows is None:
            raise ValueError(f"offloaded_matrices: {', '.join(names)}: this backend computes no rows")
        engine = self._engine
        self._check(lib.np_engine_begin_offload(engine, self._take(work)))
        block_request, row_request = ffi.new("np_offloaded_blocks *"), ffi.new("np_offloaded_matrix *")
        while kind := self._check(lib.np_engine_next_offload(engine, block_request)):
            if kind == lib.NP_OFFLOADED_MATRIX and rows is not None:
                lib.np_engine_offloaded_matrix(engine, row_request)
                rows(row_request)
            else:
                sums = blocks(block_request)
                self._check(lib.np_engine_put_block_sums(engine, ffi.from_buffer("float[]", sums), sums.size))

    def serve_lane(self, lane: Lane) -> None:
        """Compute the steps that arrive on the step channel, as `Lane.serve` does. Raises as `compute`, about the step
        that `lane` names."""
        if (done := lane.serve(self._engine)) != lib.NP_E_TIMEOUT:
            self._check(done)

    def _take(self, work: StepWork) -> Any:
        self._read_counters()  # clears the counters of a step that was abandoned
        self._step_arrays = [
            ffi.new("int32_t[]", list(values)) if values else ffi.NULL
            for values in (
                work.sequences,
                work.positions,
                work.tokens,
                work.states_from,
                work.states_to,
            )
        ]
        step = self._step
        step.number, step.epoch = work.number, work.epoch
        share = work.share
        step.participants, step.participant = share.participants, share.participant
        step.first_block, step.end_block = share.first_block, share.end_block
        step.sharers, step.sharer = share.sharers, share.sharer
        step.offloaded_blocks = share.offloaded_blocks
        step.offloaded_matrices = sum(OFFLOADED_MATRICES.get(name, 1 << 31) for name in set(share.offloaded_matrices))
        step.count, step.logits_first, step.logits_count = len(work.tokens), work.logits_first, work.logits_count
        step.sequences, step.positions, step.tokens, step.states_from, step.states_to = self._step_arrays
        step.token_scores = ffi.NULL if work.ratings is None else work.ratings.native
        return step

    def next_rows(self) -> Any | None:
        """Return the next np_product_rows of this step, or None after the last. Rows that are not known yet have `kind`
        0.

        This method, `open_rows` and `product` may be called by another thread than `compute`, between `begin` and `end`
        of Multiply.
        """
        rows = ffi.new("np_product_rows *")
        return rows if self._check(lib.np_engine_next_rows(self._engine, rows)) else None

    def open_rows(self, rows: Any) -> None:
        """Wait until the rows are resident and set their addresses, which are valid until other rows are opened. Raises
        as `compute`."""
        self._check(lib.np_engine_open_rows(self._engine, rows))

    def close_rows(self) -> None:
        lib.np_engine_close_rows(self._engine)

    def product(self, product: Any, rows: Any, tokens: Any, out: Any) -> None:
        """Compute a product with the engine's own kernels.

        rows: opened rows
        tokens: the tokens to compute, a uint32 buffer
        out: float32 [len(tokens)][product.outputs_stride]
        """
        stride = product.outputs_stride
        number, room = ffi.from_buffer("uint32_t[]", tokens), ffi.from_buffer("float[]", out, require_writable=True)
        if len(room) < len(number) * stride:
            raise ValueError(f"out: {len(room)} elements for {len(number)} tokens of {stride}")
        self._check(lib.np_engine_compute_product(self._engine, product, rows, number, len(number), room, stride))

    def counters(self) -> dict[str, float]:
        """Return the counters of the last step: the fields of np_engine_counters, times in milliseconds."""
        return counters_by_name(self._read_counters())

    def _check(self, result: int) -> int:
        if result >= 0:
            return result
        if result == lib.NP_E_EPOCH:
            raise Abandoned
        if result == lib.NP_E_DAMAGED:
            raise Damaged(self._describe_damage())
        if result == lib.NP_E_IO:
            raise Damaged(
                "fixed.safetensors: a row of `embedding` cannot be read or does not match its checksum; convert the "
                "model again or copy the package again"
            )
        raise ValueError(f"the engine refused its arguments ({result})")

    def _describe_damage(self) -> str:
        counters = self._read_counters()
        ffn, cluster = divmod(counters.damaged_word, self._manifest.layout.clusters)
        layer, expert = self._manifest.model.place_of(ffn)
        where = self._manifest.model.name_of(layer, expert)
        part = next(name for name, number in PARTS.items() if number == counters.damaged_part)
        n, experts = self._manifest.layout.cluster_neurons, self._manifest.source_experts
        if experts is not None:
            return experts.fault(self._manifest.model.run_of(layer, expert), where)
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
        if isinstance(buffers, tuple):
            return [self._pointer(kind, buffer) for buffer in buffers]
        return self._pointer(kind, buffers)

    def _native_shared(self, view: View) -> Any:
        kinds = {
            "predicted": "uint8_t *",
            "claims": "uint32_t *",
            "drafted": "int32_t *",
            "kv": "void *",
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
        if view.reuse is not None:
            structures["reuse"] = view.reuse[0]
        apart = ("fixed", "embedding_rows", "reuse", *structures)
        names = [field.name for field in dataclasses.fields(View) if field.name not in apart]
        pointers = {name: self._pointers(kinds.get(name, "float *"), getattr(view, name)) for name in names}
        shared = ffi.new("np_shared *", pointers | structures)
        self._keep += [shared, view.requests, view.trace, view.reuse]
        return shared
