"""Small random checkpoints of awkward shapes, made from a seed and a recipe: only golden logits need committing.

The numbers come from PCG64's raw stream, which numpy promises never to change, by exact integer arithmetic. The scales
make logits of order 10 and attention that looks around. Nothing here imports the project: golden/make.py reads it too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Array = NDArray[np.float32]
END_TOKEN = "<|end|>"


@dataclass(frozen=True)
class Recipe:
    """One checkpoint. `config` adds to or replaces fields of config.json."""

    name: str
    architecture: str
    activation: str  # config.json's hidden_act
    width: int
    neurons: int
    layers: int
    query_heads: int
    key_heads: int
    head_width: int
    vocabulary: int = 509
    context_tokens: int = 128
    tied: bool = False
    bias: bool = False
    dtype: str = "F16"
    shards: int = 1
    seed: int = 1
    experts: int = 0  # of a mixture, each of so many neurons
    shared: int = 0  # neurons of the expert that every token goes to
    dense: tuple[int, ...] = ()  # layers of a mixture without experts: each has config's intermediate_size neurons
    config: dict[str, Any] = field(default_factory=dict)


MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "TurboSparseMixtralForCausalLM": "mixtral",
    "SmallThinkerForCausalLM": "smallthinker",
    "BambooForCausalLM": "mistral",
    "MistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "ministral3",
    "NemotronForCausalLM": "nemotron",
    "ArceeForCausalLM": "arcee",
    "MiniCPMForCausalLM": "minicpm",
    "SparseLlamaForCausalLM": "sparsellama",
    "GptOssForCausalLM": "gpt_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "OlmoeForCausalLM": "olmoe",
    "OlmoForCausalLM": "olmo",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "Dots1ForCausalLM": "dots1",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "PhimoeForCausalLM": "phimoe",
    "Phi3ForCausalLM": "phi3",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GraniteMoeForCausalLM": "granitemoe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "StableLmForCausalLM": "stablelm",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "BailingMoeForCausalLM": "bailing_moe",
    "BailingMoeV2ForCausalLM": "bailing_moe",
    "Starcoder2ForCausalLM": "starcoder2",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "NemotronHForCausalLM": "nemotron_h",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "BambaForCausalLM": "bamba",
}

GATED = ("gate_proj", "up_proj", "down_proj")
# What a mixture's class calls its router, what comes before an expert's matrices, and these.
EXPERT_NAMES = {
    "MixtralForCausalLM": ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
    "TurboSparseMixtralForCausalLM": ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
    "Qwen3MoeForCausalLM": ("mlp.gate", "mlp.experts.{}.", GATED),
    "SmallThinkerForCausalLM": (
        "block_sparse_moe.primary_router", "block_sparse_moe.experts.{}.", ("gate", "up", "down"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """What a class of mixtures calls its parts, after a layer's name. Those without a name it does not have."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts.{}."  # what comes before an expert's matrices
    matrices: tuple[str, ...] = GATED  # two: each of all experts at once, the first one gate and up
    correction: str = ""  # of the scores by which experts are chosen
    correction_rows: tuple[int, ...] = ()  # what its shape has before the experts
    correction_deviation: float = 0.2  # as much as scores differ
    shared: str = ""  # what comes before the shared expert's matrices
    shared_gate: str = ""
    norms: tuple[str, ...] = ()  # of queries and of keys, each head by itself
    whole_norms: bool = False  # or all heads as one
    output_bias: bool = False  # of attention's last projection, where a recipe's others have one
    layer_norm: bool = False  # norms that take the mean away and add a bias
    attention: str = "self_attn."  # what comes before the parts of attention
    joins_projections: bool = False  # queries, keys and values are one matrix, and the last projection is `dense`
    embedding: str = "model.embed_tokens"


NORMS = ("q_norm", "k_norm")
DEEPSEEK = Parts(correction="mlp.gate.e_score_correction_bias", shared="mlp.shared_experts.", norms=NORMS)
MIXTRAL = Parts(router="block_sparse_moe.gate", experts="block_sparse_moe.experts.{}.", matrices=("w1", "w3", "w2"))
BAILING = Parts(
    shared="mlp.shared_experts.", norms=("query_layernorm", "key_layernorm"), attention="attention.",
    joins_projections=True, embedding="model.word_embeddings",
)  # fmt: skip
PARTS = {
    "Glm4MoeForCausalLM": DEEPSEEK,
    "Dots1ForCausalLM": DEEPSEEK,
    "DeepseekV2ForCausalLM": Parts(shared="mlp.shared_experts."),
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "Glm4MoeLiteForCausalLM": DEEPSEEK,
    "Qwen2MoeForCausalLM": Parts(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate"),
    "OlmoeForCausalLM": Parts(norms=NORMS, whole_norms=True),
    "Ernie4_5_MoeForCausalLM": Parts(
        correction="mlp.moe_statics.e_score_correction_bias", correction_rows=(1,), correction_deviation=0.08,
        shared="mlp.shared_experts.",
    ),
    "HunYuanMoEV1ForCausalLM": Parts(
        router="mlp.gate.wg", shared="mlp.shared_mlp.", norms=("query_layernorm", "key_layernorm")
    ),
    "MiniMaxM2ForCausalLM": replace(
        MIXTRAL, correction="block_sparse_moe.e_score_correction_bias", norms=NORMS, whole_norms=True
    ),
    "PhimoeForCausalLM": replace(MIXTRAL, output_bias=True, layer_norm=True),
    "BailingMoeForCausalLM": BAILING,
    "BailingMoeV2ForCausalLM": replace(BAILING, correction="mlp.gate.expert_bias"),
    "GraniteMoeForCausalLM": Parts(
        router="block_sparse_moe.router.layer", experts="block_sparse_moe.", matrices=("input_linear", "output_linear")
    ),
}  # fmt: skip

# Classes that norm the outputs of attention and feed-forward, and the norms of queries and keys that they have.
NORMED_OUTPUTS = {
    "Gemma2ForCausalLM": "none",
    "Gemma3ForCausalLM": "of each head",
    "Olmo2ForCausalLM": "of all heads",
    "Olmo3ForCausalLM": "of all heads",
}

GEMMA4_KINDS = {"s": "sliding_attention", "f": "full_attention"}


@dataclass(frozen=True)
class Named:
    """What a class of dense models with LayerNorm calls its parts; a layer's after the layer's name."""

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}."
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")  # one: of both in parallel
    norm_weight: bool = True
    norm_bias: bool = True
    projections: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one of all three
    attention_output: str = "self_attn.o_proj"
    ffn: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    output_norm: str = "model.norm"
    output: str = "lm_head"
    biased: tuple[str, ...] = ("qkv",)  # the parts with biases if a recipe has some


COHERE = Named(norms=("input_layernorm",), norm_bias=False, biased=("qkv", "output"))
LAYER_NORMED = {
    "StableLmForCausalLM": Named(),
    "OlmoForCausalLM": Named(norm_weight=False, norm_bias=False),
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": COHERE,
    "GPTNeoXForCausalLM": Named(
        embedding="gpt_neox.embed_in", layer="gpt_neox.layers.{}.", projections=("attention.query_key_value",),
        attention_output="attention.dense", ffn=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        output_norm="gpt_neox.final_layer_norm", output="embed_out", biased=("qkv", "output", "ffn"),
    ),
    "Starcoder2ForCausalLM": Named(ffn=("mlp.c_fc", "mlp.c_proj"), biased=("qkv", "output", "ffn")),
}  # fmt: skip

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("awkward", "LlamaForCausalLM", "relu", 320, 1000, 11, 5, 1, 64),
        Recipe(
            "qwen2", "Qwen2ForCausalLM", "silu", 192, 500, 3, 6, 2, 32, tied=True, bias=True, dtype="BF16",
            config={
                "rope_theta": 1_000_000.0, "use_sliding_window": False, "sliding_window": 64, "max_window_layers": 3,
            },
        ),
        Recipe(
            "relu2", "LlamaForCausalLM", "relu2", 128, 333, 2, 4, 4, 40, vocabulary=389,
            config={"rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
        Recipe("bamboo", "BambooForCausalLM", "relu", 160, 270, 3, 5, 1, 32, shards=2, config={"sliding_window": 9}),
        Recipe(
            "llama3", "LlamaForCausalLM", "relu", 128, 200, 2, 2, 1, 64, dtype="F32",
            config={
                "rope_parameters": {
                    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
                },
            },
        ),
        Recipe(
            "qwen3", "Qwen3ForCausalLM", "silu", 160, 270, 4, 4, 2, 48, dtype="BF16",
            config={"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
        ),
        Recipe("opt", "OPTForCausalLM", "relu", 192, 500, 3, 6, 6, 32, tied=True, bias=True),
        Recipe(
            "mixtral", "MixtralForCausalLM", "silu", 160, 200, 3, 4, 2, 40, experts=5, shards=2,
            config={"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
        ),
        Recipe(
            "turbosparse", "TurboSparseMixtralForCausalLM", "relu", 128, 300, 2, 4, 4, 32, experts=4, dtype="BF16",
            config={"num_local_experts": 4, "num_experts_per_tok": 2},
        ),
        Recipe(
            "qwen3moe", "Qwen3MoeForCausalLM", "silu", 96, 90, 3, 3, 1, 32, experts=9, dtype="BF16",
            config={
                "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 90, "intermediate_size": 777,
                "norm_topk_prob": True,
            },
        ),
        Recipe(
            "smallthinker", "SmallThinkerForCausalLM", "relu", 96, 150, 4, 3, 1, 32, experts=7, tied=True,
            config={
                "moe_num_primary_experts": 7, "moe_num_active_primary_experts": 3, "moe_ffn_hidden_size": 150,
                "rope_layout": [0, 1, 1, 1], "sliding_window_layout": [0, 1, 1, 0], "sliding_window_size": 9,
                "moe_primary_router_apply_softmax": False,
            },
        ),
        Recipe(
            "nemotron", "NemotronForCausalLM", "relu2", 192, 500, 3, 4, 2, 48, bias=True,
            config={"norm_eps": 1e-5, "partial_rotary_factor": 0.25, "attention_bias": True, "mlp_bias": True},
        ),
        Recipe(
            # A threshold makes a jump: it lies in a gap of the text's gates, so that rounding decides nothing.
            "prosparse", "SparseLlamaForCausalLM", "fatrelu", 160, 200, 3, 5, 5, 32,
            config={"model_type": "sparsellama", "hidden_act_param": 0.0469},
        ),
        Recipe(
            "sparse lm", "SparseLlamaForCausalLM", "silu", 128, 333, 3, 4, 4, 32, tied=True, dtype="BF16",
            config={"model_type": "llama_sparse_relu", "sparsity_gated_mlp": True, "rope_theta": 100_000.0},
        ),
        Recipe(
            "minicpm", "MiniCPMForCausalLM", "fatrelu", 160, 200, 3, 5, 1, 32, tied=True, dtype="BF16",
            config={"hidden_act_param": 0.0562, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 96},
        ),
        Recipe(
            "arcee", "ArceeForCausalLM", "relu2", 160, 333, 3, 5, 1, 64, dtype="BF16",
            config={
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 20.0, "beta_fast": 2.0, "original_max_position_embeddings": 32,
                },
            },
        ),
        Recipe(
            "falcon 7b", "FalconForCausalLM", "relu", 160, 500, 3, 5, 1, 32, tied=True,
            config={"new_decoder_architecture": False, "multi_query": True, "activation": "relu"},
        ),
        Recipe(
            "falcon 40b", "FalconForCausalLM", "relu", 192, 333, 3, 6, 2, 32, tied=True, dtype="BF16",
            config={"new_decoder_architecture": True, "activation": "relu"},
        ),
        Recipe(
            "falcon per head", "FalconForCausalLM", "relu", 96, 270, 2, 3, 3, 32, tied=True, bias=True,
            config={"new_decoder_architecture": False, "multi_query": False, "activation": "relu", "bias": True},
        ),
        Recipe(
            "smollm3", "SmolLM3ForCausalLM", "silu", 128, 200, 5, 4, 1, 32, tied=True,
            config={"rope_theta": 50_000.0, "pad_token_id": None},
        ),
        Recipe(
            "granite", "GraniteForCausalLM", "silu", 128, 200, 3, 4, 2, 32, tied=True, dtype="BF16",
            config={
                "embedding_multiplier": 3.0, "logits_scaling": 0.25, "residual_multiplier": 0.6,
                "attention_multiplier": 0.3,
            },
        ),
        Recipe(
            "gpt-oss", "GptOssForCausalLM", "silu", 96, 64, 4, 6, 2, 32, dtype="BF16", experts=6,
            config={
                "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9, "swiglu_limit": 2.0,
                "rope_parameters": {
                    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0,
                    "truncate": False, "original_max_position_embeddings": 32,
                },
            },
        ),
        Recipe(
            "glm4moe", "Glm4MoeForCausalLM", "silu", 128, 60, 4, 4, 2, 48, bias=True, dtype="BF16", experts=10,
            shared=180, dense=(0,),
            config={
                "n_routed_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 60, "n_shared_experts": 3,
                "intermediate_size": 200, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
                "norm_topk_prob": True, "routed_scaling_factor": 1.8, "attention_bias": True, "use_qk_norm": False,
                "partial_rotary_factor": 0.5, "rope_theta": 100_000.0, "num_nextn_predict_layers": 0,
            },
        ),
        Recipe(
            "glm4moe groups", "Glm4MoeForCausalLM", "silu", 96, 64, 5, 4, 1, 32, experts=12, shared=128, dense=(0, 1),
            config={
                "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "n_shared_experts": 2,
                "intermediate_size": 150, "first_k_dense_replace": 2, "n_group": 4, "topk_group": 2,
                "norm_topk_prob": False, "routed_scaling_factor": 0.6, "attention_bias": False, "use_qk_norm": True,
                "partial_rotary_factor": 0.25, "num_nextn_predict_layers": 0,
            },
        ),
        Recipe(
            "qwen2moe", "Qwen2MoeForCausalLM", "silu", 128, 48, 3, 4, 2, 32, bias=True, dtype="BF16", experts=12,
            shared=200,
            config={
                "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
                "shared_expert_intermediate_size": 200, "intermediate_size": 777, "norm_topk_prob": False,
                "decoder_sparse_step": 1, "use_sliding_window": False, "sliding_window": 9, "max_window_layers": 2,
            },
        ),
        Recipe(
            "qwen2moe dense", "Qwen2MoeForCausalLM", "silu", 96, 64, 6, 3, 1, 32, bias=True, tied=True, experts=6,
            shared=160, dense=(0, 2, 3, 4), shards=2,
            config={
                "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 160, "intermediate_size": 150, "norm_topk_prob": True,
                "decoder_sparse_step": 2, "mlp_only_layers": [2, 3],
            },
        ),
        Recipe(
            "olmoe", "OlmoeForCausalLM", "silu", 128, 80, 3, 4, 2, 32, dtype="BF16", experts=10,
            config={"num_experts": 10, "num_experts_per_tok": 3, "norm_topk_prob": False, "clip_qkv": None},
        ),
        Recipe(
            "ernie4_5moe", "Ernie4_5_MoeForCausalLM", "silu", 128, 48, 4, 4, 1, 32, tied=True, dtype="BF16", experts=8,
            shared=144, dense=(0,),
            config={
                "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 48, "moe_num_shared_experts": 3,
                "intermediate_size": 200, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
                "moe_layer_interval": 1, "use_bias": False, "rope_theta": 500_000.0,
            },
        ),
        Recipe(
            "ernie4_5moe dense", "Ernie4_5_MoeForCausalLM", "silu", 96, 64, 7, 3, 3, 32, experts=6,
            dense=(0, 1, 2, 4, 6),
            config={
                "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 0,
                "intermediate_size": 150, "moe_layer_start_index": 2, "moe_layer_end_index": 5,
                "moe_layer_interval": 2,
            },
        ),
        Recipe(
            "dots1", "Dots1ForCausalLM", "silu", 160, 40, 4, 5, 5, 32, dtype="BF16", experts=8, shared=120, dense=(0,),
            config={
                "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 3,
                "intermediate_size": 150, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
                "norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": 9, "max_window_layers": 2,
            },
        ),
        Recipe(
            "hunyuan moe", "HunYuanMoEV1ForCausalLM", "silu", 128, 72, 3, 4, 2, 32, tied=True, dtype="BF16", experts=8,
            shared=72,
            config={
                "num_experts": 8, "moe_topk": [3, 3, 3], "moe_intermediate_size": [72, 72, 72],
                "num_shared_expert": [1, 1, 1], "use_qk_norm": True, "use_mixed_mlp_moe": True,
                "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
            },
        ),
        Recipe(
            "minimax-m2", "MiniMaxM2ForCausalLM", "silu", 96, 64, 3, 4, 2, 48, dtype="BF16", experts=12,
            config={
                "num_local_experts": 12, "num_experts_per_tok": 4, "rotary_dim": 24, "scoring_func": "sigmoid",
                "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True,
            },
        ),
        Recipe(
            # Experts within a share of the best one's logit count: that makes a jump, which no token is near.
            "phimoe", "PhimoeForCausalLM", "silu", 128, 72, 3, 4, 2, 32, bias=True, seed=2, experts=6,
            config={
                "num_local_experts": 6, "num_experts_per_tok": 2, "router_jitter_noise": 0.16, "attention_bias": True,
                "lm_head_bias": True, "original_max_position_embeddings": 64,
                "rope_scaling": {
                    "type": "longrope", "short_mscale": 1.2, "long_mscale": 1.3,
                    "original_max_position_embeddings": 64, "short_factor": [1 + 0.25 * n for n in range(16)],
                    "long_factor": [2.0 + n for n in range(16)],
                },
            },
        ),
        Recipe(
            "phi3", "Phi3ForCausalLM", "silu", 128, 200, 3, 4, 2, 32, dtype="BF16",
            config={
                "partial_rotary_factor": 0.75, "original_max_position_embeddings": 64, "sliding_window": 9,
                "pad_token_id": 0,
                "rope_scaling": {
                    "type": "longrope", "short_factor": [1 + 0.25 * n for n in range(12)],
                    "long_factor": [2.0 + n for n in range(12)],
                },
            },
        ),
        Recipe(
            "granitemoe", "GraniteMoeForCausalLM", "silu", 128, 72, 3, 4, 2, 32, tied=True, dtype="BF16", experts=8,
            config={
                "num_local_experts": 8, "num_experts_per_tok": 3, "embedding_multiplier": 1.5, "logits_scaling": 0.5,
                "residual_multiplier": 0.8, "attention_multiplier": 0.3,
            },
        ),
        Recipe(
            "deepseek v2", "DeepseekV2ForCausalLM", "silu", 128, 60, 3, 4, 4, 16, dtype="BF16", experts=10, shared=120,
            dense=(0,),
            config={
                "n_routed_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 60, "n_shared_experts": 2,
                "intermediate_size": 200, "first_k_dense_replace": 1, "topk_method": "greedy", "norm_topk_prob": False,
                "routed_scaling_factor": 1.5, "q_lora_rank": None, "kv_lora_rank": 64, "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 32, "v_head_dim": 24,
                "rope_scaling": {
                    "type": "yarn", "factor": 40.0, "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0,
                    "mscale_all_dim": 0.707, "original_max_position_embeddings": 32,
                },
            },
        ),
        Recipe(
            "deepseek v2 groups", "DeepseekV2ForCausalLM", "silu", 96, 64, 3, 6, 6, 32, seed=7, experts=12,
            shared=64,
            config={
                "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "n_shared_experts": 1,
                "intermediate_size": 150, "first_k_dense_replace": 0, "topk_method": "group_limited_greedy",
                "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 4.0,
                "q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 16,
                "v_head_dim": 16,
            },
        ),
        Recipe(
            "deepseek v3", "DeepseekV3ForCausalLM", "silu", 96, 64, 4, 4, 4, 16, dtype="BF16", seed=7, experts=12,
            shared=64, dense=(0, 1),
            config={
                "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "n_shared_experts": 1,
                "intermediate_size": 150, "first_k_dense_replace": 2, "n_group": 4, "topk_group": 2,
                "norm_topk_prob": True, "routed_scaling_factor": 2.5, "q_lora_rank": 96, "kv_lora_rank": 32,
                "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_nextn_predict_layers": 0,
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0,
                    "mscale_all_dim": 1.0, "original_max_position_embeddings": 32,
                },
            },
        ),
        Recipe(
            "glm4 lite", "Glm4MoeLiteForCausalLM", "silu", 160, 60, 3, 5, 5, 16, experts=8, shared=60, dense=(0,),
            shards=2,
            config={
                "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 60, "n_shared_experts": 1,
                "intermediate_size": 200, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
                "routed_scaling_factor": 1.8, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 24, "v_head_dim": 32, "rope_interleave": False, "rms_norm_eps": 1e-3,
            },
        ),
        Recipe(
            # Scores and logits are as large as the caps, and heads wider than width / heads.
            "gemma2", "Gemma2ForCausalLM", "gelu_pytorch_tanh", 160, 270, 3, 4, 2, 64, tied=True, dtype="BF16",
            config={
                "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 40, "sliding_window": 9,
                "attn_logit_softcapping": 4.0, "final_logit_softcapping": 15.0,
            },
        ),
        Recipe(
            "gemma3", "Gemma3ForCausalLM", "gelu_pytorch_tanh", 128, 300, 4, 4, 1, 32, tied=True,
            config={
                "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "sliding_window": 9,
                "sliding_window_pattern": 3, "rope_theta": 5_000.0, "rope_local_base_freq": 300.0,
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
        ),
        Recipe(
            # Layers without windows have wider heads; key heads of their own only where values are keys.
            "gemma4", "Gemma4ForCausalLM", "gelu_pytorch_tanh", 160, 270, 5, 4, 2, 32, tied=True, dtype="BF16",
            config={
                "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 9, "global_head_dim": 64,
                "num_global_key_value_heads": 1, "attention_k_eq_v": False, "hidden_size_per_layer_input": 0,
                "final_logit_softcapping": 15.0, "use_bidirectional_attention": "vision",
                "layer_types": [GEMMA4_KINDS[kind] for kind in "ssfsf"],
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                    "full_attention": {
                        "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5_000.0,
                    },
                },
            },
        ),
        Recipe(
            "gemma4 moe", "Gemma4ForCausalLM", "gelu_pytorch_tanh", 128, 48, 4, 4, 4, 32, tied=True, shards=2,
            experts=7, shared=120,
            config={
                "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 9, "global_head_dim": 96,
                "num_global_key_value_heads": 2, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
                "enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 48,
                "intermediate_size": 120, "layer_types": [GEMMA4_KINDS[kind] for kind in "sfsf"],
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                    "full_attention": {
                        "rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 20_000.0,
                    },
                },
            },
        ),
        Recipe("olmo2", "Olmo2ForCausalLM", "silu", 160, 333, 3, 5, 5, 32, dtype="BF16"),
        Recipe(
            "olmo3", "Olmo3ForCausalLM", "silu", 128, 200, 5, 4, 2, 32, shards=2,
            config={
                "sliding_window": 9,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2_000.0},
                    "full_attention": {
                        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "beta_fast": 4.0,
                        "original_max_position_embeddings": 32,
                    },
                },
            },
        ),
        Recipe(
            "qwen3 next", "Qwen3NextForCausalLM", "silu", 96, 64, 4, 4, 2, 32, dtype="BF16", experts=9, shared=64,
            dense=(1,),
            config={
                "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 64, "intermediate_size": 150, "mlp_only_layers": [1],
                "norm_topk_prob": False, "linear_key_head_dim": 24, "linear_value_head_dim": 16,
                "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 4,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1_000.0, "partial_rotary_factor": 0.25},
            },
        ),
        Recipe(
            "qwen3.5", "Qwen3_5ForCausalLM", "silu", 128, 200, 4, 4, 1, 32, tied=True,
            config={
                "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
                "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3, "full_attention_interval": 2,
                "layer_types": ["linear_attention", "full_attention"] * 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1_000.0, "partial_rotary_factor": 0.5},
            },
        ),
        Recipe(
            "qwen3.5 moe", "Qwen3_5MoeForCausalLM", "silu", 96, 40, 4, 4, 2, 32, shards=2, experts=8,
            shared=40,
            config={
                "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
                "shared_expert_intermediate_size": 40, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
                "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 4,
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 1_000.0, "partial_rotary_factor": 0.25,
                    "mrope_section": [2, 1, 1], "mrope_interleaved": True,
                },
            },
        ),
        Recipe(
            "lfm2", "Lfm2ForCausalLM", "silu", 128, 300, 4, 4, 2, 32, tied=True, dtype="BF16",
            config={
                "layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 40,
                "block_ffn_dim_multiplier": 1.1, "norm_eps": 1e-5,
            },
        ),
        Recipe(
            "lfm2 moe", "Lfm2MoeForCausalLM", "silu", 96, 48, 5, 3, 1, 32, tied=True, experts=9, dense=(0, 1),
            config={
                "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"], "num_experts": 9,
                "num_experts_per_tok": 3, "moe_intermediate_size": 48, "intermediate_size": 120, "num_dense_layers": 2,
                "routed_scaling_factor": 1.5, "conv_L_cache": 4, "norm_eps": 1e-5,
            },
        ),
        Recipe(
            "nemotron-h", "NemotronHForCausalLM", "relu2", 96, 200, 5, 4, 2, 24,
            config={
                "hybrid_override_pattern": "M-*-MM-", "mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 24,
                "n_groups": 2, "conv_kernel": 4, "layer_norm_epsilon": 1e-5, "num_hidden_layers": 7,
                "time_step_min": 0.05,
            },
        ),
        Recipe(
            "nemotron-h moe", "NemotronHForCausalLM", "relu2", 128, 40, 6, 4, 1, 32, dtype="BF16", experts=9, shared=70,
            config={
                "layers_block_type": [
                    "linear_attention", "moe", "linear_attention", "full_attention", "moe", "mlp", "linear_attention",
                    "moe",
                ],
                "num_hidden_layers": 8, "n_routed_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
                "moe_shared_expert_intermediate_size": 70, "intermediate_size": 90, "routed_scaling_factor": 2.5,
                "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 4, "conv_kernel": 3,
                "layer_norm_epsilon": 1e-5,
            },
        ),
        Recipe(
            "granite hybrid", "GraniteMoeHybridForCausalLM", "silu", 96, 48, 4, 4, 2, 24, experts=8, shared=100,
            config={
                "num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 100,
                "layer_types": ["mamba", "mamba", "attention", "mamba"], "embedding_multiplier": 1.5,
                "logits_scaling": 0.5, "residual_multiplier": 0.8, "attention_multiplier": 0.3, "mamba_n_heads": 12,
                "mamba_d_head": 16, "mamba_d_state": 24, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
                "position_embedding_type": "nope", "time_step_limit": [0.0, {"__float__": "Infinity"}],
            },
        ),
        Recipe(
            "granite hybrid dense", "GraniteMoeHybridForCausalLM", "silu", 128, 300, 3, 4, 2, 32, tied=True,
            dtype="BF16",
            config={
                "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 300,
                "layer_types": ["mamba", "attention", "mamba"], "embedding_multiplier": 1.5, "logits_scaling": 0.5,
                "residual_multiplier": 0.8, "attention_multiplier": 0.3, "mamba_n_heads": 4, "mamba_d_head": "auto",
                "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_expand": 1,
                "position_embedding_type": "rope",
            },
        ),
        Recipe(
            "bamba", "BambaForCausalLM", "silu", 128, 200, 4, 4, 2, 32, dtype="BF16",
            config={
                "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 24,
                "mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_expand": 2, "time_step_limit": [0.0, float("inf")],
            },
        ),
        Recipe(
            "stablelm", "StableLmForCausalLM", "silu", 128, 200, 3, 4, 2, 32, bias=True, dtype="BF16",
            config={"use_qkv_bias": True, "partial_rotary_factor": 0.25},
        ),
        Recipe(
            "stablelm parallel", "StableLmForCausalLM", "silu", 160, 333, 3, 5, 5, 32, tied=True,
            config={"use_parallel_residual": True, "partial_rotary_factor": 0.5},
        ),
        Recipe(
            "olmo", "OlmoForCausalLM", "silu", 128, 200, 3, 4, 2, 32, dtype="BF16", config={"clip_qkv": 1.25},
        ),
        Recipe(
            "ministral3", "Ministral3ForCausalLM", "silu", 160, 270, 3, 5, 1, 32, dtype="BF16",
            config={
                "max_position_embeddings": 1024, "sliding_window": None,
                "rope_parameters": {
                    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 8.0,
                    "original_max_position_embeddings": 128, "max_position_embeddings": 1024, "beta_fast": 8.0,
                    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
                },
            },
        ),
        Recipe("olmo unclipped", "OlmoForCausalLM", "silu", 96, 150, 2, 3, 3, 32, tied=True),
        Recipe(
            "olmoe clipped", "OlmoeForCausalLM", "silu", 96, 60, 2, 3, 3, 32, experts=6,
            config={"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False, "clip_qkv": 0.75},
        ),
        Recipe(
            "cohere", "CohereForCausalLM", "silu", 160, 270, 3, 5, 1, 32, tied=True, dtype="BF16",
            config={"logit_scale": 0.5, "rope_theta": 75_000.0, "use_qk_norm": False},
        ),
        Recipe(
            "cohere2", "Cohere2ForCausalLM", "silu", 128, 200, 5, 4, 2, 32, tied=True, bias=True, shards=2,
            config={"logit_scale": 0.75, "sliding_window": 9, "sliding_window_pattern": 4, "attention_bias": True},
        ),
        Recipe(
            "gpt neox", "GPTNeoXForCausalLM", "gelu", 160, 333, 3, 5, 5, 32, bias=True,
            config={"rotary_pct": 0.25, "rotary_emb_base": 5_000, "use_parallel_residual": True},
        ),
        Recipe(
            "gpt neox in turn", "GPTNeoXForCausalLM", "gelu_fast", 96, 270, 3, 3, 3, 32, bias=True, dtype="BF16",
            config={"rotary_pct": 0.5, "use_parallel_residual": False},
        ),
        Recipe(
            "starcoder2", "Starcoder2ForCausalLM", "gelu_pytorch_tanh", 128, 500, 3, 4, 2, 32, tied=True, bias=True,
            config={"norm_epsilon": 1e-5, "sliding_window": 9, "use_bias": True},
        ),
        Recipe(
            "bailing", "BailingMoeForCausalLM", "silu", 128, 60, 3, 4, 2, 32, dtype="BF16", experts=10, shared=120,
            config={
                "num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 60, "num_shared_experts": 2,
                "norm_topk_prob": True, "first_k_dense_replace": 0, "use_bias": False, "norm_head": False,
                "use_qk_norm": False,
            },
        ),
        Recipe(
            "bailing v2", "BailingMoeV2ForCausalLM", "silu", 96, 64, 4, 4, 1, 32, experts=12, shared=64, dense=(0,),
            config={
                "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "num_shared_experts": 1,
                "intermediate_size": 150, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
                "routed_scaling_factor": 2.5, "score_function": "sigmoid", "norm_topk_prob": True, "use_bias": False,
                "use_qk_norm": True, "partial_rotary_factor": 0.5, "rope_theta": 6_000.0,
            },
        ),
    )
}  # fmt: skip

TINY = Recipe("tiny", "LlamaForCausalLM", "relu", 64, 100, 2, 2, 1, 32, vocabulary=300)


def random_tensor(generator: np.random.PCG64, shape: tuple[int, ...], deviation: float) -> Array:
    """Nearly normal: the sum of the four 16-bit quarters of a raw 64-bit number, centred."""
    raw = generator.random_raw(int(np.prod(shape)))
    quarters = raw.astype("<u8").view("<u2").reshape(-1, 4)
    # Several times as fast as numpy's sum along so short an axis.
    sums = quarters[:, 0].astype(np.int64) + quarters[:, 1] + quarters[:, 2] + quarters[:, 3]
    unit = (sums - 2 * 65535) / 37837.2  # the deviation of such a sum
    return (unit * deviation).astype(np.float32).reshape(shape)


def rounded(values: Array, dtype: str) -> Array:
    """The values as the dtype stores them, ties to even. All survive f16: there only the arithmetic can differ."""
    if dtype in ("F32", "F16"):
        return values.astype(np.float16).astype(np.float32)
    return (_bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32)


def _bfloat16_bits(values: Array) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """Every tensor under its Hugging Face name, rounded to the recipe's dtype."""
    if recipe.architecture == "OPTForCausalLM":
        yield from _opt_tensors(recipe)
        return
    if recipe.architecture == "NemotronForCausalLM":
        yield from _nemotron_tensors(recipe)
        return
    if recipe.architecture == "GptOssForCausalLM":
        yield from _gpt_oss_tensors(recipe)
        return
    if recipe.architecture == "FalconForCausalLM":
        yield from _falcon_tensors(recipe)
        return
    if recipe.architecture == "Phi3ForCausalLM":
        yield from _phi3_tensors(recipe)
        return
    if recipe.architecture in RECURRENT_CLASSES:
        yield from _recurrent_tensors(recipe)
        return
    if recipe.architecture in ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"):
        yield from _lfm2_tensors(recipe)
        return
    if recipe.architecture == "NemotronHForCausalLM":
        yield from _nemotron_h_tensors(recipe)
        return
    if recipe.architecture == "GraniteMoeHybridForCausalLM":
        yield from _granite_hybrid_tensors(recipe)
        return
    if recipe.architecture == "BambaForCausalLM":
        yield from _bamba_tensors(recipe)
        return
    if recipe.architecture in PARTS:
        yield from _mixture_tensors(recipe)
        return
    if recipe.architecture in NORMED_OUTPUTS:
        yield from _normed_tensors(recipe)
        return
    if recipe.architecture == "Gemma4ForCausalLM":
        yield from _gemma4_tensors(recipe)
        return
    if recipe.architecture in LAYER_NORMED:
        yield from _layer_normed_tensors(recipe, LAYER_NORMED[recipe.architecture])
        return
    generator = np.random.PCG64(recipe.seed)
    width, neurons, heads_width = recipe.width, recipe.neurons, recipe.query_heads * recipe.head_width

    def made(name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation) + np.float32(centre), recipe.dtype)

    # A tied embedding must suit logits and residual stream alike; the norms make up for its scale.
    yield made("model.embed_tokens.weight", (recipe.vocabulary, width), 5 * width**-0.5 if recipe.tied else 1.0)
    for layer in range(recipe.layers):
        name = f"model.layers.{layer}"
        yield made(f"{name}.input_layernorm.weight", (width,), 0.1, 1.0)
        for projection, heads in (("q", recipe.query_heads), ("k", recipe.key_heads), ("v", recipe.key_heads)):
            rows = heads * recipe.head_width
            yield made(f"{name}.self_attn.{projection}_proj.weight", (rows, width), 1.3 * width**-0.5)
            if recipe.bias:
                yield made(f"{name}.self_attn.{projection}_proj.bias", (rows,), 0.5)
        if recipe.architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
            for projection in ("q", "k"):
                yield made(f"{name}.self_attn.{projection}_norm.weight", (recipe.head_width,), 0.3, 1.2)
        yield made(f"{name}.self_attn.o_proj.weight", (width, heads_width), 0.5 * heads_width**-0.5)
        yield made(f"{name}.post_attention_layernorm.weight", (width,), 0.1, 1.0)
        router, expert, (gate, up, down) = EXPERT_NAMES.get(recipe.architecture, ("", "mlp.", GATED))
        if recipe.experts:
            yield made(f"{name}.{router}.weight", (recipe.experts, width), 1.5 * width**-0.5)
        for number in range(recipe.experts or 1):
            ffn = f"{name}.{expert.format(number)}"
            if recipe.architecture != "ArceeForCausalLM":
                yield made(f"{ffn}{gate}.weight", (neurons, width), width**-0.5)
            yield made(f"{ffn}{up}.weight", (neurons, width), width**-0.5)
            yield made(f"{ffn}{down}.weight", (width, neurons), 0.5 * neurons**-0.5)
    yield made("model.norm.weight", (width,), 0.1, 1.0)
    if not recipe.tied:
        yield made("lm_head.weight", (recipe.vocabulary, width), 5 * width**-0.5)


def _opt_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    generator = np.random.PCG64(recipe.seed)
    width, neurons = recipe.width, recipe.neurons

    def linear(name: str, rows: int, columns: int, gain: float) -> Iterator[tuple[str, Array]]:
        yield f"{name}.weight", rounded(random_tensor(generator, (rows, columns), gain * columns**-0.5), recipe.dtype)
        yield f"{name}.bias", rounded(random_tensor(generator, (rows,), 0.3), recipe.dtype)

    def norm(name: str) -> Iterator[tuple[str, Array]]:
        yield f"{name}.weight", rounded(random_tensor(generator, (width,), 0.1) + np.float32(1), recipe.dtype)
        yield f"{name}.bias", rounded(random_tensor(generator, (width,), 0.2), recipe.dtype)

    for name, rows in (("tokens", recipe.vocabulary), ("positions", recipe.context_tokens + 2)):
        values = random_tensor(generator, (rows, width), 5 * width**-0.5)
        yield f"model.decoder.embed_{name}.weight", rounded(values, recipe.dtype)
    for layer in range(recipe.layers):
        name = f"model.decoder.layers.{layer}"
        yield from norm(f"{name}.self_attn_layer_norm")
        for projection in "qkv":
            yield from linear(f"{name}.self_attn.{projection}_proj", width, width, 1.3)
        yield from linear(f"{name}.self_attn.out_proj", width, width, 0.5)
        yield from norm(f"{name}.final_layer_norm")
        yield from linear(f"{name}.fc1", neurons, width, 1.0)
        yield from linear(f"{name}.fc2", width, neurons, 0.5)
    yield from norm("model.decoder.final_layer_norm")


def _nemotron_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """Stored norms lack 1."""
    generator = np.random.PCG64(recipe.seed)
    width, neurons, heads_width = recipe.width, recipe.neurons, recipe.query_heads * recipe.head_width

    def made(name: str, shape: tuple[int, ...], deviation: float) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation), recipe.dtype)

    def linear(name: str, rows: int, columns: int, gain: float) -> Iterator[tuple[str, Array]]:
        yield made(f"{name}.weight", (rows, columns), gain * columns**-0.5)
        if recipe.bias:
            yield made(f"{name}.bias", (rows,), 0.3)

    def norm(name: str) -> Iterator[tuple[str, Array]]:
        yield made(f"{name}.weight", (width,), 0.1)
        yield made(f"{name}.bias", (width,), 0.2)

    yield made("model.embed_tokens.weight", (recipe.vocabulary, width), 1.0)
    for layer in range(recipe.layers):
        name = f"model.layers.{layer}"
        yield from norm(f"{name}.input_layernorm")
        for projection, heads in (("q", recipe.query_heads), ("k", recipe.key_heads), ("v", recipe.key_heads)):
            yield from linear(f"{name}.self_attn.{projection}_proj", heads * recipe.head_width, width, 1.3)
        yield from linear(f"{name}.self_attn.o_proj", width, heads_width, 0.5)
        yield from norm(f"{name}.post_attention_layernorm")
        yield from linear(f"{name}.mlp.up_proj", neurons, width, 1.0)
        yield from linear(f"{name}.mlp.down_proj", width, neurons, 0.5)
    yield from norm("model.norm")
    yield made("lm_head.weight", (recipe.vocabulary, width), 5 * width**-0.5)


def _gpt_oss_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """Matrices of experts have a row for each input. Sinks are as large as scores, and many gates exceed the limit."""
    generator = np.random.PCG64(recipe.seed)
    width, neurons, experts = recipe.width, recipe.neurons, recipe.experts
    heads_width = recipe.query_heads * recipe.head_width

    def made(name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation) + np.float32(centre), recipe.dtype)

    yield made("model.embed_tokens.weight", (recipe.vocabulary, width), 1.0)
    for layer in range(recipe.layers):
        name = f"model.layers.{layer}"
        yield made(f"{name}.input_layernorm.weight", (width,), 0.1, 1.0)
        yield made(f"{name}.self_attn.sinks", (recipe.query_heads,), 1.5)
        for part, rows, columns, gain in (
            ("q", heads_width, width, 1.3),
            ("k", recipe.key_heads * recipe.head_width, width, 1.3),
            ("v", recipe.key_heads * recipe.head_width, width, 1.3),
            ("o", width, heads_width, 0.5),
        ):
            yield made(f"{name}.self_attn.{part}_proj.weight", (rows, columns), gain * columns**-0.5)
            yield made(f"{name}.self_attn.{part}_proj.bias", (rows,), 0.3)
        yield made(f"{name}.post_attention_layernorm.weight", (width,), 0.1, 1.0)
        yield made(f"{name}.mlp.router.weight", (experts, width), 1.5 * width**-0.5)
        yield made(f"{name}.mlp.router.bias", (experts,), 0.5)
        yield made(f"{name}.mlp.experts.gate_up_proj", (experts, width, 2 * neurons), 1.5 * width**-0.5)
        yield made(f"{name}.mlp.experts.gate_up_proj_bias", (experts, 2 * neurons), 0.5)
        yield made(f"{name}.mlp.experts.down_proj", (experts, neurons, width), 0.5 * neurons**-0.5)
        yield made(f"{name}.mlp.experts.down_proj_bias", (experts, width), 0.2)
    yield made("model.norm.weight", (width,), 0.1, 1.0)
    yield made("lm_head.weight", (recipe.vocabulary, width), 5 * width**-0.5)


def _mixture_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """A shared expert counts as much as the chosen ones together. Where norms take the mean away, it is large."""
    generator, parts = np.random.PCG64(recipe.seed), PARTS[recipe.architecture]
    width, head_width = recipe.width, recipe.head_width
    heads_width, keys_width = recipe.query_heads * head_width, recipe.key_heads * head_width

    def made(name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation) + np.float32(centre), recipe.dtype)

    def norm(name: str) -> Iterator[tuple[str, Array]]:
        yield made(f"{name}.weight", (width,), 0.1, 1.0)
        if parts.layer_norm:
            yield made(f"{name}.bias", (width,), 0.2)

    def projection(name: str, rows: int, columns: int, gain: float) -> Iterator[tuple[str, Array]]:
        yield made(f"{name}.weight", (rows, columns), gain * columns**-0.5)
        if recipe.bias and (parts.output_bias or not name.endswith("o_proj")):
            yield made(f"{name}.bias", (rows,), 0.5)

    def gated(name: str, matrices: tuple[str, ...], neurons: int) -> Iterator[tuple[str, Array]]:
        *ups, down = matrices
        for up in ups:
            yield made(f"{name}{up}.weight", (neurons, width), width**-0.5)
        yield made(f"{name}{down}.weight", (width, neurons), 0.5 * neurons**-0.5)

    def mixture(name: str) -> Iterator[tuple[str, Array]]:
        experts, neurons = recipe.experts, recipe.neurons
        yield made(f"{name}.{parts.router}.weight", (experts, width), 1.5 * width**-0.5)
        if parts.correction:
            yield made(f"{name}.{parts.correction}", (*parts.correction_rows, experts), parts.correction_deviation)
        if len(parts.matrices) == 2:
            up, down = (f"{name}.{parts.experts}{matrix}.weight" for matrix in parts.matrices)
            yield made(up, (experts, 2 * neurons, width), width**-0.5)
            yield made(down, (experts, width, neurons), 0.5 * neurons**-0.5)
        else:
            for number in range(experts):
                yield from gated(f"{name}.{parts.experts.format(number)}", parts.matrices, neurons)
        if recipe.shared:
            yield from gated(f"{name}.{parts.shared}", GATED, recipe.shared)
        if parts.shared_gate:
            yield made(f"{name}.{parts.shared_gate}.weight", (1, width), 1.5 * width**-0.5)

    mean = 0.5 if parts.layer_norm else 0.0
    yield made(f"{parts.embedding}.weight", (recipe.vocabulary, width), 5 * width**-0.5 if recipe.tied else 1.0, mean)
    for layer in range(recipe.layers):
        name = f"model.layers.{layer}"
        attention = f"{name}.{parts.attention}"
        yield from norm(f"{name}.input_layernorm")
        if "kv_lora_rank" in recipe.config:
            heads_width = recipe.query_heads * recipe.config["v_head_dim"]
            for part, shape, deviation, centre in _latent_attention(recipe):
                yield made(f"{name}.self_attn.{part}.weight", shape, deviation, centre)
        elif parts.joins_projections:
            yield from projection(f"{attention}query_key_value", heads_width + 2 * keys_width, width, 1.3)
        else:
            for part, rows in (("q", heads_width), ("k", keys_width), ("v", keys_width)):
                yield from projection(f"{name}.self_attn.{part}_proj", rows, width, 1.3)
        if "kv_lora_rank" not in recipe.config and recipe.config.get("use_qk_norm", True):
            for one, values in zip(parts.norms, (heads_width, keys_width), strict=False):
                yield made(f"{attention}{one}.weight", (values if parts.whole_norms else head_width,), 0.3, 1.2)
        yield from projection(f"{attention}{'dense' if parts.joins_projections else 'o_proj'}", width, heads_width, 0.5)
        yield from norm(f"{name}.post_attention_layernorm")
        if layer in recipe.dense:
            yield from gated(f"{name}.mlp.", GATED, recipe.config["intermediate_size"])
        else:
            yield from mixture(name)
    yield from norm("model.norm")
    if not recipe.tied:
        yield made("lm_head.weight", (recipe.vocabulary, width), 5 * width**-0.5)
    if recipe.config.get("lm_head_bias"):
        yield made("lm_head.bias", (recipe.vocabulary,), 2.0)


RECURRENT_CLASSES = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")


def _recurrent_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """Memories decay so slowly that tokens far away count. Stored norms lack 1, those of DeltaNet's outputs do not."""
    generator = np.random.PCG64(recipe.seed)
    width, settings = recipe.width, recipe.config

    def made(name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation) + np.float32(centre), recipe.dtype)

    def linear(name: str, rows: int, columns: int, gain: float) -> tuple[str, Array]:
        return made(f"{name}.weight", (rows, columns), gain * columns**-0.5)

    def gated(name: str, neurons: int) -> Iterator[tuple[str, Array]]:
        yield linear(f"{name}gate_proj", neurons, width, 1.0)
        yield linear(f"{name}up_proj", neurons, width, 1.0)
        yield linear(f"{name}down_proj", width, neurons, 0.5)

    def mixture(name: str) -> Iterator[tuple[str, Array]]:
        experts, neurons = recipe.experts, recipe.neurons
        yield linear(f"{name}.mlp.gate", experts, width, 1.5)
        if recipe.architecture == "Qwen3_5MoeForCausalLM":  # as published
            yield made(f"{name}.mlp.experts.gate_up_proj", (experts, 2 * neurons, width), width**-0.5)
            yield made(f"{name}.mlp.experts.down_proj", (experts, width, neurons), 0.5 * neurons**-0.5)
        else:
            for number in range(experts):
                yield from gated(f"{name}.mlp.experts.{number}.", neurons)
        yield from gated(f"{name}.mlp.shared_expert.", recipe.shared)
        yield linear(f"{name}.mlp.shared_expert_gate", 1, width, 1.5)

    def delta(name: str) -> Iterator[tuple[str, Array]]:
        heads, key_heads = settings["linear_num_value_heads"], settings["linear_num_key_heads"]
        keys, values = key_heads * settings["linear_key_head_dim"], heads * settings["linear_value_head_dim"]
        if recipe.architecture == "Qwen3NextForCausalLM":
            yield linear(f"{name}.in_proj_qkvz", 2 * keys + 2 * values, width, 1.3)
            yield linear(f"{name}.in_proj_ba", 2 * heads, width, 1.0)
        else:
            yield linear(f"{name}.in_proj_qkv", 2 * keys + values, width, 1.3)
            yield linear(f"{name}.in_proj_z", values, width, 1.3)
            yield linear(f"{name}.in_proj_b", heads, width, 1.0)
            yield linear(f"{name}.in_proj_a", heads, width, 1.0)
        yield made(f"{name}.conv1d.weight", (2 * keys + values, 1, settings["linear_conv_kernel_dim"]), 0.5)
        yield made(f"{name}.A_log", (heads,), 1.0, -2.0)
        yield made(f"{name}.dt_bias", (heads,), 0.5, -1.0)
        yield made(f"{name}.norm.weight", (settings["linear_value_head_dim"],), 0.3, 1.0)
        yield linear(f"{name}.out_proj", width, values, 0.5)

    def attention(name: str) -> Iterator[tuple[str, Array]]:
        heads, keys = recipe.query_heads * recipe.head_width, recipe.key_heads * recipe.head_width
        yield linear(f"{name}.q_proj", 2 * heads, width, 1.3)
        yield linear(f"{name}.k_proj", keys, width, 1.3)
        yield linear(f"{name}.v_proj", keys, width, 1.3)
        yield made(f"{name}.q_norm.weight", (recipe.head_width,), 0.3, 0.2)
        yield made(f"{name}.k_norm.weight", (recipe.head_width,), 0.3, 0.2)
        yield linear(f"{name}.o_proj", width, heads, 0.7)

    yield made("model.embed_tokens.weight", (recipe.vocabulary, width), 5 * width**-0.5 if recipe.tied else 1.0)
    every = settings.get("full_attention_interval", 4)
    for layer in range(recipe.layers):
        name = f"model.layers.{layer}"
        yield made(f"{name}.input_layernorm.weight", (width,), 0.1)
        yield from attention(f"{name}.self_attn") if (layer + 1) % every == 0 else delta(f"{name}.linear_attn")
        yield made(f"{name}.post_attention_layernorm.weight", (width,), 0.1)
        if recipe.experts and layer not in recipe.dense:
            yield from mixture(name)
        else:
            yield from gated(f"{name}.mlp.", settings.get("intermediate_size", recipe.neurons))
    yield made("model.norm.weight", (width,), 0.1)
    if not recipe.tied:
        yield linear("lm_head", recipe.vocabulary, width, 5.0)


class Maker:
    """Random tensors of a recipe, one after the other."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._generator = recipe, np.random.PCG64(recipe.seed)

    def made(self, name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        values = random_tensor(self._generator, shape, deviation) + np.float32(centre)
        return name, rounded(values, self._recipe.dtype)

    def linear(self, name: str, rows: int, columns: int, gain: float) -> tuple[str, Array]:
        return self.made(f"{name}.weight", (rows, columns), gain * columns**-0.5)

    def norm(self, name: str, length: int = 0) -> tuple[str, Array]:
        return self.made(f"{name}.weight", (length or self._recipe.width,), 0.1, 1.0)

    def mamba(
        self, name: str, heads: int, head: int, state: int, groups: int, tokens: int
    ) -> Iterator[tuple[str, Array]]:
        """Memories decay so slowly that tokens far away count."""
        inner, channels, width = heads * head, heads * head + 2 * groups * state, self._recipe.width
        yield self.linear(f"{name}.in_proj", inner + channels + heads, width, 1.3)
        yield self.made(f"{name}.conv1d.weight", (channels, 1, tokens), 0.5)
        yield self.made(f"{name}.conv1d.bias", (channels,), 0.3)
        yield self.made(f"{name}.A_log", (heads,), 1.0, -2.0)
        yield self.made(f"{name}.D", (heads,), 0.5, 0.5)
        yield self.made(f"{name}.dt_bias", (heads,), 0.7, -1.5)
        yield self.norm(f"{name}.norm", inner)
        yield self.linear(f"{name}.out_proj", width, inner, 0.7)

    def attention(self, name: str, output: str = "o_proj") -> Iterator[tuple[str, Array]]:
        recipe = self._recipe
        for part, heads in (("q", recipe.query_heads), ("k", recipe.key_heads), ("v", recipe.key_heads)):
            yield self.linear(f"{name}.{part}_proj", heads * recipe.head_width, recipe.width, 1.3)
        yield self.linear(f"{name}.{output}", recipe.width, recipe.query_heads * recipe.head_width, 0.7)


def _lfm2_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    make, width, settings = Maker(recipe), recipe.width, recipe.config

    def gated(name: str, neurons: int) -> Iterator[tuple[str, Array]]:
        yield make.linear(f"{name}.w1", neurons, width, 1.0)
        yield make.linear(f"{name}.w3", neurons, width, 1.0)
        yield make.linear(f"{name}.w2", width, neurons, 0.5)

    yield make.made("model.embed_tokens.weight", (recipe.vocabulary, width), 5 * width**-0.5)
    for layer, kind in enumerate(settings["layer_types"]):
        name = f"model.layers.{layer}"
        yield make.norm(f"{name}.operator_norm")
        if kind == "conv":
            yield make.linear(f"{name}.conv.in_proj", 3 * width, width, 1.0)
            yield make.made(f"{name}.conv.conv.weight", (width, 1, settings.get("conv_L_cache", 3)), 0.6)
            yield make.linear(f"{name}.conv.out_proj", width, width, 0.7)
        else:
            yield from make.attention(f"{name}.self_attn", "out_proj")
            yield make.norm(f"{name}.self_attn.q_layernorm", recipe.head_width)
            yield make.norm(f"{name}.self_attn.k_layernorm", recipe.head_width)
        yield make.norm(f"{name}.ffn_norm")
        if not recipe.experts:
            yield from gated(f"{name}.feed_forward", 240)  # 300 * 2 / 3, times 1.1, rounded up to a multiple of 40
        elif layer in recipe.dense:
            yield from gated(f"{name}.feed_forward", settings["intermediate_size"])
        else:
            yield make.linear(f"{name}.feed_forward.gate", recipe.experts, width, 1.5)
            yield make.made(f"{name}.feed_forward.expert_bias", (recipe.experts,), 0.2)
            for number in range(recipe.experts):
                yield from gated(f"{name}.feed_forward.experts.{number}", recipe.neurons)
    yield make.norm("model.embedding_norm")


def _nemotron_h_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    make, width, settings = Maker(recipe), recipe.width, recipe.config
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    blocks = settings.get("layers_block_type") or [kinds[block] for block in settings["hybrid_override_pattern"]]

    def plain(name: str, neurons: int) -> Iterator[tuple[str, Array]]:
        yield make.linear(f"{name}.up_proj", neurons, width, 1.0)
        yield make.linear(f"{name}.down_proj", width, neurons, 0.5)

    yield make.made("backbone.embeddings.weight", (recipe.vocabulary, width), 1.0)
    for number, block in enumerate(blocks):
        name = f"backbone.layers.{number}"
        yield make.norm(f"{name}.norm")
        if block == "linear_attention":
            sizes = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
            yield from make.mamba(f"{name}.mixer", *(settings[size] for size in sizes))
        elif block == "full_attention":
            yield from make.attention(f"{name}.mixer")
        elif block == "mlp":
            yield from plain(f"{name}.mixer", settings.get("intermediate_size", recipe.neurons))
        else:
            yield make.linear(f"{name}.mixer.gate", recipe.experts, width, 1.5)
            yield make.made(f"{name}.mixer.gate.e_score_correction_bias", (recipe.experts,), 0.2)
            for expert in range(recipe.experts):
                yield from plain(f"{name}.mixer.experts.{expert}", recipe.neurons)
            yield from plain(f"{name}.mixer.shared_experts", recipe.shared)
    yield make.norm("backbone.norm_f")
    yield make.linear("lm_head", recipe.vocabulary, width, 5.0)


def _granite_hybrid_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    make, width, settings = Maker(recipe), recipe.width, recipe.config
    yield make.made("model.embed_tokens.weight", (recipe.vocabulary, width), 5 * width**-0.5 if recipe.tied else 1.0)
    for layer, kind in enumerate(settings["layer_types"]):
        name, shared = f"model.layers.{layer}", settings["shared_intermediate_size"]
        yield make.norm(f"{name}.input_layernorm")
        if kind == "mamba":
            yield from _mamba_of_granite(make, settings, width, name)
        else:
            yield from make.attention(f"{name}.self_attn")
        yield make.norm(f"{name}.post_attention_layernorm")
        yield make.linear(f"{name}.shared_mlp.input_linear", 2 * shared, width, 1.0)
        yield make.linear(f"{name}.shared_mlp.output_linear", width, shared, 0.5)
        if recipe.experts:
            mixture, experts, neurons = f"{name}.block_sparse_moe", recipe.experts, recipe.neurons
            yield make.linear(f"{mixture}.router.layer", experts, width, 1.5)
            yield make.made(f"{mixture}.input_linear.weight", (experts, 2 * neurons, width), width**-0.5)
            yield make.made(f"{mixture}.output_linear.weight", (experts, width, neurons), 0.5 * neurons**-0.5)
    yield make.norm("model.norm")
    if not recipe.tied:
        yield make.linear("lm_head", recipe.vocabulary, width, 5.0)


def _mamba_of_granite(make: Maker, settings: dict[str, Any], width: int, name: str) -> Iterator[tuple[str, Array]]:
    heads, inner = settings["mamba_n_heads"], settings["mamba_expand"] * width
    of_mamba = (settings["mamba_d_state"], settings["mamba_n_groups"], settings["mamba_d_conv"])
    yield from make.mamba(f"{name}.mamba", heads, inner // heads, *of_mamba)


def _bamba_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    make, width, settings = Maker(recipe), recipe.width, recipe.config
    yield make.made("model.embed_tokens.weight", (recipe.vocabulary, width), 1.0)
    for layer in range(recipe.layers):
        name = f"model.layers.{layer}"
        yield make.norm(f"{name}.input_layernorm")
        if layer in settings["attn_layer_indices"]:
            yield from make.attention(f"{name}.self_attn")
        else:
            yield from _mamba_of_granite(make, settings, width, name)
        yield make.norm(f"{name}.pre_ff_layernorm")
        for part, (rows, columns) in {
            "gate": (recipe.neurons, width),
            "up": (recipe.neurons, width),
            "down": (width, recipe.neurons),
        }.items():
            yield make.linear(f"{name}.feed_forward.{part}_proj", rows, columns, 0.5 if part == "down" else 1.0)
    yield make.norm("model.final_layernorm")
    yield make.linear("lm_head", recipe.vocabulary, width, 5.0)


def _latent_attention(recipe: Recipe) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
    """Name, shape, deviation and centre of matrices and norms. The input of queries is so small that epsilon counts."""
    settings, heads, width = recipe.config, recipe.query_heads, recipe.width
    rank, latent, rotated = settings["q_lora_rank"], settings["kv_lora_rank"], settings["qk_rope_head_dim"]
    head, values = settings["qk_nope_head_dim"] + rotated, settings["v_head_dim"]
    if rank is None:
        yield "q_proj", (heads * head, width), 1.3 * width**-0.5, 0.0
    else:
        yield "q_a_proj", (rank, width), 0.005 * width**-0.5, 0.0
        yield "q_a_layernorm", (rank,), 0.3, 1.0
        yield "q_b_proj", (heads * head, rank), 1.3 * rank**-0.5, 0.0
    yield "kv_a_proj_with_mqa", (latent + rotated, width), 1.3 * width**-0.5, 0.0
    yield "kv_a_layernorm", (latent,), 0.3, 1.0
    yield "kv_b_proj", (heads * (head - rotated + values), latent), 1.3 * latent**-0.5, 0.0


def _phi3_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """Queries, keys and values are joined, and so are gate and up."""
    generator, width, neurons = np.random.PCG64(recipe.seed), recipe.width, recipe.neurons

    def made(name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation) + np.float32(centre), recipe.dtype)

    yield made("model.embed_tokens.weight", (recipe.vocabulary, width), 1.0)
    for layer in range(recipe.layers):
        name, heads_width = f"model.layers.{layer}", recipe.query_heads * recipe.head_width
        rows = heads_width + 2 * recipe.key_heads * recipe.head_width
        yield made(f"{name}.input_layernorm.weight", (width,), 0.1, 1.0)
        yield made(f"{name}.self_attn.qkv_proj.weight", (rows, width), 1.3 * width**-0.5)
        yield made(f"{name}.self_attn.o_proj.weight", (width, heads_width), 0.5 * heads_width**-0.5)
        yield made(f"{name}.post_attention_layernorm.weight", (width,), 0.1, 1.0)
        yield made(f"{name}.mlp.gate_up_proj.weight", (2 * neurons, width), width**-0.5)
        yield made(f"{name}.mlp.down_proj.weight", (width, neurons), 0.5 * neurons**-0.5)
    yield made("model.norm.weight", (width,), 0.1, 1.0)
    yield made("lm_head.weight", (recipe.vocabulary, width), 5 * width**-0.5)


def _falcon_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    generator = np.random.PCG64(recipe.seed)
    width, neurons = recipe.width, recipe.neurons
    two_norms = recipe.config.get("num_ln_in_parallel_attn", 2 if recipe.config["new_decoder_architecture"] else 1) == 2

    def linear(name: str, rows: int, columns: int, gain: float) -> Iterator[tuple[str, Array]]:
        yield f"{name}.weight", rounded(random_tensor(generator, (rows, columns), gain * columns**-0.5), recipe.dtype)
        if recipe.bias:
            yield f"{name}.bias", rounded(random_tensor(generator, (rows,), 0.3), recipe.dtype)

    def norm(name: str) -> Iterator[tuple[str, Array]]:
        yield f"{name}.weight", rounded(random_tensor(generator, (width,), 0.1) + np.float32(1), recipe.dtype)
        yield f"{name}.bias", rounded(random_tensor(generator, (width,), 0.2), recipe.dtype)

    embedding = random_tensor(generator, (recipe.vocabulary, width), 5 * width**-0.5)
    yield "transformer.word_embeddings.weight", rounded(embedding, recipe.dtype)
    for layer in range(recipe.layers):
        name = f"transformer.h.{layer}"
        for one in ("ln_attn", "ln_mlp") if two_norms else ("input_layernorm",):
            yield from norm(f"{name}.{one}")
        rows = (recipe.query_heads + 2 * recipe.key_heads) * recipe.head_width
        yield from linear(f"{name}.self_attention.query_key_value", rows, width, 1.3)
        yield from linear(f"{name}.self_attention.dense", width, width, 0.5)
        yield from linear(f"{name}.mlp.dense_h_to_4h", neurons, width, 1.0)
        yield from linear(f"{name}.mlp.dense_4h_to_h", width, neurons, 0.5)
    yield from norm("transformer.ln_f")


def _normed_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """Norms of outputs make them about half as large as the embeddings. Stored norms of Gemma lack 1."""
    generator, gemma = np.random.PCG64(recipe.seed), recipe.architecture.startswith("Gemma")
    width, heads_width, key_width = (
        recipe.width,
        *(n * recipe.head_width for n in (recipe.query_heads, recipe.key_heads)),
    )

    def made(name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation) + np.float32(centre), recipe.dtype)

    def norm(name: str, length: int, deviation: float, centre: float = 1.0) -> tuple[str, Array]:
        return made(f"{name}.weight", (length,), deviation, centre - 1.0 if gemma else centre)

    yield made("model.embed_tokens.weight", (recipe.vocabulary, width), 5 * width**-0.5 if recipe.tied else 1.0)
    for layer in range(recipe.layers):
        name = f"model.layers.{layer}"
        for part, rows, columns, gain in (
            ("q", heads_width, width, 1.3),
            ("k", key_width, width, 1.3),
            ("v", key_width, width, 1.3),
            ("o", width, heads_width, 0.5),
        ):
            yield made(f"{name}.self_attn.{part}_proj.weight", (rows, columns), gain * columns**-0.5)
        for part, all_width in (("q", heads_width), ("k", key_width)):
            norms = NORMED_OUTPUTS[recipe.architecture]
            if norms != "none":
                length = recipe.head_width if norms == "of each head" else all_width
                yield norm(f"{name}.self_attn.{part}_norm", length, 0.3, 1.2)
        for part in ("input_layernorm", "pre_feedforward_layernorm") if gemma else ():
            yield norm(f"{name}.{part}", width, 0.1)
        for part in ("post_attention_layernorm", "post_feedforward_layernorm"):
            yield norm(f"{name}.{part}", width, 0.5, 2.0) if gemma else norm(f"{name}.{part}", width, 0.2, 0.5)
        for part, rows, columns in (
            ("gate", recipe.neurons, width),
            ("up", recipe.neurons, width),
            ("down", width, recipe.neurons),
        ):
            yield made(f"{name}.mlp.{part}_proj.weight", (rows, columns), columns**-0.5)
    yield norm("model.norm", width, 0.1)
    if not recipe.tied:
        yield made("lm_head.weight", (recipe.vocabulary, width), 5 * width**-0.5)


def _gemma4_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """Norms of queries and keys are small, since nothing divides scores. Layer scalars are far from 1."""
    generator, width, settings = np.random.PCG64(recipe.seed), recipe.width, recipe.config

    def made(name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation) + np.float32(centre), recipe.dtype)

    def norm(name: str, length: int, deviation: float, centre: float = 1.0) -> tuple[str, Array]:
        return made(f"{name}.weight", (length,), deviation, centre)

    yield made("model.embed_tokens.weight", (recipe.vocabulary, width), 5 * width**-0.5)
    for layer in range(recipe.layers):
        name = f"model.layers.{layer}"
        is_full, joint = settings["layer_types"][layer] == "full_attention", settings["attention_k_eq_v"]
        head_width = settings["global_head_dim"] if is_full else recipe.head_width
        key_heads = settings["num_global_key_value_heads"] if is_full and joint else recipe.key_heads
        heads_width = recipe.query_heads * head_width
        for part, rows in (("q", heads_width), ("k", key_heads * head_width), ("v", key_heads * head_width)):
            if part != "v" or not (is_full and joint):
                yield made(f"{name}.self_attn.{part}_proj.weight", (rows, width), 1.3 * width**-0.5)
        yield made(f"{name}.self_attn.o_proj.weight", (width, heads_width), heads_width**-0.5)
        for part in ("q_norm", "k_norm"):
            yield norm(f"{name}.self_attn.{part}", head_width, 0.15, 0.5)
        for part in ("input_layernorm", "pre_feedforward_layernorm"):
            yield norm(f"{name}.{part}", width, 0.1)
        for part in ("post_attention_layernorm", "post_feedforward_layernorm"):
            yield norm(f"{name}.{part}", width, 0.3, 1.0)
        yield made(f"{name}.layer_scalar", (1,), 0.2, 0.7)
        wide = recipe.shared or recipe.neurons
        for part, shape in (("gate", (wide, width)), ("up", (wide, width)), ("down", (width, wide))):
            yield made(f"{name}.mlp.{part}_proj.weight", shape, shape[1] ** -0.5)
        if recipe.experts:
            yield norm(f"{name}.pre_feedforward_layernorm_2", width, 0.3, 1.5)
            yield norm(f"{name}.post_feedforward_layernorm_1", width, 0.3, 0.8)
            yield norm(f"{name}.post_feedforward_layernorm_2", width, 0.3, 1.3)
            yield made(f"{name}.router.proj.weight", (recipe.experts, width), 2.5)
            yield made(f"{name}.router.scale", (width,), 0.4, 1.0)
            yield made(f"{name}.router.per_expert_scale", (recipe.experts,), 0.4, 1.0)
            yield made(f"{name}.experts.gate_up_proj", (recipe.experts, 2 * recipe.neurons, width), width**-0.5)
            yield made(f"{name}.experts.down_proj", (recipe.experts, width, recipe.neurons), recipe.neurons**-0.5)
    yield norm("model.norm", width, 0.1)


def _layer_normed_tensors(recipe: Recipe, names: Named) -> Iterator[tuple[str, Array]]:
    """Embeddings have a mean that LayerNorm takes away."""
    generator, width = np.random.PCG64(recipe.seed), recipe.width
    queries, keys = (heads * recipe.head_width for heads in (recipe.query_heads, recipe.key_heads))

    def made(name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation) + np.float32(centre), recipe.dtype)

    def linear(name: str, part: str, rows: int, columns: int, gain: float) -> Iterator[tuple[str, Array]]:
        yield made(f"{name}.weight", (rows, columns), gain * columns**-0.5)
        if recipe.bias and part in names.biased:
            yield made(f"{name}.bias", (rows,), 0.3)

    def norm(name: str) -> Iterator[tuple[str, Array]]:
        if names.norm_weight:
            yield made(f"{name}.weight", (width,), 0.1, 1.0)
        if names.norm_bias:
            yield made(f"{name}.bias", (width,), 0.2)

    yield made(f"{names.embedding}.weight", (recipe.vocabulary, width), 5 * width**-0.5 if recipe.tied else 1.0, 0.5)
    *before, down = names.ffn
    for number in range(recipe.layers):
        layer = names.layer.format(number)
        parallel = recipe.config.get("use_parallel_residual") and recipe.architecture == "StableLmForCausalLM"
        for one in names.norms[:1] if parallel else names.norms:
            yield from norm(f"{layer}{one}")
        rows = (queries, keys, keys) if len(names.projections) == 3 else (queries + 2 * keys,)
        for part, count in zip(names.projections, rows, strict=True):
            yield from linear(f"{layer}{part}", "qkv", count, width, 1.3)
        yield from linear(f"{layer}{names.attention_output}", "output", width, queries, 0.5)
        for part in before:
            yield from linear(f"{layer}{part}", "ffn", recipe.neurons, width, 1.0)
        yield from linear(f"{layer}{down}", "ffn", width, recipe.neurons, 0.5)
    yield from norm(names.output_norm)
    if not recipe.tied:
        yield made(f"{names.output}.weight", (recipe.vocabulary, width), 5 * width**-0.5)


def tokens(recipe: Recipe, count: int = 40) -> list[int]:
    """A token list that repeats itself a little and starts with the last id."""
    raw = np.random.PCG64(recipe.seed + 1000).random_raw(count) % recipe.vocabulary
    return [
        recipe.vocabulary - 1,
        *(int(token) for token in raw[: count // 2]),
        *(int(t) for t in raw[: count - count // 2 - 1]),
    ]


def config(recipe: Recipe) -> dict[str, Any]:
    """The recipe's config.json."""
    if recipe.architecture == "OPTForCausalLM":
        return {
            "architectures": [recipe.architecture],
            "model_type": "opt",
            "activation_function": recipe.activation,
            "hidden_size": recipe.width,
            "word_embed_proj_dim": recipe.width,
            "ffn_dim": recipe.neurons,
            "num_hidden_layers": recipe.layers,
            "num_attention_heads": recipe.query_heads,
            "vocab_size": recipe.vocabulary,
            "max_position_embeddings": recipe.context_tokens,
            "tie_word_embeddings": recipe.tied,
            "eos_token_id": recipe.vocabulary - 1,
            "bos_token_id": None,
            "pad_token_id": None,
            **recipe.config,
        }
    if recipe.architecture == "FalconForCausalLM":
        return {
            "architectures": [recipe.architecture],
            "model_type": "falcon",
            "hidden_size": recipe.width,
            "ffn_hidden_size": recipe.neurons,
            "num_hidden_layers": recipe.layers,
            "num_attention_heads": recipe.query_heads,
            "num_kv_heads": recipe.key_heads,
            "vocab_size": recipe.vocabulary,
            "max_position_embeddings": recipe.context_tokens,
            "tie_word_embeddings": recipe.tied,
            "eos_token_id": recipe.vocabulary - 1,
            "bos_token_id": None,
            **recipe.config,
        }
    return {
        "architectures": [recipe.architecture],
        "model_type": MODEL_TYPES[recipe.architecture],
        "hidden_act": recipe.activation,
        "hidden_size": recipe.width,
        "intermediate_size": recipe.neurons,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.query_heads,
        "num_key_value_heads": recipe.key_heads,
        "head_dim": recipe.head_width,
        "vocab_size": recipe.vocabulary,
        "max_position_embeddings": recipe.context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": recipe.tied,
        "eos_token_id": recipe.vocabulary - 1,
        "bos_token_id": None,
        **recipe.config,
    }


def tokenizer(vocabulary: int) -> Tokenizer:
    """Byte-level BPE of exactly `vocabulary` ids: the bytes, pairs of letters, and one special token, the last id."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in "etaoinshrdlu" for b in "abcdefghijklmnopqrstuvwxyz"][: vocabulary - len(pieces) - 1]
    pieces += [a + b for a, b in pairs]
    result = Tokenizer(models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=pairs))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([END_TOKEN])
    return result


def write_checkpoint(directory: Path, recipe: Recipe, more: dict[str, Array] | None = None) -> Path:
    """Write the recipe as a Hugging Face directory and return it: config.json, safetensors, tokenizer.json. more: other
    tensors among those of the recipe."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(recipe), indent=1))
    (directory / "tokenizer.json").write_text(tokenizer(recipe.vocabulary).to_str())
    stored = {name: _stored(values, recipe.dtype) for name, values in [*tensors(recipe), *(more or {}).items()]}
    if recipe.shards == 1:
        write_safetensors(directory / "model.safetensors", stored)
        return directory
    names = list(stored)
    places = {
        name: f"model-{n % recipe.shards + 1:05}-of-{recipe.shards:05}.safetensors" for n, name in enumerate(names)
    }
    for file in sorted(set(places.values())):
        write_safetensors(directory / file, {name: stored[name] for name in names if places[name] == file})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return directory


Stored = tuple[str, tuple[int, ...], bytes]


def _stored(values: Array, dtype: str) -> Stored:
    stored = {"F32": values.copy, "F16": lambda: values.astype(np.float16), "BF16": lambda: _bfloat16_bits(values)}[
        dtype
    ]()
    return dtype, values.shape, stored.tobytes()


def write_safetensors(path: Path, tensors: dict[str, Stored]) -> None:
    """Write (dtype, shape, bytes) by name, as the format says: header length, header, bytes back to back."""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))
