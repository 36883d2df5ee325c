"""The description of recurrent layers in a GGUF file: which layers they are, their sizes, and their tensors.

llama.cpp's converter stores decays, not their logarithms, and norms with their 1. In Qwen3.5 it puts the first head of
every key head before the second ones, in Qwen3-Next a key head's heads stay together. Files of Nemotron-H number blocks
of one part, a mixer or a feed-forward. In Kimi-Linear's, memories have the number of attention's heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from neuronpipe.plans.convert.stored_tensors import Inventory
from neuronpipe.plans.models.family import GgufArchitecture, TensorNames
from neuronpipe.plans.models.recurrent_sizes import WITH_MEMORY, Mixer
from neuronpipe.plans.models.recurrent_tensors import (
    RecurrentTensors,
    SourceRows,
    convolution_tensors,
    deltanet_tensors,
    joined_deltanet_tensors,
    kda_tensors,
    mamba_tensors,
)
from neuronpipe.plans.models.spec import MAX, MAX_CONVOLUTION, LayerKind, ModelSpec, runs_of
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted
from neuronpipe.protocol.frozen import frozen

KEY_HEADS, NEURONS = "attention.head_count_kv", "feed_forward_length"
DEFAULT_INTERVAL = 4  # of layers with attention, in files that do not state it


@frozen
class GgufLayers:
    """The layers of a GGUF file some of which are recurrent.

    metadata: the keys of the file; those with a number for each layer have the one number that is not 0
    fields: fields of ModelSpec
    mixers: the mixer of each layer
    places: the numbers of each layer's mixer and feed-forward in the file; None: it has no such part
    rotated: heads of attention are rotated
    """

    metadata: Record
    fields: dict[str, Any]
    mixers: tuple[Mixer, ...]
    places: tuple[tuple[int | None, int | None], ...]
    rotated: bool

    @property
    def attention_block(self) -> int:
        """The number of the first layer with attention, in the file."""
        place = self.places[self.mixers.index("attention")][0]
        assert place is not None
        return place

    def kinds(self, dense_experts: list[int] | None) -> tuple[LayerKind, ...]:
        """Return `layer_kinds` of ModelSpec. dense_experts: the field of LayerKind, of each layer in the file"""
        dense = None
        if dense_experts is not None:
            by_block = dict(enumerate(dense_experts))
            dense = [0 if feed_forward is None else by_block.get(feed_forward, 0) for _, feed_forward in self.places]
        return runs_of(
            [0] * len(self.mixers),
            [self.rotated or mixer != "attention" for mixer in self.mixers],
            dense,
            mixers=self.mixers,
            feed_forward=[feed_forward is not None for _, feed_forward in self.places],
        )

    def names(self, names: TensorNames, rules: GgufArchitecture, inventory: Inventory) -> TensorNames:
        """Return the names of tensors. names: those of other architectures"""
        if rules.recurrent == "convolution" and inventory.has("token_embd_norm.weight"):
            names = replace(names, output_norm="token_embd_norm")
        return replace(
            names,
            recurrent=self._tensors(rules, inventory),
            blocks=tuple((mixer or 0, feed_forward or 0) for mixer, feed_forward in self.places),
        )

    def _tensors(self, rules: GgufArchitecture, inventory: Inventory) -> Callable[[ModelSpec, int], RecurrentTensors]:
        def tensors(model: ModelSpec, layer: int) -> RecurrentTensors:
            if rules.recurrent == "convolution":
                return _renamed(convolution_tensors(model, "shortconv"), "shortconv.conv")
            if rules.recurrent == "mamba2":
                return _mamba(model)
            if rules.recurrent == "kda":
                return _kda(model)
            block = f"blk.{self.places[layer][0]}"
            return _deltanet(
                model,
                tiled=rules.tiled_heads,
                is_joined=not rules.tiled_heads and inventory.has(f"{block}.ssm_in.weight"),
                has_joined_rates=not rules.tiled_heads and inventory.has(f"{block}.ssm_ba.weight"),
            )

        return tensors


def all_blocks(metadata: Record, name: str) -> int:
    """Return the number of layers in a file. name: value of `general.architecture`"""
    return metadata.integer(f"{name}.block_count", 1, MAX.layers)


def blocks(metadata: Record, name: str) -> int:
    """Return the number of layers in a file without those behind the last one, which predict further tokens."""
    layers, field = all_blocks(metadata, name), f"{name}.nextn_predict_layers"
    return layers - (metadata.integer(field, 0, layers - 1) if metadata.has(field) else 0)


def gguf_layers(metadata: Record, name: str, rules: GgufArchitecture, inventory: Inventory) -> GgufLayers:
    """Return the layers of a file of an architecture with recurrent layers. Raises UserError, which names file and key,
    for what is missing, contradictory or not supported.

    name: value of `general.architecture`
    """
    assert rules.recurrent is not None
    count = blocks(metadata, name)
    neurons = _numbers(metadata, f"{name}.{NEURONS}", count, MAX.neurons) if rules.one_part else [0] * count
    for block in range(count if rules.one_part else 0):
        # llama.cpp's converter leaves out dense blocks of a mixture.
        if not neurons[block] and inventory.has(tensor := f"blk.{block}.ffn_up.weight"):
            metadata.fail(f"{name}.{NEURONS}", f"is 0 for layer {block}, but {tensor} is there: not supported")
    mixers = _mixers(metadata, name, rules, neurons)
    if "attention" not in mixers:
        metadata.fail(f"{name}.{KEY_HEADS}", "no layer has attention: not supported")
    for key in ("moe_latent_size", "expert_latent_length"):
        if metadata.has(f"{name}.{key}"):
            metadata.fail(f"{name}.{key}", "experts that read a latent are not supported")
    fields: dict[str, Any] = {"gated_attention": rules.gated_attention}
    if rules.recurrent in mixers:
        first = mixers.index(rules.recurrent)
        fields |= _sizes(metadata, name, rules.recurrent)
        fields["convolution_bias"] = inventory.has(f"blk.{first}.ssm_conv1d.bias")
    rotated, field = rules.rotated, f"{name}.rope.scaling.finetuned"
    if rotated is None:
        rotated = not metadata.has(field) or metadata.boolean(field)
    if rules.drafts and _has_draft_layer(metadata, name, count, inventory):
        mixers.append("attention")
        fields["draft_layers"] = 1
    places = _places(mixers, one_part=rules.one_part)
    return GgufLayers(
        _with_one_number(metadata, f"{name}.{KEY_HEADS}", f"{name}.{NEURONS}"),
        fields,
        tuple("none" if mixer is None else mixers[mixer] for mixer, _ in places),
        tuple(places),
        rotated,
    )


def _has_draft_layer(metadata: Record, name: str, layer: int, inventory: Inventory) -> bool:
    """Return True if this layer, the one behind the last, is a draft layer with all of its tensors that shares
    embedding and output matrix."""
    tensors, of_its_own = ("eh_proj", "enorm", "hnorm", "shared_head_norm"), ("embed_tokens", "shared_head_head")

    def has(tensor: str) -> bool:
        return inventory.has(f"blk.{layer}.nextn.{tensor}.weight")

    return all_blocks(metadata, name) == layer + 1 and all(map(has, tensors)) and not any(map(has, of_its_own))


def _mixers(metadata: Record, name: str, rules: GgufArchitecture, neurons: list[int]) -> list[Mixer]:
    """Return the mixer of each block; none: it is a feed-forward, which has `neurons`."""
    assert rules.recurrent is not None
    count = len(neurons)
    listed, interval = f"{name}.attention.recurrent_layers", f"{name}.full_attention_interval"
    field = f"{name}.{KEY_HEADS}"
    if metadata.has(listed):
        is_recurrent = metadata.items(listed)[:count]
        if len(is_recurrent) < count or not all(isinstance(value, bool) for value in is_recurrent):
            metadata.fail(listed, f"is not true or false for each of {count} layers")
    elif metadata.has(field) and isinstance(metadata.value(field), list):
        is_recurrent = [heads == 0 for heads in _numbers(metadata, field, count, MAX.key_heads)]
    elif rules.recurrent == "deltanet":
        every = metadata.integer(interval, 1, MAX.layers) if metadata.has(interval) else DEFAULT_INTERVAL
        is_recurrent = [(block + 1) % every != 0 for block in range(count)]
    else:
        metadata.fail(field, "is no list of a number for each layer, so nothing tells which layers have attention")
    return [
        "none" if width else rules.recurrent if recurrent else "attention"
        for recurrent, width in zip(is_recurrent, neurons, strict=True)
    ]


def _places(mixers: list[Mixer], *, one_part: bool) -> list[tuple[int | None, int | None]]:
    """Return the layers' numbers of mixer and feed-forward: a mixer and the feed-forward behind it are one layer."""
    if not one_part:
        return [(block, block) for block in range(len(mixers))]
    places: list[tuple[int | None, int | None]] = []
    for block, mixer in enumerate(mixers):
        if mixer != "none":
            places.append((block, None))
        elif places and places[-1][1] is None:
            places[-1] = (places[-1][0], block)
        else:
            places.append((None, block))
    return places


def _sizes(metadata: Record, name: str, mixer: Mixer) -> dict[str, Any]:
    """Return the fields of ModelSpec that describe recurrent layers."""

    def integer(key: str, maximum: int) -> int:
        return metadata.integer(f"{name}.{key}", 1, maximum)

    if mixer == "kda":
        heads, width = integer("attention.head_count", MAX.query_heads), integer("kda.head_dim", MAX.head_width)
        return {
            "state_heads": heads,
            "state_key_heads": heads,
            "state_key_width": width,
            "state_value_width": width,
            "state_rank": width,
            "convolution_tokens": integer("ssm.conv_kernel", MAX_CONVOLUTION),
        }
    if mixer not in WITH_MEMORY:
        return {"convolution_tokens": integer("shortconv.l_cache", MAX_CONVOLUTION)}
    heads, groups = integer("ssm.time_step_rank", MAX.query_heads), integer("ssm.group_count", MAX.query_heads)
    inner = integer("ssm.inner_size", MAX.width)
    if inner % heads:
        metadata.fail(f"{name}.ssm.inner_size", f"{inner} is no multiple of ssm.time_step_rank, {heads}")
    if heads % groups:
        metadata.fail(f"{name}.ssm.time_step_rank", f"{heads} is no multiple of ssm.group_count, {groups}")
    return {
        "state_heads": heads,
        "state_key_heads": groups,
        "state_key_width": integer("ssm.state_size", MAX.head_width),
        "state_value_width": inner // heads,
        "state_norm_groups": groups if mixer == "mamba2" else 0,
        "convolution_tokens": integer("ssm.conv_kernel", MAX_CONVOLUTION),
    }


def _numbers(metadata: Record, field: str, count: int, maximum: int) -> list[int]:
    """Return the first `count` numbers of a list with one for each layer."""
    numbers = metadata.items(field)[:count]
    if len(numbers) < count or not all(type(number) is int and 0 <= number <= maximum for number in numbers):
        metadata.fail(field, f"{quoted(numbers)} is not a number from 0 to {maximum} for each of {count} layers")
    return numbers


def _with_one_number(metadata: Record, *fields: str) -> Record:
    """Return the keys with the numbers of those layers that have the part which a key describes."""
    for field in fields:
        if metadata.has(field) and isinstance(numbers := metadata.value(field), list) and any(numbers):
            metadata = Record(
                {**metadata.without(field), field: [number for number in numbers if number]}, metadata.where
            )
    return metadata


def _renamed(tensors: RecurrentTensors, convolution: str | tuple[str, ...], *names: str) -> RecurrentTensors:
    """Return tensors with other names: of the convolution, and of the parts of the input."""
    parts = zip(tensors.input, names or [part.name for part in tensors.input], strict=True)
    return tensors._replace(
        input=tuple(part._replace(name=part_name) for part, part_name in parts),
        convolution=(convolution,) if isinstance(convolution, str) else convolution,
        decay="ssm_a",
        decay_is_logarithm=False,
        time_bias="ssm_dt.bias",
        skip="ssm_d",
        norm="ssm_norm.weight",
    )


def _mamba(model: ModelSpec) -> RecurrentTensors:
    tensors = _renamed(mamba_tensors(model, ""), "ssm_conv1d", "ssm_in")
    (rates,) = tensors.rates
    return tensors._replace(rates=(rates._replace(name="ssm_in"),), output="ssm_out")


def _kda(model: ModelSpec) -> RecurrentTensors:
    convolutions = tuple(f"ssm_conv1d_{part}" for part in "qkv")
    tensors = _renamed(kda_tensors(model, ""), convolutions, "attn_q", "attn_k", "attn_v", "ssm_f_a", "ssm_g_a")
    (rates,) = tensors.rates
    return tensors._replace(
        rates=(rates._replace(name="ssm_beta"),), output="attn_output", decays="ssm_f_b", gates="ssm_g_b"
    )


def _deltanet(model: ModelSpec, *, tiled: bool, is_joined: bool, has_joined_rates: bool) -> RecurrentTensors:
    """Return the tensors of a layer with DeltaNet.

    tiled: the first heads of all key heads precede the second ones
    is_joined: queries, keys, values and gates lie in one tensor, as in Qwen3-Next's checkpoints and older files
    has_joined_rates: so do the rates
    """
    joined, apart = joined_deltanet_tensors(model, ""), deltanet_tensors(model, "")
    if is_joined:
        tensors = _renamed(joined, "ssm_conv1d", "ssm_in")
    else:
        tensors = _renamed(apart, "ssm_conv1d", "attn_qkv", "attn_gate")
    if has_joined_rates:
        rates: tuple[SourceRows, ...] = (joined.rates[0]._replace(name="ssm_ba"),)
    else:
        rates = tuple(
            part._replace(name=name) for part, name in zip(apart.rates, ("ssm_alpha", "ssm_beta"), strict=True)
        )
    tensors = tensors._replace(rates=rates, output="ssm_out")
    if not tiled or model.state_heads == model.state_key_heads:
        return tensors
    keys, share = model.state_key_heads, model.state_heads // model.state_key_heads
    heads = [number * keys + key for key in range(keys) for number in range(share)]
    values = [head * model.state_value_width + row for head in heads for row in range(model.state_value_width)]
    channels = [*range(2 * model.state_keys_width), *(2 * model.state_keys_width + value for value in values)]
    rows = {"attn_qkv": channels, "attn_gate": values}
    return tensors._replace(
        input=tuple(part._replace(rows=rows[part.name]) for part in tensors.input),
        rates=tuple(part._replace(rows=heads) for part in rates),
        channels=channels,
        heads=heads,
        output_columns=values,
    )
