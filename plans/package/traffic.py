"""The bytes that computing reads of a package: by every step, of a neuron, of a position."""

from __future__ import annotations

from neuronpipe.plans.package.layout import quant_bytes, scale_bytes
from neuronpipe.plans.package.manifest import Manifest, Shape
from neuronpipe.plans.package.reader import Package


def neuron_row_bytes(manifest: Manifest) -> int:
    """A neuron's gate, up or down: quants and scales."""
    quantization, width = manifest.quantization, manifest.shape.width
    return quant_bytes(quantization, width) + scale_bytes(quantization, width)


def step_bytes(package: Package, *, predicts: bool) -> int:
    """The fixed tensors that a step reads from end to end, however many tokens it has."""
    sizes = {name: entry.stop - entry.start for name, entry in package.fixed.items()}
    total = sum(sizes.values())
    if not package.manifest.tied_embeddings:  # of the embedding a step reads one row for each token
        total -= sum(size for name, size in sizes.items() if name.startswith("embedding."))
    if predicts and package.predictor is not None:
        total += sum(entry.stop - entry.start for entry in package.predictor.values())
    return total


def position_bytes(shape: Shape) -> int:
    """Keys and values of one position, of all layers and heads, as fp16."""
    return shape.layers * shape.key_heads * 2 * shape.head_width * 2
