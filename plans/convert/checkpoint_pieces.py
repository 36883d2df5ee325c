"""The pieces of a checkpoint that are converted one at a time: the embedding, each layer, the output; and the order of
a layer's neurons."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from neuronpipe.plans.convert.checkpoint import Checkpoint, RowNumbers, StoredMatrix
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.tensors import fixed_matrices
from neuronpipe.protocol.errors import UserError, safe_name
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Piece:
    """The part of a model that is converted at once.

    vectors, matrices: names in fixed.safetensors
    layer: layer of its neurons
    orders: the order of these neurons, by expert
    """

    vectors: tuple[str, ...]
    matrices: tuple[str, ...]
    files: tuple[SourceFile, ...]
    layer: int | None = None
    orders: tuple[RowNumbers, ...] = ()


def pieces_of(checkpoint: Checkpoint, shares: NDArray[np.float32] | None) -> tuple[Piece, ...]:
    """Return a checkpoint's pieces. Every name of fixed.safetensors is in one of them."""
    model = checkpoint.model
    matrices = [name for name, _, _ in fixed_matrices(model)]

    def piece(belongs: Callable[[str], bool], predictors: Sequence[StoredMatrix] = (), **layer: Any) -> Piece:
        stored = [*checkpoint.matrices.items(), *checkpoint.vectors.items()]
        files = {part.file for name, parts in stored if belongs(name) for part in parts}
        files |= {matrix.file for matrix in predictors}
        return Piece(
            vectors=tuple(name for name in checkpoint.vectors if belongs(name)),
            matrices=tuple(name for name in matrices if belongs(name)),
            files=tuple(sorted(files, key=lambda file: file.path)),
            **layer,
        )

    def of_layer(number: int) -> Piece:
        as_stored = np.arange(model.neurons)
        orders = (as_stored,) * model.experts if shares is None else tuple(map(hot_first, shares[number]))
        ffns = slice(number * model.experts, (number + 1) * model.experts)
        stored = checkpoint.predictors
        predictors = () if stored is None else (*stored.first[ffns], *stored.second[ffns])
        return piece(lambda name: name.startswith(f"layers.{number}."), predictors, layer=number, orders=orders)

    layers = [of_layer(number) for number in range(model.layers)]
    first = piece(lambda name: name in ("embedding", "position_embedding"))
    norm = piece(lambda name: name.startswith("output_norm"))
    output = piece(lambda name: name == "output")
    if set(output.files) <= set(first.files):  # convert it first, so that its file is not needed until the end
        return (first, output, *layers, norm)
    return (first, *layers, norm, output)


def read_frequencies(path: Path, model: ModelSpec) -> NDArray[np.float32]:
    """Read firing shares 0..1 of every neuron from a .npy file, [layers, experts, neurons] in the source's order."""
    expected = (model.layers, model.experts, model.neurons)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about old headers; if they matter, an error follows
            # The file is mapped, because a damaged header may promise more than fits memory.
            shares = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy raises any error of Python's parser for a bad header
        raise UserError(f"{path}: not a .npy file of firing shares: {safe_name(str(error))}") from None
    if not isinstance(shares, np.ndarray) or shares.dtype.kind != "f" or shares.shape != expected:
        raise UserError(f"{path}: expected floating-point firing shares of shape {list(expected)}")
    if not ((shares >= 0) & (shares <= 1)).all():
        raise UserError(f"{path}: firing shares lie between 0 and 1")
    return np.asarray(shares, dtype=np.float32)


def hot_first(shares: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return neuron numbers by falling share; among equals in the order of the source."""
    return np.argsort(-shares, kind="stable")
