"""The registry of families. A new family needs a file in this folder and a line in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping

from neuronpipe.plans.models import (
    arcee,
    bailing,
    bamba,
    cohere,
    deepseek,
    ernie,
    exaone4,
    falcon,
    gemma,
    gemma4,
    glm4_moe,
    gpt_neox,
    gpt_oss,
    granite,
    granite_hybrid,
    hunyuan,
    kimi_linear,
    lfm2,
    llama,
    minicpm,
    mistral3,
    mixtral,
    nemotron,
    nemotron_h,
    olmo,
    olmo2,
    olmoe,
    opt,
    phi,
    qwen3,
    qwen3_next,
    seed_oss,
    smallthinker,
    smollm3,
    sparse_llama,
    stablelm,
)
from neuronpipe.plans.models.family import Architecture, Family, GgufArchitecture

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        llama.FAMILY,
        qwen3.FAMILY,
        mixtral.FAMILY,
        smallthinker.FAMILY,
        opt.FAMILY,
        nemotron.FAMILY,
        falcon.FAMILY,
        sparse_llama.FAMILY,
        minicpm.FAMILY,
        arcee.FAMILY,
        gpt_oss.FAMILY,
        smollm3.FAMILY,
        granite.FAMILY,
        glm4_moe.FAMILY,
        olmoe.FAMILY,
        ernie.FAMILY,
        hunyuan.FAMILY,
        phi.FAMILY,
        deepseek.FAMILY,
        gemma.FAMILY,
        gemma4.FAMILY,
        olmo2.FAMILY,
        qwen3_next.FAMILY,
        kimi_linear.FAMILY,
        lfm2.FAMILY,
        nemotron_h.FAMILY,
        granite_hybrid.FAMILY,
        bamba.FAMILY,
        stablelm.FAMILY,
        cohere.FAMILY,
        gpt_neox.FAMILY,
        bailing.FAMILY,
        olmo.FAMILY,
        mistral3.FAMILY,
        exaone4.FAMILY,
        seed_oss.FAMILY,
    )
}

ARCHITECTURES: Mapping[str, Architecture] = {
    name: architecture for family in FAMILIES.values() for name, architecture in family.architectures.items()
}

GGUF_ARCHITECTURES: Mapping[str, tuple[Family, GgufArchitecture]] = {
    name: (family, architecture) for family in FAMILIES.values() for name, architecture in family.gguf.items()
}

# Known architectures that are refused: classes of transformers and values of `general.architecture` in GGUF files.
_MISSING: Mapping[tuple[str, ...], str] = {
    ("BitNetForCausalLM", "bitnet", "bitnet-b1.58"): "ternary weights, and a norm between neurons and Down",
    ("FalconH1ForCausalLM", "falcon-h1"): "attention and Mamba-2 side by side in a layer",
    ("JambaForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM", "jamba", "mamba"): "Mamba-1 layers",
    ("Mamba2ForCausalLM", "mamba2"): "layers without a feed-forward",
    ("Rwkv6ForCausalLM", "RwkvForCausalLM", "rwkv6", "rwkv7"): "time mixing",
    ("Llama4ForCausalLM", "Llama4ForConditionalGeneration", "llama4"): "routers that scale the inputs of experts",
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
