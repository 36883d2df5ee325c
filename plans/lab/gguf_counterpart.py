"""The GGUF counterpart of a shape: random weights for engines that read GGUF and compute densely.

Such engines do the same work for any weights, so that the counterpart is as fast as the model. Encodings follow
llama.cpp's presets (src/llama-quant.cpp, 2026-11): one for most matrices, Q6_K for the output, F32 for norms and
routers; in Q4_K_M also Q6_K for values and Down of some layers; Q5_0 and Q8_0 for rows that are no whole blocks; in
MXFP4 experts are in it and the rest in Q8_0. The architecture is `llama` (SiLU, dense or a mixture) or one of those
that `architecture` names. Routers are random; hot experts have longer rows. Biases and sinks are zeros. llama.cpp
computes phimoe with RMS norms and the shares of a softmax, so that its text is not that of Phi-3.5-MoE.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter, LlamaFileType
from neuronpipe.plans.lab import latent_counterpart as latents
from neuronpipe.plans.lab import recurrent_counterpart as recurrent
from neuronpipe.plans.lab.counterpart_weights import BLOCK_WEIGHTS, Progress, Tensor, write_weights
from neuronpipe.plans.lab.recurrent_counterpart import ONE_PART, recurrent_architecture
from neuronpipe.plans.lab.synth.routing import frequencies, routing_of
from neuronpipe.plans.lab.synth.shapes import LOCAL_ROPE_BASE, rope_base, rotated_pairs, rotated_width
from neuronpipe.plans.models.spec import LayerKind, ModelSpec, runs_of
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.plans.package.tensors import norm_widths, row_lengths
from neuronpipe.plans.predictor.fit import quantile
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

NAME = "shape twin"  # part of files, so it cannot change
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # kinds of token, as GGUF numbers them
SPACE = "▁"
SPECIAL_PIECES = ("<unk>", "<s>", "</s>")
BYTE_PIECES = tuple(f"<0x{value:02X}>" for value in range(256))
LETTERS = (SPACE, *"0123456789")
MIN_VOCABULARY = len(SPECIAL_PIECES) + len(BYTE_PIECES) + len(LETTERS)


NOT_ROTATED = 1e30  # llama.cpp's divisor of the frequencies of pairs that are not rotated
SMALLTHINKER_WINDOW_TOKENS, SMALLTHINKER_PERIOD = 4096, 4  # llama.cpp uses these for every file
GATING = {"softmax": ExpertGatingFuncType.SOFTMAX, "sigmoid": ExpertGatingFuncType.SIGMOID}


@frozen
class Preset:
    """The encodings of a file.

    larger: encoding of values and Down in layers that get more bits
    experts: encoding of experts; None: as other matrices
    """

    file_type: LlamaFileType
    usual: str
    larger: str
    output: str
    experts: str | None = None


PRESETS = {
    "Q4_0": Preset(LlamaFileType.MOSTLY_Q4_0, "Q4_0", "Q4_0", "Q6_K"),
    "Q4_K_M": Preset(LlamaFileType.MOSTLY_Q4_K_M, "Q4_K", "Q6_K", "Q6_K"),
    "Q6_K": Preset(LlamaFileType.MOSTLY_Q6_K, "Q6_K", "Q6_K", "Q6_K"),
    "Q8_0": Preset(LlamaFileType.MOSTLY_Q8_0, "Q8_0", "Q8_0", "Q8_0"),
    "MXFP4": Preset(LlamaFileType.MOSTLY_MXFP4_MOE, "Q8_0", "Q8_0", "Q8_0", experts="MXFP4"),
}


def write_gguf_counterpart(
    path: Path, model: ModelSpec, seed: int, progress: Progress | None = None, *, preset: str = "Q4_0"
) -> None:
    """Write the GGUF counterpart of a shape. The same seed gives the same bytes.

    preset: a key of PRESETS
    progress: receives the bytes that are written, and all bytes

    The file appears complete or not at all. Raises UserError for shapes that GGUF cannot express, and for errors of the
    disk.
    """
    encodings = PRESETS[preset]
    _require(path, model, encodings)
    tensors = tuple(tensor.in_whole_blocks() for tensor in _tensors(model, encodings))
    with whole_file(path) as place:
        writer = GGUFWriter(place, architecture(model))
        _describe(writer, model, encodings)
        for tensor in tensors:
            kind = GGMLQuantizationType[tensor.encoding]
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float16), tensor.size_bytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        write_weights(place, tensors, seed, progress)


def architecture(model: ModelSpec) -> str:
    """Return llama.cpp's name for the architecture of a shape."""
    if (of_recurrent := recurrent_architecture(model)) is not None:
        return of_recurrent
    if model.latent_width:
        return latents.ARCHITECTURE
    if model.router == "sparsemixer":
        return "phimoe"
    if model.branch_norms:
        return "gemma4"
    if model.router_reads == "layer":
        return "smallthinker"
    if model.attention_sinks:
        return "gpt-oss"
    if model.joint_norm:
        return "olmoe"
    if model.choosing_bias:
        return "glm4moe"
    if model.head_norm:
        return "qwen3" if model.experts == 1 else "qwen3moe"
    return "llama"


def _require(path: Path, model: ModelSpec, preset: Preset) -> None:
    if model.norms_after and not model.branch_norms:
        raise UserError(f"{path}: norms: a GGUF counterpart has none of what attention and feed-forward add")
    if any(model.windows_tokens) and model.layer_kinds != _windowed_layers(model):
        raise UserError(
            f"{path}: layer_kinds: has attention windows ({max(model.windows_tokens)} tokens); a GGUF counterpart has "
            "none, or those of llama.cpp's smallthinker or gpt-oss"
        )
    if model.draft_layers:
        raise UserError(f"{path}: draft_layers: a GGUF counterpart has none")
    if model.vocabulary < MIN_VOCABULARY:
        raise UserError(f"{path}: vocabulary is {model.vocabulary}; the tokenizer of GGUF needs {MIN_VOCABULARY}")
    lengths = row_lengths(model) | {"neurons": model.neurons}
    if model.latent_width:
        lengths["head_width - rotary_width"] = model.unrotated_width
    for field, columns in lengths.items():
        if columns % BLOCK_WEIGHTS:
            raise UserError(f"{path}: {field} is {columns}, no multiple of {BLOCK_WEIGHTS} as GGUF's encodings need")


def _windowed_layers(model: ModelSpec) -> tuple[LayerKind, ...] | None:
    """Return the layers that llama.cpp computes for a model with windows; None for architectures without any."""
    if architecture(model) == "gpt-oss":
        return runs_of([0 if layer % 2 else max(model.windows_tokens) for layer in range(model.layers)])
    if architecture(model) == "gemma4":
        return model.layer_kinds
    if architecture(model) != "smallthinker":
        return None
    full = [layer % SMALLTHINKER_PERIOD == 0 for layer in range(model.layers)]
    return runs_of(
        [0 if is_full else SMALLTHINKER_WINDOW_TOKENS for is_full in full], [not is_full for is_full in full]
    )


def _has_more_bits(layer: int, layers: int) -> bool:
    """Return True for the layers to which llama.cpp gives more bits."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _tensors(model: ModelSpec, preset: Preset) -> Iterator[Tensor]:
    width, name, usual, block = model.width, architecture(model), preset.usual, 0
    yield Tensor("token_embd.weight", model.vocabulary, width, usual)
    norm = "post_attention_norm" if name in ("gpt-oss", "glm4moe", "qwen35", "qwen35moe") else "ffn_norm"
    for layer in range(model.layers):
        place, larger = f"blk.{block}", preset.larger if _has_more_bits(layer, model.layers) else usual
        if model.mixers[layer] != "none":
            yield from _norm(model, f"{place}.attn_norm")
            yield from _mixer(model, layer, place, preset, larger)
        if name in ONE_PART and model.mixers[layer] != "none" and model.ffn_layers[layer]:
            block += 1
            place = f"blk.{block}"
        if model.ffn_layers[layer]:
            yield from _norm(model, f"{place}.{'attn_norm' if name in ONE_PART else norm}")
            for part, length in _ones_of_gemma4(model).items():
                yield Tensor(f"{place}.{part}", 0, length, "F32")
            for part, shape in _zeros(model, layer):
                yield Tensor(f"{place}.{part}", shape[0], shape[1], "F32", constant=0.0)
            yield from _feed_forward(model, layer, place, preset, larger)
        block += 1
    output_norm = "token_embd_norm" if name in ("lfm2", "lfm2moe") else "output_norm"
    yield from _norm(model, output_norm)
    if model.branch_norms:
        pairs, rotated = model.table_width(is_local=False) // 2, rotated_pairs(model, is_local=False)
        values = (1.0,) * rotated + (NOT_ROTATED,) * (pairs - rotated)
        yield Tensor("rope_freqs.weight", 0, pairs, "F32", values=values)
    yield Tensor("output.weight", model.vocabulary, width, preset.output)
    if model.logit_bias:
        yield Tensor("output.bias", 0, model.vocabulary, "F32", constant=0.0)


def _norm(model: ModelSpec, name: str) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", 0, model.width, "F32")
    if model.norm == "layer":
        yield Tensor(f"{name}.bias", 0, model.width, "F32", constant=0.0)


def _ones_of_gemma4(model: ModelSpec) -> dict[str, int]:
    """Return the lengths of a layer's further norms and scales in files of Gemma 4."""
    if not model.branch_norms:
        return {}
    norms = ("post_attention_norm", "post_ffw_norm", "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
    return {f"{norm}.weight": model.width for norm in norms} | {
        "layer_output_scale.weight": 1,
        "ffn_gate_inp.scale": model.width,
        "ffn_down_exps.scale": model.experts,
    }


def _mixer(model: ModelSpec, layer: int, place: str, preset: Preset, larger: str) -> Iterator[Tensor]:
    width, heads, usual = model.width, model.layer_heads[layer], preset.usual
    if model.mixers[layer] != "attention":
        yield from recurrent.recurrent_tensors(model, layer, place, usual)
        return
    if model.latent_width:
        yield from latents.latent_tensors(model, place, usual)
        yield Tensor(f"{place}.attn_output.weight", width, heads.query_width, usual)
        return
    yield Tensor(f"{place}.attn_q.weight", heads.query_width * (1 + model.gated_attention), width, usual)
    yield Tensor(f"{place}.attn_k.weight", heads.key_width, width, usual)
    if not heads.value_from_key:
        yield Tensor(f"{place}.attn_v.weight", heads.key_width, width, larger)
    if model.head_norm or model.joint_norm:
        for letter, length in zip(("q", "k"), norm_widths(model, heads), strict=True):
            yield Tensor(f"{place}.attn_{letter}_norm.weight", 0, length, "F32")
    yield Tensor(f"{place}.attn_output.weight", width, heads.query_width, usual)


def _feed_forward(model: ModelSpec, layer: int, place: str, preset: Preset, larger: str) -> Iterator[Tensor]:
    width, usual = model.width, preset.usual
    experts, suffix = (model.experts, "_exps") if model.experts > 1 else (0, "")
    down = preset.experts or larger
    rows = preset.experts or usual
    always_active = model.expert_counts[layer] - model.routed_experts(layer)
    if model.experts > 1 and always_active:
        is_beside = model.routed_experts(layer) > 0 and not model.branch_norms
        kind, neurons = "_shexp" if is_beside else "", always_active * model.neurons
        for matrix in model.ffn_matrices[:-1]:
            yield Tensor(f"{place}.ffn_{matrix}{kind}.weight", neurons, width, usual)
        yield Tensor(f"{place}.ffn_down{kind}.weight", width, neurons, larger)
    if model.experts > 1 and not model.routed_experts(layer):
        return
    if experts:
        yield Tensor(f"{place}.ffn_gate_inp.weight", experts, width, "F32", lengths=_router_lengths(model, layer))
    if model.branch_norms:
        yield Tensor(f"{place}.ffn_gate_up_exps.weight", 2 * model.neurons, width, rows, experts)
    else:
        for matrix in model.ffn_matrices[:-1]:
            yield Tensor(f"{place}.ffn_{matrix}{suffix}.weight", model.neurons, width, rows, experts)
    yield Tensor(f"{place}.ffn_down{suffix}.weight", width, model.neurons, down, experts)


def _zeros(model: ModelSpec, layer: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield name and shape of a layer's biases and sinks; 0 rows: a vector."""
    key_width = model.key_heads * model.head_width
    if model.qkv_bias:
        for part, length in (("q", model.query_width), ("k", key_width), ("v", key_width)):
            yield f"attn_{part}.bias", (0, length)
    if model.choosing_bias and model.routed_experts(layer):
        yield "exp_probs_b.bias", (0, model.experts)
    if model.shared_gate and model.routed_experts(layer):
        yield "ffn_gate_inp_shexp.weight", (0, model.width)
    if model.output_bias:
        yield "attn_output.bias", (0, model.width)
    if not model.attention_sinks:
        return
    yield "attn_sinks.weight", (0, model.query_heads)
    yield "ffn_gate_inp.bias", (0, model.experts)
    for matrix in ("gate", "up", "down"):
        yield f"ffn_{matrix}_exps.bias", (model.experts, model.width if matrix == "down" else model.neurons)


def _router_lengths(model: ModelSpec, layer: int) -> tuple[float, ...]:
    """Return lengths of a router's rows with which it chooses each expert as often as the package's router does; empty
    if all experts are equally likely. Each layer has other hot experts.

    Normal values with these deviations exceed a common value with the requested frequencies.
    """
    routing = routing_of(model)
    if not routing.hot.share:
        return ()
    lengths = -1 / quantile(frequencies(model, routing))
    return tuple(np.random.default_rng(layer).permutation(lengths).tolist())


def _describe_gemma4(writer: GGUFWriter, model: ModelSpec) -> None:
    """Write the keys of Gemma 4's heads and windows. Those of layers with windows end in `_swa`."""
    width, local_width = (model.table_width(is_local=is_local) for is_local in (False, True))
    writer.add_head_count_kv([heads.key_heads for heads in model.layer_heads])
    writer.add_sliding_window_pattern(list(model.local_layers))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_key_length_swa(local_width)
    writer.add_value_length_swa(local_width)
    writer.add_rope_dimension_count_swa(local_width)
    writer.add_rope_freq_base_swa(LOCAL_ROPE_BASE)
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_final_logit_softcapping(model.logit_cap)


def _describe(writer: GGUFWriter, model: ModelSpec, preset: Preset) -> None:
    writer.add_name(NAME)
    writer.add_file_type(preset.file_type)
    writer.add_vocab_size(model.vocabulary)
    writer.add_context_length(model.context_tokens)
    writer.add_embedding_length(model.width)
    parts = max(kind.dense_experts for kind in model.layer_kinds) or 1  # of a layer without router
    parts = model.shared_experts if model.branch_norms else parts
    numbers: dict[str, Any] = {
        "block_count": model.layers,
        "feed_forward_length": parts * model.neurons,
        "attention.head_count": model.query_heads,
    }
    if architecture(model) == "gemma4":
        _describe_gemma4(writer, model)
    else:
        numbers |= {
            "attention.head_count_kv": model.key_heads,
            "attention.key_length": model.head_width,
            "attention.value_length": model.head_width,
        }
    methods: dict[type, Any] = {
        list: writer.add_array, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool
    }  # fmt: skip
    for key, value in (numbers | recurrent.recurrent_keys(model) | latents.latent_keys(model)).items():
        methods[type(value)](f"{architecture(model)}.{key}", value)
    writer.add_rope_dimension_count(rotated_width(model))
    writer.add_rope_freq_base(rope_base(model))
    writer.add_layer_norm_rms_eps(model.norm_epsilon)
    if model.experts > 1:
        writer.add_expert_count(model.experts)
        writer.add_expert_used_count(model.experts_per_token)
        if architecture(model) != "llama":  # llama has neither of these keys
            writer.add_expert_feed_forward_length(model.neurons)
            if architecture(model) not in ("gpt-oss", "gemma4", "phimoe"):
                writer.add_expert_gating_func(GATING[model.router])
        if architecture(model) in ("glm4moe", "nemotron_h_moe", "deepseek2", "kimi-linear"):
            writer.add_leading_dense_block_count(sum(model.dense_layers))
            writer.add_expert_shared_count(model.shared_experts)
            writer.add_expert_weights_scale(model.routed_scale)
            writer.add_expert_weights_norm(model.normalized_shares)
        if architecture(model) == "lfm2moe":
            writer.add_leading_dense_block_count(sum(model.dense_layers))
    if any(model.windows_tokens):
        writer.add_sliding_window(max(model.windows_tokens))
    # Every number is a shorter number and a digit, so that merges produce all of them.
    words = [f"{SPACE}{number}" for number in range(model.vocabulary - MIN_VOCABULARY)]
    pieces = [*SPECIAL_PIECES, *BYTE_PIECES, *LETTERS, *words]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * len(BYTE_PIECES), *[NORMAL] * (len(LETTERS) + len(words))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * (len(pieces) - len(words)) + [-float(n) for n in range(len(words))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
