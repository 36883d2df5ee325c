"""The tensors of recurrent layers in a source, and the order of their rows in packages: queries, keys, values, gate.

Rates are those of the time, then with DeltaNet those of the share that a memory takes over. In KDA the inputs of decays
and of the gate take the gate's place, and rates are those of the share alone.
"""

from __future__ import annotations

from typing import NamedTuple

from neuronpipe.plans.models.spec import ModelSpec


class SourceRows(NamedTuple):
    """Rows of a tensor in a source.

    name: name after the prefix of the layer, without `.weight`
    total: number of rows that the tensor has
    rows: the rows that are needed, in the order of packages
    """

    name: str
    total: int
    rows: list[int]


class RecurrentTensors(NamedTuple):
    """The tensors of a recurrent layer in a source. Names follow the prefix of the layer.

    input, rates: the rows of `recurrent_input` and `recurrent_rates`
    output: name of the output matrix
    convolution: names of the convolution; a tensor has `.weight` [channels, 1, tokens], and if the model says so the
        only one has `.bias`. Several have equal shares of the channels
    decays, gates: names of the matrices of decays and gate in KDA
    channels: the stored channels in the order of packages
    decay: the tensor that is the logarithm of the negative `decay`; the whole name, as for the tensors below
    time_bias, skip: the vectors of these names
    norm: `recurrent_norm`
    decay_is_logarithm: if False, the tensor is `decay` itself
    heads: the stored heads of `decay`, `time_bias` and `skip` in the order of packages; None: as stored
    output_columns: the stored columns of the output matrix in the order of packages; None: as stored
    """

    input: tuple[SourceRows, ...]
    rates: tuple[SourceRows, ...]
    output: str
    convolution: tuple[str, ...]
    channels: list[int]
    decays: str = ""
    gates: str = ""
    decay: str = ""
    time_bias: str = ""
    skip: str = ""
    norm: str = ""
    decay_is_logarithm: bool = True
    heads: list[int] | None = None
    output_columns: list[int] | None = None


def deltanet_tensors(model: ModelSpec, prefix: str) -> RecurrentTensors:
    """Return the tensors of DeltaNet in Qwen3.5: queries, keys and values lie in one tensor."""
    keys, values, heads = model.state_keys_width, model.state_values_width, model.state_heads
    channels = list(range(2 * keys + values))
    return _deltanet(
        prefix,
        (
            SourceRows(f"{prefix}.in_proj_qkv", len(channels), channels),
            SourceRows(f"{prefix}.in_proj_z", values, list(range(values))),
        ),
        tuple(SourceRows(f"{prefix}.in_proj_{rate}", heads, list(range(heads))) for rate in "ab"),
        channels,
    )


def joined_deltanet_tensors(model: ModelSpec, prefix: str) -> RecurrentTensors:
    """Return the tensors of DeltaNet in Qwen3-Next: a key head's query, key, values and gates follow each other."""
    share = model.state_heads // model.state_key_heads
    parts = (model.state_key_width, model.state_key_width, *[share * model.state_value_width] * 2)
    rows = [row for part in range(4) for row in _of_each(model.state_key_heads, parts, part)]
    rates = [row for part in (1, 0) for row in _of_each(model.state_key_heads, (share, share), part)]
    return _deltanet(
        prefix,
        (SourceRows(f"{prefix}.in_proj_qkvz", len(rows), rows),),
        (SourceRows(f"{prefix}.in_proj_ba", len(rates), rates),),
        list(range(2 * model.state_keys_width + model.state_values_width)),
    )


def kda_tensors(model: ModelSpec, prefix: str) -> RecurrentTensors:
    """Return the tensors of Kimi delta attention: queries, keys and values have a tensor and a convolution each."""
    keys, rank, heads = model.state_keys_width, model.state_rank, model.state_heads
    rows = {"q_proj": keys, "k_proj": keys, "v_proj": model.state_values_width, "f_a_proj": rank, "g_a_proj": rank}
    return RecurrentTensors(
        tuple(SourceRows(f"{prefix}.{name}", count, list(range(count))) for name, count in rows.items()),
        (SourceRows(f"{prefix}.b_proj", heads, list(range(heads))),),
        f"{prefix}.o_proj",
        tuple(f"{prefix}.{part}_conv1d" for part in "qkv"),
        list(range(2 * keys + model.state_values_width)),
        decays=f"{prefix}.f_b_proj",
        gates=f"{prefix}.g_b_proj",
        decay=f"{prefix}.A_log",
        time_bias=f"{prefix}.dt_bias",
        norm=f"{prefix}.o_norm.weight",
    )


def mamba_tensors(model: ModelSpec, prefix: str) -> RecurrentTensors:
    """Return the tensors of Mamba-2, where gate, values, keys, queries and rates lie in one tensor in this order."""
    values, keys = model.state_values_width, model.state_keys_width
    channels = [*range(values + keys, values + 2 * keys), *range(values, values + keys), *range(values)]
    total = 2 * values + 2 * keys + model.state_heads
    rows = [*(values + channel for channel in channels), *range(values)]
    rates = list(range(total - model.state_heads, total))
    return RecurrentTensors(
        (SourceRows(f"{prefix}.in_proj", total, rows),),
        (SourceRows(f"{prefix}.in_proj", total, rates),),
        f"{prefix}.out_proj",
        (f"{prefix}.conv1d",),
        channels,
        decay=f"{prefix}.A_log",
        time_bias=f"{prefix}.dt_bias",
        skip=f"{prefix}.D",
        norm=f"{prefix}.norm.weight",
    )


def convolution_tensors(model: ModelSpec, prefix: str) -> RecurrentTensors:
    """Return the tensors of LFM2's convolution. Its input lies in one tensor: a factor, the gate, the other factor."""
    width = model.width
    rows = [*range(width), *range(2 * width, 3 * width), *range(width, 2 * width)]
    return RecurrentTensors(
        (SourceRows(f"{prefix}.in_proj", 3 * width, rows),),
        (),
        f"{prefix}.out_proj",
        (f"{prefix}.conv",),
        list(range(width)),
    )


def _deltanet(
    prefix: str, of_input: tuple[SourceRows, ...], rates: tuple[SourceRows, ...], channels: list[int]
) -> RecurrentTensors:
    return RecurrentTensors(
        of_input,
        rates,
        f"{prefix}.out_proj",
        (f"{prefix}.conv1d",),
        channels,
        decay=f"{prefix}.A_log",
        time_bias=f"{prefix}.dt_bias",
        norm=f"{prefix}.norm.weight",
    )


def _of_each(heads: int, parts: tuple[int, ...], part: int) -> list[int]:
    """Return the rows of one part of each head, where a head's parts follow each other."""
    first, stride = sum(parts[:part]), sum(parts)
    return [head * stride + first + row for head in range(heads) for row in range(parts[part])]
