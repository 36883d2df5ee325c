"""The tensors of a recurrent layer: taken from a source, in the order of packages."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
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
    matrices["recurrent_output"] = (inventory.take(output, model.width, model.gate_width(number)),)
    channels, order = model.channels(number), np.asarray(tensors.channels, dtype=np.int64)
    weights = _convolution(inventory, f"{layer}{tensors.convolution}.weight", channels, model.convolution_tokens)
    vectors: Tensors = {"convolution": (weights.reordered(order).turned(),)}
    if model.convolution_bias:
        bias = inventory.take(f"{layer}{tensors.convolution}.bias", channels)
        vectors["convolution.bias"] = (bias.as_column().reordered(order),)
    if model.rates(number):
        vectors |= _vectors_of_memories(inventory, model, number, layer, tensors)
    return matrices, vectors


def _vectors_of_memories(
    inventory: Inventory, model: ModelSpec, number: int, layer: str, tensors: RecurrentTensors
) -> Tensors:
    heads, is_mamba = model.state_heads, model.mixers[number] == "mamba2"
    decay = inventory.take(f"{layer}{tensors.decay}", heads)
    vectors: Tensors = {
        "decay": (Decays(decay.name, decay.file, decay.offset, decay.rows, decay.columns, decay.encoding),),
        "time_bias": (inventory.take(f"{layer}{tensors.time_bias}", heads),),
        "recurrent_norm": (
            inventory.take(f"{layer}{tensors.norm}", model.state_values_width if is_mamba else model.state_value_width),
        ),
    }
    if is_mamba:
        vectors["skip"] = (inventory.take(f"{layer}{tensors.skip}", heads),)
    return vectors


def _rows(inventory: Inventory, layer: str, parts: Iterable[SourceRows], width: int) -> tuple[StoredMatrix, ...]:
    return tuple(
        inventory.take(f"{layer}{part.name}.weight", part.total, width).selected(_order(part.rows)) for part in parts
    )


def _order(rows: list[int]) -> RowNumbers:
    return np.asarray(rows, dtype=np.int64)


def _convolution(inventory: Inventory, name: str, channels: int, tokens: int) -> StoredMatrix:
    """Return the weights of a convolution as a matrix [channels, tokens], which may be stored with one more
    dimension."""
    has_middle = len(inventory.shape(name)) == 3
    return inventory.take(name, channels, *([1] if has_middle else []), tokens)
