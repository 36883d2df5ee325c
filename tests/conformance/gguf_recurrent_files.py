"""The recipes with recurrent layers as GGUF files, named and permuted as llama.cpp's converter does it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from tests.conformance.checkpoints import Array, Recipe, config, tensors
from tests.conformance.gguf_files import add_tokenizer, add_value, interleaved, stored

ARCHITECTURES = {
    "qwen3 next": "qwen3next",
    "qwen3.5": "qwen35",
    "qwen3.5 moe": "qwen35moe",
    "lfm2": "lfm2",
    "lfm2 moe": "lfm2moe",
    "nemotron-h": "nemotron_h",
    "nemotron-h moe": "nemotron_h_moe",
    "granite hybrid": "granitehybrid",
    "granite hybrid dense": "granitehybrid",
    "kimi linear": "kimi-linear",
}
AROUND = {
    "model.embed_tokens": "token_embd",
    "backbone.embeddings": "token_embd",
    "model.norm": "output_norm",
    "backbone.norm_f": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
}
ATTENTION = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "out_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "q_layernorm": "attn_q_norm",
    "k_layernorm": "attn_k_norm",
}
MEMORIES = {
    "in_proj": "ssm_in",
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_a": "ssm_alpha",
    "in_proj_b": "ssm_beta",
    "in_proj_ba": "ssm_ba",
    "conv1d": "ssm_conv1d",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "D": "ssm_d",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
}
OF_LAYER = {
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    **{f"self_attn.{name}": to for name, to in ATTENTION.items()},
    **{f"mixer.{name}": ATTENTION[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{f"{part}.{name}": to for part in ("linear_attn", "mixer", "mamba") for name, to in MEMORIES.items()},
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mixer.{part}_proj": f"ffn_{part}" for part in ("up", "down")},
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{f"mixer.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("up", "down")},
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mixer.gate": "ffn_gate_inp",
    "feed_forward.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
}
NEXTN = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}
KIMI = {
    "kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "kv_a_layernorm": "attn_kv_a_norm",
    **{f"{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    **{f"{part}_{matrix}_proj": f"ssm_{part}_{matrix}" for part in "fg" for matrix in "ab"},
    "b_proj": "ssm_beta",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "o_norm": "ssm_norm",
}
OF_LAYER |= {f"self_attn.{name}": to for name, to in KIMI.items()}
OF_LAYER |= {f"block_sparse_moe.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
OF_LAYER |= {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
}
MATRICES = {"w1": "gate", "w3": "up", "w2": "down", **{f"{part}_proj": part for part in ("gate", "up", "down")}}


def write_recurrent_gguf(
    path: Path,
    recipe: Recipe,
    encoding: str = "F16",
    *,
    instead: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    older: bool = False,
    drafts: Mapping[str, Array] | None = None,
) -> Path:
    """Write a recipe with its matrices in one encoding. instead: keys and values, after the architecture's name, that
    replace or add to those of the converter; without: keys that are left out. older: Qwen3-Next as its first files.
    drafts: the tensors of a draft layer, by their names in a checkpoint."""
    architecture = ARCHITECTURES[recipe.name]
    writer = GGUFWriter(path, architecture)
    writer.add_name("model")
    add_tokenizer(writer, recipe)
    instead = (instead or {}) | ({"block_count": recipe.layers + 1, "nextn_predict_layers": 1} if drafts else {})
    for key, value in (keys(recipe) | instead).items():
        if key not in without:
            add_value(writer, f"{architecture}.{key}", value)
    for name, values in gguf_tensors(recipe, older=older, drafts=drafts or {}):
        is_plain = values.ndim == 1 or re.search(r"ffn_gate_inp|ssm_(conv1d|a|d|norm)|shortconv\.conv", name)
        if is_plain or encoding == "F32":
            writer.add_tensor(name, np.ascontiguousarray(values))
        else:
            writer.add_tensor(name, stored(values, encoding), raw_dtype=GGMLQuantizationType[encoding])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def keys(recipe: Recipe) -> dict[str, Any]:
    """What the converter says of a recipe, by the keys after the architecture's name."""
    settings, values = recipe.config, config(recipe)
    common = {
        "block_count": settings.get("num_hidden_layers", recipe.layers),
        "context_length": recipe.context_tokens,
        "embedding_length": recipe.width,
        "feed_forward_length": recipe.neurons,
        "attention.head_count": recipe.query_heads,
        "attention.head_count_kv": recipe.key_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": values.get("rope_parameters", {}).get("rope_theta", 10_000.0),
    }
    lengths = {"attention.key_length": recipe.head_width, "attention.value_length": recipe.head_width}
    if recipe.experts:
        common |= {
            "expert_count": recipe.experts,
            "expert_used_count": settings.get("num_experts_per_tok", settings.get("num_experts_per_token")),
            "expert_feed_forward_length": recipe.neurons,
        }
    if recipe.name == "kimi linear":
        return common | _keys_of_kimi(recipe)
    if "linear_num_value_heads" in settings:
        heads, share = settings["linear_num_value_heads"], settings["rope_parameters"]["partial_rotary_factor"]
        return common | lengths | {
            "ssm.conv_kernel": settings["linear_conv_kernel_dim"],
            "ssm.state_size": settings["linear_key_head_dim"],
            "ssm.group_count": settings["linear_num_key_heads"],
            "ssm.time_step_rank": heads,
            "ssm.inner_size": heads * settings["linear_value_head_dim"],
            "full_attention_interval": settings.get("full_attention_interval", 4),
            "rope.dimension_count": int(recipe.head_width * share),
            "rope.dimension_sections": [11, 11, 10, 0],
        }  # fmt: skip
    if recipe.name.startswith("lfm2"):
        attention = [kind == "full_attention" for kind in settings["layer_types"]]
        return common | {
            "attention.head_count_kv": [recipe.key_heads * is_attention for is_attention in attention],
            "shortconv.l_cache": settings.get("conv_L_cache", 3),
            "feed_forward_length": settings["intermediate_size"] if recipe.experts else 240,
            **({"leading_dense_block_count": 2, "expert_gating_func": 2} if recipe.experts else {}),
        }
    if recipe.name.startswith("nemotron"):
        return common | lengths | _keys_of_blocks(recipe)
    return common | _keys_of_granite(recipe)


def _keys_of_blocks(recipe: Recipe) -> dict[str, Any]:
    settings, blocks = recipe.config, blocks_of(recipe)
    keys = {
        "attention.head_count_kv": [recipe.key_heads * (block == "full_attention") for block in blocks],
        "attention.layer_norm_epsilon": 1e-5,
        "feed_forward_length": [recipe.neurons * (block in ("mlp", "moe")) for block in blocks],
        "rope.dimension_count": recipe.width // recipe.query_heads,  # without meaning
        "ssm.conv_kernel": settings["conv_kernel"],
        "ssm.state_size": settings["ssm_state_size"],
        "ssm.group_count": settings["n_groups"],
        "ssm.time_step_rank": settings["mamba_num_heads"],
        "ssm.inner_size": settings["mamba_num_heads"] * settings["mamba_head_dim"],
    }
    if recipe.experts:
        keys |= {
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": recipe.shared,
            "expert_weights_norm": True,
            "expert_weights_scale": settings["routed_scaling_factor"],
            "expert_group_count": 1,
        }
    return keys


def _keys_of_kimi(recipe: Recipe) -> dict[str, Any]:
    settings, linear = recipe.config, recipe.config["linear_attn_config"]
    latent, rotated = settings["kv_lora_rank"], settings["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": [int(layer + 1 in linear["full_attn_layers"]) for layer in range(recipe.layers)],
        "attention.key_length": latent + rotated,
        "attention.value_length": settings["v_head_dim"],
        "attention.key_length_mla": settings["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": settings["v_head_dim"],
        "attention.kv_lora_rank": latent,
        "rope.dimension_count": rotated,
        "ssm.conv_kernel": linear["short_conv_kernel_size"],
        "kda.head_dim": linear["head_dim"],
        "feed_forward_length": settings["intermediate_size"],
        "expert_shared_count": 1,
        "leading_dense_block_count": 1,
        "expert_weights_scale": settings["routed_scaling_factor"],
        "expert_gating_func": 2,
    }


def _keys_of_granite(recipe: Recipe) -> dict[str, Any]:
    settings = recipe.config
    return {
        "attention.head_count_kv": [recipe.key_heads * (kind == "attention") for kind in settings["layer_types"]],
        "feed_forward_length": recipe.neurons,
        "expert_shared_feed_forward_length": settings["shared_intermediate_size"],
        "rope.dimension_count": recipe.head_width,
        "rope.scaling.finetuned": settings["position_embedding_type"] == "rope",
        "embedding_scale": settings["embedding_multiplier"],
        "logit_scale": settings["logits_scaling"],
        "residual_scale": settings["residual_multiplier"],
        "attention.scale": settings["attention_multiplier"],
        "ssm.conv_kernel": settings["mamba_d_conv"],
        "ssm.state_size": settings["mamba_d_state"],
        "ssm.group_count": settings["mamba_n_groups"],
        "ssm.time_step_rank": settings["mamba_n_heads"],
        "ssm.inner_size": settings["mamba_expand"] * recipe.width,
    }


def blocks_of(recipe: Recipe) -> list[str]:
    """The blocks of a Nemotron-H, by the names of its list."""
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    settings = recipe.config
    return settings.get("layers_block_type") or [kinds[block] for block in settings["hybrid_override_pattern"]]


def gguf_tensors(
    recipe: Recipe, *, older: bool = False, drafts: Mapping[str, Array] = MappingProxyType({})
) -> Iterator[tuple[str, Array]]:
    """The recipe's tensors by the names that they have in GGUF, those of all experts of a layer in one. drafts: as in
    write_recurrent_gguf"""
    stacks: dict[str, list[Array]] = {}
    of_drafts = {name.replace("mtp.layers.0", f"model.layers.{recipe.layers}"): drafts[name] for name in drafts}
    for full_name, values in [*tensors(recipe), *of_drafts.items()]:
        if full_name in NEXTN:
            yield f"blk.{recipe.layers}.{NEXTN[full_name]}", _with_one(recipe, full_name, values)
            continue
        match = re.fullmatch(r"(?:model|backbone)\.layers\.(\d+)\.(.+)", full_name)
        if match is None:
            stem = full_name.removesuffix(".weight")
            yield f"{AROUND[stem]}.weight", _with_one(recipe, full_name, values)
            continue
        block, name = f"blk.{match[1]}", match[2]
        if expert := re.fullmatch(r"\w+\.experts\.\d+\.(\w+)\.weight", name):
            stacks.setdefault(f"{block}.ffn_{MATRICES[expert[1]]}_exps.weight", []).append(values)
        else:
            yield from ((f"{block}.{part}", of_part) for part, of_part in _of_layer(recipe, name, values, older=older))
    for name, parts in stacks.items():
        yield name, np.stack(parts)


def _of_layer(recipe: Recipe, name: str, values: Array, *, older: bool) -> Iterator[tuple[str, Array]]:
    """The tensors of a layer that one tensor of a checkpoint becomes."""
    stem, kind = name.rsplit(".", 1) if name.endswith((".weight", ".bias")) else (name, "")
    if stem in ("mlp.experts.gate_up_proj", "block_sparse_moe.input_linear"):
        yield from zip(("ffn_gate_exps.weight", "ffn_up_exps.weight"), np.split(values, 2, axis=1), strict=True)
    elif stem in ("mlp.experts.down_proj", "block_sparse_moe.output_linear"):
        yield "ffn_down_exps.weight", values
    elif stem.startswith("shared_mlp"):
        suffix = "_shexp.weight" if recipe.experts else ".weight"
        if stem == "shared_mlp.output_linear":
            yield f"ffn_down{suffix}", values
        else:
            yield from zip((f"ffn_gate{suffix}", f"ffn_up{suffix}"), np.split(values, 2), strict=True)
    elif stem == "self_attn.kv_b_proj":
        heads = values.reshape(recipe.query_heads, -1, values.shape[1])
        of_keys, of_values = np.split(heads, [recipe.config["qk_nope_head_dim"]], axis=1)
        yield "attn_k_b.weight", np.ascontiguousarray(of_keys.swapaxes(1, 2))
        yield "attn_v_b.weight", np.ascontiguousarray(of_values)
    elif stem == "linear_attn.in_proj_qkvz" and not older:
        yield from _apart(recipe, values)
    elif stem == "linear_attn.in_proj_qkvz":
        yield "ssm_in.weight", values
    else:
        to = OF_LAYER.get(stem, "post_attention_norm" if recipe.name.startswith("qwen") else "ffn_norm")
        yield (f"{to}.{kind}" if kind else to), _changed(recipe, name, values)


def _apart(recipe: Recipe, values: Array) -> Iterator[tuple[str, Array]]:
    """Queries, keys and values of all key heads, and gates, which a checkpoint of Qwen3-Next stores head by head."""
    settings = recipe.config
    key_heads, key_width = settings["linear_num_key_heads"], settings["linear_key_head_dim"]
    of_heads = values.reshape(key_heads, -1, recipe.width)
    share = (of_heads.shape[1] - 2 * key_width) // 2
    parts = np.split(of_heads, [key_width, 2 * key_width, 2 * key_width + share], axis=1)
    flat = [part.reshape(-1, recipe.width) for part in parts]
    yield "attn_qkv.weight", np.concatenate(flat[:3])
    yield "attn_gate.weight", flat[3]


def _with_one(recipe: Recipe, name: str, values: Array) -> Array:
    is_norm = name.endswith("norm.weight") or "norm_" in name
    is_short = recipe.name.startswith("qwen") and is_norm and "linear_attn" not in name
    return values + np.float32(1) if is_short else values


def _changed(recipe: Recipe, name: str, values: Array) -> Array:
    """A tensor as the converter stores it: its heads permuted, its shape changed, its values computed."""
    settings, stem = recipe.config, name.removesuffix(".weight")
    values = _with_one(recipe, name, values)
    if recipe.name.startswith("granite") and (match := re.fullmatch(r"self_attn\.([qk])_proj", stem)):
        return interleaved(values, recipe.query_heads if match[1] == "q" else recipe.key_heads)
    if stem.endswith("A_log"):
        values = -np.exp(values)
    if stem.endswith("_conv1d"):
        return values[None]
    if stem.endswith(("conv1d", "conv.conv")):
        values = values[:, 0]
    if stem == "mlp.shared_expert_gate":
        return values[0]
    if stem.startswith(("mixer", "mamba")):
        if stem.endswith(("A_log", ".D")):
            return values[:, None]
        groups = settings.get("n_groups", settings.get("mamba_n_groups"))
        return values.reshape(groups, -1) if stem.endswith("r.norm") or stem.endswith("a.norm") else values
    if not recipe.name.startswith("qwen3.5") or not stem.startswith("linear_attn"):
        return values
    heads, key_heads = settings["linear_num_value_heads"], settings["linear_num_key_heads"]
    keys, width = key_heads * settings["linear_key_head_dim"], settings["linear_value_head_dim"]

    def tiled(part: Array, of_head: int, axis: int = 0) -> Array:
        """The first heads of all key heads, then the second ones."""
        shape = part.shape
        split = part.reshape(*shape[:axis], key_heads, heads // key_heads, of_head, *shape[axis + 1 :])
        return split.swapaxes(axis, axis + 1).reshape(shape)

    match stem.removeprefix("linear_attn."):
        case "in_proj_qkv" | "conv1d":
            return np.concatenate((values[: 2 * keys], tiled(values[2 * keys :], width)))
        case "in_proj_z":
            return tiled(values, width)
        case "in_proj_a" | "in_proj_b" | "A_log" | "dt_bias":
            return tiled(values, 1)
        case "out_proj":
            return tiled(values, width, axis=1)
    return values
