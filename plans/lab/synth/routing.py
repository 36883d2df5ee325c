"""Synthetic routers whose choices repeat as often, and are as uneven, as those of a model family.

A router reads the state, which changes slowly, and the token's code, which differs for every token: the larger the
code's share, the fewer experts repeat. An expert's own value, a bias on the steady coordinates, is the same for all
tokens: the larger its share, the more often experts come back. Hot experts have such a bias too. A router also reads
the outputs of layers, in the directions that differ most from the input of the layer before: the larger their share,
the fewer experts can be predicted a layer ahead. Random directions would differ too little.

Published for Mixtral and Qwen3: 35 to 43 % of a token's experts repeat, 80 to 89 % can be predicted a layer ahead.
Assumed: SmallThinker's repeat as often; families without published routes are like Qwen3 and Gemma 4; an expert's own
value is the same for all sequences; the deviation of the values.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from neuronpipe.plans.cost.expert_misses import EXPERT_SHARE, HotExperts, hot_experts_of, own_share_of
from neuronpipe.plans.lab.synth.shapes import Coordinates
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.predictor.fit import quantile
from neuronpipe.plans.reference.expert_shares import expert_shares
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

Array = NDArray[np.float32]


@frozen
class Routing:
    """Requested properties of a family's routers.

    own_share: share of the values' variance that is the experts' own
    token_share: share of the rest that the token's code causes
    moved: variance of the difference between values and those from the input of the layer before, relative to the
        variance of the values
    hot: the experts that are chosen more often than others
    deviation: standard deviation of the values
    """

    own_share: float = 0.0
    token_share: float = 0.0
    moved: float = 0.0
    hot: HotExperts = HotExperts()
    deviation: float = 1.5  # the better of two chosen experts has about 70 % of the sum


MOVING = 16  # number of directions of the outputs of layers that a router reads
# They are combinations of as many principal components of how outputs move. In the others the topics of the calibration
# tokens differ little by chance: a router would choose the same experts for most tokens of another topic.
COMPONENTS = 32
MAX_WRITTEN = 0.5  # their maximal share of a router's variance, of what is not the experts' own
RIDGE = 0.01  # excludes directions with little variance

# In the simulator CLOCK misses with it as much as on recorded routes of Qwen3-30B-A3B and Gemma-4-26B-A4B (beside
# plans/cost/expert_misses.py): 48, 33, 12, 5 and 2 % with 10, 15, 30, 45 and 60 % resident (recorded: 48, 33, 12, 4 and
# 2 %).
RECORDED = Routing(own_share=EXPERT_SHARE, token_share=0.7)
ROUTINGS = {
    "smallthinker": Routing(own_share_of("smallthinker"), token_share=0.5, hot=hot_experts_of("smallthinker")),
    "llama": Routing(own_share_of("llama"), token_share=0.5, moved=0.06),  # TurboSparse-Mixtral
    **dict.fromkeys(("qwen3", "deepseek", "phi", "nemotron_h", "granite_hybrid"), replace(RECORDED, moved=0.045)),
}


def routing_of(model: ModelSpec) -> Routing:
    return ROUTINGS.get(model.family, RECORDED) if model.experts > 1 else Routing()


def frequencies(model: ModelSpec, routing: Routing) -> NDArray[np.float64]:
    """Return the requested frequency of each expert of a layer, hot experts first. The sum is experts_per_token."""
    hot, frequency = routing.hot.count(model.experts), routing.hot.frequency
    other_frequency = (model.experts_per_token - hot * frequency) / (model.experts - hot)
    return np.where(np.arange(model.experts) < hot, frequency, other_frequency)


def make_router(
    model: ModelSpec, places: Coordinates, read: Array, before: Array | None, random: np.random.Generator
) -> tuple[Array, Array]:
    """Return a layer's router [experts, width], and `expert_shares` of the calibration tokens.

    read: the router's inputs [tokens, width]
    before: inputs of the router of the layer before; None in the first layer
    """
    routing, rows = routing_of(model), np.zeros((model.experts, model.width), dtype=np.float32)
    steps, written = np.zeros((model.width, 0)), 0.0
    other_share = 1 - routing.own_share
    if routing.moved and before is not None:
        steps, moved = _what_moves(places, read, before)
        written = min(MAX_WRITTEN * other_share, routing.moved / moved)
    for part, share in ((places.state, 1 - routing.token_share), (places.identity, routing.token_share)):
        if power := share * (other_share - written):
            length = float(np.sqrt(np.square(read[:, part]).sum(axis=1).mean()))
            weights = random.standard_normal((model.experts, part.stop - part.start))
            rows[:, part] = weights * (np.sqrt(power) * routing.deviation / length)
    if written:
        weights = random.standard_normal((model.experts, steps.shape[1])) / np.sqrt(steps.shape[1])
        rows += (weights @ steps.T * (np.sqrt(written) * routing.deviation)).astype(np.float32)
    biases = np.zeros(0)
    if routing.hot.share:
        biases = routing.deviation * quantile(frequencies(model, routing))
    elif routing.own_share:
        ranks = (np.arange(model.experts) + 0.5) / model.experts
        biases = routing.deviation * math.sqrt(routing.own_share) * quantile(ranks)
    if len(biases):
        steady = read[:, places.steady].sum(axis=1).mean()
        rows[:, places.steady] = random.permutation(biases)[:, None] / steady
    return rows, expert_shares(model, read @ rows.T)


def _what_moves(places: Coordinates, read: Array, before: Array) -> tuple[NDArray[np.float64], float]:
    """Return the directions [width, MOVING] of the outputs of layers in which `read` and `before` differ most, scaled
    to unit variance of `read`, and the mean variance of the difference."""
    written = slice(places.attention.start, places.feed_forward.stop)
    now, step = read[:, written].astype(np.float64), (read - before)[:, written].astype(np.float64)
    components = np.linalg.svd(step - step.mean(axis=0), full_matrices=False)[2][:COMPONENTS].T
    now, step = now @ components, step @ components
    covariance = np.cov(now.T)
    covariance += np.eye(len(covariance)) * (RIDGE * np.trace(covariance) / len(covariance))
    white = np.linalg.inv(np.linalg.cholesky(covariance))
    moved, turn = np.linalg.eigh(white @ np.cov(step.T) @ white.T)
    directions = np.zeros((read.shape[1], MOVING))
    directions[written] = components @ white.T @ turn[:, -MOVING:]
    return directions, float(moved[-MOVING:].mean())
