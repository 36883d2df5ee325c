"""Parses the manifest's section `silent`: the thresholds of mode thresholded and their measured cost."""

from __future__ import annotations

from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.manifest import Silent
from neuronpipe.plans.strict_json import Record


def parse_silent(record: Record, model: ModelSpec) -> Silent:
    """Return the parsed thresholds. Raises UserError if they do not fit the model."""
    if model.activation != "silu":
        record.fail("by_layer", f"only silu has thresholds; this model computes {model.activation}")
    silent = record.read(Silent)
    if len(silent.by_layer) != model.layers:
        record.fail("by_layer", f"{len(silent.by_layer)} layers, but the model has {model.layers}")
    return silent
