"""What the tokens of a text want: of each token and layer the neurons that fire and those that a predictor names.

Generated after plans/lab/synth (Bamboo's curves, a preset's memory), a sample of the neurons, each of which stands for
`scale` of them, so that a 47B costs no more than a 7B; or recorded from a package. Seeded; no clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from neuronpipe.plans.activity.replacement_policies import Ids
from neuronpipe.plans.lab.simulate.models import SimulatedModel
from neuronpipe.plans.lab.simulate.wanted_neurons import Recording
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
FITTED_TOKENS, BISECTIONS = 24, 14
NOISE = Preset(a=0.0, b=0.6, rb=0.97, re=0.4, pj=0.02, keep=0.0)  # a predictor's error, beyond.md 5.4 step 6


@frozen
class Wanted:
    """Of one layer and token: ids of what is looked up, ascending, and which of them fire."""

    looked: Ids
    fires: NDArray[np.bool_]


@frozen
class Workload:
    """tokens: of each token what each layer wants. order: all ids, most frequent first. frequency: of each id, of a
    token that chooses its expert. scale: neurons that an id stands for. of_layer: ids of one layer."""

    tokens: list[list[Wanted]]
    order: Ids
    frequency: NDArray[np.float64]
    scale: float
    of_layer: int


def generated(model: SimulatedModel, preset: Preset, tokens: int, seed: int, batch: int = 1) -> Workload:
    """A text of so many tokens. batch: so many texts at once; a neuron is wanted when one of them wants it."""
    random = np.random.default_rng(seed)
    spec = model.spec
    sampled = min(spec.neurons, max(64, MAX_SAMPLED // (spec.layers * spec.experts)))
    one_expert = [active_shares(layer, spec.layers, sampled, model.active) for layer in range(spec.layers)]
    shares = np.concatenate([np.tile(layer, spec.experts) for layer in one_expert])
    cuts = (-quantile(shares)).astype(np.float32)
    text = _Text(model, preset, cuts, _predictor(model, preset, cuts, random))
    of_layer = spec.experts * sampled
    made: list[list[Wanted]] = []
    texts = [text.tokens(tokens, np.random.default_rng((seed, n))) for n in range(batch)]
    for each in zip(*texts, strict=True):
        named = np.logical_or.reduce([one[0] for one in each])
        fires = np.logical_or.reduce([one[1] for one in each])
        ids = np.flatnonzero(named)
        bounds = np.searchsorted(ids, np.arange(spec.layers + 1) * of_layer)
        made.append([Wanted(ids[a:b], fires[ids[a:b]]) for a, b in itertools.pairwise(bounds)])
    order = np.argsort(-shares, kind="stable")
    return Workload(made, order, shares, spec.neurons / sampled, of_layer)


class _Text:
    """One text: what its tokens want, one after the other."""

    def __init__(self, model: SimulatedModel, preset: Preset, cuts: Floats, predictor: Predictor) -> None:
        self._model, self._preset, self._cuts, self._predictor = model, preset, cuts, predictor

    def tokens(self, count: int, random: np.random.Generator) -> Iterator[tuple[Mask, Mask]]:
        """Of all neurons, those named and those that fire."""
        spec, width = self._model.spec, len(self._cuts)
        own = routing_of(spec).own  # of a router's values, what comes from the token and not from the state
        bias = _router_biases(spec)
        noise = stretches(NOISE, count, width, random)
        routes = stretches(
            self._preset, count, spec.layers * spec.experts, random
        )  # routers follow the state, as in synth
        for states in stretches(self._preset, count, width, random):
            margins = states - self._cuts
            scores = margins + np.float32(self._predictor.noise) * next(noise) if self._predictor.noise else margins
            for margin, score, route in zip(margins, scores, next(routes), strict=True):
                named = score > self._predictor.cut
                if spec.experts > 1:
                    values = route * np.sqrt(1 - own) + np.sqrt(own) * random.standard_normal(len(route))
                    named &= _chosen(values.reshape(spec.layers, spec.experts) + bias, spec.experts_per_token, width)
                yield named, (margin > 0) & named


def _router_biases(spec: ModelSpec) -> NDArray[np.float64]:
    """Return what makes some experts of each layer as hot as those of the family are, [layers, experts]; the same for
    every text."""
    routing = routing_of(spec)
    if not routing.hot_experts:
        return np.zeros((spec.layers, spec.experts))
    biases, random = quantile(frequencies(spec, routing)), np.random.default_rng(0)
    return np.stack([random.permutation(biases) for _ in range(spec.layers)])


def _chosen(route: NDArray[np.floating[Any]], count: int, width: int) -> Mask:
    """Neurons of the experts with the greatest values."""
    here = np.zeros(route.shape, dtype=bool)
    np.put_along_axis(here, np.argsort(-route, axis=1)[:, :count], True, axis=1)
    return np.repeat(here.reshape(-1), width // here.size)


@frozen
class Predictor:
    """Names a neuron whose margin, with so much noise, exceeds `cut`."""

    noise: float = 0.0
    cut: float = 0.0


def _predictor(model: SimulatedModel, preset: Preset, cuts: Floats, random: np.random.Generator) -> Predictor:
    """One that finds RECALL of what fires and names as many as the model's does; without false positives, all."""
    if model.predicted >= 1:
        return Predictor(cut=-np.inf)
    if model.predicted <= model.active:
        return Predictor()
    margins = next(stretches(preset, FITTED_TOKENS, len(cuts), random)) - cuts
    noise = next(stretches(NOISE, FITTED_TOKENS, len(cuts), random))
    low, high = 0.01, 4.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        scores = margins + np.float32(middle) * noise
        cut = float(np.quantile(scores[margins > 0], 1 - RECALL))
        low, high = (middle, high) if (scores > cut).mean() < model.predicted else (low, middle)
    return Predictor(middle, cut)


def recorded(recording: Recording, tokens: int) -> Workload:
    """What was recorded, again from its start where the text is longer. Everything that is looked up counts as fired:
    a recording has clusters."""
    order, steps = recording.by_cluster()
    if not steps:
        raise UserError("the recording has no tokens; make one with `python -m neuronpipe.plans.lab.simulate record`")
    made = [[Wanted(layer, np.ones(len(layer), dtype=bool)) for layer in steps[n % len(steps)]] for n in range(tokens)]
    of_layer = recording.chosen.shape[2] * recording.clusters
    counts = np.zeros(recording.all)
    for token in steps:
        for layer in token:
            counts[layer] += 1
    return Workload(made, order, counts / len(steps), 1.0, of_layer)


def in_clusters(work: Workload, experts: int, neurons: int) -> tuple[list[list[Ids]], int]:
    """The same in clusters of so many neurons, hottest first as in the workload: of each token what each layer looks
    up; and how many clusters there are of a feed-forward."""
    of_ffn = work.of_layer // experts
    clusters = -(-of_ffn // neurons)

    def touched(ids: Ids) -> Ids:
        ffn, neuron = np.divmod(ids, of_ffn)
        return np.unique(ffn * clusters + neuron // neurons)

    return [[touched(layer.looked) for layer in token] for token in work.tokens], clusters
