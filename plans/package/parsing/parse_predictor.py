"""Parses the manifest's section `predictor`: the description of predictor.safetensors, and its measured quality."""

from __future__ import annotations

from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import GROUP_WEIGHTS
from neuronpipe.plans.package.manifest import PREDICTOR_QUANTIZATIONS, Predictor
from neuronpipe.plans.strict_json import Record


def parse_predictor(record: Record, model: ModelSpec) -> Predictor:
    """Return the parsed predictor. Raises UserError if it does not fit the model."""
    if model.all_neurons_fire:
        record.fail("sides", f"{model.activation} neurons always fire; there is nothing to predict")
    record.choice("quantization", *PREDICTOR_QUANTIZATIONS)
    predictor = record.read(Predictor)
    _check_sides(record, predictor, model)
    _check_ranks(record, predictor, model)
    if len(predictor.by_layer) not in (0, model.layers):
        record.fail("by_layer", f"expected {model.layers} objects")
    cost = ("text", "held_out_tokens", "exact_perplexity", "predicted_perplexity")
    missing = [name for name in cost if getattr(predictor, name) is None]
    if 0 < len(missing) < len(cost):
        record.fail(missing[0], f"missing, besides {', '.join(name for name in cost if name not in missing)}")
    if predictor.rank % GROUP_WEIGHTS:
        record.fail("rank", f"{predictor.rank} is no multiple of {GROUP_WEIGHTS}")
    if predictor.reads == "attention" and model.experts > 1:
        record.fail("reads", "predictors of a mixture read the feed-forward's input, not attention's")
    if not predictor.by_layer and predictor.calibration_tokens:
        record.fail("by_layer", "is empty, though the predictor was calibrated")
    if predictor.quantization != "f16" and model.width % GROUP_WEIGHTS:
        record.fail("quantization", f"{predictor.quantization} needs a width that is a multiple of {GROUP_WEIGHTS}")
    return predictor


def _check_sides(record: Record, predictor: Predictor, model: ModelSpec) -> None:
    sides, is_drelu = predictor.sides, model.activation == "drelu"
    if sides not in ((model.trigger,), ("gate", "up")):
        record.fail("sides", f"expected {model.trigger}{', or gate and up' if is_drelu else ''}")
    if len(sides) > 1 and not is_drelu:
        record.fail("sides", f"the sign of up decides nothing with {model.activation}")


def _check_ranks(record: Record, predictor: Predictor, model: ModelSpec) -> None:
    if predictor.ranks is None:
        return
    if len(predictor.ranks) != model.ffns:
        record.fail("ranks", f"expected {model.ffns}, one for each feed-forward")
    if max(predictor.ranks) != predictor.rank:
        record.fail("ranks", f"the greatest is {max(predictor.ranks)}, and not `rank`, {predictor.rank}")
    for rank in predictor.ranks:
        if rank % GROUP_WEIGHTS:
            record.fail("ranks", f"{rank} is no multiple of {GROUP_WEIGHTS}")
