"""The tensors of predictor.safetensors: low-rank factors that guess which neurons of a layer will fire, by name."""

from __future__ import annotations

from collections.abc import Iterator

from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.fixed import QUANT_DTYPES
from neuronpipe.plans.package.layout import quant_bytes, scale_bytes
from neuronpipe.plans.package.manifest import Predictor

DEFAULT_RECALL = 0.98  # of the active neurons, the share that `profile` aims to predict


def predictor_matrices(model: ModelSpec, predictor: Predictor, layer: int) -> Iterator[tuple[str, int, int]]:
    """(name, rows, columns) of one layer's quantized matrices, in the order of the file."""
    name = f"layers.{layer}.predictor"
    yield f"{name}.input", predictor.rank, model.width
    for side in predictor.sides:
        yield f"{name}.{side}", model.neurons, predictor.rank


def predictor_tensors(model: ModelSpec, predictor: Predictor) -> dict[str, tuple[str, tuple[int, ...]]]:
    """name -> (safetensors dtype, model) in file order: float32 vectors first, so that every tensor is aligned."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        f"layers.{layer}.predictor.{side}.bias": ("F32", (model.neurons,))
        for layer in range(model.layers)
        for side in predictor.sides
    }
    # Two-byte elements before those of one byte: an odd number of odd rows must not push scales off their alignment.
    narrow: dict[str, tuple[str, tuple[int, ...]]] = {}
    for layer in range(model.layers):
        for name, rows, columns in predictor_matrices(model, predictor, layer):
            quants = quant_bytes(predictor.quantization, columns)
            if predictor.quantization == "f16":
                tensors[f"{name}.quants"] = ("F16", (rows, columns))
                continue
            narrow[f"{name}.quants"] = (QUANT_DTYPES[predictor.quantization], (rows, quants))
            tensors[f"{name}.scales"] = ("F16", (rows, scale_bytes(predictor.quantization, columns) // 2))
    return {**tensors, **narrow}
