"""Bytes that a step reads from memory: of the fixed tensors, per neuron, and per position of the KV cache."""

from __future__ import annotations

from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import Quantization, row_bytes
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.reader import Package


def neuron_row_bytes(manifest: Manifest) -> int:
    """Return the mean bytes of a row of the value part, quants and scales."""
    values = manifest.layout.matrices[1:]
    return sum(row_bytes(place.quantization or manifest.quantization, manifest.model.width) for place in values) // len(
        values
    )


def trigger_row_bytes(manifest: Manifest) -> int:
    """Return the bytes of a row of the trigger part, quants and scales."""
    return row_bytes(manifest.trigger_quantization, manifest.model.width)


def step_bytes(package: Package, *, predicts: bool) -> int:
    """Return the bytes of the fixed tensors that a step reads entirely, however many tokens it has.

    predicts: add the predictor; in a mixture the predictors of the experts of one token
    """
    sizes = {name: entry.stop - entry.start for name, entry in package.fixed.items()}
    total = sum(sizes.values())
    looked_up = ["position_embedding"]
    if not package.manifest.model.tied_embeddings:
        looked_up += ["embedding.quants", "embedding.scales"]
    total -= sum(sizes.get(name, 0) for name in looked_up)
    if predicts and package.predictor is not None:
        predictors = sum(entry.stop - entry.start for entry in package.predictor.values())
        total += predictors * package.manifest.model.active_ffns // package.manifest.model.ffns
    return total


def position_bytes(model: ModelSpec, kv_type: Quantization) -> int:
    """Return the bytes of the keys and values of one position, in all layers and heads, as elements of this type."""
    return row_bytes(kv_type, model.position_elements)
