"""The pieces of a checkpoint, which are converted one at a time, and the order of neurons."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from neuronpipe.plans.convert.checkpoint import Checkpoint
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.convert.stored_tensors import RowNumbers, StoredMatrix
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.tensors import fixed_matrices
from neuronpipe.protocol.errors import UserError, safe_name
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a model: the embedding, a layer, the output norm, or the output matrix.

    vectors, matrices: names in fixed.safetensors
    layer: the layer whose neurons and predictors belong to it; None: no layer
    orders: for each expert of the layer, the order of its neurons
    """

    vectors: tuple[str, ...]
    matrices: tuple[str, ...]
    files: tuple[SourceFile, ...]
    layer: int | None = None
    orders: tuple[RowNumbers, ...] = ()


def pieces_of(checkpoint: Checkpoint, shares: NDArray[np.float32] | None) -> tuple[Piece, ...]:
    """Return the pieces of a checkpoint in the order of their conversion.

    shares: from `read_frequencies`; None: neurons are ordered as in the source
    """
    model = checkpoint.model
    matrices = [name for name, _, _ in fixed_matrices(model)]

    def piece(belongs: Callable[[str], bool], predictors: Sequence[StoredMatrix] = (), **layer: Any) -> Piece:
        stored = [*checkpoint.matrices.items(), *checkpoint.vectors.items()]
        files = {file for name, parts in stored if belongs(name) for part in parts for file in part.files}
        files |= {matrix.file for matrix in predictors}
        return Piece(
            vectors=tuple(name for name in checkpoint.vectors if belongs(name)),
            matrices=tuple(name for name in matrices if belongs(name)),
            files=tuple(sorted(files, key=lambda file: file.path)),
            **layer,
        )

    def of_layer(number: int) -> Piece:
        as_stored = np.arange(model.neurons)
        of_layer = model.ffns_of(number)
        ffns = slice(of_layer.start, of_layer.stop)
        orders = (as_stored,) * len(of_layer) if shares is None else tuple(map(hot_first, shares[ffns]))
        stored = checkpoint.predictors
        predictors = () if stored is None else (*stored.first[ffns], *stored.second[ffns])
        return piece(lambda name: name.startswith(f"layers.{number}."), predictors, layer=number, orders=orders)

    layers = [of_layer(number) for number in range(model.layers)]
    first = piece(lambda name: name in ("embedding", "position_embedding"))
    norm = piece(lambda name: name.startswith(("output_norm", "output.bias")))
    output = piece(lambda name: name == "output")
    if set(output.files) <= set(first.files):  # then the file is not needed until the end
        return (first, output, *layers, norm)
    return (first, *layers, norm, output)


def read_frequencies(path: Path, model: ModelSpec) -> NDArray[np.float32]:
    """Return the firing shares 0..1 in a .npy file, [feed-forwards, neurons] in the source's order. Raises UserError if
    they do not fit the model. The file has [layers, experts, neurons], unless layers have different numbers of experts.
    """
    is_even = len(set(model.expert_counts)) == 1
    expected = (model.layers, model.most_experts, model.neurons) if is_even else (model.ffns, model.neurons)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about old headers; if they matter, an error follows
            # Mapped, because a damaged header may state a shape that does not fit memory.
            shares = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy raises any error of Python's parser for a bad header
        raise UserError(f"{path}: not a .npy file of firing shares: {safe_name(str(error))}") from None
    if not isinstance(shares, np.ndarray) or shares.dtype.kind != "f" or shares.shape != expected:
        raise UserError(f"{path}: expected floating-point firing shares of shape {list(expected)}")
    if not ((shares >= 0) & (shares <= 1)).all():
        raise UserError(f"{path}: firing shares lie between 0 and 1")
    return np.asarray(shares, dtype=np.float32).reshape(model.ffns, model.neurons)


def hot_first(shares: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the numbers of neurons by descending share; among equals in the order of the source."""
    return np.argsort(-shares, kind="stable")
