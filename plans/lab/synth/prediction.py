"""The predictor of a feed-forward, fitted while its neurons are computed, on directions that `directions.py` chooses.

It reads the input of attention, so that flash reads are hidden by attention, which writes little here. Its factors are
q4: q8 would predict 1.41 neurons per active one instead of 1.50 (100m), for twice the bytes of factors.
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
RECALL_STEP = 4  # every fourth token is enough to estimate recall


@frozen
class PredictorShape:
    """The rank and the quantization of a predictor."""

    rank: int
    quantization: Quantization


@frozen
class BlockPredictor:
    """The predictor's rows of a block of neurons, and their scores."""

    factor: Rows
    scores: Array  # of the held-out tokens
    active: Mask  # of the held-out tokens
    line: ScoreModel
    probabilities: NDArray[np.float64]  # of neurons that are active in some of the calibration tokens


@frozen
class Prediction:
    """The common part of a layer's predictors: directions, the rows that multiply the input, and their products with
    the calibration tokens.

    held_out: the tokens on which predictors are judged
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
        """Fit directions.

        normed: inputs of the feed-forward
        reads: inputs of the predictor, both [tokens, width]
        """
        directions = Directions.leading(normed[~held_out], places, shape.rank)
        input_rows = encode(shape.quantization, directions.rows(normed.shape[1]))
        hidden = Vectors(shape.quantization, product(shape.quantization, input_rows, reads))
        return cls(shape.quantization, directions, input_rows, hidden, held_out)

    def of_block(self, gate: Rows, gates: Array, active: Mask) -> BlockPredictor:
        """Fit a block's rows.

        gates, active: values of Gate, and a mask of active neurons, both [tokens, neurons]
        """
        factor = self.directions.factor(gate, self.quantization)
        scores, calibration = self.hidden.times(factor), np.flatnonzero(~self.held_out)[::RECALL_STEP]
        line = ScoreModel.fitted(scores[~self.held_out], gates[~self.held_out], active[~self.held_out])
        probabilities = line.probabilities(scores[calibration], active[calibration])
        return BlockPredictor(factor, scores[self.held_out], active[self.held_out], line, probabilities)

    def together(self, blocks: Sequence[BlockPredictor], recall: float) -> tuple[LayerFactors, PredictorQuality]:
        """Return the whole predictor, with thresholds that reach this recall on the calibration tokens, and its quality
        on the held-out tokens."""
        minimum = min_probability(np.concatenate([block.probabilities for block in blocks]), recall)
        biases = [block.line.bias(minimum) for block in blocks]
        predicted = [block.scores + bias > 0 for block, bias in zip(blocks, biases, strict=True)]
        quants, scales = zip(*(block.factor for block in blocks), strict=True)
        side = SideFactor(Rows(np.concatenate(quants), np.concatenate(scales)), np.concatenate(biases))
        quality = judge(np.hstack(predicted), np.hstack([block.active for block in blocks]))
        return LayerFactors(self.input_rows, {"gate": side}), quality
