"""Parses the manifest's section `silent`: the thresholds of mode thresholded and their measured cost."""

from __future__ import annotations

from neuronpipe.plans.models.spec import MAX_THRESHOLD, ModelSpec
from neuronpipe.plans.package.manifest import MAX_PERPLEXITY, MAX_SILENT_SHARE, MAX_TEXT_TOKENS, Silent, SilentLayer
from neuronpipe.plans.strict_json import Record


def parse_silent(record: Record, model: ModelSpec) -> Silent:
    """Return the parsed thresholds. Raises UserError if they do not fit the model."""
    if model.activation != "silu":
        record.fail("by_layer", f"only silu has thresholds; this model computes {model.activation}")
    silent = Silent(
        share=record.number("share", 0.0, MAX_SILENT_SHARE),
        by_layer=tuple(_parse_layer(layer) for layer in record.records("by_layer")),
        text=record.line("text"),
        calibration_tokens=record.integer("calibration_tokens", 1, MAX_TEXT_TOKENS),
        held_out_tokens=record.integer("held_out_tokens", 1, MAX_TEXT_TOKENS),
        exact_perplexity=record.number("exact_perplexity", 1.0, MAX_PERPLEXITY),
        thresholded_perplexity=record.number("thresholded_perplexity", 1.0, MAX_PERPLEXITY),
    )
    record.finish()
    if len(silent.by_layer) != model.layers:
        record.fail("by_layer", f"{len(silent.by_layer)} layers, but the model has {model.layers}")
    return silent


def _parse_layer(record: Record) -> SilentLayer:
    layer = SilentLayer(record.number("threshold", 0.0, MAX_THRESHOLD), record.number("share", 0.0, 1.0))
    record.finish()
    return layer
