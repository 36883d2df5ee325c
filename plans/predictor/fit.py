"""A predictor without training: low-rank factors of Gate (and Up) that matter on a calibration text, and thresholds.

Values of a side [tokens, neurons] are centred and divided by their deviation (D); their leading directions over
neurons, V [neurons, rank], give the truncated singular value decomposition of the rows whitened by the inputs (SVDP)
without forming a covariance: score = V · (V^T D G) · x. Where the predictor reads another vector than the
feed-forward's, V^T D G is carried over to it by regression. Thresholds come last, on the scores of the quantized
factors: a neuron is predicted where it is active with a probability above c, and c is what gives the wanted recall over
all neurons of the layer. A rare neuron thus needs no sample of its own firing: its deviation is known from every token.
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
NEVER = np.float32(-1e30)  # a bias that no score reaches


@frozen
class Calibration:
    """One layer on the calibration text: what the predictor reads [tokens, width], what the feed-forward reads, and per
    predicted side its weights [neurons, width] and values [tokens, neurons]; active bool [tokens, neurons]."""

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
    """Factors of one layer, encoded, with the thresholds that reach `recall` on the calibration text. progress: told
    which share of the time is over, about. Raises UserError when there are no numbers to encode."""
    weight = np.sqrt(layer.active.mean(axis=0) + MIN_ACTIVITY)  # what fires often costs more when it is missed
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
        rows = carried_over(rows, layer.reads, layer.feed_forward)
    mean = layer.reads.mean(axis=0)
    rows = rows - np.outer(rows @ mean, mean) / (mean @ mean)  # the bias carries what every token has in common
    if not (np.isfinite(rows).all() and np.isfinite(directions).all()):
        # Seen with the OpenBLAS in numpy on an emulated matrix extension (SME): finite matrices, and a product of NaN.
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
    """The first `rank` right singular vectors of values [tokens, neurons] as [neurons, rank], randomized."""
    count = min(rank + SPARE_DIRECTIONS, *values.shape)
    random = np.random.default_rng(0)
    basis = values.T @ random.standard_normal((len(values), count), dtype=np.float32)
    for _ in range(POWER_STEPS):
        basis = values.T @ (values @ _orthonormal(basis))
    basis = _orthonormal(basis)
    small = values @ basis
    turn = np.linalg.eigh((small.T @ small).astype(np.float64))[1][:, ::-1]  # the largest first
    directions = np.zeros((values.shape[1], rank), dtype=np.float32)
    found = min(rank, count)
    directions[:, :found] = basis @ turn[:, :found].astype(np.float32)
    return directions


def _orthonormal(basis: Array) -> Array:
    """Orthonormal columns of the same span, by products alone: an order faster than Householder's for tall matrices.
    Directions below the precision of their inner products become zero."""
    size, turn = np.linalg.eigh((basis.T @ basis).astype(np.float64))
    inverse = np.where(size > MIN_DEVIATION * size[-1], 1 / np.sqrt(np.maximum(size, 1e-300)), 0)
    return np.asarray(basis @ (turn * inverse).astype(np.float32))


def carried_over(rows: Array, reads: Array, target: Array) -> Array:
    """Rows that give from `reads` what `rows` give from `target`: each coordinate by its own slope, and what that
    leaves by ridge regression, so that a short text does not invent relations."""
    source, wanted = reads - reads.mean(axis=0), target - target.mean(axis=0)
    power = np.square(source).sum(axis=0)
    slope = (source * wanted).sum(axis=0) / np.maximum(power, MIN_DEVIATION)
    left = (wanted - source * slope) @ rows.T
    tokens, width = source.shape
    ridge = np.float32(power.mean() * max(0.01, width / tokens))
    if tokens > width:
        change = np.linalg.solve(source.T @ source + ridge * np.eye(width, dtype=np.float32), source.T @ left)
    else:
        change = source.T @ np.linalg.solve(source @ source.T + ridge * np.eye(tokens, dtype=np.float32), left)
    return np.asarray(rows * slope + change.T)


def scores(quantization: Quantization, factors: LayerFactors, hidden: Hidden, reads: Array) -> dict[Side, Array]:
    """Each side's scores [tokens, neurons] with its bias, as the engines compute them."""
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
    """Factors with biases. Per neuron value ≈ slope · score + offset with a normal error, so that P(value > 0 | score)
    is known; with one side of two, that is multiplied by how often the other side fires as well."""
    plain = LayerFactors(rows, {side: SideFactor(part, np.zeros(1, np.float32)) for side, part in sides.items()})
    raw = scores(quantization, plain, hidden, layer.reads)
    others = layer.active if len(sides) == 1 else None
    lines = {side: Line.fitted(raw[side], layer.values[side], others) for side in sides}
    chances = [line.chances(raw[side], layer.active) for side, line in lines.items()]
    least = least_chance(np.minimum.reduce(chances), recall)
    return LayerFactors(rows, {side: SideFactor(sides[side], line.bias(least)) for side, line in lines.items()})


@frozen
class Line:
    """value ≈ slope · score + offset with a normal error of this deviation, for each neuron [neurons].

    others: how often it is active when the value is above zero. constant: 1 for a value that is always the same and
    above zero, -1 where it is not above zero, 0 for all others.
    """

    slope: NDArray[np.float64]
    offset: NDArray[np.float64]
    error: NDArray[np.float64]
    others: NDArray[np.float64]
    constant: Array

    @classmethod
    def fitted(cls, score: Array, value: Array, active: NDArray[np.bool_] | None) -> Line:
        """From scores and values [tokens, neurons]. active: which were, if something else decides as well."""
        tokens = len(value)
        score_mean, value_mean = score.mean(axis=0), value.mean(axis=0)
        score, centred = score - score_mean, value - value_mean
        spread = np.maximum(_products(score, score) / tokens, MIN_DEVIATION**2)
        variance = _products(centred, centred) / tokens
        slope = np.maximum(_products(score, centred) / tokens / spread, MIN_DEVIATION)
        error = np.sqrt(np.maximum(variance - np.square(slope) * spread, MIN_DEVIATION**2))
        others = np.ones(value.shape[1])
        if active is not None:
            fired = (value > 0).sum(axis=0)
            others = np.minimum((active.sum(axis=0) + 0.1) / (fired + PRIOR_FIRINGS), 1.0)
        constant = np.where(variance <= MIN_DEVIATION**2, np.where(value[0] > 0, 1, -1), 0).astype(np.float32)
        return cls(slope, value_mean - slope * score_mean, error, others, constant)

    def chances(self, score: Array, where: NDArray[np.bool_]) -> NDArray[np.float64]:
        """How likely each neuron is active, given its score; of the pairs of token and neuron that `where` says."""
        tokens, neurons = np.nonzero(where)
        points = (self.slope[neurons] * score[tokens, neurons] + self.offset[neurons]) / self.error[neurons]
        likely = share_below(points) * self.others[neurons]
        return np.where(self.constant[neurons] != 0, self.constant[neurons] > 0, likely)

    def bias(self, least: float) -> Array:
        """What makes scores positive that are active with a chance above this one."""
        with np.errstate(invalid="ignore"):
            cut = (self.error * quantile(np.minimum(least / self.others, 1.0)) - self.offset) / self.slope
        bias = np.where(np.isfinite(cut), -cut, NEVER)
        return np.where(self.constant != 0, -NEVER * self.constant, bias).astype(np.float32)


def least_chance(chances: NDArray[np.float64], recall: float) -> float:
    """The chance that this share of the active neurons reaches."""
    if not len(chances):
        return MIN_CHANCE
    missed = int((1 - recall) * len(chances))
    return float(np.clip(np.partition(chances, missed)[missed] * (1 - 1e-6), MIN_CHANCE, MAX_CHANCE))


def _products(a: Array, b: Array) -> NDArray[np.float64]:
    """Sums over tokens of a · b, [neurons]."""
    return np.asarray(np.einsum("tn,tn->n", a, b), dtype=np.float64)


# The normal distribution on arrays, without a library for it.
_POINTS = np.linspace(-6.0, 6.0, 4801)
_SHARES = np.array([NormalDist().cdf(point) for point in _POINTS])


def quantile(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """The point below which the share lies; minus or plus infinity at 0 and 1."""
    return np.asarray(np.interp(shares, _SHARES, _POINTS, left=-np.inf, right=np.inf))


def share_below(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """P(z < point); beyond six deviations 0 or 1."""
    return np.asarray(np.interp(points, _POINTS, _SHARES, left=0.0, right=1.0))
