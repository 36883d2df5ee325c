"""The recipes of checkpoints.py as GGUF files, named and permuted as the stock converter does it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import quantize
from numpy.typing import NDArray

from tests.conformance.checkpoints import Array, Recipe, config, tensors, tokenizer

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.gate_up_proj": "ffn_up",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    **{
        f"mlp.{kind}.{matrix}_proj": f"ffn_{matrix}_shexp"
        for kind in ("shared_experts", "shared_expert", "shared_mlp")
        for matrix in ("gate", "up", "down")
    },
    "mlp.gate.wg": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.primary_router": "ffn_gate_inp",
    "transformer.word_embeddings": "token_embd",
    "transformer.ln_f": "output_norm",
    "ln_mlp": "attn_norm",  # as in falcons of one norm, input_layernorm
    "ln_attn": "attn_norm_2",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "model.word_embeddings": "token_embd",
    "attention.query_layernorm": "attn_q_norm",
    "attention.key_layernorm": "attn_k_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
OUTPUT_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
EXPERT = re.compile(r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.\d+\.(\w+)\.weight")
JOINED_EXPERTS = re.compile(r"(model\.layers\.\d+)\.block_sparse_moe\.(input|output)_linear\.weight")
STACKS = {
    **dict.fromkeys(("w1", "gate_proj", "gate"), "ffn_gate_exps"),
    **dict.fromkeys(("w3", "up_proj", "up"), "ffn_up_exps"),
    **dict.fromkeys(("w2", "down_proj", "down"), "ffn_down_exps"),
}
ARCHITECTURES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "SmallThinkerForCausalLM": "smallthinker",
    "BambooForCausalLM": "bamboo",
    "FalconForCausalLM": "falcon",
    "NemotronForCausalLM": "nemotron",
    "ArceeForCausalLM": "arcee",
    "GptOssForCausalLM": "gpt-oss",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite",
    "Glm4MoeForCausalLM": "glm4moe",
    "Dots1ForCausalLM": "dots1",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "OlmoeForCausalLM": "olmoe",
    "OlmoForCausalLM": "olmo",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "Exaone4ForCausalLM": "exaone4",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan-moe",
    "SeedOssForCausalLM": "seed_oss",
    "GraniteMoeForCausalLM": "granitemoe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "StableLmForCausalLM": "stablelm",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "GPTNeoXForCausalLM": "gptneox",
    "BailingMoeForCausalLM": "bailingmoe",
    "BailingMoeV2ForCausalLM": "bailingmoe2",
    "Starcoder2ForCausalLM": "starcoder2",
    "Ministral3ForCausalLM": "mistral3",
    "PhimoeForCausalLM": "phimoe",
    "Phi3ForCausalLM": "phi3",
    "MiniCPMForCausalLM": "minicpm",
}
INTERLEAVED = (
    "llama", "bamboo", "arcee", "smollm3", "granite", "granitemoe", "bailingmoe", "olmo", "mistral3", "minicpm",
)  # fmt: skip
LAYER_NORM = ("falcon", "nemotron", "stablelm", "command-r", "cohere2", "gptneox", "starcoder2", "olmo")


def gguf_name(name: str, *, normed: bool = False) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight; normed: of a class that norms outputs"""
    if name.startswith("blk."):
        return "rope_freqs.weight" if name == "blk.rope_freqs" else name
    if name.endswith(("e_score_correction_bias", "mlp.gate.expert_bias")):
        return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    stem, kind = name.rsplit(".", 1)
    if normed and (match := re.fullmatch(r"model\.layers\.(\d+)\.(.*norm)", stem)):
        return f"blk.{match[1]}.{(NAMES | OUTPUT_NORMS)[match[2]]}.{kind}"
    if match := re.fullmatch(r"(?:model\.layers|transformer\.h|gpt_neox\.layers)\.(\d+)\.(.*)", stem):
        return f"blk.{match[1]}.{NAMES.get(match[2], match[2])}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def interleaved(values: Array, heads: int) -> Array:
    """Rows of each head reordered from halves (0, 1, .., h, h+1, ..) to pairs (0, h, 1, h+1, ..)."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def joined_projections(
    named: Iterator[tuple[str, Array]], recipe: Recipe, architecture: str
) -> Iterator[tuple[str, Array]]:
    """Queries, keys and values of a layer as one tensor, as `--fuse-qkv` of the stock converter writes them."""
    parts: dict[str, list[Array]] = {}
    for name, values in named:
        match = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.(\w+)", name)
        if match is None:
            yield name, values
            continue
        heads = {"q": recipe.query_heads, "k": recipe.key_heads}.get(match[2])
        rows = parts.setdefault(f"blk.{match[1]}.attn_qkv.{match[3]}", [])
        rows.append(interleaved(values, heads) if heads and architecture in INTERLEAVED else values)
    for name, rows in parts.items():
        yield name, np.concatenate(rows)


def parts_apart(values: Array, recipe: Recipe) -> Array:
    """Falcon's query_key_value, stored by groups, with all queries first, then all keys, then all values."""
    group = recipe.query_heads // recipe.key_heads + 2
    rows = values.reshape(recipe.key_heads, group, recipe.head_width, -1)
    parts = (rows[:, :-2], rows[:, -2:-1], rows[:, -1:])
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])


def write_gguf(
    path: Path,
    recipe: Recipe,
    encoding: str = "F16",
    *,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, Array] | None = None,
    instead: dict[str, Array] | None = None,
    more: dict[str, Array] | None = None,
    name: str = "model",
    powerinfer: bool = False,
    architecture: str | None = None,
    tensors_of_part: int = 0,
    joint_latents: bool = True,
    joint: bool | None = None,
    joined: bool = False,
) -> Path:
    """Write a recipe with its matrices in one encoding. metadata adds entries; extra adds float32 tensors, and instead
    puts them in place of the recipe's; more adds matrices in that encoding. powerinfer: as that program's converter
    does it, Down transposed. tensors_of_part: in several files of so many tensors; the first one's path is returned.
    joint_latents: keys and values of latents are one matrix. joined: queries, keys and values are one. joint: gate and
    up of all experts are one matrix (None: of Gemma 4)."""
    architecture = architecture or ARCHITECTURES.get(recipe.architecture, "llama")
    writer = GGUFWriter(path, architecture, split_max_tensors=tensors_of_part)
    writer.add_name(name)
    writer.add_block_count(recipe.layers)
    writer.add_context_length(recipe.context_tokens)
    writer.add_embedding_length(recipe.width)
    writer.add_feed_forward_length(recipe.neurons)
    writer.add_head_count(recipe.query_heads)
    writer.add_head_count_kv(recipe.key_heads)
    if architecture == "falcon":
        writer.add_tensor_data_layout("jploski")
    elif architecture != "deepseek2":
        writer.add_key_length(recipe.head_width)
        writer.add_value_length(recipe.head_width)
    (writer.add_layer_norm_eps if architecture in LAYER_NORM else writer.add_layer_norm_rms_eps)(1e-5)
    add_rope(writer, recipe)
    add_tokenizer(writer, recipe)
    for key, value in (metadata or {}).items():
        add_value(writer, key, value)
    all_tensors = stacked_experts(recipe, joint=joint) if joint_latents else split_keys_values(recipe)
    for full_name, tensor in joined_projections(all_tensors, recipe, architecture) if joined else all_tensors:
        if gguf_name(full_name) not in (instead or {}):
            add_tensor(writer, recipe, full_name, tensor, encoding, architecture, powerinfer=powerinfer)
    for full_name, tensor in {**(extra or {}), **(instead or {})}.items():
        writer.add_tensor(full_name, tensor)
    for full_name, tensor in (more or {}).items():
        writer.add_tensor(full_name, stored(tensor, encoding), raw_dtype=GGMLQuantizationType[encoding])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if powerinfer:
        with path.open("r+b") as file:
            file.write(b"PWRI")
    return next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))), path) if tensors_of_part else path


def add_rope(writer: GGUFWriter, recipe: Recipe) -> None:
    """What the stock converter says of rotary positions: nothing, of a falcon."""
    values = config(recipe)
    rope = values.get("rope_parameters", values)
    if alpha := values.get("rope_scaling", {}).get("alpha"):  # the base is all that it changes
        width = recipe.head_width
        writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0) * alpha ** (width / (width - 2)))
        return
    if theta := rope.get("rotary_emb_base", rope.get("rope_theta")):
        writer.add_rope_freq_base(theta)
    if {"partial_rotary_factor", "rotary_pct", "rotary_dim"} & values.keys():
        share = values.get("partial_rotary_factor", values.get("rotary_dim", 0) / recipe.head_width)
        share = values.get("rotary_pct", share)
        writer.add_rope_dimension_count(int(share * recipe.head_width))
        writer.add_rope_scaling_type(RopeScalingType.NONE)
    scaling = values.get("rope_scaling", rope if rope.get("rope_type") == "yarn" else {})
    if "factor" in scaling:
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])


def stacked_experts(recipe: Recipe, *, joint: bool | None = None) -> Iterator[tuple[str, Array]]:
    """The recipe's tensors; those of all experts of a layer in one, by the name that it has in GGUF."""
    stacks: dict[str, list[Array]] = {}
    if recipe.architecture == "GptOssForCausalLM":
        yield from _gpt_oss(recipe)
        return
    if recipe.architecture == "Gemma4ForCausalLM":
        yield from _gemma4(recipe, joint=joint is not False)
        return
    for name, tensor in tensors(recipe):
        if match := JOINED_EXPERTS.fullmatch(name):
            yield from _apart(f"{match[1]}.", match[2], tensor)
        elif match := EXPERT.fullmatch(name):
            stacks.setdefault(f"{match[1]}.{STACKS[match[2]]}.weight", []).append(tensor)
        else:
            yield name, tensor
    for name, parts in stacks.items():
        if joint and "ffn_gate_exps" in name:
            up = stacks[name.replace("gate", "up")]
            yield name.replace("gate", "gate_up"), np.concatenate([np.stack(parts), np.stack(up)], axis=1)
        elif not joint or "ffn_up_exps" not in name:
            yield name, np.stack(parts)


def _apart(layer: str, kind: str, tensor: Array) -> Iterator[tuple[str, Array]]:
    """The stacks of a layer of Granite, whose checkpoints have gate and up in one."""
    if kind == "output":
        yield f"{layer}ffn_down_exps.weight", tensor
        return
    for matrix, rows in zip(("gate", "up"), np.split(tensor, 2, axis=1), strict=True):
        yield f"{layer}ffn_{matrix}_exps.weight", np.ascontiguousarray(rows)


def _gpt_oss(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """The tensors of gpt-oss: gate and up apart, a row per neuron, and Down with a row per output."""
    for name, tensor in tensors(recipe):
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        place = "" if match is None else match[2]
        layer = "" if match is None else f"blk.{match[1]}"
        if place == "self_attn.sinks":
            yield f"{layer}.attn_sinks.weight", tensor
        elif place == "post_attention_layernorm.weight":
            yield f"{layer}.post_attention_norm.weight", tensor
        elif place.startswith("mlp.experts.gate_up_proj"):
            kind = "bias" if place.endswith("_bias") else "weight"
            for first, matrix in enumerate(("gate", "up")):
                rows = tensor[..., first::2]
                yield f"{layer}.ffn_{matrix}_exps.{kind}", rows if kind == "bias" else _turned(rows)
        elif place.startswith("mlp.experts.down_proj"):
            kind = "bias" if place.endswith("_bias") else "weight"
            yield f"{layer}.ffn_down_exps.{kind}", tensor if kind == "bias" else _turned(tensor)
        else:
            yield name, tensor


GEMMA4_NAMES = {
    "layer_scalar": "layer_output_scale.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def _gemma4(recipe: Recipe, *, joint: bool) -> Iterator[tuple[str, Array]]:
    """The tensors of Gemma 4, and the divisors by which most pairs of wide heads are not rotated."""
    for name, tensor in tensors(recipe):
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if match and match[2] == "experts.gate_up_proj" and not joint:
            for matrix, rows in zip(("gate", "up"), np.split(tensor, 2, axis=1), strict=True):
                yield f"blk.{match[1]}.ffn_{matrix}_exps.weight", np.ascontiguousarray(rows)
        elif match and match[2] in GEMMA4_NAMES:
            yield f"blk.{match[1]}.{GEMMA4_NAMES[match[2]]}", tensor
        else:
            yield name, tensor
    width = recipe.config["global_head_dim"]
    share = recipe.config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    divisors = np.where(np.arange(width // 2) < int(width * share / 2), 1.0, 1e30)
    yield "blk.rope_freqs", divisors.astype(np.float32)


def gemma4_keys(recipe: Recipe) -> dict[str, Any]:
    """What llama.cpp's converter says of the layers of Gemma 4."""
    settings, joint = recipe.config, recipe.config["attention_k_eq_v"]
    has_window = [kind == "sliding_attention" for kind in settings["layer_types"]]
    width, positions = settings["global_head_dim"], settings["rope_parameters"]
    full = settings["num_global_key_value_heads"] if joint else recipe.key_heads
    mixture = {
        "expert_count": recipe.experts,
        "expert_used_count": settings.get("top_k_experts"),
        "expert_feed_forward_length": settings.get("moe_intermediate_size"),
    }
    values = {
        "attention.sliding_window": settings["sliding_window"],
        "attention.sliding_window_pattern": has_window,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.key_length_swa": recipe.head_width,
        "attention.value_length_swa": recipe.head_width,
        "attention.head_count_kv": [recipe.key_heads if window else full for window in has_window],
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "rope.freq_base": positions["full_attention"]["rope_theta"],
        "rope.freq_base_swa": positions["sliding_attention"]["rope_theta"],
        "rope.dimension_count": width,
        "rope.dimension_count_swa": recipe.head_width,
        **(mixture if recipe.experts else {}),
    }
    if cap := settings.get("final_logit_softcapping"):
        values["final_logit_softcapping"] = cap
    return {f"gemma4.{key}": value for key, value in values.items()}


def _turned(experts: Array) -> Array:
    return np.ascontiguousarray(experts.swapaxes(1, 2))


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    """Enter one metadata value by its Python type."""
    method = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    method.get(type(value), writer.add_array)(key, value)


def add_tensor(
    writer: GGUFWriter,
    recipe: Recipe,
    name: str,
    values: Array,
    encoding: str,
    architecture: str,
    *,
    powerinfer: bool = False,
) -> None:
    """Enter one tensor; vectors stay float32, as the stock converter keeps them."""
    heads = {"q": recipe.query_heads, "k": recipe.key_heads}
    match = re.search(r"self_attn\.([qk])_proj", name)
    if architecture in INTERLEAVED and match:
        values = interleaved(values, heads[match[1]])
    if "query_key_value" in name and architecture == "bailingmoe":
        ends = np.cumsum([count * recipe.head_width for count in (recipe.query_heads, recipe.key_heads)])
        for part, rows in zip("qkv", np.split(values, ends), strict=True):
            own = name.replace("attention.query_key_value", f"self_attn.{part}_proj")
            add_tensor(writer, recipe, own, rows, encoding, architecture)
        return
    if "query_key_value" in name and architecture != "bailingmoe2":
        values = parts_apart(values, recipe)
    if architecture in ("glm4moe", "seed_oss"):
        name = name.replace("post_attention_layernorm", "post_attention_norm")
    if name.endswith(("shared_expert_gate.weight", "e_score_correction_bias")):
        values = values.reshape(-1)
    if architecture in ("nemotron", "gemma2", "gemma3") and name.endswith("norm.weight"):
        values = values + np.float32(1)
    named = gguf_name(name, normed=architecture in ("gemma2", "gemma3", "gemma4", "olmo2", "exaone4"))
    if powerinfer and "ffn_down" in named:
        named, values = named.replace("ffn_down", "ffn_down_t"), np.ascontiguousarray(values.T)
    is_plain = values.ndim == 1 or named.endswith(".bias") or "ffn_gate_inp" in named  # routers, too
    if is_plain or encoding == "F32":
        writer.add_tensor(named, values)
        return
    kind = GGMLQuantizationType[encoding]
    writer.add_tensor(named, stored(values, encoding), raw_dtype=kind)


def stored(values: Array, encoding: str) -> NDArray[np.uint8]:
    """A matrix in an encoding. The library cannot make K-quants: those get random bits, the same for the same shape."""
    if encoding in SCALE_PLACES:
        return random_blocks(encoding, *values.shape)
    return quantize(values, GGMLQuantizationType[encoding])


# Where the high bytes of a block's fp16 scales lie.
SCALE_PLACES = {
    "Q2_K": (81, 83),
    "Q3_K": (109,),
    "Q4_K": (1, 3),
    "Q5_K": (1, 3),
    "Q6_K": (209,),
    "IQ4_NL": (1,),
    "IQ4_XS": (1,),
}


def random_blocks(encoding: str, rows: int, columns: int) -> NDArray[np.uint8]:
    """Any bits are valid blocks. Random fp16 scales would be wild, so their exponents are made small."""
    block_weights, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[encoding]]
    shape = (rows, columns // block_weights * block_bytes)
    blocks = np.random.default_rng((rows, columns)).integers(0, 256, shape, dtype=np.uint8)
    flat = blocks.reshape(-1, block_bytes)
    for place in SCALE_PLACES[encoding]:
        flat[:, place] = flat[:, place] & 0x83 | 0x18
    return blocks


def add_tokenizer(writer: GGUFWriter, recipe: Recipe, *, split: str | None = "gpt-2") -> None:
    """The recipe's tokenizer as GGUF describes byte-level BPE. split: its name there; None: in files of 2023."""
    model = json.loads(tokenizer(recipe.vocabulary).to_str())
    pieces = [*model["model"]["vocab"], *(token["content"] for token in model["added_tokens"])]
    writer.add_tokenizer_model("gpt2")
    if split is not None:
        writer.add_tokenizer_pre(split)
    writer.add_token_list(pieces)
    writer.add_token_types([1] * (len(pieces) - 1) + [3])
    writer.add_token_merges([" ".join(merge) for merge in model["model"]["merges"]])
    writer.add_eos_token_id(recipe.vocabulary - 1)


def latent_keys(recipe: Recipe, *, joint: bool) -> dict[str, Any]:
    """What llama.cpp's converter says of latents. joint: as before it split the matrix of keys and values."""
    settings, suffix = recipe.config, "" if joint else "_mla"
    latent, rotated = settings["kv_lora_rank"], settings["qk_rope_head_dim"]
    wide = {} if joint else {"attention.key_length": latent + rotated, "attention.value_length": latent}
    return {
        **wide,
        f"attention.key_length{suffix}": settings["qk_nope_head_dim"] + rotated,
        f"attention.value_length{suffix}": settings["v_head_dim"],
        "attention.q_lora_rank": settings["q_lora_rank"],
        "attention.kv_lora_rank": latent,
        "rope.dimension_count": rotated,
    }


def split_keys_values(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """The recipe's tensors with keys apart from values, and a row of keys for each element of the latent."""
    settings = recipe.config
    for name, tensor in stacked_experts(recipe):
        if not name.endswith("kv_b_proj.weight"):
            yield name, tensor
            continue
        layer = f"blk.{name.split('.')[2]}"
        heads = tensor.reshape(recipe.query_heads, -1, settings["kv_lora_rank"])
        keys, values = np.split(heads, [settings["qk_nope_head_dim"]], axis=1)
        yield f"{layer}.attn_k_b.weight", _turned(keys)
        yield f"{layer}.attn_v_b.weight", np.ascontiguousarray(values)


def llama3_factors(recipe: Recipe) -> Array:
    """rope_freqs.weight of a recipe with llama3 scaling: what each frequency is divided by."""
    rope = config(recipe)["rope_parameters"]
    exponents = np.arange(0, recipe.head_width, 2) / recipe.head_width
    turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** -exponents / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (kept + (1 - kept) / rope["factor"])).astype(np.float32)
