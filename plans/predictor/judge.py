"""How good a predictor is on text that it was not fitted on."""

from __future__ import annotations

import numpy as np
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import Hidden, PredictorQuality
from neuronpipe.plans.package.predictor_writer import LayerFactors
from neuronpipe.plans.predictor.fit import scores
from numpy.typing import NDArray


def predicted_neurons(
    quantization: Quantization, factors: LayerFactors, hidden: Hidden, reads: NDArray[np.float32]
) -> NDArray[np.bool_]:
    """Which neurons are predicted to be active, bool [tokens, neurons]."""
    positive = [score > 0 for score in scores(quantization, factors, hidden, reads).values()]
    return np.asarray(np.logical_and.reduce(positive))


def judge(predicted: NDArray[np.bool_], active: NDArray[np.bool_]) -> PredictorQuality:
    """Recall, precision and predicted share over tokens and neurons; a layer where nothing fires has recall 1."""
    hits = int((predicted & active).sum())
    return PredictorQuality(
        recall=round(hits / max(1, int(active.sum())), 6) if active.any() else 1.0,
        precision=round(hits / max(1, int(predicted.sum())), 6),
        predicted=round(float(predicted.mean()), 6),
    )
