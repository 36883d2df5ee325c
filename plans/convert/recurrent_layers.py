"""The tensors of a recurrent layer: taken from a source, in the order of packages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import field, replace

import numpy as np
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.convert.stored_tensors import Inventory, RowNumbers, StoredMatrix
from neuronpipe.plans.models.recurrent_tensors import RecurrentTensors, SourceRows
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

RecurrentNames = Callable[[ModelSpec, int], RecurrentTensors]
"""(model, layer) -> the tensors of a recurrent layer."""

Tensors = dict[str, tuple[StoredMatrix, ...]]
"""Name after the prefix of a layer in packages -> the stored tensors of which it consists."""


@frozen
class Convolution(StoredMatrix):
    """The weights of all channels for one token after the other. The parts have a row for each channel."""

    parts: tuple[StoredMatrix, ...] = field(kw_only=True)

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return tuple(part.file for part in self.parts)

    def stored(self, rows: RowNumbers) -> NDArray[np.uint8]:
        channels = [part.values(np.arange(part.rows, dtype=np.int64)) for part in self.parts]
        return np.ascontiguousarray(np.concatenate(channels).T[rows]).view(np.uint8)


@frozen
class Decays(StoredMatrix):
    """Logarithms of the negative `decay` of memories, one for each head."""

    def vector(self) -> NDArray[np.float32]:
        return np.asarray(-np.exp(StoredMatrix.vector(self)), dtype=np.float32)


def take_recurrent_layer(
    inventory: Inventory, model: ModelSpec, number: int, layer: str, tensors: RecurrentTensors
) -> tuple[Tensors, Tensors]:
    """Return the matrices and the vectors of a recurrent layer. Raises UserError as `Inventory.take`.

    layer: the prefix of the layer's names in the source
    """
    matrices: Tensors = {"recurrent_input": _rows(inventory, layer, tensors.input, model.width)}
    if model.rates(number):
        matrices["recurrent_rates"] = _rows(inventory, layer, tensors.rates, model.width)
    output = f"{layer}{tensors.output}.weight"
    stored = inventory.take(output, model.width, model.gate_width(number))
    if tensors.output_columns is not None:
        stored = stored.columns_reordered(_order(tensors.output_columns))
    matrices["recurrent_output"] = (stored,)
    if tensors.decays:
        for name, stored_name, rows in (
            ("recurrent_decays", tensors.decays, model.decays_width(number)),
            ("recurrent_gates", tensors.gates, model.gate_width(number)),
        ):
            matrices[name] = (inventory.take(f"{layer}{stored_name}.weight", rows, model.state_rank),)
    channels, order = model.channels(number), _order(tensors.channels)
    vectors: Tensors = {"convolution": (_convolution(inventory, layer, tensors, channels, model.convolution_tokens),)}
    if model.convolution_bias:
        bias = inventory.take(f"{layer}{tensors.convolution[0]}.bias", channels)
        vectors["convolution.bias"] = (bias.as_column().reordered(order),)
    if model.rates(number):
        vectors |= _vectors_of_memories(inventory, model, number, layer, tensors)
    return matrices, vectors


def _vectors_of_memories(
    inventory: Inventory, model: ModelSpec, number: int, layer: str, tensors: RecurrentTensors
) -> Tensors:
    is_mamba = model.mixers[number] == "mamba2"

    def of_heads(name: str, length: int = model.state_heads) -> StoredMatrix:
        stored = _vector(inventory, f"{layer}{name}", length)
        return stored if tensors.heads is None else stored.as_column().reordered(_order(tensors.heads))

    decay = of_heads(tensors.decay)
    if tensors.decay_is_logarithm:
        decay = Decays(decay.name, decay.file, decay.offset, decay.rows, decay.columns, decay.encoding, decay.order)
    normed = model.state_values_width if is_mamba else model.state_value_width
    vectors: Tensors = {
        "decay": (decay,),
        "time_bias": (of_heads(tensors.time_bias, model.decays_width(number)),),
        "recurrent_norm": (_vector(inventory, f"{layer}{tensors.norm}", normed),),
    }
    if is_mamba:
        vectors["skip"] = (of_heads(tensors.skip),)
    return vectors


def _vector(inventory: Inventory, name: str, length: int) -> StoredMatrix:
    """Return a vector that may be stored with further dimensions."""
    shape = inventory.shape(name)
    if len(shape) > 1 and math.prod(shape) == length:
        return replace(inventory.take(name, *shape), rows=1, columns=length)
    return inventory.take(name, length)


def _rows(inventory: Inventory, layer: str, parts: Iterable[SourceRows], width: int) -> tuple[StoredMatrix, ...]:
    return tuple(
        inventory.take(f"{layer}{part.name}.weight", part.total, width).selected(_order(part.rows)) for part in parts
    )


def _order(rows: list[int]) -> RowNumbers:
    return np.asarray(rows, dtype=np.int64)


def _convolution(
    inventory: Inventory, layer: str, tensors: RecurrentTensors, channels: int, tokens: int
) -> StoredMatrix:
    """Return the weights of a convolution as a matrix [tokens, channels]. The stored ones, [channels, tokens], may have
    further dimensions."""
    rows, order = channels // len(tensors.convolution), _order(tensors.channels)
    parts = []
    for name in (f"{layer}{stored}.weight" for stored in tensors.convolution):
        shape = inventory.shape(name)
        is_longer = len(shape) > 2 and shape[-1] == tokens and math.prod(shape) == rows * tokens
        stored = inventory.take(name, *(shape if is_longer else (rows, tokens)))
        parts.append(replace(stored, rows=rows))
    if len(parts) == 1:
        return parts[0].reordered(order).turned()
    first = parts[0]
    return Convolution(first.name, first.file, first.offset, tokens, channels, "F32", parts=tuple(parts))
