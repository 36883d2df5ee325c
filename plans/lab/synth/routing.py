"""Synthetic routers whose choices repeat as often, and are as uneven, as those of a model family.

A router reads the state, which moves slowly, and the token's code, which differs for every token: the more of the code,
the less often a token chooses the experts of the token before. It also reads what the layers write, where that differs
most from the input of the layer before: the more of it, the fewer experts can be guessed a layer ahead. Random rows
over what layers write would change too little from layer to layer. Hot experts have a bias on the steady coordinates.

Published for Mixtral and Qwen3: 35 to 43 % of a token's experts repeat, 80 to 89 % can be named a layer ahead. Assumed:
SmallThinker repeats as often; Qwen3's experts are equally likely over all sequences; the deviation of the values.
"""

from __future__ import annotations

import numpy as np
from neuronpipe.plans.cost.activation_rates import HotExperts, hot_experts_of
from neuronpipe.plans.lab.synth.shapes import Coordinates
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.predictor.fit import quantile
from neuronpipe.plans.reference.engine import expert_shares
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

Array = NDArray[np.float32]


@frozen
class Routing:
    """Requested properties of a family's routers.

    token_share: share of the values' variance that comes from the token's code. moved: variance of the difference to
    the values that the input of the layer before would give, relative to theirs. hot: the experts that are chosen more
    often than others. deviation: standard deviation of a router's values.
    """

    token_share: float = 0.0
    moved: float = 0.0
    hot: HotExperts = HotExperts()
    deviation: float = 1.5  # the better of two chosen experts has about 70 % of the sum


MOVING = 16  # directions in which a router follows the layers
MAX_WRITTEN = 0.5  # of a router's variance
RIDGE = 0.01  # excludes directions that hardly move

ROUTINGS = {
    "smallthinker": Routing(token_share=0.5, hot=hot_experts_of("smallthinker")),
    "llama": Routing(token_share=0.5, moved=0.06),  # TurboSparse-Mixtral
    "qwen3": Routing(token_share=0.1, moved=0.045),
}


def routing_of(model: ModelSpec) -> Routing:
    """Return the routing of a model's family."""
    return ROUTINGS.get(model.family, Routing())


def frequencies(model: ModelSpec, routing: Routing) -> NDArray[np.float64]:
    """Return the requested frequency of each expert of a layer, hot ones first; their sum is experts_per_token."""
    hot, frequency = routing.hot.count(model.experts), routing.hot.frequency
    other_frequency = (model.experts_per_token - hot * frequency) / (model.experts - hot)
    return np.where(np.arange(model.experts) < hot, frequency, other_frequency)


def make_router(
    model: ModelSpec, places: Coordinates, read: Array, before: Array | None, random: np.random.Generator
) -> tuple[Array, Array]:
    """Return a layer's router, float32 [experts, width], and the experts' shares of each token [tokens, experts].

    read: the vectors that the router reads [tokens, width]. before: those of the layer before; None in the first layer.
    A share is 0 where an expert is not chosen.
    """
    routing, rows = routing_of(model), np.zeros((model.experts, model.width), dtype=np.float32)
    steps, written = np.zeros((model.width, 0)), 0.0
    if routing.moved and before is not None:
        steps, moved = _what_moves(places, read, before)
        written = min(MAX_WRITTEN, routing.moved / moved)
    for part, power in ((places.state, 1 - routing.token_share), (places.identity, routing.token_share)):
        if power:
            length = float(np.sqrt(np.square(read[:, part]).sum(axis=1).mean()))
            weights = random.standard_normal((model.experts, part.stop - part.start))
            rows[:, part] = weights * (np.sqrt(power * (1 - written)) * routing.deviation / length)
    if written:
        weights = random.standard_normal((model.experts, steps.shape[1])) / np.sqrt(steps.shape[1])
        rows += (weights @ steps.T * (np.sqrt(written) * routing.deviation)).astype(np.float32)
    if routing.hot.share:
        biases = routing.deviation * quantile(frequencies(model, routing))
        steady = read[:, places.steady].sum(axis=1).mean()
        rows[:, places.steady] = random.permutation(biases)[:, None] / steady
    return rows, expert_shares(model, read @ rows.T)


def _what_moves(places: Coordinates, read: Array, before: Array) -> tuple[NDArray[np.float64], float]:
    """Return the directions [width, count] of what layers write in which vectors differ most from those of the layer
    before, scaled to unit variance of the vectors, and the mean variance of that difference."""
    written = slice(places.attention.start, places.feed_forward.stop)
    now, step = read[:, written].astype(np.float64), (read - before)[:, written].astype(np.float64)
    covariance = np.cov(now.T)
    covariance += np.eye(len(covariance)) * (RIDGE * np.trace(covariance) / len(covariance))
    white = np.linalg.inv(np.linalg.cholesky(covariance))
    moved, turn = np.linalg.eigh(white @ np.cov(step.T) @ white.T)
    directions = np.zeros((read.shape[1], MOVING))
    directions[written] = white.T @ turn[:, -MOVING:]
    return directions, float(moved[-MOVING:].mean())
