"""The tensors of fixed.safetensors: everything but the neurons, by name."""

from __future__ import annotations

from collections.abc import Iterator

from neuronpipe.plans.package.layout import Quantization, quant_bytes, scale_bytes
from neuronpipe.plans.package.manifest import Shape

QUANT_DTYPES = {"q4": "U8", "q8": "I8", "f16": "F16"}


def fixed_matrices(shape: Shape, tied_embeddings: bool) -> Iterator[tuple[str, int, int]]:
    """(name, rows, columns) of every quantized matrix, in the order of the file."""
    yield "embedding", shape.vocabulary, shape.width
    if not tied_embeddings:
        yield "output", shape.vocabulary, shape.width
    for layer in range(shape.layers):
        yield f"layers.{layer}.qkv", shape.qkv_rows, shape.width
        yield f"layers.{layer}.attention_output", shape.width, shape.query_width


def fixed_vectors(shape: Shape, attention_bias: bool) -> Iterator[tuple[str, int]]:
    """(name, length) of every float32 vector, in the order of the file."""
    yield "rope.inverse_frequency", shape.head_width // 2
    yield "output_norm", shape.width
    for layer in range(shape.layers):
        yield f"layers.{layer}.attention_norm", shape.width
        yield f"layers.{layer}.ffn_norm", shape.width
        if attention_bias:
            yield f"layers.{layer}.qkv.bias", shape.qkv_rows


def fixed_tensors(
    shape: Shape, quantization: Quantization, attention_bias: bool, tied_embeddings: bool
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """name -> (safetensors dtype, shape) in file order: float32 vectors first, so that every tensor is aligned."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        name: ("F32", (length,)) for name, length in fixed_vectors(shape, attention_bias)
    }
    item_bytes = 2 if quantization == "f16" else 1
    for name, rows, columns in fixed_matrices(shape, tied_embeddings):
        tensors[f"{name}.quants"] = (
            QUANT_DTYPES[quantization],
            (rows, quant_bytes(quantization, columns) // item_bytes),
        )
        if quantization != "f16":
            tensors[f"{name}.scales"] = ("F16", (rows, scale_bytes(quantization, columns) // 2))
    return tensors
