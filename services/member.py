"""One member of a step: the native engine over this process's view of shared memory, and the loop over layers.

Decode workers are the members of one step together; the prefill worker is the only member of its own. Both run
`compute`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.services.parts import DEMAND, GATE, PREFETCH, REST

TYPES = {"f16": lib.NP_F16, "q8": lib.NP_Q8, "q4": lib.NP_Q4}
ACTIVATIONS = {"relu": lib.NP_RELU, "drelu": lib.NP_DRELU, "relu2": lib.NP_RELU2, "silu": lib.NP_SILU}


class Abandoned(Exception):
    """The epoch changed, or the loader cannot be asked: leave the step, its inputs are still there."""


class Damaged(Exception):
    """A cluster that the step needs cannot be read; the text names it."""


Fetch = Callable[[int, bytes, int], None]
"""(part, packed little-endian word indices, priority): ask the loader for clusters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """Buffers of shared memory, as the mapped segments give them; each at least as long as the layouts say."""

    fixed: Mapping[str, Any]  # tensor name -> buffer
    residual: Any
    queries: Any
    attention: Any
    partials: Any
    logits: Any
    kv: Any
    gate_slots: Any
    rest_slots: Any
    gate_words: Any
    rest_words: Any
    gate_window: Any
    rest_window: Any
    arrivals: Any
    epoch: Any
    barrier: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """This member's place in the step, from the plan."""

    sequences: int
    context_tokens: int
    most_tokens: int
    logit_rows: int
    members: int
    share_from: float
    share_to: float
    window_blocks: int
    spin_us: int
    prefetch: bool  # ask for the next window while this one is computed


def native_shape(manifest: Manifest, context_tokens: int) -> Any:
    """The package's shape and layout as the native library wants them."""
    s, layout = manifest.shape, manifest.layout
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
            "window_tokens": s.window_tokens,
            "norm_epsilon": s.norm_epsilon,
            "type": TYPES[manifest.quantization],
            "activation": ACTIVATIONS[manifest.activation],
            "cluster_neurons": layout.cluster_neurons,
            "clusters": layout.clusters,
            "block_neurons": layout.block_neurons,
            "blocks": layout.blocks,
            "gate_part_bytes": layout.gate_part_bytes,
            "rest_part_bytes": layout.rest_part_bytes,
            "gate_quants": layout.gate_quants,
            "gate_scales": layout.gate_scales,
            "up_quants": layout.up_quants,
            "down_quants": layout.down_quants,
            "up_scales": layout.up_scales,
            "down_scales": layout.down_scales,
            "scales_in_gate": layout.scales_part == "gate",
        },
    )


class Member:
    """The engine of one process. Not thread-safe; `close` before the segments are unmapped."""

    def __init__(self, manifest: Manifest, view: View, place: Place, fetch: Fetch) -> None:
        self._manifest = manifest
        self._place = place
        self._fetch = fetch
        self._keep: list[Any] = []  # cffi frees what nobody holds
        shape = native_shape(manifest, place.context_tokens)
        fixed = self._native_fixed(view.fixed)
        shared = self._native_shared(view)
        self._step_ms = 0.0
        self._engine = lib.np_engine_create(
            shape,
            fixed,
            shared,
            place.sequences,
            place.most_tokens,
            place.logit_rows,
            place.members,
            place.share_from,
            place.share_to,
            place.spin_us,
        )
        if self._engine == ffi.NULL:
            raise MemoryError("the engine's private memory could not be allocated")
        own = ffi.new("uint32_t[2]")
        lib.np_engine_own_blocks(self._engine, own, own + 1)
        self._windows = [
            (first, min(first + place.window_blocks, own[1])) for first in range(own[0], own[1], place.window_blocks)
        ]
        self._ids = ffi.new("uint32_t[]", manifest.layout.clusters)

    def close(self) -> None:
        """Free the engine."""
        lib.np_engine_destroy(self._engine)
        self._engine = ffi.NULL
        self._keep.clear()

    def compute(
        self,
        epoch: int,
        sequences: Sequence[int],
        positions: Sequence[int],
        tokens: Sequence[int],
        logits: tuple[int, int] | None,
    ) -> None:
        """One pass of these tokens over all layers; logits of `logits` = (first token, count) into logit rows 0...

        Raises Abandoned when the epoch changed, Damaged when a cluster failed, ValueError for arguments out of range.
        """
        began_ns = lib.np_trace_now()
        self._read_counters()  # a step that was abandoned left its own
        self._check(
            lib.np_engine_begin(self._engine, epoch, list(sequences), list(positions), list(tokens), len(tokens))
        )
        self._check(lib.np_engine_embed(self._engine))
        for layer in range(self._manifest.shape.layers):
            self._check(lib.np_engine_attention(self._engine, layer))
            self._feed_forward(layer)
        if logits is not None:
            self._check(lib.np_engine_logits(self._engine, logits[0], logits[1], 0))
        self._step_ms = (lib.np_trace_now() - began_ns) / 1e6

    def counters(self) -> dict[str, float]:
        """What happened in the last `compute`: rows read, clusters looked up and missed, time taken and waited."""
        counters = self._read_counters()
        return {
            "active": counters.neurons_fired,
            "gate_rows": counters.neurons_total,
            "up_rows": counters.neurons_fired,
            "down_rows": counters.neurons_fired,
            "gate_clusters": counters.gate_clusters,
            "gate_missed": counters.gate_missed,
            "rest_clusters": counters.rest_clusters,
            "rest_missed": counters.rest_missed,
            "step_ms": self._step_ms,
            "flash_ms": counters.wait_us / 1000,
            "meet_ms": counters.meet_us / 1000,
        }

    def _feed_forward(self, layer: int) -> None:
        engine, ids = self._engine, self._ids
        self._check(lib.np_engine_ffn(engine, layer))
        for number, (first, end) in enumerate(self._windows):
            self._request(GATE, self._check(lib.np_engine_open(engine, first, end, ids)), DEMAND)
            try:
                pending = self._check(lib.np_engine_gates(engine, 0))
                self._request(REST, lib.np_engine_rest_missing(engine, ids), DEMAND)
                if self._place.prefetch:
                    self._prefetch_after(layer, number)
                if pending:
                    self._check(lib.np_engine_gates(engine, 1))
                    self._request(REST, lib.np_engine_rest_missing(engine, ids), DEMAND)
                if self._check(lib.np_engine_blocks(engine, 0)):
                    self._check(lib.np_engine_blocks(engine, 1))
            finally:
                lib.np_engine_close(engine)
        self._check(lib.np_engine_combine(engine))

    def _prefetch_after(self, layer: int, window: int) -> None:
        """Ask for the next window's clusters, in this layer or the next."""
        if window + 1 == len(self._windows):
            layer, window = layer + 1, -1
        if layer == self._manifest.shape.layers:
            return
        first, end = self._windows[window + 1]
        for part in (GATE, REST):
            self._request(part, lib.np_engine_absent(self._engine, part, layer, first, end, self._ids), PREFETCH)

    def _request(self, part: int, count: int, priority: int) -> None:
        if count:
            self._fetch(part, bytes(ffi.buffer(self._ids, 4 * count)), priority)

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
        layer, cluster = divmod(counters.damaged_word, self._manifest.layout.clusters)
        part = "up/down" if counters.damaged_part else "gate"
        n = self._manifest.layout.cluster_neurons
        return (
            f"bundles.bin: layer {layer}, neurons {cluster * n} to {cluster * n + n - 1}: the {part} part "
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

    def _native_shared(self, view: View) -> Any:
        kinds = {
            "kv": "uint16_t *",
            "gate_slots": "uint8_t *",
            "rest_slots": "uint8_t *",
            "gate_words": "uint32_t *",
            "rest_words": "uint32_t *",
            "gate_window": "uint64_t *",
            "rest_window": "uint64_t *",
            "arrivals": "uint32_t *",
            "epoch": "uint32_t *",
            "barrier": "np_barrier *",
        }
        names = [field.name for field in dataclasses.fields(View) if field.name != "fixed"]
        shared = ffi.new(
            "np_shared *", {name: self._pointer(kinds.get(name, "float *"), getattr(view, name)) for name in names}
        )
        self._keep.append(shared)
        return shared

    def _native_fixed(self, tensors: Mapping[str, Any]) -> Any:
        def matrix(name: str) -> dict[str, Any]:
            return {
                "quants": self._pointer("void *", tensors[f"{name}.quants"]),
                "scales": self._pointer("void *", tensors.get(f"{name}.scales")),
            }

        def vector(name: str) -> Any:
            return self._pointer("float *", tensors.get(name))

        layers = ffi.new(
            "np_layer[]",
            [
                {
                    "qkv": matrix(f"layers.{n}.qkv"),
                    "attention_output": matrix(f"layers.{n}.attention_output"),
                    "qkv_bias": vector(f"layers.{n}.qkv.bias"),
                    "attention_norm": vector(f"layers.{n}.attention_norm"),
                    "ffn_norm": vector(f"layers.{n}.ffn_norm"),
                }
                for n in range(self._manifest.shape.layers)
            ],
        )
        embedding = matrix("embedding")
        fixed = ffi.new(
            "np_fixed *",
            {
                "embedding": embedding,
                "output": embedding if self._manifest.tied_embeddings else matrix("output"),
                "output_norm": vector("output_norm"),
                "inverse_frequency": vector("rope.inverse_frequency"),
                "layers": layers,
            },
        )
        self._keep += [layers, fixed]
        return fixed
