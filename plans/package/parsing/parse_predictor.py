"""Parses the manifest's section `predictor`: the description of predictor.safetensors, and its measured quality."""

from __future__ import annotations

from typing import cast

from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import GROUP_WEIGHTS, Quantization
from neuronpipe.plans.package.manifest import (
    MAX_PERPLEXITY,
    MAX_RANK,
    MAX_TEXT_TOKENS,
    PREDICTOR_QUANTIZATIONS,
    Hidden,
    Predictor,
    PredictorInput,
    PredictorQuality,
    Side,
)
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted


def parse_predictor(record: Record, model: ModelSpec) -> Predictor:
    """Return the parsed predictor. Raises UserError if it does not fit the model."""
    if model.all_neurons_fire:
        record.fail("sides", f"{model.activation} neurons always fire; there is nothing to predict")
    measured = record.has("exact_perplexity")
    predictor = Predictor(
        rank=record.integer("rank", GROUP_WEIGHTS, MAX_RANK),
        quantization=cast(Quantization, record.choice("quantization", *PREDICTOR_QUANTIZATIONS)),
        reads=cast(PredictorInput, record.choice("reads", "attention", "feed_forward", "residual")),
        sides=_parse_sides(record, model),
        hidden=cast(Hidden, record.choice("hidden", "none", "relu")),
        calibration_tokens=record.integer("calibration_tokens", 0, MAX_TEXT_TOKENS),
        by_layer=_parse_quality(record, model.layers),
        ranks=_parse_ranks(record, model) if record.has("ranks") else None,
        text=record.line("text") if measured else None,
        held_out_tokens=record.integer("held_out_tokens", 1, MAX_TEXT_TOKENS) if measured else None,
        exact_perplexity=record.number("exact_perplexity", 1.0, MAX_PERPLEXITY) if measured else None,
        predicted_perplexity=record.number("predicted_perplexity", 1.0, MAX_PERPLEXITY) if measured else None,
    )
    record.finish()
    if predictor.rank % GROUP_WEIGHTS:
        record.fail("rank", f"{predictor.rank} is no multiple of {GROUP_WEIGHTS}")
    if predictor.ranks is not None and max(predictor.ranks) != predictor.rank:
        record.fail("ranks", f"the greatest is {max(predictor.ranks)}, and not `rank`, {predictor.rank}")
    if predictor.reads == "attention" and model.experts > 1:
        record.fail("reads", "predictors of a mixture read the feed-forward's input, not attention's")
    if not predictor.by_layer and predictor.calibration_tokens:
        record.fail("by_layer", "is empty, though the predictor was calibrated")
    if predictor.quantization != "f16" and model.width % GROUP_WEIGHTS:
        record.fail("quantization", f"{predictor.quantization} needs a width that is a multiple of {GROUP_WEIGHTS}")
    return predictor


def _parse_sides(record: Record, model: ModelSpec) -> tuple[Side, ...]:
    sides, is_drelu = record.items("sides"), model.activation == "drelu"
    if sides not in ([model.trigger], ["gate", "up"]):
        record.fail("sides", f"expected {model.trigger}{', or gate and up' if is_drelu else ''}")
    if len(sides) > 1 and not is_drelu:
        record.fail("sides", f"the sign of up decides nothing with {model.activation}")
    return tuple(sides)


def _parse_ranks(record: Record, model: ModelSpec) -> tuple[int, ...]:
    ranks = record.items("ranks")
    if len(ranks) != model.ffns:
        record.fail("ranks", f"expected {model.ffns}, one for each feed-forward")
    for rank in ranks:
        if type(rank) is not int or rank % GROUP_WEIGHTS or not 0 < rank <= MAX_RANK:
            record.fail("ranks", f"expected multiples of {GROUP_WEIGHTS} up to {MAX_RANK}, found {quoted(rank)}")
    return tuple(ranks)


def _parse_quality(record: Record, layers: int) -> tuple[PredictorQuality, ...]:
    items = record.items("by_layer")
    if not items:
        return ()
    if len(items) != layers or not all(isinstance(item, dict) for item in items):
        record.fail("by_layer", f"expected {layers} objects")
    quality = []
    for number, item in enumerate(items):
        entry = Record(item, record.where, f"predictor.by_layer[{number}].")
        quality.append(
            PredictorQuality(*(entry.number(name, 0.0, 1.0) for name in ("recall", "precision", "predicted")))
        )
        entry.finish()
    return tuple(quality)
