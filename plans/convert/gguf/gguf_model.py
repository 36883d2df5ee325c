"""Opens a GGUF model of any architecture that a family supports."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from neuronpipe.plans.convert.chat_template import examined, gguf_template
from neuronpipe.plans.convert.checkpoint import Checkpoint, Options, take_tensors
from neuronpipe.plans.convert.gguf.gguf_gemma4 import with_gemma4_layers
from neuronpipe.plans.convert.gguf.gguf_header import uniform_integer
from neuronpipe.plans.convert.gguf.gguf_latents import gguf_latents
from neuronpipe.plans.convert.gguf.gguf_mixture import GgufMixture, gguf_mixture
from neuronpipe.plans.convert.gguf.gguf_names import is_parallel, tensor_names
from neuronpipe.plans.convert.gguf.gguf_parts import OpenPart, open_parts
from neuronpipe.plans.convert.gguf.gguf_recurrent import GgufLayers, all_blocks, blocks, gguf_layers
from neuronpipe.plans.convert.gguf.gguf_rope import (
    context_tokens,
    frequencies,
    query_growth,
    rotated_width,
    with_positions_factor,
)
from neuronpipe.plans.convert.gguf.gguf_tokenizer import gguf_ends, package_tokenizer
from neuronpipe.plans.convert.gguf.implied_fields import local_frequencies, with_implied_fields
from neuronpipe.plans.convert.gguf.powerinfer import (
    OPT_SPLIT,
    is_opt,
    powerinfer_activation,
    powerinfer_architecture,
    powerinfer_names,
    powerinfer_opt,
    powerinfer_threshold,
)
from neuronpipe.plans.convert.rope import interleaved_order, joined_order, latent_orders, paired_order
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.convert.source_predictors import take_predictors
from neuronpipe.plans.convert.stored_tensors import Inventory, OpenFile, RowNumbers
from neuronpipe.plans.gguf_part_names import model_stem
from neuronpipe.plans.models.family import (
    SAY_WHICH,
    Family,
    GgufArchitecture,
    named_activation,
    sounds_like_relu,
)
from neuronpipe.plans.models.registry import GGUF_ARCHITECTURES, MISSING_BY_ARCHITECTURE
from neuronpipe.plans.models.spec import (
    MAX,
    MAX_SCALE,
    MIN_SCALE,
    Activation,
    LayerKind,
    ModelSpec,
    SpecError,
    runs_of,
)
from neuronpipe.plans.package.manifest import Source
from neuronpipe.plans.strict_json import Record, one_line
from neuronpipe.protocol.errors import quoted

NOPE_EVERY = 4  # in a smallthinker with windows, each fourth layer has neither window nor rotary positions


def open_gguf(path: Path, options: Options, open_file: OpenFile = SourceFile) -> Checkpoint:
    """Return the checkpoint in a GGUF model. Reads headers, but no weights. Raises UserError for anything that is
    missing, contradictory or not supported.

    path: the file, or the first part of a model in several files
    open_file: opens the files, which may lie elsewhere
    """
    parts = open_parts(path, open_file)
    header = parts[0].header
    metadata = header.metadata
    name = metadata.text("general.architecture")
    family, architecture = powerinfer_architecture(metadata) if header.powerinfer else _architecture(metadata, name)
    if header.powerinfer:
        activation = powerinfer_activation(metadata, path.name, options.activation)
    else:
        activation = _activation(path, metadata, name, architecture, options.activation)
    with ExitStack() as files:
        for part in parts:
            files.callback(part.file.close)
        inventory = _inventory(path, parts)
        layers = None
        if architecture.recurrent is not None:
            layers = gguf_layers(metadata, name, architecture, inventory)
            metadata = layers.metadata
        if header.powerinfer and is_opt(metadata):
            model = powerinfer_opt(metadata, inventory, options.context_tokens)
            metadata = metadata.over({"tokenizer.ggml.pre": OPT_SPLIT}, "OPT")
        else:
            tokens = context_tokens(metadata, name, inventory, options.context_tokens)
            model = _model(metadata, name, family.name, architecture, activation, inventory, tokens, layers)
            if architecture.gemma4_layers:
                model = with_gemma4_layers(metadata, name, inventory, model)
            model = with_implied_fields(metadata, name, architecture, model)
        names = tensor_names(model, architecture, inventory, layers)
        names = powerinfer_names(names) if header.powerinfer else names
        down_by_neuron = header.powerinfer or _down_by_neuron(metadata, model, inventory)
        matrices, vectors = take_tensors(
            inventory,
            model,
            names,
            _orders(metadata, name, model, architecture),
            down_by_neuron=down_by_neuron,
        )
        table = None
        if model.positions == "rotary":
            table = frequencies(metadata, name, architecture, model, inventory)
            model = with_positions_factor(metadata, name, architecture, model, table)
        threshold = powerinfer_threshold(metadata) if header.powerinfer else 0.0
        predictors = take_predictors(inventory, model, names, enabled=options.predictor, threshold=threshold)
        left_out = range(blocks(metadata, name), all_blocks(metadata, name))
        unused = "|".join([architecture.harmless, *(rf"blk\.{layer}\..*" for layer in left_out)])
        left_out_notes = inventory.refuse_leftovers(re.compile(unused))
        template = gguf_template(metadata, options.chat_template)
        facts = examined(template, options.examine_template, options.chat_template)
        return Checkpoint(
            source=Source("gguf", one_line(f"{model_stem(path.name)}.gguf" if len(parts) > 1 else path.name), name),
            model=model,
            ends=gguf_ends(metadata, model.vocabulary, facts.closing),
            tokenizer=package_tokenizer(path, metadata, options.tokenizer, model.vocabulary),
            chat_template=template,
            notes=(*facts.notes(template), *left_out_notes),
            inverse_frequency=table,
            local_inverse_frequency=local_frequencies(metadata, name, architecture, model),
            matrices=matrices,
            vectors=vectors,
            down_by_neuron=down_by_neuron,
            predictors=predictors,
            files=files.pop_all(),
        )
    raise AssertionError  # for the type checker, which assumes that ExitStack.__exit__ may suppress errors


def _architecture(metadata: Record, name: str) -> tuple[Family, GgufArchitecture]:
    if (missing := MISSING_BY_ARCHITECTURE.get(name)) is not None:
        metadata.fail("general.architecture", f"{quoted(name)} is not supported: it needs {missing}")
    if name not in GGUF_ARCHITECTURES:
        metadata.fail("general.architecture", f"{quoted(name)} is not supported; {', '.join(GGUF_ARCHITECTURES)} are")
    return GGUF_ARCHITECTURES[name]


def _activation(
    path: Path, metadata: Record, name: str, architecture: GgufArchitecture, requested: Activation | None
) -> Activation:
    """Return the requested activation, or the one that the file names, or the architecture's. Raises UserError if the
    architecture has none, or has SiLU and a name sounds like a ReLU model."""
    if requested is not None:
        return requested
    field = f"{name}.hidden_activation"
    if metadata.has(field):
        return named_activation(metadata, field, relu_may_mean_drelu=architecture.relu_may_mean_drelu)
    keys = [key for key in metadata.names() if re.fullmatch(r"general\.(\w+\.)*(\d+\.)?(name|basename|finetune)", key)]
    names = [metadata.text(key) for key in keys]
    if architecture.activation is None:
        metadata.fail(
            "general.architecture",
            f"{name!r} means GELU, which is not supported; ReluFalcon has relu: if this is that model, pass "
            "--activation relu",
        )
    if architecture.activation == "silu" and (suspect := sounds_like_relu(*names, path.name)):
        metadata.fail(
            "general.architecture",
            f"{name!r} means SiLU, but {quoted(suspect)} sounds like a ReLU model, which such a file cannot "
            f"tell; {SAY_WHICH}",
        )
    return architecture.activation


def _inventory(path: Path, parts: Sequence[OpenPart]) -> Inventory:
    inventory = Inventory(path)
    for part in parts:
        for name, tensor in part.header.tensors.items():
            inventory.add(name, part.file, tensor.start, tensor.shape, tensor.encoding)
    return inventory


def _model(
    metadata: Record,
    name: str,
    family: str,
    architecture: GgufArchitecture,
    activation: Activation,
    inventory: Inventory,
    context_tokens: int,
    recurrent: GgufLayers | None,
) -> ModelSpec:
    def integer(key: str, minimum: int, maximum: int, default: int | None = None) -> int:
        field = f"{name}.{key}"
        return (
            default
            if default is not None and not metadata.has(field)
            else uniform_integer(metadata, field, minimum, maximum)
        )

    experts = integer("expert_count", 0, MAX.experts, 0) or 1
    layers, block = blocks(metadata, name), f"blk.{0 if recurrent is None else recurrent.attention_block}"
    mixture = gguf_mixture(metadata, name, architecture, inventory, layers, experts) if experts > 1 else None
    rotated = recurrent is None or recurrent.rotated
    width, query_heads = integer("embedding_length", 1, MAX.width), integer("attention.head_count", 1, MAX.query_heads)
    head_width = integer("attention.key_length", 2, MAX.head_width, width // query_heads)
    whole = (
        "attention.value_length",
        *(() if architecture.partial_rotary or not rotated else ("rope.dimension_count",)),
    )
    latents = gguf_latents(metadata, name) if architecture.latents else {}
    for key in () if latents else whole:
        if integer(key, 1, MAX.head_width, head_width) != head_width:
            metadata.fail(f"{name}.{key}", f"differs from the width of a head, {head_width}: not supported")
    epsilons = [f"{name}.attention.layer_norm_{kind}" for kind in ("epsilon", "rms_epsilon")]
    if architecture.norm != "layer":
        epsilons.reverse()
    epsilon = next(filter(metadata.has, epsilons), epsilons[0])
    key_heads = query_heads
    if not architecture.gemma4_layers:  # there they may differ between layers, and are read later
        key_heads = integer("attention.head_count_kv", 1, MAX.key_heads, query_heads)
    default_window = architecture.window_tokens
    min_window = 1 if default_window is None else 0
    window_tokens = integer("attention.sliding_window", min_window, MAX.context_tokens, default_window)
    if metadata.has(f"{name}.attention.causal") and not metadata.boolean(f"{name}.attention.causal"):
        metadata.fail(f"{name}.attention.causal", "is false: attention to later tokens is not supported")
    if architecture.norm == "layer" and inventory.has(norm := "blk.0.attn_q_norm.weight"):
        metadata.fail(norm, "norms of queries and keys are not supported in this architecture")
    try:
        return ModelSpec(
            family=family,
            width=width,
            **(_dense_fields(integer, inventory) if mixture is None else mixture.fields),
            layer_kinds=_layer_kinds(layers, window_tokens, architecture, mixture, recurrent),
            query_heads=query_heads,
            **({} if recurrent is None else recurrent.fields),
            **(latents or {"key_heads": key_heads, "head_width": head_width}),
            vocabulary=inventory.shape("token_embd.weight")[0],
            context_tokens=context_tokens,
            norm=architecture.norm,
            norm_epsilon=metadata.number(epsilon, 0.0, 1.0),
            head_norm=inventory.has(f"{block}.attn_q_norm.weight") and not architecture.joint_norm,
            norm_after_rotation=architecture.norm_after_rotation,
            joint_norm=architecture.joint_norm,
            activation=activation,
            gated=architecture.gated,
            qkv_bias=architecture.qkv_bias
            or any(map(inventory.has, (f"{block}.attn_q.bias", f"{block}.attn_qkv.bias"))),
            output_bias=inventory.has(f"{block}.attn_output.bias"),
            logit_bias=inventory.has("output.bias"),
            attention_sinks=inventory.has(f"{block}.attn_sinks.weight"),
            activation_limit=architecture.activation_limit,
            tied_embeddings=not inventory.has("output.weight"),
            parallel=is_parallel(metadata, name, architecture, inventory),
            **_scales(metadata, name, architecture, head_width),
            **query_growth(metadata, name),
        )
    except SpecError as error:
        metadata.fail(error.field, error.complaint)


def _dense_fields(integer: Callable[..., int], inventory: Inventory) -> dict[str, Any]:
    """Return the fields of ModelSpec that describe the feed-forward of a dense model."""
    neurons = integer("feed_forward_length", 1, MAX.neurons)
    return {"neurons": neurons, "ffn_bias": inventory.has("blk.0.ffn_up.bias")}


def _layer_kinds(
    layers: int,
    window_tokens: int,
    architecture: GgufArchitecture,
    mixture: GgufMixture | None,
    recurrent: GgufLayers | None,
) -> tuple[LayerKind, ...]:
    """Return the runs of equal layers. All layers have the same window unless the architecture has a pattern, which
    files do not state. In a smallthinker with windows, layers 0, 4, 8 ... have none and are not rotated, as in
    llama.cpp."""
    if recurrent is not None:
        return recurrent.kinds(None if mixture is None else mixture.dense_experts)
    if architecture.full_layer_every and window_tokens:
        every = architecture.full_layer_every
        windows = [0 if number % every == every - 1 else window_tokens for number in range(layers)]
        return runs_of(windows, [window > 0 or architecture.rotates_full_layers for window in windows])
    if every := architecture.unrotated_layer_every:
        return runs_of([window_tokens] * layers, [(number + 1) % every != 0 for number in range(layers)])
    if architecture.router_reads != "layer" or not window_tokens:
        return runs_of([window_tokens] * layers, None, None if mixture is None else mixture.dense_experts)
    full = [number % NOPE_EVERY == 0 for number in range(layers)]
    return runs_of([0 if is_full else window_tokens for is_full in full], [not is_full for is_full in full])


def _scales(metadata: Record, name: str, architecture: GgufArchitecture, head_width: int) -> dict[str, Any]:
    """Return the factors of ModelSpec that the file states, if the architecture has some."""
    if not architecture.has_scales:
        return {}

    def factor(key: str, default: float) -> float:
        field, is_required = f"{name}.{key}", key in architecture.required_scales
        return metadata.number(field, MIN_SCALE, MAX_SCALE) if is_required or metadata.has(field) else default

    scores = factor("attention.scale", head_width**-0.5)
    return {
        "attention_scale": scores * math.sqrt(head_width),
        "embedding_scale": factor("embedding_scale", 1.0),
        "residual_scale": factor("residual_scale", 1.0),
        "logit_scale": 1 / factor("logit_scale", 1.0),
    }


def _down_by_neuron(metadata: Record, model: ModelSpec, inventory: Inventory) -> bool:
    """Return True if Down of the experts is stored by neuron, as SmallThinker's own engine does under the same name.
    Raises UserError if the shape does not tell."""
    if model.router_reads != "layer":
        return False
    if model.width == model.neurons:
        metadata.fail(
            "smallthinker.expert_feed_forward_length",
            f"is embedding_length, {model.width}: nothing tells whether Down is transposed; convert the original "
            "checkpoint instead",
        )
    return inventory.shape("blk.0.ffn_down_exps.weight")[1:] == (model.neurons, model.width)


def _orders(metadata: Record, name: str, model: ModelSpec, architecture: GgufArchitecture) -> dict[str, RowNumbers]:
    """Return the order of the rows of queries and keys; empty if they are stored as the engine rotates them."""
    heads = {"query": model.query_heads, "key": model.key_heads}
    if model.latent_width:
        return latent_orders(model) if architecture.rotated else {}
    if architecture.interleaved:
        orders = {part: interleaved_order(count, model.head_width) for part, count in heads.items()}
    elif architecture.partial_rotary and (rotated := rotated_width(metadata, name, model)) < model.head_width:
        orders = {part: paired_order(count, model.head_width, rotated) for part, count in heads.items()}
    else:
        return {}
    return orders | {"query_key_value": joined_order(model, orders)}
