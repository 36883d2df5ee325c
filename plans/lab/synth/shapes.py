"""The shapes that can be synthesized, and the coordinate ranges of their residual stream."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from neuronpipe.plans.models.recurrent_sizes import Mixer
from neuronpipe.plans.models.spec import LayerKind, ModelSpec, runs_of
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

GROUP = 32
NEMOTRON3_BLOCKS = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


def _shape(
    width: int,
    neurons: int,
    layers: int,
    heads: tuple[int, int, int],
    vocabulary: int,
    context: int,
    experts: tuple[int, int] = (1, 1),
    **more: Any,
) -> ModelSpec:
    """Return a ModelSpec, a dReLU Llama by default.

    heads: query heads, key heads, width of a head
    experts: number per layer, and per token
    more: further fields of ModelSpec
    """
    query_heads, key_heads, head_width = heads
    fields: dict[str, Any] = {
        "family": "llama", "activation": "drelu", "norm_epsilon": 1e-5, "layer_kinds": (LayerKind(layers),),
    }  # fmt: skip
    return ModelSpec(
        width=width,
        neurons=neurons,
        experts=experts[0],
        experts_per_token=experts[1],
        query_heads=query_heads,
        key_heads=key_heads,
        head_width=head_width,
        vocabulary=vocabulary,
        context_tokens=context,
        **(fields | more),
    )


def _windows_of_smallthinker(layers: int) -> tuple[LayerKind, ...]:
    full = [layer % 4 == 0 for layer in range(layers)]
    return runs_of([0 if is_full else 4096 for is_full in full], [not is_full for is_full in full])


def _windows_of_gpt_oss(layers: int) -> tuple[LayerKind, ...]:
    return runs_of([0 if layer % 2 else 128 for layer in range(layers)])


def _layers_of_qwen35(layers: int, draft_layers: int = 0) -> tuple[LayerKind, ...]:
    mixers: list[Mixer] = ["deltanet" if (layer + 1) % 4 else "attention" for layer in range(layers)]
    mixers += ["attention"] * draft_layers
    return runs_of([0] * len(mixers), mixers=mixers)


def _layers_of_lfm2(layers: int, attention: tuple[int, ...], dense: int) -> tuple[LayerKind, ...]:
    return runs_of(
        [0] * layers,
        dense_experts=[4 * (layer < dense) for layer in range(layers)],
        mixers=["attention" if layer in attention else "convolution" for layer in range(layers)],
    )


_GPT_OSS: dict[str, Any] = {
    "family": "gpt_oss", "activation": "clamped_swiglu", "activation_limit": 7.0, "norm_epsilon": 1e-5,
    "qkv_bias": True, "output_bias": True, "ffn_bias": True, "router_bias": True, "attention_sinks": True,
}  # fmt: skip
_SMALLTHINKER: dict[str, Any] = {
    "family": "smallthinker", "activation": "relu", "norm_epsilon": 1e-6, "router": "sigmoid", "router_reads": "layer",
}  # fmt: skip
_QWEN3: dict[str, Any] = {"family": "qwen3", "activation": "silu", "norm_epsilon": 1e-6, "head_norm": True}
_GLM: dict[str, Any] = {
    "family": "glm4_moe", "activation": "silu", "norm_epsilon": 1e-5, "router": "sigmoid", "choosing_bias": True,
    "qkv_bias": True,
}  # fmt: skip
_QWEN35: dict[str, Any] = {
    "family": "qwen3_next", "activation": "silu", "norm_epsilon": 1e-6, "head_norm": True, "gated_attention": True,
    "shared_experts": 1, "shared_gate": True, "convolution_tokens": 4,
}  # fmt: skip
_LFM2: dict[str, Any] = {
    "family": "lfm2", "activation": "silu", "norm_epsilon": 1e-5, "head_norm": True, "router": "sigmoid",
    "choosing_bias": True, "convolution_tokens": 3,
}  # fmt: skip
_OLMOE: dict[str, Any] = {
    "family": "olmoe", "activation": "silu", "norm_epsilon": 1e-5, "joint_norm": True, "normalized_shares": False,
}  # fmt: skip

# Dense models whose neurons all fire. Where the published output is the embedding, here it is a matrix of its own.
_SMOLLM2: dict[str, Any] = {"activation": "silu"}

# Without the published factor of embeddings: those of synthetic packages are as large as the residual stream should be.
# The output matrix is not the embedding, so that greedy decoding follows trajectories.
_GEMMA4: dict[str, Any] = {
    "family": "gemma4", "activation": "gelu", "norm_epsilon": 1e-6, "norms": "both", "head_norm": True,
    "value_norm": True, "router_norm": True, "expert_scales": True, "branch_norms": True, "layer_scales": True,
    "logit_cap": 30.0,
}  # fmt: skip

_LATENTS: dict[str, Any] = {"family": "deepseek", "activation": "silu"}
_GLM_FLASH: dict[str, Any] = {
    "norm_epsilon": 1e-5, "router": "sigmoid", "choosing_bias": True, "routed_scale": 1.8, **_LATENTS,
}  # fmt: skip
_DEEPSEEK_V2: dict[str, Any] = {"norm_epsilon": 1e-6, "normalized_shares": False, **_LATENTS}
_KIMI_LINEAR: dict[str, Any] = {
    "family": "kimi_linear", "activation": "silu", "norm_epsilon": 1e-5, "router": "sigmoid", "choosing_bias": True,
    "routed_scale": 2.446, "convolution_tokens": 4, "shared_experts": 1,
}  # fmt: skip
_PHI: dict[str, Any] = {
    "family": "phi", "activation": "silu", "norm_epsilon": 1e-5, "norm": "layer", "router": "sparsemixer",
    "router_jitter": 0.01, "qkv_bias": True, "output_bias": True, "logit_bias": True,
}  # fmt: skip
_MAMBA2: dict[str, Any] = {"norm_epsilon": 1e-5, "convolution_tokens": 4, "convolution_bias": True}
_NEMOTRON3: dict[str, Any] = {
    "family": "nemotron_h", "activation": "relu2", "gated": False, "router": "sigmoid", "choosing_bias": True,
    "routed_scale": 2.5, "min_time_step": 0.001, **_MAMBA2,
}  # fmt: skip
# The factor of embeddings is left out as with Gemma 4, and so is that of logits, which changes no choice.
_GRANITE4: dict[str, Any] = {
    "family": "granite_hybrid", "activation": "silu", "residual_scale": 0.22, **_MAMBA2,
}  # fmt: skip


def _layers_of_nemotron3(blocks: str) -> tuple[LayerKind, ...]:
    """Return the layers of a published pattern: M is Mamba-2, * attention without positions, E the experts that belong
    to the layer of the block before."""
    layers = blocks.replace("E", "e ").replace("M", " M").replace("*", " *").split()
    mixers: list[Mixer] = ["mamba2" if layer[0] == "M" else "attention" for layer in layers]
    return runs_of(
        [0] * len(layers),
        [mixer != "attention" for mixer in mixers],
        mixers=mixers,
        feed_forward=[layer.endswith("e") for layer in layers],
    )


def _layers_of_kimi(layers: int, dense: int) -> tuple[LayerKind, ...]:
    """Return layers of which each fourth one and the last one have attention without positions.

    dense: number of experts in the first layer, which has no router
    """
    mixers: list[Mixer] = [
        "attention" if layer % 4 == 0 or layer == layers else "kda" for layer in range(1, layers + 1)
    ]
    dense_experts = [dense, *[0] * (layers - 1)]
    return runs_of([0] * layers, [mixer == "kda" for mixer in mixers], dense_experts, mixers=mixers)


def _layers_of_granite4(layers: int, attention: tuple[int, ...]) -> tuple[LayerKind, ...]:
    mixers: list[Mixer] = ["attention" if layer in attention else "mamba2" for layer in range(layers)]
    return runs_of([0] * layers, [mixer != "attention" for mixer in mixers], mixers=mixers)


def _layers_of_gemma4(periods: int, window: int, key_heads: int, head_width: int) -> tuple[LayerKind, ...]:
    """Return runs of five layers with windows and one without, which has wider heads and no value matrix.

    key_heads, head_width: sizes of the heads of layers without windows
    """
    windowed = LayerKind(5, window, local_positions=True)
    return (windowed, LayerKind(1, key_heads=key_heads, head_width=head_width, value_from_key=True)) * periods


SHAPES = {
    "turbosparse-mistral-7b": _shape(4096, 14336, 32, (32, 8, 128), 32000, 4096),
    "turbosparse-1b": _shape(2048, 7168, 20, (16, 4, 128), 32000, 4096),
    "turbosparse-mixtral-47b": _shape(4096, 14336, 32, (32, 8, 128), 57024, 4096, (8, 2)),
    "turbosparse-mixtral-2b": _shape(1024, 3584, 20, (16, 4, 64), 32000, 4096, (8, 2)),
    "turbosparse-100m": _shape(768, 2688, 12, (12, 3, 64), 8000, 4096),
    "smallthinker-21b": _shape(
        2560, 768, 52, (28, 4, 128), 151936, 16384, (64, 6), layer_kinds=_windows_of_smallthinker(52), **_SMALLTHINKER
    ),
    "smallthinker-4b": _shape(1536, 768, 32, (12, 2, 128), 151936, 32768, (32, 4), **_SMALLTHINKER),
    "smallthinker-100m": _shape(
        512, 256, 12, (8, 2, 64), 8000, 8192, (16, 4), layer_kinds=_windows_of_smallthinker(12), **_SMALLTHINKER
    ),
    "gpt-oss-20b": _shape(
        2880, 2880, 24, (64, 8, 64), 201088, 131072, (32, 4), layer_kinds=_windows_of_gpt_oss(24), **_GPT_OSS
    ),
    "gpt-oss-120b": _shape(
        2880, 2880, 36, (64, 8, 64), 201088, 131072, (128, 4), layer_kinds=_windows_of_gpt_oss(36), **_GPT_OSS
    ),
    "gpt-oss-100m": _shape(
        512, 128, 12, (8, 2, 64), 8000, 8192, (32, 4), layer_kinds=_windows_of_gpt_oss(12), **_GPT_OSS
    ),
    "glm-4.5-air": _shape(
        4096, 1408, 46, (96, 8, 128), 151552, 131072, (128, 8), shared_experts=1,
        layer_kinds=(LayerKind(1, dense_experts=8), LayerKind(45)), **_GLM,
    ),
    "glm-moe-100m": _shape(
        512, 128, 12, (8, 2, 64), 8000, 8192, (32, 4), shared_experts=2,
        layer_kinds=(LayerKind(1, dense_experts=6), LayerKind(11)), **_GLM,
    ),
    "gemma-4-26b-a4b": _shape(
        2816, 704, 30, (16, 8, 256), 262144, 262144, (128, 8), shared_experts=3,
        layer_kinds=_layers_of_gemma4(5, 1024, 2, 512), attention_scale=math.sqrt(512), local_attention_scale=16.0,
        **_GEMMA4,
    ),
    "gemma-4-100m": _shape(
        512, 128, 12, (8, 4, 32), 8000, 8192, (32, 4), shared_experts=3,
        layer_kinds=_layers_of_gemma4(2, 512, 2, 64), attention_scale=8.0, local_attention_scale=math.sqrt(32),
        **_GEMMA4,
    ),
    "olmoe-7b": _shape(2048, 1024, 16, (16, 16, 128), 50304, 4096, (64, 8), **_OLMOE),
    "qwen3-30b-a3b": _shape(2048, 768, 48, (32, 4, 128), 151936, 40960, (128, 8), **_QWEN3),
    "qwen3-8b": _shape(4096, 12288, 36, (32, 8, 128), 151936, 40960, **_QWEN3),
    "qwen3-4b": _shape(2560, 9728, 36, (32, 8, 128), 151936, 40960, **_QWEN3),
    "qwen3-1.7b": _shape(2048, 6144, 28, (16, 8, 128), 151936, 8192, **_QWEN3),
    "qwen3-0.6b": _shape(1024, 3072, 28, (16, 8, 128), 151936, 8192, **_QWEN3),
    "qwen3-moe-100m": _shape(512, 128, 12, (8, 2, 64), 8000, 8192, (32, 4), **_QWEN3),
    "qwen3.6-35b-a3b": _shape(
        2048, 512, 40, (16, 2, 256), 248320, 262144, (256, 8), layer_kinds=_layers_of_qwen35(40), state_heads=32,
        state_key_heads=16, state_key_width=128, state_value_width=128, **_QWEN35,
    ),
    "qwen3.6-35b-a3b-mtp": _shape(
        2048, 512, 40, (16, 2, 256), 248320, 262144, (256, 8), layer_kinds=_layers_of_qwen35(40, 1), draft_layers=1,
        state_heads=32, state_key_heads=16, state_key_width=128, state_value_width=128, **_QWEN35,
    ),
    "qwen3.5-moe-100m": _shape(
        512, 128, 12, (4, 2, 64), 8000, 8192, (32, 4), layer_kinds=_layers_of_qwen35(12), state_heads=8,
        state_key_heads=4, state_key_width=64, state_value_width=64, **_QWEN35,
    ),
    "qwen3.5-moe-mtp-100m": _shape(
        512, 128, 12, (4, 2, 64), 8000, 8192, (32, 4), layer_kinds=_layers_of_qwen35(12, 1), draft_layers=1,
        state_heads=8, state_key_heads=4, state_key_width=64, state_value_width=64, **_QWEN35,
    ),
    # The model's output is its embedding; here it is a matrix of its own.
    "lfm2-8b-a1b": _shape(
        2048, 1792, 24, (32, 8, 64), 65536, 128000, (32, 4),
        layer_kinds=_layers_of_lfm2(24, (2, 6, 10, 14, 18, 21), dense=2), **_LFM2,
    ),
    "glm-4.7-flash": _shape(
        2048, 1536, 47, (20, 1, 256), 154880, 202752, (64, 4), shared_experts=1,
        layer_kinds=(LayerKind(1, dense_experts=7), LayerKind(46)), latent_width=512, rotary_width=64, value_width=256,
        query_rank=768, **_GLM_FLASH,
    ),
    "glm-flash-100m": _shape(
        512, 128, 12, (8, 1, 96), 8000, 8192, (32, 4), shared_experts=1,
        layer_kinds=(LayerKind(1, dense_experts=7), LayerKind(11)), latent_width=128, rotary_width=32, value_width=64,
        query_rank=192, **_GLM_FLASH,
    ),
    "deepseek-v2-lite": _shape(
        2048, 1408, 27, (16, 1, 192), 102400, 163840, (64, 6), shared_experts=2,
        layer_kinds=(LayerKind(1, dense_experts=8), LayerKind(26)), latent_width=512, rotary_width=64, value_width=128,
        **_DEEPSEEK_V2,
    ),
    # llama.cpp takes a model of 27 layers for one whose queries have no latent.
    "deepseek-v2-100m": _shape(
        512, 64, 27, (8, 1, 96), 8000, 8192, (32, 4), shared_experts=2,
        layer_kinds=(LayerKind(1, dense_experts=8), LayerKind(26)), latent_width=128, rotary_width=32, value_width=64,
        **_DEEPSEEK_V2,
    ),
    "kimi-linear-48b-a3b": _shape(
        2304, 1024, 27, (32, 1, 192), 163840, 1048576, (256, 8), layer_kinds=_layers_of_kimi(27, dense=9),
        latent_width=512, rotary_width=64, value_width=128, state_heads=32, state_key_heads=32, state_key_width=128,
        state_value_width=128, state_rank=128, **_KIMI_LINEAR,
    ),
    "kimi-linear-100m": _shape(
        512, 128, 12, (8, 1, 96), 8000, 8192, (32, 4), layer_kinds=_layers_of_kimi(12, dense=4), latent_width=128,
        rotary_width=32, value_width=64, state_heads=8, state_key_heads=8, state_key_width=64, state_value_width=64,
        state_rank=64, **_KIMI_LINEAR,
    ),
    "smollm2-1.7b": _shape(2048, 8192, 24, (32, 32, 64), 49152, 8192, **_SMOLLM2),
    "smollm2-360m": _shape(960, 2560, 32, (15, 5, 64), 49152, 8192, **_SMOLLM2),
    "smollm2-135m": _shape(576, 1536, 30, (9, 3, 64), 49152, 8192, **_SMOLLM2),
    # Its rotary positions have another table beyond 4,096 tokens, so that a package has that context by default.
    "phi-3.5-moe": _shape(4096, 6400, 32, (32, 8, 128), 32064, 4096, (16, 2), **_PHI),
    "phi-moe-100m": _shape(512, 256, 12, (8, 2, 64), 8000, 4096, (16, 2), **_PHI),
    "nemotron-3-nano": _shape(
        2688, 1856, 29, (32, 2, 128), 131072, 262144, (128, 6), shared_experts=2,
        layer_kinds=_layers_of_nemotron3(NEMOTRON3_BLOCKS), state_heads=64, state_key_heads=8, state_key_width=128,
        state_value_width=64, state_norm_groups=8, **_NEMOTRON3,
    ),
    "nemotron-3-100m": _shape(
        512, 256, 8, (8, 2, 64), 8000, 8192, (16, 4), shared_experts=2,
        layer_kinds=_layers_of_nemotron3("MEMEM*EMEME*EME"), state_heads=16, state_key_heads=4, state_key_width=64,
        state_value_width=64, state_norm_groups=4, **_NEMOTRON3,
    ),
    "granite-4-h-tiny": _shape(
        1536, 512, 40, (12, 4, 128), 100352, 131072, (64, 6), shared_experts=2,
        layer_kinds=_layers_of_granite4(40, (5, 15, 25, 35)), state_heads=48, state_key_heads=1, state_key_width=128,
        state_value_width=64, state_norm_groups=1, attention_scale=math.sqrt(128) / 128, **_GRANITE4,
    ),
    "granite-4-h-100m": _shape(
        512, 128, 12, (8, 2, 64), 8000, 8192, (32, 4), shared_experts=2,
        layer_kinds=_layers_of_granite4(12, (3, 9)), state_heads=16, state_key_heads=1, state_key_width=64,
        state_value_width=64, state_norm_groups=1, attention_scale=0.125, **_GRANITE4,
    ),
}  # fmt: skip

# Published bases of rotary positions. ModelSpec has no base, since packages have the table that follows from it.
_ROPE_BASES = {
    "smallthinker": 1_500_000.0, "qwen3": 1_000_000.0, "gpt_oss": 150_000.0, "glm4_moe": 1_000_000.0,
    "gemma4": 1_000_000.0, "qwen3_next": 10_000_000.0, "lfm2": 1_000_000.0,
}  # fmt: skip
LOCAL_ROPE_BASE = 10_000.0  # of Gemma 4's layers with windows
PROPORTION = 0.25  # of the pairs of a head that rotate in its other layers
_ROTATED_SHARES = {"glm4_moe": 2, "qwen3_next": 4}


def rope_base(model: ModelSpec) -> float:
    return _ROPE_BASES.get(model.family, 10_000.0)


def rotated_width(model: ModelSpec) -> int:
    """Return how many elements of a head are rotated."""
    return model.table_width(is_local=False) // _ROTATED_SHARES.get(model.family, 1)


def rope_frequencies(model: ModelSpec, *, is_local: bool = False) -> NDArray[np.float32]:
    """Return a table of rotary positions, [head_width / 2]; 0 for pairs that are not rotated."""
    width = model.table_width(is_local=is_local)
    rotated, table = rotated_width(model), np.zeros(width // 2, dtype=np.float32)
    if model.family == "gemma4":
        table[:] = (LOCAL_ROPE_BASE if is_local else rope_base(model)) ** (-np.arange(0, width, 2) / width)
        table[rotated_pairs(model, is_local=is_local) :] = 0
        return table
    table[: rotated // 2] = rope_base(model) ** (-np.arange(0, rotated, 2) / rotated)
    return table


def rotated_pairs(model: ModelSpec, *, is_local: bool) -> int:
    """Return how many pairs of a head of Gemma 4 are rotated."""
    pairs = model.table_width(is_local=is_local) // 2
    return pairs if is_local else int(pairs * PROPORTION)


@frozen
class Coordinates:
    """Ranges of the residual stream's coordinates, in whole quantization groups.

    steady: the same value for every token, with which rows of neurons express a bias
    identity: the token's code, which the output and some routers read
    attention, feed_forward: outputs of the layers
    state: the state of the trajectory
    """

    steady: slice
    identity: slice
    attention: slice
    feed_forward: slice
    state: slice

    @property
    def state_width(self) -> int:
        return int(self.state.stop - self.state.start)


def coordinates(width: int) -> Coordinates:
    # Codes of v tokens in n coordinates have correlations of at most about sqrt(2 ln v / n), here a third.
    identity = 256 if width >= 2048 else 192
    written = max(GROUP, rank_of(width) // 8 // GROUP * GROUP)
    bounds = [0, GROUP]
    for size in (identity, written, 2 * written):
        bounds.append(bounds[-1] + size)
    return Coordinates(*(slice(a, b) for a, b in zip(bounds, [*bounds[1:], width], strict=True)))


def rank_of(width: int) -> int:
    """Return the rank of a shape's predictor: 352 for the published width of 4096, otherwise in proportion."""
    return max(2, int(width * 352 / 4096 / GROUP + 0.5)) * GROUP
