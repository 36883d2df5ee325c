"""The bytes that computing reads of a package: by every step, of a neuron, of a position."""

from __future__ import annotations

from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import row_bytes
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.reader import Package


def neuron_row_bytes(manifest: Manifest) -> int:
    """A neuron's up or down, and its gate where that has no quantization of its own: quants and scales."""
    return row_bytes(manifest.quantization, manifest.model.width)


def trigger_row_bytes(manifest: Manifest) -> int:
    """The row that decides whether a neuron fires: its gate, or its up where it has none."""
    return row_bytes(manifest.trigger_quantization, manifest.model.width)


def step_bytes(package: Package, *, predicts: bool) -> int:
    """The fixed tensors that a step reads from end to end, however many tokens it has; of a mixture's predictors those
    of the experts that one token chooses."""
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
    """Keys and values of one position, of all layers and heads, as fp16."""
    return model.layers * model.key_heads * 2 * model.head_width * 2
