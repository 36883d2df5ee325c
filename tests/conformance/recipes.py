"""The recipes of small random checkpoints of awkward shapes, one at least for each class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "Exaone4ForCausalLM": "exaone4",
    "Dots1ForCausalLM": "dots1",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "SeedOssForCausalLM": "seed_oss",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "PhimoeForCausalLM": "phimoe",
    "Phi3ForCausalLM": "phi3",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "KimiLinearForCausalLM": "kimi_linear",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GraniteMoeForCausalLM": "granitemoe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
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

GEMMA4_KINDS = {"s": "sliding_attention", "f": "full_attention"}

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
        Recipe(  # as transformers 5 writes the number of experts
            "qwen3moe windows", "Qwen3MoeForCausalLM", "silu", 96, 90, 3, 3, 1, 32, experts=7, tied=True,
            config={
                "num_local_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 90,
                "use_sliding_window": True, "sliding_window": 9, "norm_topk_prob": False,
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
            "biases", "LlamaForCausalLM", "silu", 128, 200, 2, 4, 2, 32, bias=True, dtype="BF16",
            config={"attention_bias": True, "mlp_bias": True},
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
            "qwen2moe windows", "Qwen2MoeForCausalLM", "silu", 96, 48, 5, 4, 2, 24, bias=True, experts=7, shared=90,
            config={
                "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
                "shared_expert_intermediate_size": 90, "norm_topk_prob": True, "use_sliding_window": True,
                "sliding_window": 9, "max_window_layers": 3,
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
        *(
            Recipe(
                name, "Ministral3ForCausalLM", "silu", 160, 270, 3, 5, 1, 32, dtype="BF16",
                config={
                    "max_position_embeddings": 1024, "sliding_window": None,
                    "rope_parameters": {
                        "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 8.0,
                        "original_max_position_embeddings": original, "max_position_embeddings": 1024,
                        "beta_fast": fast, "beta_slow": slow, "mscale": 1.0, "mscale_all_dim": 1.0,
                        "llama_4_scaling_beta": growth,
                    },
                },
            )
            for name, original, fast, slow, growth in (
                ("ministral3", 128, 8.0, 1.0, 0.1), ("ministral3 long", 8, 2.0, 0.25, 0.5)
            )
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
            "kimi linear", "KimiLinearForCausalLM", "silu", 96, 64, 5, 4, 4, 40, experts=12, shared=64, dense=(0,),
            config={
                "num_experts": 12, "num_experts_per_token": 3, "moe_intermediate_size": 64, "num_shared_experts": 1,
                "intermediate_size": 150, "first_k_dense_replace": 1, "num_expert_group": 1, "topk_group": 1,
                "routed_scaling_factor": 2.446, "moe_router_activation_func": "sigmoid", "moe_renormalize": True,
                "q_lora_rank": None, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24,
                "v_head_dim": 24, "mla_use_nope": True, "pad_token_id": None, "rope_scaling": None,
                "model_max_length": 128,
                "linear_attn_config": {
                    "full_attn_layers": [3, 5], "kda_layers": [1, 2, 4], "num_heads": 4, "head_dim": 32,
                    "short_conv_kernel_size": 4,
                },
            },
        ),
        Recipe(
            "kimi linear groups", "KimiLinearForCausalLM", "silu", 96, 64, 4, 4, 4, 40, dtype="BF16", experts=12,
            shared=128, dense=(0, 1), shards=2,
            config={
                "num_experts": 12, "num_experts_per_token": 3, "moe_intermediate_size": 64, "num_shared_experts": 2,
                "intermediate_size": 130, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
                "num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "moe_renormalize": False,
                "q_lora_rank": 32, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24,
                "v_head_dim": 24, "pad_token_id": None, "layer_types": ["full_attention", *["linear_attention"] * 3],
                "linear_num_heads": 3, "linear_head_dim": 32, "linear_conv_kernel_dim": 4,
            },
        ),
        Recipe(
            "exaone4", "Exaone4ForCausalLM", "silu", 160, 270, 5, 5, 1, 32, vocabulary=389, dtype="BF16", seed=2,
            config={
                "sliding_window": 9, "sliding_window_pattern": "LLLG",
                "layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention"],
                "rope_parameters": {
                    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 16.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
                },
            },
        ),
        Recipe(
            "exaone4 without windows", "Exaone4ForCausalLM", "silu", 96, 150, 3, 4, 2, 48, vocabulary=389,
            config={
                "sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 3,
                "rope_theta": 1_000.0,
            },
        ),
        Recipe(
            "ernie4_5", "Ernie4_5ForCausalLM", "silu", 96, 200, 3, 4, 1, 40, vocabulary=389, tied=True, dtype="BF16",
            config={"use_bias": False, "rope_theta": 5_000.0},
        ),
        Recipe(
            "hunyuan dense", "HunYuanDenseV1ForCausalLM", "silu", 128, 270, 3, 4, 2, 48, vocabulary=389, tied=True,
            dtype="BF16",
            config={
                "attention_head_dim": 48, "use_qk_norm": True, "use_cla": False, "attention_bias": False,
                "rope_scaling": {
                    "type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                },
            },
        ),
        Recipe(
            "seed-oss", "SeedOssForCausalLM", "silu", 96, 200, 3, 6, 2, 48, vocabulary=389, bias=True, dtype="BF16",
            config={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "rope_theta": 5_000.0},
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
        Recipe(
            "qwen2.5 vl", "Qwen2_5_VLForConditionalGeneration", "silu", 96, 200, 3, 4, 2, 24, vocabulary=389, bias=True,
            dtype="BF16",
            config={"rope_scaling": {"type": "mrope", "mrope_section": [4, 4, 4]}, "rope_theta": 5_000.0},
        ),
        Recipe(
            "qwen3 vl", "Qwen3VLForConditionalGeneration", "silu", 128, 200, 3, 4, 2, 32, vocabulary=389, tied=True,
            config={
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 6_000.0, "mrope_section": [6, 5, 5],
                    "mrope_interleaved": True,
                },
            },
        ),
        Recipe(
            "qwen3 vl moe", "Qwen3VLMoeForConditionalGeneration", "silu", 96, 64, 3, 3, 1, 32, vocabulary=389,
            dtype="BF16", experts=9,
            config={
                "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "intermediate_size": 777,
                "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
                "rope_theta": 6_000.0,
            },
        ),
    )
}  # fmt: skip

TINY = Recipe("tiny", "LlamaForCausalLM", "relu", 64, 100, 2, 2, 1, 32, vocabulary=300)
