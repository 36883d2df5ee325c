"""Predicted neurons, the quality of predictions, and a reader of a package's predictor."""

from __future__ import annotations

import numpy as np
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import Hidden, PredictorQuality
from neuronpipe.plans.package.predictor_writer import LayerFactors, SideFactor
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.tensors import predictor_name
from neuronpipe.plans.package.writer import Rows
from neuronpipe.plans.predictor.fit import scores
from neuronpipe.plans.reference.engine import LayerRun
from numpy.typing import NDArray


def predicted_neurons(
    quantization: Quantization, factors: LayerFactors, hidden: Hidden, reads: NDArray[np.float32]
) -> NDArray[np.bool_]:
    """Return a mask [tokens, neurons] of the neurons that are predicted to be active."""
    positive = [score > 0 for score in scores(quantization, factors, hidden, reads).values()]
    return np.asarray(np.logical_and.reduce(positive))


def judge(predicted: NDArray[np.bool_], active: NDArray[np.bool_]) -> PredictorQuality:
    """Return the quality of predictions, both masks [tokens, neurons]. Recall is 1 if no neuron is active, precision 0
    if none is predicted."""
    hits = int((predicted & active).sum())
    return PredictorQuality(
        recall=round(hits / max(1, int(active.sum())), 6) if active.any() else 1.0,
        precision=round(hits / max(1, int(predicted.sum())), 6),
        predicted=round(float(predicted.mean()), 6),
    )


class StoredPredictor:
    """Reader of a package's predictor.safetensors, without a cache. Raises ValueError if there is none."""

    def __init__(self, package: Package) -> None:
        if package.predictor is None or package.manifest.predictor is None:
            raise ValueError("this package has no predictor")
        self._entries, self._predictor = package.predictor, package.manifest.predictor
        self._model = package.manifest.model
        self._file: NDArray[np.uint8] = np.memmap(package.predictor_path, mode="r", dtype=np.uint8)

    def of_ffn(self, number: int) -> LayerFactors:
        """Return the factors of feed-forward `number`, counted through all layers."""
        name = predictor_name(self._model, *self._model.place_of(number))
        return LayerFactors(
            self._rows(f"{name}.input"),
            {
                side: SideFactor(
                    self._rows(f"{name}.{side}"), self._bytes(f"{name}.{side}.bias").view("<f4").reshape(-1)
                )
                for side in self._predictor.sides
            },
        )

    def mask(self, run: LayerRun) -> NDArray[np.bool_]:
        """Return a mask [tokens, neurons] of a feed-forward's predicted neurons, for the reference engine."""
        predictor = self._predictor
        factors = self.of_ffn(run.ffn)
        return predicted_neurons(predictor.quantization, factors, predictor.hidden, run.read_by(predictor.reads))

    def _bytes(self, name: str) -> NDArray[np.uint8]:
        entry = self._entries[name]
        return np.array(self._file[entry.start : entry.stop].reshape(entry.shape[0], -1))

    def _rows(self, name: str) -> Rows:
        quants = self._bytes(f"{name}.quants")
        plain = self._predictor.quantization == "f16"
        return Rows(quants, quants[:, :0] if plain else self._bytes(f"{name}.scales"))
