"""Miss rates over the size of a cache, by simulation on a recording.

The pool is a sample of the clusters of all layers, with the same resident share, since all clusters of a 7B would take
hours. A sample that is independent of frequency preserves the curve (spatial sampling, SHARDS, Waldspurger et al., FAST
2015). The first tokens warm the pool and are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from neuronpipe.plans.activity.eviction_rule import HALF_LIFE_TOKENS
from neuronpipe.plans.activity.recording import Recording
from neuronpipe.plans.activity.replacement_policies import Clock, Ids, Lfu, Lru, Optimal, Policy
from neuronpipe.plans.package.activity_profile import Points, ProfileMode, Unit
from neuronpipe.plans.package.activity_profile import Policy as PolicyName
from neuronpipe.plans.package.manifest import Manifest
from numpy.typing import NDArray

SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
SAMPLED_UNITS, SAMPLED_TOKENS = 4096, 1024
STEPS = 8  # maximal number of steps per token: several layers form a step, for speed
SKIPPED_TOKENS = 64  # tokens that are not counted; at most a quarter of the recording
CLOCK_USES = 7  # as in the cache service
Steps = list[list[Ids]]
"""For each token, the clusters that each of its steps accesses."""

MAKERS: Mapping[PolicyName, Callable[[Ids, int, Steps], Policy]] = {
    "clock": lambda order, slots, steps: Clock(order, slots, max_uses=CLOCK_USES),
    "lru": lambda order, slots, steps: Lru(order, slots),
    "lfu": lambda order, slots, steps: Lfu(order, slots, HALF_LIFE_TOKENS * len(steps[0])),
    "optimal": lambda order, slots, steps: Optimal(order, slots, [accessed for token in steps for accessed in token]),
}


def miss_curves(
    manifest: Manifest,
    recording: Recording,
    frequency: NDArray[np.float32],
    mode: ProfileMode,
    progress: Callable[[int, int], None] = lambda done, all_: None,
) -> dict[Unit, dict[PolicyName, Points]]:
    """Return curves of (resident share, miss rate) by unit of residency and policy.

    frequency: frequencies of neurons for single tokens [layers, experts, neurons], by which the pool is filled at first
    """
    model = manifest.model
    units: dict[Unit, tuple[Ids, Steps]] = {
        "bundle" if mode == "predicted" else "value": _clusters(manifest, recording, frequency)
    }
    if model.experts > 1:
        units["expert"] = _experts(recording)
    total, done = len(units) * len(MAKERS) * len(SHARES), 0
    curves: dict[Unit, dict[PolicyName, Points]] = {}
    for unit, (order, steps) in units.items():
        curves[unit] = {}
        for name, make in MAKERS.items():
            points = [(0.0, 1.0)]
            for share in SHARES:
                policy = make(order, max(1, round(share * len(order))), steps)
                points.append((share, round(_miss_rate(policy, steps), 6)))
                done += 1
                progress(done, total)
            curves[unit][name] = (*points, (1.0, 0.0))
    return curves


def _miss_rate(policy: Policy, steps: Steps) -> float:
    miss_count = accesses = 0
    for token, token_steps in enumerate(steps):
        for step in token_steps:
            misses = policy.step(step)
            if token >= min(SKIPPED_TOKENS, len(steps) // 4):
                miss_count, accesses = miss_count + misses, accesses + len(step)
    return miss_count / accesses if accesses else 0.0


def _clusters(manifest: Manifest, recording: Recording, frequency: NDArray[np.float32]) -> tuple[Ids, Steps]:
    """Return the sampled clusters, most frequent first, and the steps. A step accesses a cluster if it accesses one of
    its neurons."""
    model, layout = manifest.model, manifest.layout
    ffns = model.ffns
    every = max(1, ffns * layout.clusters // SAMPLED_UNITS)
    # Each feed-forward starts at another cluster, so that the sample of a package ordered by frequency has the mean
    # frequency of the whole.
    starts = np.arange(ffns) * every // ffns
    tokens = min(len(recording.tokens), SAMPLED_TOKENS)
    accessed: list[NDArray[np.bool_]] = []
    frequencies: list[NDArray[np.float32]] = []
    for ffn, (layer, expert) in enumerate(model.places):
        clusters = np.arange(starts[ffn], layout.clusters, every)
        neurons = clusters[:, None] * layout.cluster_neurons + np.arange(layout.cluster_neurons)
        exists = neurons < model.neurons
        neurons = np.minimum(neurons, model.neurons - 1)
        bits = np.unpackbits(recording.accessed_bits(layer, expert)[:tokens], axis=1, bitorder="little")
        accessed.append(np.asarray((bits[:, neurons] & exists).any(axis=2)))
        frequencies.append((frequency[ffn][neurons] * exists).max(axis=1))
    ffns_per_step = -(-model.layers // STEPS) * model.most_experts
    return np.argsort(-np.concatenate(frequencies), kind="stable"), _steps(accessed, ffns_per_step)


def _experts(recording: Recording) -> tuple[Ids, Steps]:
    chosen, layers = recording.tokens["expert"][:SAMPLED_TOKENS], recording.model.layers
    counts = recording.model.expert_counts
    accessed = [(chosen[:, layer, :, None] == np.arange(counts[layer])).any(axis=1) for layer in range(layers)]
    frequencies = np.concatenate([hits.mean(axis=0) for hits in accessed])
    return np.argsort(-frequencies, kind="stable"), _steps(accessed, -(-layers // STEPS))


def _steps(accessed: list[NDArray[np.bool_]], ffns_per_step: int) -> Steps:
    """Return the steps of each token, as indices into the pool.

    accessed: for each feed-forward, or layer of experts, a mask [tokens, units]
    ffns_per_step: number of items of `accessed` that form a step
    """
    starts = np.cumsum([0, *(hits.shape[1] for hits in accessed)])
    groups = [
        (int(starts[first]), np.concatenate(accessed[first : first + ffns_per_step], axis=1))
        for first in range(0, len(accessed), ffns_per_step)
    ]
    return [[np.flatnonzero(hits[token]) + start for start, hits in groups] for token in range(len(accessed[0]))]
