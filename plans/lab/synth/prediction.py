"""The predictor of a feed-forward, fitted on the directions of directions.py while the neurons are computed.

By default it reads the input of attention, so that flash works during attention, and its factors are q4. In q8 it would
predict 1.41 instead of 1.50 neurons per active neuron (100m), with twice the bytes.
"""

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
RECALL_STEP = 4  # every fourth calibration token is enough to estimate recall


@frozen
class PredictorShape:
    rank: int
    quantization: Quantization


@frozen
class BlockPredictor:
    """The predictor of a block of neurons.

    scores: scores of the held-out tokens, without biases
    active: active neurons of the held-out tokens
    probabilities: probabilities of the active neurons of some calibration tokens
    """

    factor: Rows
    scores: Array
    active: Mask
    line: ScoreModel
    probabilities: NDArray[np.float64]


@frozen
class Prediction:
    """The common part of a layer's predictors.

    input_rows: the first factor
    hidden: its products with the predictor's inputs
    held_out: mask of the tokens on which predictors are evaluated
    """

    quantization: Quantization
    directions: Directions
    input_rows: Rows
    hidden: Vectors
    held_out: Mask

    @classmethod
    def of_layer(
        cls, shape: PredictorShape, places: Coordinates, normed: Array, reads: Array, held_out: Mask
    ) -> Prediction:
        """Return the common part, with fitted directions.

        normed, reads: inputs of the feed-forward and of the predictor [tokens, width]
        """
        directions = Directions.leading(normed[~held_out], places, shape.rank)
        input_rows = encode(shape.quantization, directions.rows(normed.shape[1]))
        hidden = Vectors(shape.quantization, product(shape.quantization, input_rows, reads))
        return cls(shape.quantization, directions, input_rows, hidden, held_out)

    def of_block(self, gate: Rows, gates: Array, active: Mask) -> BlockPredictor:
        """Return the predictor of a block.

        gates, active: values of Gate, and a mask of active neurons [tokens, neurons]
        """
        factor = self.directions.factor(gate, self.quantization)
        scores, calibration = self.hidden.times(factor), np.flatnonzero(~self.held_out)[::RECALL_STEP]
        line = ScoreModel.fitted(scores[~self.held_out], gates[~self.held_out], active[~self.held_out])
        probabilities = line.probabilities(scores[calibration], active[calibration])
        return BlockPredictor(factor, scores[self.held_out], active[self.held_out], line, probabilities)

    def together(self, blocks: Sequence[BlockPredictor], recall: float) -> tuple[LayerFactors, PredictorQuality]:
        """Return the predictor of a feed-forward, with thresholds that reach `recall` on calibration tokens, and its
        quality on held-out tokens."""
        minimum = min_probability(np.concatenate([block.probabilities for block in blocks]), recall)
        biases = [block.line.bias(minimum) for block in blocks]
        predicted = [block.scores + bias > 0 for block, bias in zip(blocks, biases, strict=True)]
        quants, scales = zip(*(block.factor for block in blocks), strict=True)
        side = SideFactor(Rows(np.concatenate(quants), np.concatenate(scales)), np.concatenate(biases))
        quality = judge(np.hstack(predicted), np.hstack([block.active for block in blocks]))
        return LayerFactors(self.input_rows, {"gate": side}), quality
