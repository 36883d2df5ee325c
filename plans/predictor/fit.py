"""A predictor without training: low-rank factors of Gate (and Up) weighted by a calibration text, and thresholds.

A side is Gate or Up. Its values are the products of its rows G [neurons, width] with the inputs. The values [tokens,
neurons] are centred and multiplied by D, the inverse of their deviations. Their leading directions over neurons, V
[neurons, rank], give the truncated singular value decomposition of the rows whitened by the inputs, without forming a
covariance: score = V · (V^T D G) · x. If the predictor reads another vector than the feed-forward does, V^T D G is
transferred to that vector by regression. Thresholds are fitted last, on the scores of the quantized factors: a neuron
is predicted if it is active with a probability above c, which is chosen for the requested recall over all neurons of
the layer. A neuron need not fire on the text, since all tokens determine the deviation of its values.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from neuronpipe.plans.convert.quantize import encode
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import Hidden, Side
from neuronpipe.plans.package.predictor_writer import LayerFactors, SideFactor
from neuronpipe.plans.package.writer import Rows
from neuronpipe.plans.reference.quantized import product
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

Array = NDArray[np.float32]
POWER_STEPS = 2
SPARE_DIRECTIONS = 16
PRIOR_FIRINGS = 2.0
MIN_CHANCE, MAX_CHANCE = 1e-4, 0.9999
MIN_DEVIATION = 1e-6
MIN_ACTIVITY = 0.003
NEVER = np.float32(-1e30)  # a bias with which no score is positive


@frozen
class Calibration:
    """One feed-forward on the calibration text.

    reads: the predictor's inputs [tokens, width]
    feed_forward: the feed-forward's inputs [tokens, width]; the same array as `reads` if the predictor reads them
    weights: rows of each predicted side [neurons, width]
    values: products of these with the feed-forward's inputs, minus the model's threshold [tokens, neurons]
    active: the neurons that fire [tokens, neurons]
    """

    reads: Array
    feed_forward: Array
    weights: dict[Side, Array]
    values: dict[Side, Array]
    active: NDArray[np.bool_]


def fit_layer(
    layer: Calibration,
    rank: int,
    quantization: Quantization,
    recall: float,
    progress: Callable[[float], None] = lambda share: None,
) -> LayerFactors:
    """Return encoded factors of a feed-forward, with thresholds that reach `recall` on the calibration text. Raises
    UserError if the factors are not finite.

    progress: receives the approximate share of the time that is over
    """
    weight = np.sqrt(layer.active.mean(axis=0) + MIN_ACTIVITY)  # missing a neuron that fires often costs more
    deviation = {side: np.maximum(values.std(axis=0), MIN_DEVIATION) / weight for side, values in layer.values.items()}
    scaled = np.concatenate(
        [(values - values.mean(axis=0)) / deviation[side] for side, values in layer.values.items()], axis=1
    )
    progress(0.2)
    directions = leading_directions(scaled, rank)
    progress(0.55)
    bounds = np.cumsum([0] + [len(deviation[side]) for side in layer.values])
    parts = {side: directions[a:b] for side, a, b in zip(layer.values, bounds[:-1], bounds[1:], strict=True)}
    rows = sum((parts[side] / deviation[side][:, None]).T @ layer.weights[side] for side in layer.values)
    if layer.reads is not layer.feed_forward:
        rows = transfer_rows(rows, layer.reads, layer.feed_forward)
    mean = layer.reads.mean(axis=0)
    rows = rows - np.outer(rows @ mean, mean) / (mean @ mean)  # the bias carries the component that all tokens share
    if not (np.isfinite(rows).all() and np.isfinite(directions).all()):
        # Observed with numpy's OpenBLAS on an emulated matrix extension (SME): finite matrices with a product of NaN.
        raise UserError(
            "the predictor has values that are not numbers: the package is damaged (`neuronpipe perplexity` shows it), "
            "or numpy cannot multiply matrices on this processor; on Arm, try again with OPENBLAS_CORETYPE=ARMV8 set"
        )
    return thresholds(
        encode(quantization, rows.astype(np.float32)),
        {side: encode(quantization, part.astype(np.float32)) for side, part in parts.items()},
        layer,
        quantization,
        recall,
    )


def leading_directions(values: Array, rank: int) -> Array:
    """Return the first `rank` right singular vectors of `values` [tokens, neurons] as [neurons, rank]. The method is
    randomized, with a fixed seed; missing vectors are 0."""
    count = min(rank + SPARE_DIRECTIONS, *values.shape)
    random = np.random.default_rng(0)
    basis = values.T @ random.standard_normal((len(values), count), dtype=np.float32)
    for _ in range(POWER_STEPS):
        basis = values.T @ (values @ _orthonormal(basis))
    basis = _orthonormal(basis)
    projected = values @ basis
    rotation = np.linalg.eigh((projected.T @ projected).astype(np.float64))[1][:, ::-1]  # the largest first
    directions = np.zeros((values.shape[1], rank), dtype=np.float32)
    count_used = min(rank, count)
    directions[:, :count_used] = basis @ rotation[:, :count_used].astype(np.float32)
    return directions


def _orthonormal(basis: Array) -> Array:
    """Return orthonormal columns with the span of `basis`; directions below the precision of inner products become 0.
    For tall matrices this is ten times as fast as Householder's method."""
    size, rotation = np.linalg.eigh((basis.T @ basis).astype(np.float64))
    inverse = np.where(size > MIN_DEVIATION * size[-1], 1 / np.sqrt(np.maximum(size, 1e-300)), 0)
    return np.asarray(basis @ (rotation * inverse).astype(np.float32))


def transfer_rows(rows: Array, reads: Array, target: Array) -> Array:
    """Return rows whose products with `reads` approximate the products of `rows` with `target`.

    Each coordinate of `target` is fitted by the same coordinate of `reads`, the residual by ridge regression, so that a
    short text does not cause spurious relations.
    """
    source, centred_target = reads - reads.mean(axis=0), target - target.mean(axis=0)
    power = np.square(source).sum(axis=0)
    slope = (source * centred_target).sum(axis=0) / np.maximum(power, MIN_DEVIATION)
    residual = (centred_target - source * slope) @ rows.T
    tokens, width = source.shape
    ridge = np.float32(power.mean() * max(0.01, width / tokens))
    if tokens > width:
        change = np.linalg.solve(source.T @ source + ridge * np.eye(width, dtype=np.float32), source.T @ residual)
    else:
        change = source.T @ np.linalg.solve(source @ source.T + ridge * np.eye(tokens, dtype=np.float32), residual)
    return np.asarray(rows * slope + change.T)


def scores(quantization: Quantization, factors: LayerFactors, hidden: Hidden, reads: Array) -> dict[Side, Array]:
    """Return each side's scores [tokens, neurons], bias included, bit for bit as the engines compute them."""
    inner = product(quantization, factors.input, reads)
    if hidden == "relu":
        inner = np.maximum(inner, 0)
    return {side: product(quantization, factor.rows, inner) + factor.bias for side, factor in factors.sides.items()}


def thresholds(
    rows: Rows,
    sides: dict[Side, Rows],
    layer: Calibration,
    quantization: Quantization,
    recall: float,
    hidden: Hidden = "none",
) -> LayerFactors:
    """Return factors with biases that reach `recall` on the calibration text. Probabilities are those of ScoreModel.

    rows, sides: encoded first factor, and second factor of each side
    """
    plain = LayerFactors(rows, {side: SideFactor(part, np.zeros(1, np.float32)) for side, part in sides.items()})
    raw = scores(quantization, plain, hidden, layer.reads)
    active = layer.active if len(sides) == 1 else None
    models = {side: ScoreModel.fitted(raw[side], layer.values[side], active) for side in sides}
    probabilities = [model.probabilities(raw[side], layer.active) for side, model in models.items()]
    threshold = min_probability(np.minimum.reduce(probabilities), recall)
    return LayerFactors(rows, {side: SideFactor(sides[side], model.bias(threshold)) for side, model in models.items()})


@frozen
class ScoreModel:
    """A linear model of each neuron: value ≈ slope · score + offset with a normal error. All arrays are [neurons].

    error: standard deviation of the error
    active_if_positive: probability that a neuron is active if its value is above 0
    constant: 1 if the value is constant and above 0, -1 if it is constant and not above 0, otherwise 0
    """

    slope: NDArray[np.float64]
    offset: NDArray[np.float64]
    error: NDArray[np.float64]
    active_if_positive: NDArray[np.float64]
    constant: Array

    @classmethod
    def fitted(cls, score: Array, value: Array, active: NDArray[np.bool_] | None) -> ScoreModel:
        """Return the model of scores and values [tokens, neurons].

        active: the neurons that fire [tokens, neurons]; None: a neuron fires if its value is above 0
        """
        tokens = len(value)
        score_mean, value_mean = score.mean(axis=0), value.mean(axis=0)
        score, centred = score - score_mean, value - value_mean
        spread = np.maximum(_products(score, score) / tokens, MIN_DEVIATION**2)
        variance = _products(centred, centred) / tokens
        slope = np.maximum(_products(score, centred) / tokens / spread, MIN_DEVIATION)
        error = np.sqrt(np.maximum(variance - np.square(slope) * spread, MIN_DEVIATION**2))
        active_if_positive = np.ones(value.shape[1])
        if active is not None:
            fired = (value > 0).sum(axis=0)
            active_if_positive = np.minimum((active.sum(axis=0) + 0.1) / (fired + PRIOR_FIRINGS), 1.0)
        constant = np.where(variance <= MIN_DEVIATION**2, np.where(value[0] > 0, 1, -1), 0).astype(np.float32)
        return cls(slope, value_mean - slope * score_mean, error, active_if_positive, constant)

    def probabilities(self, score: Array, where: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the probabilities that neurons are active, given their scores [tokens, neurons]. In one dimension, for
        the pairs of token and neuron that are true in `where`."""
        tokens, neurons = np.nonzero(where)
        points = (self.slope[neurons] * score[tokens, neurons] + self.offset[neurons]) / self.error[neurons]
        probabilities = share_below(points) * self.active_if_positive[neurons]
        return np.where(self.constant[neurons] != 0, self.constant[neurons] > 0, probabilities)

    def bias(self, min_probability: float) -> Array:
        """Return biases with which a score is positive if the neuron is active with a probability above
        `min_probability`."""
        with np.errstate(invalid="ignore"):
            point = quantile(np.minimum(min_probability / self.active_if_positive, 1.0))
            threshold = (self.error * point - self.offset) / self.slope
        bias = np.where(np.isfinite(threshold), -threshold, NEVER)
        return np.where(self.constant != 0, -NEVER * self.constant, bias).astype(np.float32)


def min_probability(probabilities: NDArray[np.float64], recall: float) -> float:
    """Return the probability that the share `recall` of the active neurons exceeds, within MIN_CHANCE..MAX_CHANCE.

    probabilities: predicted probabilities of the active neurons
    """
    if not len(probabilities):
        return MIN_CHANCE
    missed = int((1 - recall) * len(probabilities))
    return float(np.clip(np.partition(probabilities, missed)[missed] * (1 - 1e-6), MIN_CHANCE, MAX_CHANCE))


def _products(a: Array, b: Array) -> NDArray[np.float64]:
    return np.asarray(np.einsum("tn,tn->n", a, b), dtype=np.float64)


# The standard normal distribution for arrays, without a dependency on scipy.
_POINTS = np.linspace(-6.0, 6.0, 4801)
_SHARES = np.array([NormalDist().cdf(point) for point in _POINTS])


def quantile(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the quantiles of the standard normal distribution; minus or plus infinity beyond six deviations."""
    return np.asarray(np.interp(shares, _SHARES, _POINTS, left=-np.inf, right=np.inf))


def share_below(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return P(z < point) of the standard normal distribution; 0 or 1 beyond six deviations."""
    return np.asarray(np.interp(points, _POINTS, _SHARES, left=0.0, right=1.0))
