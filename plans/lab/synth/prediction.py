"""The predictor of a feed-forward, fitted while its neurons are made, of directions that `directions.py` chooses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from neuronpipe.plans.convert.quantize import encode
from neuronpipe.plans.lab.synth.directions import Directions
from neuronpipe.plans.lab.synth.shapes import Coordinates
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import PredictorQuality
from neuronpipe.plans.package.predictor_writer import LayerFactors, SideFactor
from neuronpipe.plans.package.writer import Rows
from neuronpipe.plans.predictor.fit import ScoreModel, min_probability
from neuronpipe.plans.predictor.predictions import judge
from neuronpipe.plans.reference.quantized import Vectors, product
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

Array = NDArray[np.float32]
Mask = NDArray[np.bool_]
RECALL_STEP = 4  # one token in so many is enough for the share of all active neurons that is found


@frozen
class PredictorShape:
    """What a layer's predictor is to be."""

    rank: int
    quantization: Quantization


@frozen
class BlockPredictor:
    """The part of a block of neurons, and what is to know of it."""

    factor: Rows
    scores: Array  # of the held-out tokens
    active: Mask  # of the held-out tokens
    line: ScoreModel
    probabilities: NDArray[np.float64]  # of those active in some of the others


@frozen
class Prediction:
    """What all predictors of a layer have in common: their directions, the rows they multiply their input with, and
    what these make of the calibration tokens. held_out: the tokens that they are judged on."""

    quantization: Quantization
    directions: Directions
    input_rows: Rows
    hidden: Vectors
    held_out: Mask

    @classmethod
    def of_layer(
        cls, shape: PredictorShape, places: Coordinates, normed: Array, reads: Array, held_out: Mask
    ) -> Prediction:
        """normed: what the feed-forward reads. reads: what the predictor reads, [tokens, width]."""
        directions = Directions.leading(normed[~held_out], places, shape.rank)
        input_rows = encode(shape.quantization, directions.rows(normed.shape[1]))
        hidden = Vectors(shape.quantization, product(shape.quantization, input_rows, reads))
        return cls(shape.quantization, directions, input_rows, hidden, held_out)

    def of_block(self, gate: Rows, gates: Array, active: Mask) -> BlockPredictor:
        """gates, active: values of Gate and which neurons are active, [tokens, neurons]."""
        factor = self.directions.factor(gate, self.quantization)
        scores, some = self.hidden.times(factor), np.flatnonzero(~self.held_out)[::RECALL_STEP]
        line = ScoreModel.fitted(scores[~self.held_out], gates[~self.held_out], active[~self.held_out])
        probabilities = line.probabilities(scores[some], active[some])
        return BlockPredictor(factor, scores[self.held_out], active[self.held_out], line, probabilities)

    def together(self, blocks: Sequence[BlockPredictor], recall: float) -> tuple[LayerFactors, PredictorQuality]:
        """The whole predictor with the thresholds that reach this recall on the calibration tokens, judged on the
        others."""
        least = min_probability(np.concatenate([block.probabilities for block in blocks]), recall)
        biases = [block.line.bias(least) for block in blocks]
        predicted = [block.scores + bias > 0 for block, bias in zip(blocks, biases, strict=True)]
        quants, scales = zip(*(block.factor for block in blocks), strict=True)
        side = SideFactor(Rows(np.concatenate(quants), np.concatenate(scales)), np.concatenate(biases))
        quality = judge(np.hstack(predicted), np.hstack([block.active for block in blocks]))
        return LayerFactors(self.input_rows, {"gate": side}), quality
