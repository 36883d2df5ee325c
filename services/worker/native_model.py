"""A package's model as the native engine takes it: its shape, and the tensors of its layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from neuronpipe.native import ROW_TYPES, ffi
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.native_fields import names_checksum, native_value, numbers
from neuronpipe.plans.package.tensors import layer_norms, mixer_matrices, predictor_name
from neuronpipe.services.steps.step_counters import PARTS

_SHAPE_FIELDS = {name for name, _ in ffi.typeof("np_shape").fields}
_SAME_FIELDS = tuple(field.name for field in fields(ModelSpec) if field.name in _SHAPE_FIELDS)
"""Fields of ModelSpec that np_shape has too, with the same values unless `native_shape` says otherwise."""

_VECTORS = {
    "qkv_bias": "qkv.bias",
    "attention_output_bias": "attention_output.bias",
    "query_norm": "query_norm",
    "key_norm": "key_norm",
    "latent_norm": "latent_norm",
    "query_down_norm": "query_down_norm",
    "sinks": "sinks",
    "gate_bias": "gate.bias",
    "up_bias": "up.bias",
    "down_bias": "down.bias",
    "scale": "scale",
    "router": "router",
    "router_norm": "router_norm",
    "expert_scales": "expert_scales",
    "router_bias": "router.bias",
    "choosing_bias": "router.choosing_bias",
    "shared_gate": "shared_gate",
    "convolution": "convolution",
    "convolution_bias": "convolution.bias",
    "decay": "decay",
    "time_bias": "time_bias",
    "skip": "skip",
    "recurrent_norm": "recurrent_norm",
}
"""Field of np_layer -> the tensor of a layer that it points at; NULL if the package has no such tensor."""

Pointer = Callable[[str, Any], Any]


def native_shape(manifest: Manifest, context_tokens: int, *, predicts: bool, moved_scales: bool = False) -> Any:
    """Return the np_shape of a package. The slices of a dense feed-forward are experts that compute every token.

    moved_scales: scales are co-located with value slots, by the plan's memory
    """
    s, layout, slots = manifest.model, manifest.layout, manifest.slots(moved=moved_scales)
    predictor = manifest.predictor if predicts else None
    places = {
        matrix.name: {
            "part": PARTS[matrix.part],
            "quants": matrix.quants,
            "scales_part": PARTS[matrix.scales_part],
            "scales": matrix.scales,
            "type": ROW_TYPES[matrix.quantization or manifest.quantization],
        }
        for matrix in slots.matrices
    }
    return ffi.new(
        "np_shape *",
        {
            **{name: native_value(name, getattr(s, name)) for name in _SAME_FIELDS},
            "layers": s.layers,
            "heads_width": s.heads_width,
            "state_elements": s.all_state_elements,
            "context_tokens": context_tokens,
            "neurons": s.neurons // layout.slices,
            "experts": s.most_experts * layout.slices,
            "experts_per_token": s.most_active_experts * layout.slices,
            "chosen_per_token": s.experts_per_token if s.experts > 1 else 0,
            "rotary": s.positions == "rotary",
            "type": ROW_TYPES[manifest.quantization],
            "cluster_neurons": layout.cluster_neurons,
            "clusters": layout.clusters // layout.slices,
            "block_neurons": layout.block_neurons,
            "blocks": layout.blocks // layout.slices,
            "slot_bytes": (slots.trigger_bytes, slots.value_bytes),
            **places,
            "down_by_output": layout.down_by_output,
            "predictor_rank": predictor.rank if predictor else 0,
            "predictor_type": ROW_TYPES[predictor.quantization] if predictor else 0,
            "predictor_relu": predictor is not None and predictor.hidden == "relu",
            "predictor_reads": native_value("predictor_reads", predictor.reads) if predictor else 0,
        },
    )


def engine_json(manifest: Manifest, context_tokens: int, *, moved_scales: bool) -> str:
    """Return a run's engine.json: the numbers of np_shape and of each np_layer, without a predictor, in JSON. Programs
    without Python fill these structures from it."""
    shape = native_shape(manifest, context_tokens, predicts=False, moved_scales=moved_scales)
    layers = ffi.new("np_layer[]", [layer_facts(manifest, n) for n in range(manifest.model.layers)])
    content = {
        "fields": names_checksum(),
        "shape": numbers("np_shape", shape),
        "layers": [numbers("np_layer", layer) for layer in layers],
    }
    return json.dumps(content) + "\n"


class NativeTensors:
    """Makes the np_fixed of a package from its tensors. Its memory lives as long as `keep`.

    tensors: buffers by name, as in fixed.safetensors and predictor.safetensors
    pointer: (C type, buffer or None) -> a pointer that stays valid
    keep: receives references that keep cffi from freeing native memory
    """

    def __init__(self, manifest: Manifest, tensors: Mapping[str, Any], pointer: Pointer, keep: list[Any]) -> None:
        self._manifest, self._tensors, self._pointer, self._keep = manifest, tensors, pointer, keep

    def fixed(self, *, predicts: bool, thresholded: bool) -> Any:
        """Return the np_fixed.

        predicts: with predictors, if the package has them
        thresholded: with the thresholds of SiLU neurons, if the package has them
        """
        layers = ffi.new("np_layer[]", self.layers(predicts=predicts, thresholded=thresholded))
        embedding = self._matrix("embedding")
        fixed = ffi.new(
            "np_fixed *",
            {
                "embedding": embedding,
                "output": embedding if self._manifest.model.tied_embeddings else self._matrix("output"),
                "output_norm": self._norm("output_norm"),
                "output_bias": self._vector("output.bias"),
                "inverse_frequency": self._vector("rope.inverse_frequency"),
                "local_inverse_frequency": self._vector("rope.local_inverse_frequency"),
                "position_embedding": self._vector("position_embedding"),
                "layers": layers,
            },
        )
        self._keep += [layers, fixed]
        return fixed

    def layers(self, *, predicts: bool = False, thresholded: bool = False) -> list[dict[str, Any]]:
        """Return the fields of the np_layer of each layer; see `fixed`."""
        model, silent = self._manifest.model, self._manifest.silent
        return [
            {
                **layer_facts(self._manifest, n),
                "silent_below": silent.by_layer[n].threshold if thresholded and silent is not None else 0.0,
                **{name: self._matrix(f"layers.{n}.{name}") for name in mixer_matrices(model, n)},
                **{norm: self._norm(f"layers.{n}.{norm}") for norm in layer_norms(model, n)},
                **{field: self._vector(f"layers.{n}.{name}") for field, name in _VECTORS.items()},
                **(self._predictors(n) if predicts else {}),
            }
            for n in range(model.layers)
        ]

    def _predictors(self, layer: int) -> dict[str, Any]:
        predictor, model = self._manifest.predictor, self._manifest.model
        if predictor is None:
            return {}
        names = [predictor_name(model, layer, expert) for expert in range(model.expert_counts[layer])]
        native = ffi.new(
            "np_predictor[]",
            [
                {
                    "input": self._matrix(f"{name}.input"),
                    "sides": [self._matrix(f"{name}.{side}") for side in predictor.sides],
                    "biases": [self._vector(f"{name}.{side}.bias") for side in predictor.sides],
                    "rank": predictor.rank_of(ffn),
                }
                for ffn, name in zip(model.ffns_of(layer), names, strict=True)
            ],
        )
        self._keep.append(native)
        return {"predictors": native}

    def _matrix(self, name: str) -> dict[str, Any]:
        predictor = self._manifest.predictor if ".predictor." in name else None
        quantization = self._manifest.quantization_of(name) if predictor is None else predictor.quantization
        return {
            "quants": self._pointer("void *", self._tensors[f"{name}.quants"]),
            "scales": self._pointer("void *", self._tensors.get(f"{name}.scales")),
            "type": ROW_TYPES[quantization],
        }

    def _vector(self, name: str) -> Any:
        return self._pointer("float *", self._tensors.get(name))

    def _norm(self, name: str) -> dict[str, Any]:
        return {"weight": self._vector(name), "bias": self._vector(f"{name}.bias")}


def layer_facts(manifest: Manifest, layer: int) -> dict[str, Any]:
    """Return the fields of np_layer that are no tensors."""
    model, slices = manifest.model, manifest.layout.slices
    return {
        "first_ffn": model.first_ffns[layer] * slices,
        "experts": model.expert_counts[layer] * slices,
        "routed_experts": model.routed_experts(layer),
        "window_tokens": model.windows_tokens[layer],
        "cached_before": model.cached_before(layer),
        "mixer": native_value("mixer", model.mixers[layer]),
        "state_before": model.state_before(layer),
        "rotary": model.rotary_layers[layer],
        "local_positions": model.local_layers[layer],
        "key_heads": model.layer_heads[layer].key_heads,
        "head_width": model.layer_heads[layer].width,
        "value_from_key": model.layer_heads[layer].value_from_key,
    }
