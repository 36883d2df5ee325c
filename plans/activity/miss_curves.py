"""Miss rates over the size of a cache, by simulation of what a text wanted.

The pool is a sample: clusters taken evenly from all layers, at the same resident share. A sample of keys that is
independent of how often they are wanted keeps the curve (spatial sampling, as SHARDS, Waldspurger et al. 2015); the
whole of a 7B would take hours. Before anything is counted some of the tokens go by, so that the pool has met the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from neuronpipe.plans.activity.recording import Recording
from neuronpipe.plans.activity.replacement_policies import Clock, Ids, Lfu, Lru, Optimal, Policy
from neuronpipe.plans.package.activity_profile import Points, ProfileMode, Unit
from neuronpipe.plans.package.activity_profile import Policy as PolicyName
from neuronpipe.plans.package.manifest import Manifest
from numpy.typing import NDArray

SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
SAMPLED_UNITS, SAMPLED_TOKENS = 4096, 1024
STEPS = 8  # of a token: so many layers are looked up together that there are no more, for speed
SKIPPED_TOKENS = 64  # not counted; of a short text no more than a quarter
CLOCK_USES = 7  # what the cache service counts
LFU_HALF_LIFE_TOKENS = 16
Steps = list[list[Ids]]
"""Of each token what its steps want."""

MAKERS: Mapping[PolicyName, Callable[[Ids, int, Steps], Policy]] = {
    "clock": lambda order, slots, steps: Clock(order, slots, most_uses=CLOCK_USES),
    "lru": lambda order, slots, steps: Lru(order, slots),
    "lfu": lambda order, slots, steps: Lfu(order, slots, LFU_HALF_LIFE_TOKENS * len(steps[0])),
    "optimal": lambda order, slots, steps: Optimal(order, slots, [wanted for token in steps for wanted in token]),
}


def miss_curves(
    manifest: Manifest,
    recorded: Recording,
    frequency: NDArray[np.float32],
    mode: ProfileMode,
    progress: Callable[[int, int], None] = lambda done, all_: None,
) -> dict[Unit, dict[PolicyName, Points]]:
    """Of the units of residency that this mode has, by each policy. frequency: of neurons [layers, experts, neurons],
    by which a pool is filled at first."""
    model = manifest.model
    units: dict[Unit, tuple[Ids, Steps]] = {
        "bundle" if mode == "predicted" else "value": _clusters(manifest, recorded, frequency)
    }
    if model.experts > 1:
        units["expert"] = _experts(recorded)
    work, done = len(units) * len(MAKERS) * len(SHARES), 0
    curves: dict[Unit, dict[PolicyName, Points]] = {}
    for unit, (order, steps) in units.items():
        curves[unit] = {}
        for name, make in MAKERS.items():
            points = [(0.0, 1.0)]
            for share in SHARES:
                policy = make(order, max(1, round(share * len(order))), steps)
                points.append((share, round(_miss_rate(policy, steps), 6)))
                done += 1
                progress(done, work)
            curves[unit][name] = (*points, (1.0, 0.0))
    return curves


def _miss_rate(policy: Policy, steps: Steps) -> float:
    missed = wanted = 0
    for token, of_token in enumerate(steps):
        for step in of_token:
            misses = policy.step(step)
            if token >= min(SKIPPED_TOKENS, len(steps) // 4):
                missed, wanted = missed + misses, wanted + len(step)
    return missed / wanted if wanted else 0.0


def _clusters(manifest: Manifest, recorded: Recording, frequency: NDArray[np.float32]) -> tuple[Ids, Steps]:
    """The sampled clusters by frequency, and the steps: a cluster is wanted when one of its neurons is."""
    model, layout = manifest.model, manifest.layout
    ffns = model.ffns
    every = max(1, ffns * layout.clusters // SAMPLED_UNITS)
    # From another cluster on in each feed-forward, so that in packages by frequency the sample is as hot as the whole.
    starts = np.arange(ffns) * every // ffns
    tokens = min(len(recorded.tokens), SAMPLED_TOKENS)
    wanted: list[NDArray[np.bool_]] = []
    heat: list[NDArray[np.float32]] = []
    for place, (layer, expert) in enumerate(np.ndindex(model.layers, model.experts)):
        clusters = np.arange(starts[place], layout.clusters, every)
        neurons = clusters[:, None] * layout.cluster_neurons + np.arange(layout.cluster_neurons)
        there = neurons < model.neurons
        neurons = np.minimum(neurons, model.neurons - 1)
        bits = np.unpackbits(recorded.of(layer, expert)[:tokens], axis=1, bitorder="little")
        wanted.append(np.asarray((bits[:, neurons] & there).any(axis=2)))
        heat.append((frequency[layer, expert][neurons] * there).max(axis=1))
    together = -(-model.layers // STEPS) * model.experts
    return np.argsort(-np.concatenate(heat), kind="stable"), _steps(wanted, together)


def _experts(recorded: Recording) -> tuple[Ids, Steps]:
    """The experts of all layers by frequency, and the steps."""
    chosen, layers = recorded.tokens["expert"][:SAMPLED_TOKENS], recorded.model.layers
    numbers = np.arange(recorded.model.experts)
    wanted = [(chosen[:, layer, :, None] == numbers).any(axis=1) for layer in range(layers)]
    heat = np.concatenate([hits.mean(axis=0) for hits in wanted])
    return np.argsort(-heat, kind="stable"), _steps(wanted, -(-layers // STEPS))


def _steps(wanted: list[NDArray[np.bool_]], together: int) -> Steps:
    """Of each token what it wants, a step after the other: numbers in the pool. wanted: [tokens, units] of each
    feed-forward, so many of which make a step."""
    starts = np.cumsum([0, *(hits.shape[1] for hits in wanted)])
    layers = [
        (int(starts[first]), np.concatenate(wanted[first : first + together], axis=1))
        for first in range(0, len(wanted), together)
    ]
    return [[np.flatnonzero(hits[token]) + start for start, hits in layers] for token in range(len(wanted[0]))]
