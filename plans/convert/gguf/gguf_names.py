"""The names of tensors in GGUF files, and what the presence of some says."""

from __future__ import annotations

from dataclasses import replace

from neuronpipe.plans.convert.gguf.gguf_gemma4 import gemma4_names
from neuronpipe.plans.convert.gguf.gguf_latents import latent_names
from neuronpipe.plans.convert.gguf.gguf_recurrent import GgufLayers
from neuronpipe.plans.convert.stored_tensors import Inventory
from neuronpipe.plans.models.family import GgufArchitecture, TensorNames
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.strict_json import Record

# Tensor names of llama.cpp, the same in every architecture (gguf-py/gguf/constants.py).
NAMES = TensorNames(
    embedding="token_embd",
    output="output",
    output_norm="output_norm",
    layer="blk.{}.",
    attention_norm="attn_norm",
    ffn_norm="ffn_norm",
    attention_output_norm="post_attention_norm",
    ffn_output_norm="post_ffw_norm",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    query_key_value="attn_qkv",
    sinks="attn_sinks.weight",
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    attention_output="attn_output",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    draft_input="nextn.eh_proj",
    draft_embedding_norm="nextn.enorm",
    draft_hidden_norm="nextn.hnorm",
    draft_output_norm="nextn.shared_head_norm",
)
MIXTURE_NAMES = replace(
    NAMES,
    router="ffn_gate_inp",
    choosing_bias="exp_probs_b.bias",
    gate="ffn_gate_exps",
    up="ffn_up_exps",
    down="ffn_down_exps",
    shared="ffn_{}_shexp",
    shared_gate="ffn_gate_inp_shexp",
    dense="ffn_{}",
    stacked=True,
)
JOINT_GATE_UP = "ffn_gate_up_exps"  # of all experts, gate and up in one tensor, as newer files may have it
FFN_NORM = "blk.0.ffn_norm.weight"


def is_parallel(metadata: Record, name: str, architecture: GgufArchitecture, inventory: Inventory) -> bool:
    """Return the field `parallel` of ModelSpec. name: general.architecture"""
    if architecture.parallel == "stated":
        field = f"{name}.use_parallel_residual"
        return not metadata.has(field) or metadata.boolean(field)
    if architecture.parallel == "one norm":
        return not inventory.has(FFN_NORM)
    return architecture.parallel == "always"


def tensor_names(
    model: ModelSpec, architecture: GgufArchitecture, inventory: Inventory, layers: GgufLayers | None
) -> TensorNames:
    names = NAMES if model.experts == 1 else MIXTURE_NAMES
    has_weights, has_biases = architecture.norm_weight, architecture.norm_bias
    names = replace(names, ffn_norm=architecture.ffn_norm, norm_weight=has_weights, norm_bias=has_biases)
    if any(inventory.has(f"blk.{layer}.{JOINT_GATE_UP}.weight") for layer in range(model.layers)):
        names = replace(names, gate_up=JOINT_GATE_UP)
    elif architecture.joint_gate_up:
        names = replace(names, gate_up=names.up)
    if model.latent_width:
        block = 0 if layers is None else layers.attention_block
        names = latent_names(names, inventory, query_rank=model.query_rank, block=block)
        return names if layers is None else layers.names(names, architecture, inventory)
    if architecture.gemma4_layers:
        return gemma4_names(names)
    if layers is not None:
        return layers.names(names, architecture, inventory)
    if not model.parallel or inventory.has(FFN_NORM):
        return names
    norm = "attn_norm_2" if inventory.has("blk.0.attn_norm_2.weight") else "attn_norm"
    return replace(names, attention_norm=norm, ffn_norm="attn_norm")
