"""Random packages straight from a description, for what an architecture may combine and no single family does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from neuronpipe.plans.convert.quantize import encode
from neuronpipe.plans.models.spec import LayerKind, ModelSpec
from neuronpipe.plans.package.layout import CODEBOOK_QUANTIZATIONS, MINIMUM_QUANTIZATIONS, Quantization
from neuronpipe.plans.package.manifest import (
    EMBEDDINGS,
    MANIFEST,
    Manifest,
    Predictor,
    PredictorQuality,
    Silent,
    SilentLayer,
    Source,
)
from neuronpipe.plans.package.model_layout import layout_of_model
from neuronpipe.plans.package.predictor_writer import FiringShares, LayerFactors, SideFactor, write_predictor
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.tensors import fixed_matrices, fixed_vectors
from neuronpipe.plans.package.writer import PackageWriter
from neuronpipe.plans.predictor.fit import scores
from neuronpipe.plans.quantization_choice import RECIPES
from neuronpipe.plans.reference.engine import LayerRun, ReferenceEngine
from numpy.typing import NDArray

from tests.conformance.checkpoints import tokenizer

Array = NDArray[np.float32]
COMMON: dict[str, Any] = {"vocabulary": 509, "context_tokens": 128, "norm_epsilon": 1e-5}
OPT: dict[str, Any] = {
    "family": "llama",  # a label, by which nothing computes
    "norm": "layer",
    "positions": "learned",
    "activation": "relu",
    "gated": False,
    "qkv_bias": True,
    "output_bias": True,
    "ffn_bias": True,
    "tied_embeddings": True,
    **COMMON,
}

# A threshold makes a jump: it lies in a gap of the gates of the tests' text, so that rounding decides nothing.
SPECS = {
    "opt": ModelSpec(
        width=160, neurons=333, layer_kinds=(LayerKind(3),), query_heads=4, key_heads=4, head_width=40, **OPT
    ),
    "opt odd": ModelSpec(
        width=99, neurons=500, layer_kinds=(LayerKind(2),), query_heads=3, key_heads=3, head_width=33, **OPT
    ),
    "qwen3": ModelSpec(
        family="llama", width=192, neurons=500, layer_kinds=(LayerKind(2, 24), LayerKind(2)), query_heads=6,
        key_heads=2, head_width=64, activation="silu", head_norm=True, **COMMON,
    ),
    "ungated relu2": ModelSpec(
        family="llama", width=128, neurons=700, layer_kinds=(LayerKind(1), LayerKind(1, 9), LayerKind(1, 30)),
        query_heads=4, key_heads=2, head_width=32, activation="relu2", gated=False, **COMMON,
    ),
    "gated layer norm": ModelSpec(
        family="llama", width=96, neurons=300, layer_kinds=(LayerKind(2),), query_heads=3, key_heads=3, head_width=32,
        norm="layer", positions="learned", activation="drelu", output_bias=True, **COMMON,
    ),
    "many neurons": ModelSpec(
        family="llama", width=64, neurons=1500, layer_kinds=(LayerKind(2),), query_heads=2, key_heads=1, head_width=32,
        activation="relu", **COMMON,
    ),
    "mixtral": ModelSpec(
        family="llama", width=160, neurons=200, experts=5, experts_per_token=2, layer_kinds=(LayerKind(2),),
        query_heads=4, key_heads=2, head_width=40, activation="silu", **COMMON,
    ),
    # Routers so large that participants share their products, even of one token.
    "many experts": ModelSpec(
        family="llama", width=256, neurons=32, experts=128, experts_per_token=6, router_bias=True,
        layer_kinds=(LayerKind(2),), query_heads=4, key_heads=2, head_width=48, activation="silu", **COMMON,
    ),
    "many experts, early": ModelSpec(
        family="llama", width=256, neurons=32, experts=128, experts_per_token=6, router="sigmoid", router_reads="layer",
        layer_kinds=(LayerKind(2),), query_heads=4, key_heads=2, head_width=48, activation="relu", **COMMON,
    ),
    "turbosparse": ModelSpec(
        family="llama", width=128, neurons=300, experts=4, experts_per_token=2, layer_kinds=(LayerKind(2),),
        query_heads=4, key_heads=4, head_width=32, activation="drelu", **COMMON,
    ),
    "smallthinker": ModelSpec(
        family="llama", width=96, neurons=150, experts=9, experts_per_token=3, router="sigmoid", router_reads="layer",
        layer_kinds=(LayerKind(1, 0, False), LayerKind(2, 20)), query_heads=8, key_heads=2, head_width=32,
        activation="relu", **COMMON,
    ),
    "threshold": ModelSpec(
        family="llama", width=128, neurons=100, layer_kinds=(LayerKind(2),), query_heads=4, key_heads=2, head_width=32,
        activation="relu", activation_threshold=0.29, **COMMON,
    ),
    "scaled": ModelSpec(
        family="llama", width=96, neurons=300, layer_kinds=(LayerKind(3),), query_heads=3, key_heads=3, head_width=32,
        activation="relu", embedding_scale=12.0, residual_scale=0.7, logit_scale=0.3, attention_scale=1.4,
        **COMMON,
    ),
    "gpt-oss": ModelSpec(
        family="llama", width=96, neurons=160, experts=6, experts_per_token=3, router_bias=True,
        layer_kinds=(LayerKind(1, 20), LayerKind(1)), query_heads=6, key_heads=2, head_width=32, attention_sinks=True,
        activation="clamped_swiglu", activation_limit=1.0, qkv_bias=True, output_bias=True, ffn_bias=True, **COMMON,
    ),
    "glm": ModelSpec(
        family="llama", width=96, neurons=160, experts=8, experts_per_token=3, shared_experts=2, router="sigmoid",
        choosing_bias=True, router_groups=4, groups_per_token=2, routed_scale=1.8, joint_norm=True,
        layer_kinds=(LayerKind(1, dense_experts=3), LayerKind(2, 20)), query_heads=6, key_heads=2, head_width=32,
        activation="silu", qkv_bias=True, **COMMON,
    ),
    "shared gate": ModelSpec(
        family="llama", width=128, neurons=70, experts=6, experts_per_token=2, shared_experts=3, shared_gate=True,
        normalized_shares=False, layer_kinds=(LayerKind(1), LayerKind(1, dense_experts=11), LayerKind(1)),
        query_heads=4, key_heads=2, head_width=32, head_norm=True, norm_after_rotation=True, activation="relu",
        **COMMON,
    ),
    "phimoe": ModelSpec(
        family="llama", width=96, neurons=80, experts=5, experts_per_token=2, router="sparsemixer", router_jitter=0.2,
        layer_kinds=(LayerKind(2),), query_heads=3, key_heads=3, head_width=32, norm="layer", activation="silu",
        qkv_bias=True, output_bias=True, logit_bias=True, rotary_scale=1.2, **COMMON,
    ),
    "latents": ModelSpec(
        family="llama", width=96, neurons=100, layer_kinds=(LayerKind(2), LayerKind(1, 20)), query_heads=6, key_heads=1,
        head_width=40, latent_width=64, rotary_width=16, value_width=16, activation="silu", **COMMON,
    ),
    "latents of a mixture": ModelSpec(
        family="llama", width=160, neurons=96, experts=8, experts_per_token=3, shared_experts=2, router_groups=4,
        groups_per_token=2, groups_by_best=True, normalized_shares=False, routed_scale=1.8,
        layer_kinds=(LayerKind(1, dense_experts=3), LayerKind(2)), query_heads=5, key_heads=1, head_width=112,
        latent_width=96, rotary_width=32, value_width=128, query_rank=224, attention_scale=0.7, rotary_scale=1.2,
        query_growth=0.1, query_growth_tokens=9,
        activation="silu", **COMMON,
    ),
    "latents with relu": ModelSpec(
        family="llama", width=64, neurons=300, layer_kinds=(LayerKind(2),), query_heads=4, key_heads=1, head_width=48,
        latent_width=32, rotary_width=32, value_width=8, query_rank=256, activation="relu", output_bias=True, **COMMON,
    ),
    "norms after": ModelSpec(
        family="llama", width=160, neurons=500, layer_kinds=(LayerKind(2, 20), LayerKind(1)), query_heads=5,
        key_heads=5, head_width=32, norms="after", joint_norm=True, activation="relu", residual_scale=0.8, **COMMON,
    ),
    "mixture with norms after": ModelSpec(
        family="llama", width=96, neurons=100, experts=5, experts_per_token=2, shared_experts=1,
        layer_kinds=(LayerKind(2),), query_heads=3, key_heads=1, head_width=32, norms="after", activation="silu",
        **COMMON,
    ),
    "gemma": ModelSpec(
        family="llama", width=160, neurons=300, layer_kinds=(LayerKind(2, 20, local_positions=True), LayerKind(1)),
        query_heads=4, key_heads=2, head_width=64, norms="both", head_norm=True, activation="gelu", score_cap=5.0,
        logit_cap=12.0, embedding_scale=12.65, attention_scale=1.3, local_attention_scale=0.9, tied_embeddings=True,
        **COMMON,
    ),
    "heads of layers": ModelSpec(
        family="llama", width=96, neurons=200, layer_kinds=(
            LayerKind(2, 20, local_positions=True), LayerKind(1, key_heads=1, head_width=96, value_from_key=True),
            LayerKind(1, 9, rotary=False, key_heads=4, head_width=64), LayerKind(1, key_heads=2, head_width=96),
        ),
        query_heads=4, key_heads=2, head_width=32, head_norm=True, value_norm=True, activation="silu", qkv_bias=True,
        local_attention_scale=1.4, **COMMON,
    ),
    "joint keys are values": ModelSpec(
        family="llama", width=96, neurons=200, query_heads=3, key_heads=3, head_width=32, joint_norm=True,
        layer_kinds=(LayerKind(2, value_from_key=True), LayerKind(1, key_heads=1)), activation="relu", **COMMON,
    ),
    "clipped": ModelSpec(
        family="llama", width=96, neurons=200, query_heads=6, key_heads=2, head_width=32, qkv_limit=0.6,
        query_growth=0.4, query_growth_tokens=9,
        layer_kinds=(LayerKind(2), LayerKind(1, value_from_key=True)), activation="relu", qkv_bias=True, **COMMON,
    ),
    "clipped after joint norms": ModelSpec(
        family="llama", width=96, neurons=200, query_heads=3, key_heads=3, head_width=32, qkv_limit=0.6,
        query_growth=0.7, query_growth_tokens=5,
        layer_kinds=(LayerKind(2),), activation="silu", joint_norm=True, value_norm=True, **COMMON,
    ),
    "gemma 4": ModelSpec(
        family="llama", width=160, neurons=64, experts=8, experts_per_token=3, shared_experts=2, router_norm=True,
        expert_scales=True, branch_norms=True, layer_scales=True, layer_kinds=(
            LayerKind(2, 20, local_positions=True), LayerKind(1, key_heads=1, head_width=96, value_from_key=True),
        ),
        query_heads=4, key_heads=2, head_width=32, norms="both", head_norm=True, value_norm=True, activation="gelu",
        logit_cap=12.0, embedding_scale=12.65, attention_scale=3.3, local_attention_scale=1.9, tied_embeddings=True,
        **COMMON,
    ),
    "scaled layers": ModelSpec(
        family="llama", width=96, neurons=300, layer_kinds=(LayerKind(3),), query_heads=3, key_heads=3, head_width=32,
        norms="after", layer_scales=True, activation="relu", **COMMON,
    ),
    "layer norm both": ModelSpec(
        family="llama", width=128, neurons=300, layer_kinds=(LayerKind(2),), query_heads=4, key_heads=2, head_width=32,
        norm="layer", norms="both", activation="drelu", ffn_bias=False, **COMMON,
    ),
    "deltanet": ModelSpec(
        family="llama", width=160, neurons=300,
        layer_kinds=(LayerKind(2, mixer="deltanet"), LayerKind(1), LayerKind(1, mixer="deltanet")), query_heads=4,
        key_heads=2, head_width=32, gated_attention=True, head_norm=True, state_heads=6, state_key_heads=2,
        state_key_width=25, state_value_width=80, convolution_tokens=4, activation="silu", **COMMON,
    ),
    "mixture with deltanet": ModelSpec(
        family="llama", width=96, neurons=64, experts=7, experts_per_token=2, shared_experts=1, shared_gate=True,
        layer_kinds=(LayerKind(1), LayerKind(2, mixer="deltanet")), query_heads=3, key_heads=1, head_width=32,
        gated_attention=True, state_heads=2, state_key_heads=2, state_key_width=16, state_value_width=144,
        convolution_tokens=3, convolution_bias=True, activation="silu", **COMMON,
    ),
    "kda": ModelSpec(
        family="llama", width=160, neurons=300,
        layer_kinds=(LayerKind(2, mixer="kda"), LayerKind(1), LayerKind(1, mixer="kda")), query_heads=4, key_heads=2,
        head_width=32, state_heads=4, state_key_heads=4, state_key_width=25, state_value_width=88, state_rank=64,
        convolution_tokens=4, activation="silu", **COMMON,
    ),
    "mixture with kda and latents": ModelSpec(
        family="llama", width=96, neurons=64, experts=7, experts_per_token=2, shared_experts=1, router="sigmoid",
        choosing_bias=True, routed_scale=2.4,
        layer_kinds=(
            LayerKind(1, mixer="kda", dense_experts=3), LayerKind(1, rotary=False), LayerKind(2, mixer="kda"),
            LayerKind(1, 20),
        ),
        query_heads=4, key_heads=1, head_width=40, latent_width=64, rotary_width=16, value_width=24, state_heads=2,
        state_key_heads=2, state_key_width=16, state_value_width=144, state_rank=32, convolution_tokens=3,
        activation="silu", **COMMON,
    ),
    "mixture with mamba": ModelSpec(
        family="llama", width=128, neurons=100, experts=6, experts_per_token=2, shared_experts=2, router="sigmoid",
        choosing_bias=True, routed_scale=1.8,
        layer_kinds=(
            LayerKind(1, mixer="mamba2"), LayerKind(1, mixer="mamba2", feed_forward=False), LayerKind(1, rotary=False),
            LayerKind(1, mixer="none", dense_experts=3),
        ),
        query_heads=4, key_heads=1, head_width=32, state_heads=8, state_key_heads=4, state_key_width=24,
        state_value_width=20, state_norm_groups=4, convolution_tokens=4, convolution_bias=True, min_time_step=0.1,
        activation="relu2", gated=False, **COMMON,
    ),
    "convolutions": ModelSpec(
        family="llama", width=320, neurons=300,
        layer_kinds=(LayerKind(2, mixer="convolution"), LayerKind(1, 20), LayerKind(1, mixer="convolution")),
        query_heads=5, key_heads=1, head_width=64, head_norm=True, convolution_tokens=3, activation="relu",
        tied_embeddings=True, residual_scale=0.8, **COMMON,
    ),
    "parallel": ModelSpec(
        family="llama", width=160, neurons=500, layer_kinds=(LayerKind(3),), query_heads=5, key_heads=1, head_width=32,
        norm="layer", activation="relu", gated=False, parallel=True, tied_embeddings=True, **COMMON,
    ),
    "starcoder2": ModelSpec(
        family="llama", width=128, neurons=700, layer_kinds=(LayerKind(2, 20),), query_heads=4, key_heads=2,
        head_width=32, norm="layer", activation="gelu", gated=False, qkv_bias=True, output_bias=True, ffn_bias=True,
        tied_embeddings=True, **COMMON,
    ),
    "neox": ModelSpec(
        family="llama", width=96, neurons=500, layer_kinds=(LayerKind(3),), query_heads=3, key_heads=3, head_width=32,
        norm="layer", activation="gelu_erf", gated=False, parallel=True, qkv_bias=True, output_bias=True, ffn_bias=True,
        **COMMON,
    ),
    "gated gelu_erf": ModelSpec(
        family="llama", width=96, neurons=300, layer_kinds=(LayerKind(2),), query_heads=3, key_heads=1, head_width=32,
        activation="gelu_erf", **COMMON,
    ),
    "slices": ModelSpec(
        family="llama", width=128, neurons=768, layer_kinds=(LayerKind(2, 24), LayerKind(1)), query_heads=4,
        key_heads=2, head_width=32, activation="silu", head_norm=True, **COMMON,
    ),
    "slices in parallel": ModelSpec(
        family="llama", width=96, neurons=1024, layer_kinds=(LayerKind(2),), query_heads=3, key_heads=1, head_width=32,
        norm="layer", activation="gelu", parallel=True, **COMMON,
    ),
    "slices with norms after": ModelSpec(
        family="llama", width=96, neurons=1280, layer_kinds=(LayerKind(2),), query_heads=3, key_heads=1, head_width=32,
        activation="gelu", norms="after", **COMMON,
    ),
    "slices with mamba": ModelSpec(
        family="llama", width=128, neurons=768,
        layer_kinds=(LayerKind(1, mixer="mamba2", feed_forward=False), LayerKind(2), LayerKind(1, mixer="mamba2")),
        query_heads=4, key_heads=1, head_width=32, state_heads=8, state_key_heads=4, state_key_width=24,
        state_value_width=20, state_norm_groups=4, convolution_tokens=4, convolution_bias=True, min_time_step=0.1,
        activation="silu", **COMMON,
    ),
    "one slice": ModelSpec(
        family="llama", width=64, neurons=512, layer_kinds=(LayerKind(2),), query_heads=2, key_heads=1, head_width=32,
        activation="silu", **COMMON,
    ),
    "cohere": ModelSpec(
        family="llama", width=128, neurons=300, layer_kinds=(LayerKind(2, 20), LayerKind(1, rotary=False)),
        query_heads=4, key_heads=2, head_width=32, norm="layer", activation="silu", parallel=True, qkv_bias=True,
        output_bias=True, logit_scale=0.7, tied_embeddings=True, **COMMON,
    ),
}  # fmt: skip

RANK = 64


def write_package(target: Path, model: ModelSpec, quantization: Quantization) -> Package:
    """A package of this model, its weights as wide as those of the conformance checkpoints, so that logits are of order
    10. Biases of Up leave few neurons firing. q3: of gates, and the rest is q4."""
    random = np.random.default_rng(1)
    quantization, gates = ("q4", quantization) if quantization == "q3" else (quantization, None)
    layout = layout_of_model(
        model, quantization, "source", differing={"gate": gates, "down": RECIPES[quantization].down}
    )
    manifest = Manifest(
        name=target.name, source=Source("synthetic", target.name, "random"), model=model, quantization=quantization,
        end_tokens=(), layout=layout, files={}, quantization_error={}, fired_by_layer=None,
        quantizations=_fixed_quantizations(model, quantization),
    )  # fmt: skip
    with PackageWriter(target, manifest, overwrite=False) as writer:
        for name, length in fixed_vectors(model):
            writer.vector(name, _vector(name, length, random))
        for name, rows, columns in fixed_matrices(model):
            writer.matrix(
                name,
                encode(manifest.quantization_of(name), _normal(random, (rows, columns), _deviation(name, columns))),
            )
        for _ in range(model.ffns):
            scales = [width**-0.5 for width in (model.width, 4 * model.neurons)]
            deviations = [scales[matrix == "down"] for matrix in model.ffn_matrices]
            by_neuron = model.neurons, model.width
            by_output = model.width * layout.slices, model.neurons // layout.slices
            by_name = {"down": by_output} if layout.down_by_output else {}
            shapes = [by_name.get(name, by_neuron) for name in model.ffn_matrices]
            rows_of = [_normal(random, shape, deviation) for shape, deviation in zip(shapes, deviations, strict=True)]
            encoded = [place.quantization or quantization for place in layout.matrices]
            writer.neurons(*(encode(own, rows) for own, rows in zip(encoded, rows_of, strict=True)))
        writer.complete(tokenizer(model.vocabulary).to_str().encode(), {})
        return writer.publish()


def _fixed_quantizations(model: ModelSpec, quantization: Quantization) -> dict[str, Quantization]:
    """Embedding and output as the recipes of encodings with minima or codebooks have them; else as the rest. Where all
    neurons fire, the matrices of attention have one of three that read different inputs."""
    names = [name for name, _, _ in fixed_matrices(model)]
    chosen: dict[str, Quantization] = {}
    if quantization in (*MINIMUM_QUANTIZATIONS, *CODEBOOK_QUANTIZATIONS):
        chosen = dict.fromkeys([name for name in names if name in EMBEDDINGS], RECIPES[quantization].ends)
    if model.all_neurons_fire and quantization != "f16":
        attention = [name for name in names if name not in EMBEDDINGS]
        others: tuple[Quantization, ...] = ("q8", "q5k", "q4")
        chosen |= {name: others[number % 3] for number, name in enumerate(attention)}
    return {name: other for name, other in chosen.items() if other != quantization}


def _normal(random: np.random.Generator, shape: tuple[int, ...], deviation: float) -> Array:
    return (deviation * random.standard_normal(shape)).astype(np.float32)


def _deviation(name: str, columns: int) -> float:
    factors = {"embedding": 5.0, "output": 5.0, "attention_output": 0.5, "recurrent_output": 0.5}
    factor = factors.get(name.split(".")[-1], 1.3)
    return float(factor * columns**-0.5)


def _vector(name: str, length: int, random: np.random.Generator) -> Array:
    if name == "rope.inverse_frequency":
        return np.asarray(10_000.0 ** (-np.arange(length) / length), dtype=np.float32)
    if name == "rope.local_inverse_frequency":
        return np.asarray(300.0 ** (-np.arange(length) / length), dtype=np.float32)
    if name.endswith("output_norm") and "layers" in name:
        return _normal(random, (length,), 0.1) + np.float32(0.4)
    if name.endswith("decay"):
        return np.asarray(-np.exp(_normal(random, (length,), 1.0) - 2), dtype=np.float32)
    if name.endswith("convolution"):
        return _normal(random, (length,), 0.6)
    if name.endswith("router"):
        return _normal(random, (length,), 0.12)
    if name.endswith(("shared_gate", "choosing_bias")):
        return _normal(random, (length,), 0.15)
    if name.endswith("router_norm"):
        return _normal(random, (length,), 0.4) + np.float32(1.5)
    if name.endswith(("expert_scales", ".scale")):
        return _normal(random, (length,), 0.3) + np.float32(0.9)
    if name.endswith("sinks"):
        return _normal(random, (length,), 1.5)
    centre = 1.0 if name.endswith("norm") else -1.8 if name.endswith("up.bias") else 0.0
    return _normal(random, (length,), 0.3) + np.float32(centre)


def give_predictor(package: Package, text: Sequence[int]) -> tuple[Package, Array]:
    """The package with a random predictor of its triggers, and the reference's logits of the text with it. A good
    predictor would hide mistakes. Each neuron's threshold lies where the text's scores leave a gap: rounding decides
    nothing."""
    model, random, layers = package.manifest.model, np.random.default_rng(2), []
    for _ in range(model.ffns):
        rows = encode("f16", _normal(random, (model.neurons, RANK), RANK**-0.5))
        reads = encode("f16", _normal(random, (RANK, model.width), model.width**-0.5))
        layers.append(LayerFactors(reads, {model.trigger: SideFactor(rows, np.zeros(model.neurons, np.float32))}))

    def mask(run: LayerRun) -> NDArray[np.bool_]:
        layer = layers[run.ffn]
        raw = scores("f16", layer, "none", run.feed_forward_input)[model.trigger]
        bias = -_in_a_gap(raw)
        layers[run.ffn] = LayerFactors(layer.input, {model.trigger: SideFactor(layer.sides[model.trigger].rows, bias)})
        return np.asarray(raw + bias > 0)

    logits = ReferenceEngine(package, mask=mask).run(text).logits
    quality = tuple(PredictorQuality(0.5, 0.5, 0.5) for _ in range(model.layers))
    predictor = Predictor(RANK, "f16", "feed_forward", (model.trigger,), "none", 0, quality)
    shares = (0.5,) * model.layers
    return write_predictor(package, predictor, layers, FiringShares(shares, shares)), logits


def strength(run: LayerRun) -> Array:
    """|silu(gate)| of an expert's neurons: what a threshold is compared with."""
    gate = run.values["gate"]
    return np.asarray(np.abs(gate / (1 + np.exp(-gate))))


def give_thresholds(package: Package, text: Sequence[int]) -> tuple[Package, Array]:
    """The package with thresholds by which many neurons are silent, and the reference's logits of the text with them.
    They lie where the text's values leave a gap: rounding decides nothing."""
    layers, thresholds = package.manifest.model.layers, np.zeros(package.manifest.model.layers, np.float32)
    logits = np.empty(0, np.float32)
    for number in range(layers + 1):  # each layer's values depend on the thresholds of those before
        seen: list[Array] = []

        def mask(run: LayerRun, number: int = number, seen: list[Array] = seen) -> NDArray[np.bool_]:
            values = strength(run)
            seen += [values.reshape(-1, 1)] if run.layer == number else []
            return np.asarray(values >= thresholds[run.layer])

        logits = ReferenceEngine(package, mask=mask).run(text).logits
        if number < layers:
            thresholds[number] = _in_a_gap(np.concatenate(seen))[0]
    measured = tuple(SilentLayer(float(threshold), 0.5) for threshold in thresholds)
    silent = Silent(0.5, measured, "a test's text", len(text), len(text), 9.0, 9.1)
    manifest = dataclasses.replace(package.manifest, silent=silent).sealed()
    (package.path / MANIFEST).write_bytes(manifest.to_bytes())
    return Package.open(package.path), logits


def _in_a_gap(raw: Array) -> Array:
    """For each column the middle of the widest gap between neighbours among the middle half of its values."""
    values = np.sort(raw, axis=0)[len(raw) // 4 : -(len(raw) // 4)]
    gap = np.diff(values, axis=0).argmax(axis=0)
    columns = np.arange(values.shape[1])
    return np.asarray((values[gap, columns] + values[gap + 1, columns]) / 2)
