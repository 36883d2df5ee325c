"""The neurons that are predicted and that fire, for each token and layer of a sequence.

A workload is generated like plans/lab/synth (Bamboo's curves, the autocorrelation of a preset) or recorded from a
package. A generated workload is a sample of the neurons, so that a 47B takes no longer than a 7B. All layers are in it,
since misses differ between layers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from neuronpipe.plans.activity.replacement_policies import Ids
from neuronpipe.plans.lab.shapes.models import SimulatedModel
from neuronpipe.plans.lab.simulate.recording import Recording
from neuronpipe.plans.lab.synth.activation_rates import active_shares
from neuronpipe.plans.lab.synth.routing import frequencies, routing_of
from neuronpipe.plans.lab.synth.trajectory import Preset, stretches
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.predictor.fit import quantile
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]

MAX_SAMPLED = 49152  # neurons of all layers together
RECALL = 0.95
# Share of the variance of states that is common to all tokens of a sequence, by family, in place of that of a preset.
# Attention adds to the preset's. So CLOCK misses 58, 29, 15 and 7.7 % of a 2B's clusters with 15, 30, 45 and 60 %
# resident, and 26, 12, 6.7 and 3.8 % of a 47B's with 15, 30, 43 and 56 %; runs missed 58, 29, 15 and 7.0, and 26, 11,
# 6.0 and 3.0 %.
STEADY_SHARES = {"llama": 0.25}
FITTED_TOKENS, BISECTIONS, MAX_BISECTED = 24, 14, 16.0
NOISE = Preset(a=0.0, b=0.6, rb=0.97, re=0.4, pj=0.02, keep=0.0)  # a predictor's error


@frozen
class LayerDemand:
    """The neurons that a token looks up in a layer.

    looked: ids, ascending, numbered over all layers
    fires: for each of these, True if it fires
    """

    looked: Ids
    fires: NDArray[np.bool_]


@frozen
class Workload:
    """The demands of all tokens.

    tokens: [token][layer]
    order: all ids, most frequent first
    frequency: share of the tokens that access each id; in a generated workload, of those that choose its expert
    scale: number of neurons for which an id stands
    of_ffn: number of ids of a feed-forward
    """

    tokens: list[list[LayerDemand]]
    order: Ids
    frequency: NDArray[np.float64]
    scale: float
    of_ffn: int


def generated(model: SimulatedModel, preset: Preset, tokens: int, seed: int, batch: int = 1) -> Workload:
    """Return a generated workload of `tokens` steps. A step of a batch wants the neurons that any sequence wants."""
    random = np.random.default_rng(seed)
    spec = model.spec
    if spec.experts > 1 and (steady := STEADY_SHARES.get(spec.family, 0.0)) > preset.a:
        preset = dataclasses.replace(preset, a=steady, b=max(0.0, preset.b - (steady - preset.a)))
    sampled = min(spec.neurons, max(64, MAX_SAMPLED // spec.ffns))
    one_expert = [active_shares(layer, spec.layers, sampled, model.active) for layer in range(spec.layers)]
    shares = np.concatenate(
        [np.tile(layer, count) for layer, count in zip(one_expert, spec.expert_counts, strict=True)]
    )
    cuts = (-quantile(shares)).astype(np.float32)
    generator = _Sequence(model, preset, cuts, _predictor(model, preset, shares, random))
    steps: list[list[LayerDemand]] = []
    sequences = [generator.tokens(tokens, np.random.default_rng((seed, n))) for n in range(batch)]
    for step_masks in zip(*sequences, strict=True):
        is_named = np.logical_or.reduce([masks[0] for masks in step_masks])
        fires = np.logical_or.reduce([masks[1] for masks in step_masks])
        ids = np.flatnonzero(is_named)
        bounds = np.searchsorted(ids, np.array(spec.first_ffns) * sampled)
        steps.append([LayerDemand(ids[a:b], fires[ids[a:b]]) for a, b in itertools.pairwise(bounds)])
    order = np.argsort(-shares, kind="stable")
    return Workload(steps, order, shares, spec.neurons / sampled, sampled)


class _Sequence:
    def __init__(self, model: SimulatedModel, preset: Preset, cuts: Floats, predictor: Predictor) -> None:
        self._model, self._preset, self._cuts, self._predictor = model, preset, cuts, predictor

    def tokens(self, count: int, random: np.random.Generator) -> Iterator[tuple[Mask, Mask]]:
        """Yield two masks over all neurons for each token: predicted neurons, and those of them that fire."""
        spec, width = self._model.spec, len(self._cuts)
        routing, bias = routing_of(spec), _router_biases(spec, random)
        own_share, token_share = routing.own_share, routing.token_share
        noise = stretches(NOISE, count, width, random)
        # Routers follow the state, as in synth.
        routes = stretches(self._preset, count, spec.layers * spec.experts, random)
        for states in stretches(self._preset, count, width, random):
            fires = states > self._cuts
            scores = states + np.float32(self._predictor.noise) * next(noise) if self._predictor.noise else states
            names = scores > self._predictor.cuts
            for is_firing, is_named, route in zip(fires, names, next(routes), strict=True):
                if spec.experts > 1:
                    tokens_part = np.sqrt(token_share) * random.standard_normal(len(route))
                    values = np.sqrt(1 - own_share) * (route * np.sqrt(1 - token_share) + tokens_part)
                    is_named &= _chosen(values.reshape(spec.layers, spec.experts) + bias, spec, width)
                yield is_named, is_firing & is_named


def _router_biases(spec: ModelSpec, of_sequence: np.random.Generator) -> NDArray[np.float64]:
    """Return biases [layers, experts] with which experts are as frequent as in the family.

    Hot experts do not depend on the sequence. Other families are trained to choose all experts equally often, so that
    their experts differ in frequency within a sequence only.
    """
    routing, random = routing_of(spec), np.random.default_rng(0)
    if routing.own_share:
        return math.sqrt(routing.own_share) * of_sequence.standard_normal((spec.layers, spec.experts))
    if not routing.hot.share:
        return np.zeros((spec.layers, spec.experts))
    biases = quantile(frequencies(spec, routing))
    return np.stack([random.permutation(biases) for _ in range(spec.layers)])


def _chosen(route: NDArray[np.floating[Any]], spec: ModelSpec, width: int) -> Mask:
    """Return a mask of the `width` neurons of all layers: those of the experts with the greatest router values `route`
    [layers, experts] in each layer, and of the experts that compute every token."""
    is_chosen = np.ones(spec.ffns, dtype=bool)
    best = np.argsort(-route, axis=1)[:, : spec.experts_per_token]
    for layer, first in enumerate(spec.first_ffns[:-1]):
        if spec.routed_experts(layer):
            is_chosen[first : first + spec.experts] = False
            is_chosen[first + best[layer]] = True
    return np.repeat(is_chosen, width // spec.ffns)


@frozen
class Predictor:
    """A predictor that predicts a neuron if its state plus noise exceeds its cut.

    cuts: [neurons]
    noise: factor of the noise
    """

    cuts: Floats
    noise: float = 0.0


def _predictor(
    model: SimulatedModel, preset: Preset, shares: NDArray[np.float64], random: np.random.Generator
) -> Predictor:
    """Return a predictor with recall RECALL that predicts as many neurons as the model's predictor; a perfect one if
    that has no false positives.

    Rare neurons have as many false positives per activation as others, since a predictor learns their frequency.

    shares: share of the tokens for which each neuron fires
    """
    if model.predicted >= 1:
        return Predictor(np.full(len(shares), -np.inf, dtype=np.float32))
    cuts = (-quantile(shares)).astype(np.float32)
    if model.predicted <= model.active:
        return Predictor(cuts)

    def naming_shares(times: float) -> NDArray[np.float64]:
        return 1 - (1 - shares) ** times  # about `times` the share of a rare neuron

    naming_cuts = (
        -quantile(naming_shares(_bisect(lambda times: naming_shares(times).mean() > model.predicted)))
    ).astype(np.float32)
    states = next(stretches(preset, FITTED_TOKENS, len(cuts), random))
    errors = next(stretches(NOISE, FITTED_TOKENS, len(cuts), random))
    fires = states > cuts

    def scaled(noise: float) -> Floats:
        return np.float32(np.hypot(1.0, noise)) * naming_cuts

    noise = _bisect(lambda noise: (states + np.float32(noise) * errors > scaled(noise))[fires].mean() < RECALL)
    return Predictor(scaled(noise), noise)


def _bisect(is_too_much: Callable[[float], bool]) -> float:
    """Return the greatest value up to MAX_BISECTED that is not too much."""
    low, high = 0.0, MAX_BISECTED
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_too_much(middle) else (middle, high)
    return low


def recorded(recording: Recording, tokens: int) -> Workload:
    """Return a recorded workload of `tokens` steps, repeated if the recording is shorter. Its ids are clusters, all of
    which count as firing. Raises UserError if the recording is empty."""
    order, steps = recording.by_cluster()
    if not steps:
        raise UserError("the recording has no tokens; make one with `python -m neuronpipe.plans.lab.simulate record`")
    demands = [
        [LayerDemand(layer, np.ones(len(layer), dtype=bool)) for layer in steps[n % len(steps)]] for n in range(tokens)
    ]
    counts = np.zeros(recording.all)
    for token in steps:
        for layer in token:
            counts[layer] += 1
    return Workload(demands, order, counts / len(steps), 1.0, recording.clusters)


def in_clusters(work: Workload, neurons: int) -> tuple[list[list[Ids]], int]:
    """Return the looked up clusters [token][layer] if consecutive ids form clusters of `neurons` neurons, and the
    number of clusters of a feed-forward."""
    clusters = -(-work.of_ffn // neurons)

    def touched(ids: Ids) -> Ids:
        ffn, neuron = np.divmod(ids, work.of_ffn)
        return np.unique(ffn * clusters + neuron // neurons)

    return [[touched(layer.looked) for layer in token] for token in work.tokens], clusters
