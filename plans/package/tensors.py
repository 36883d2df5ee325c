"""Names, types and shapes of the tensors of a package's safetensors files: the fixed tensors and the predictor."""

from __future__ import annotations

from collections.abc import Iterator

from neuronpipe.plans.models.attention_sizes import Heads
from neuronpipe.plans.models.recurrent_sizes import DELTA_RULE, RECURRENT, WITH_MEMORY
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import Quantization, quant_bytes, scale_bytes
from neuronpipe.plans.package.manifest import Manifest, Predictor

QUANT_DTYPES = {"q8": "I8", "f16": "F16"}  # U8 for all others
DRAFT_INPUT = "draft_input"
"""The matrix of a draft layer that is multiplied with the normed embedding of the next token, followed by the normed
result of the layers before."""
DRAFT_NORMS = ("draft_embedding_norm", "draft_hidden_norm", "draft_output_norm")


def fixed_matrices(model: ModelSpec) -> Iterator[tuple[str, int, int]]:
    """Yield (name, rows, columns) of every matrix of fixed.safetensors, in the order of the file."""
    yield "embedding", model.vocabulary, model.width
    if not model.tied_embeddings:
        yield "output", model.vocabulary, model.width
    for layer in range(model.layers):
        if model.mixers[layer] in RECURRENT:
            yield from _recurrent_matrices(model, layer)
        elif model.mixers[layer] == "attention":
            if model.latent_width:
                for name, rows, columns in latent_matrices(model):
                    yield f"layers.{layer}.{name}", rows, columns
            else:
                yield f"layers.{layer}.qkv", model.layer_heads[layer].qkv_rows, model.width
            yield f"layers.{layer}.attention_output", model.width, model.layer_heads[layer].query_width
        if layer >= model.text_layers:
            yield f"layers.{layer}.{DRAFT_INPUT}", model.width, 2 * model.width


def _recurrent_matrices(model: ModelSpec, layer: int) -> Iterator[tuple[str, int, int]]:
    yield f"layers.{layer}.recurrent_input", model.recurrent_rows(layer), model.width
    if model.rates(layer):
        yield f"layers.{layer}.recurrent_rates", model.rates(layer), model.width
    if model.mixers[layer] == "kda":
        yield f"layers.{layer}.recurrent_decays", model.decays_width(layer), model.state_rank
        yield f"layers.{layer}.recurrent_gates", model.gate_width(layer), model.state_rank
    yield f"layers.{layer}.recurrent_output", model.width, model.gate_width(layer)


def latent_matrices(model: ModelSpec) -> Iterator[tuple[str, int, int]]:
    """Yield (name without prefix, rows, columns) of the matrices of a layer with latents, but for attention_output.
    `key_up` maps a head's query to the latents: its rows are multiplied with the elements of the query, and added."""
    yield "latent_down", model.cached_width, model.width
    if model.query_rank:
        yield "query_down", model.query_rank, model.width
    yield "query", model.query_heads * model.head_width, model.query_rank or model.width
    yield "key_up", model.query_heads * model.unrotated_width, model.latent_width
    yield "value_up", model.query_heads * model.value_width, model.latent_width


def mixer_matrices(model: ModelSpec, layer: int) -> tuple[str, ...]:
    """Return the names of the matrices of a layer's mixer, and of the input of a draft layer, without their prefix."""
    if model.mixers[layer] in RECURRENT:
        rates = ("recurrent_rates",) if model.rates(layer) else ()
        raised = ("recurrent_decays", "recurrent_gates") if model.mixers[layer] == "kda" else ()
        return "recurrent_input", *rates, *raised, "recurrent_output"
    if model.mixers[layer] == "none":
        return ()
    if layer >= model.text_layers:
        return DRAFT_INPUT, "qkv", "attention_output"
    if not model.latent_width:
        return "qkv", "attention_output"
    return *(name for name, _, _ in latent_matrices(model)), "attention_output"


def row_lengths(model: ModelSpec) -> dict[str, int]:
    """Return the lengths of rows of weights by the fields of ModelSpec that they follow from."""
    lengths = {"width": model.width} | ({"2 * width": 2 * model.width} if model.draft_layers else {})
    if any(mixer in WITH_MEMORY for mixer in model.mixers):
        lengths |= {"state_heads * state_value_width": model.state_values_width}
    if model.state_rank:
        lengths |= {"state_rank": model.state_rank}
    if model.latent_width:
        lengths |= {"latent_width": model.latent_width, "query_heads * value_width": model.query_width}
        return lengths | ({"query_rank": model.query_rank} if model.query_rank else {})
    for width in sorted({heads.width for heads in model.layer_heads}):
        name = "head_width" if width == model.head_width else f"{width} (head_width of a layer)"
        lengths[f"query_heads * {name}"] = model.query_heads * width
    return lengths


def fixed_vectors(model: ModelSpec) -> Iterator[tuple[str, int]]:
    """Yield (name, length) of every float32 vector of fixed.safetensors, in the order of the file. Also two tables with
    rows of `width`: `position_embedding` with a row per position, a layer's `router` with a row per expert. Biases of
    feed-forwards lie expert after expert."""
    if model.positions == "rotary":
        yield "rope.inverse_frequency", model.table_width(is_local=False) // 2
        if any(model.local_layers):
            yield "rope.local_inverse_frequency", model.table_width(is_local=True) // 2
    else:
        yield "position_embedding", model.context_tokens * model.width
    yield from _norm("output_norm", model)
    if model.logit_bias:
        yield "output.bias", model.vocabulary
    for layer in range(model.layers):
        for name in layer_norms(model, layer):
            yield from _norm(f"layers.{layer}.{name}", model)
        if model.mixers[layer] == "attention":
            yield from _attention_vectors(model, layer)
        for name, length in recurrent_vectors(model, layer).items():
            yield f"layers.{layer}.{name}", length
        if not model.ffn_layers[layer]:
            continue
        for name, length, is_present in (
            ("scale", 1, model.layer_scales),
            ("gate.bias", model.experts * model.neurons, model.ffn_bias and model.gated),
            ("up.bias", model.experts * model.neurons, model.ffn_bias),
            ("down.bias", model.experts * model.width, model.ffn_bias),
            ("router.bias", model.experts, model.router_bias and not model.dense_layers[layer]),
            ("router.choosing_bias", model.experts, model.choosing_bias and not model.dense_layers[layer]),
            ("router_norm", model.width, model.router_norm and not model.dense_layers[layer]),
            ("expert_scales", model.experts, model.expert_scales and not model.dense_layers[layer]),
            ("shared_gate", model.width, model.shared_gate and not model.dense_layers[layer]),
        ):
            if is_present:
                yield f"layers.{layer}.{name}", length
        if model.routed_experts(layer):
            yield f"layers.{layer}.router", model.experts * model.width


def _attention_vectors(model: ModelSpec, layer: int) -> Iterator[tuple[str, int]]:
    heads = model.layer_heads[layer]
    query_norm, key_norm = norm_widths(model, heads)
    for name, length, is_present in (
        ("qkv.bias", heads.qkv_rows, model.qkv_bias),
        ("query_norm", query_norm, model.head_norm or model.joint_norm),
        ("key_norm", key_norm, model.head_norm or model.joint_norm),
        ("latent_norm", model.latent_width, model.latent_width > 0),
        ("query_down_norm", model.query_rank, model.query_rank > 0),
        ("attention_output.bias", model.width, model.output_bias),
        ("sinks", model.query_heads, model.attention_sinks),
    ):
        if is_present:
            yield f"layers.{layer}.{name}", length


def recurrent_vectors(model: ModelSpec, layer: int) -> dict[str, int]:
    """Return the lengths of a recurrent layer's vectors by their names, without their prefix.

    `convolution` has for each token that it mixes, the latest one last, the weights of all channels. `decay` is the
    logarithm of a memory's decay in a unit of time. `time_bias` is of each memory, in KDA of each of its rows.
    `recurrent_norm` has the weights of one head with DeltaNet and KDA.
    """
    mixer = model.mixers[layer]
    if mixer not in RECURRENT:
        return {}
    lengths = {"convolution": model.convolution_tokens * model.channels(layer)}
    if model.convolution_bias:
        lengths["convolution.bias"] = model.channels(layer)
    if mixer in WITH_MEMORY:
        lengths |= {"decay": model.state_heads, "time_bias": model.decays_width(layer)}
        lengths["recurrent_norm"] = model.state_value_width if mixer in DELTA_RULE else model.state_values_width
    if mixer == "mamba2":
        lengths["skip"] = model.state_heads
    return lengths


def norm_widths(model: ModelSpec, heads: Heads) -> tuple[int, int]:
    """Return the lengths of the weights of a layer's norms of queries and keys: of one head, or of all together."""
    return (heads.query_width, heads.key_width) if model.joint_norm else (heads.width, heads.width)


def layer_norms(model: ModelSpec, layer: int) -> tuple[str, ...]:
    """Return the names of a layer's norms of the residual stream or of what is added to it, and of a draft layer's."""
    parts = [
        *(["attention"] if model.mixers[layer] != "none" else []),
        *(["ffn"] if model.ffn_layers[layer] else []),
    ]
    before = tuple(f"{part}_norm" for part in parts) if model.norms_before else ()
    after = tuple(f"{part}_output_norm" for part in parts) if model.norms_after else ()
    of_branches = ("routed_norm", "routed_output_norm", "shared_output_norm") if model.branch_norms else ()
    return (*before, *after, *of_branches, *(DRAFT_NORMS if layer >= model.text_layers else ()))


def _norm(name: str, model: ModelSpec) -> Iterator[tuple[str, int]]:
    yield name, model.width
    if model.norm == "layer":
        yield f"{name}.bias", model.width


def fixed_tensors(manifest: Manifest) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of fixed.safetensors, name -> (safetensors dtype, shape), in the order of the file. float32
    vectors come first, so that every tensor is aligned."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    tensors.update((name, ("F32", (length,))) for name, length in fixed_vectors(manifest.model))
    for name, rows, columns in fixed_matrices(manifest.model):
        tensors.update(_encoded(name, rows, columns, manifest.quantization_of(name)))
    return tensors


def _encoded(name: str, rows: int, columns: int, quantization: Quantization) -> dict[str, tuple[str, tuple[int, ...]]]:
    if quantization == "f16":
        return {f"{name}.quants": ("F16", (rows, columns))}
    dtype = QUANT_DTYPES.get(quantization, "U8")
    return {
        f"{name}.quants": (dtype, (rows, quant_bytes(quantization, columns))),
        f"{name}.scales": ("F16", (rows, scale_bytes(quantization, columns) // 2)),
    }


def predictor_name(model: ModelSpec, layer: int, expert: int) -> str:
    """Return the prefix of the tensor names of one feed-forward's predictor."""
    return f"layers.{layer}.predictor" if model.experts == 1 else f"layers.{layer}.experts.{expert}.predictor"


def predictor_names(model: ModelSpec) -> Iterator[str]:
    """Yield the prefixes of all predictors, by layer, then expert."""
    return (predictor_name(model, layer, expert) for layer, expert in model.places)


def predictor_matrices(model: ModelSpec, predictor: Predictor) -> Iterator[tuple[str, int, int]]:
    for ffn, name in enumerate(predictor_names(model)):
        yield f"{name}.input", predictor.rank_of(ffn), model.width
        for side in predictor.sides:
            yield f"{name}.{side}", model.neurons, predictor.rank_of(ffn)


def predictor_tensors(model: ModelSpec, predictor: Predictor) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of predictor.safetensors, name -> (safetensors dtype, shape), in the order of the file: wider
    elements first, so that every tensor is aligned."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        f"{name}.{side}.bias": ("F32", (model.neurons,)) for name in predictor_names(model) for side in predictor.sides
    }
    # Odd sizes of one-byte elements would misalign the two-byte scales behind them.
    narrow: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, rows, columns in predictor_matrices(model, predictor):
        for tensor, described in _encoded(name, rows, columns, predictor.quantization).items():
            (tensors if described[0] == "F16" else narrow)[tensor] = described
    return {**tensors, **narrow}
