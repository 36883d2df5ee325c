"""Known architectures that are refused, and what they would need. The keys are classes of transformers and values of
`general.architecture` in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping

_MISSING: Mapping[tuple[str, ...], str] = {
    ("BitNetForCausalLM", "bitnet", "bitnet-b1.58"): "ternary weights, and a norm between neurons and Down",
    ("FalconH1ForCausalLM", "falcon-h1"): "attention and Mamba-2 side by side in a layer",
    ("KimiLinearForCausalLM", "kimi-linear"): "Kimi delta attention, whose decay differs from channel to channel",
    ("JambaForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM", "jamba", "mamba"): "Mamba-1 layers",
    ("Mamba2ForCausalLM", "mamba2"): "layers without a feed-forward",
    ("Rwkv6ForCausalLM", "RwkvForCausalLM", "rwkv6", "rwkv7"): "time mixing",
    ("Llama4ForCausalLM", "Llama4ForConditionalGeneration", "llama4"): "routers that scale the inputs of experts",
    ("mistral3",): "factors of queries that grow with the position; convert the checkpoint in safetensors",
    ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration", "gemma3n"): "embeddings and residual streams by layer",
    ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "deepseek32", "glm-dsa"): "sparse attention with an indexer",
    ("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"): "lightning attention",
    ("BloomForCausalLM", "MPTForCausalLM", "bloom", "mpt"): "attention scores with linear biases (ALiBi)",
    ("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "gpt2", "starcoder"): "tensors of queries, keys and values as GPT-2 "
    "stores them",
}

MISSING_BY_ARCHITECTURE: Mapping[str, str] = {
    name: missing for architectures, missing in _MISSING.items() for name in architectures
}
"""What an architecture needs that no family has."""
