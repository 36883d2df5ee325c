"""Bytes that computing reads from a package's tensors: per step, per neuron, per position."""

from __future__ import annotations

from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import row_bytes
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.reader import Package


def neuron_row_bytes(manifest: Manifest) -> int:
    """Return the bytes of a neuron's rows in the value part, quants and scales, divided by their number."""
    values = manifest.layout.matrices[1:]
    return sum(row_bytes(place.quantization or manifest.quantization, manifest.model.width) for place in values) // len(
        values
    )


def trigger_row_bytes(manifest: Manifest) -> int:
    """Return the bytes of the row that decides whether a neuron fires: its gate, or its up without a gate."""
    return row_bytes(manifest.trigger_quantization, manifest.model.width)


def step_bytes(package: Package, *, predicts: bool) -> int:
    """Return the bytes of the fixed tensors that a step reads entirely, however many tokens it has; in a mixture with
    the predictors of the experts that one token chooses."""
    sizes = {name: entry.stop - entry.start for name, entry in package.fixed.items()}
    total = sum(sizes.values())
    looked_up = ["position_embedding"]  # a step reads one row for each token
    if not package.manifest.model.tied_embeddings:
        looked_up += ["embedding.quants", "embedding.scales"]
    total -= sum(sizes.get(name, 0) for name in looked_up)
    if predicts and package.predictor is not None:
        predictors = sum(entry.stop - entry.start for entry in package.predictor.values())
        total += predictors * package.manifest.model.experts_per_token // package.manifest.model.experts
    return total


def position_bytes(model: ModelSpec) -> int:
    """Return the bytes of keys and values of one position, in all layers and heads, as fp16."""
    return model.layers * model.key_heads * 2 * model.head_width * 2
