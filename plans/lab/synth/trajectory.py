"""The generator of the workload: a state that changes from token to token. Presets reproduce published statistics.

A state is sqrt(a) c + sqrt(b) u + sqrt(1-a-b) e, with a fixed context c and two processes u (topic) and e with memories
rb and re (x = r x + sqrt(1-r^2) noise). With probability pj per token the topic changes: both memories are multiplied
by `keep` for that token. Every coordinate is normal with unit variance, so that products with any rows have the same
autocorrelation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from neuronpipe.plans.predictor.fit import quantile
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

STRETCH_TOKENS = 64  # few enough that states stay in the CPU's cache
_QUANTILES = quantile((np.arange(1 << 16) + 0.5) / (1 << 16)).astype(np.float32)


@frozen
class Preset:
    """A workload. Fields as in the formula at the top of this file."""

    a: float
    b: float
    rb: float
    re: float
    pj: float
    keep: float


PRESETS = {
    "default": Preset(a=0.05, b=0.6, rb=0.97, re=0.4, pj=0.02, keep=0.0),
    "mild": Preset(a=0.1, b=0.5, rb=0.97, re=0.4, pj=0.03, keep=0.3),
    "optimistic": Preset(a=0.6, b=0.3, rb=0.98, re=0.7, pj=0.0, keep=0.0),
    "pessimistic": Preset(a=0.15, b=0.15, rb=0.95, re=0.3, pj=0.0, keep=0.0),
    "independent": Preset(a=0.0, b=0.0, rb=0.0, re=0.0, pj=0.0, keep=0.0),
}


def trajectory(preset: Preset, tokens: int, width: int, random: np.random.Generator) -> NDArray[np.float32]:
    """Return the states of a trajectory, [tokens, width]."""
    return np.concatenate(list(stretches(preset, tokens, width, random)))


def stretches(preset: Preset, tokens: int, width: int, random: np.random.Generator) -> Iterator[NDArray[np.float32]]:
    """Yield the states of `trajectory`, STRETCH_TOKENS tokens at a time."""
    context, *processes_start = _normal((3, width), random)
    context *= np.float32(math.sqrt(preset.a))
    processes = np.stack(processes_start)
    parts = np.sqrt(np.array([preset.b, 1 - preset.a - preset.b], dtype=np.float32))
    steady = np.array([[preset.rb], [preset.re]], dtype=np.float32)
    memories = {
        factor: (steady * factor, np.sqrt(1 - np.square(steady * factor)))
        for factor in map(np.float32, (1, preset.keep))
    }
    for start in range(0, tokens, STRETCH_TOKENS):
        states = np.empty((min(STRETCH_TOKENS, tokens - start), width), dtype=np.float32)
        for state in states:
            memory, share = memories[np.float32(preset.keep if random.random() < preset.pj else 1)]
            noise = _normal((2, width), random)
            noise *= share
            processes *= memory
            processes += noise
            np.dot(parts, processes, out=state)
            state += context
        yield states


def _normal(shape: tuple[int, int], random: np.random.Generator) -> NDArray[np.float32]:
    """Return normal values from 65,536 equally likely ones, which is twice as fast as numpy's generator."""
    return _QUANTILES.take(random.integers(0, len(_QUANTILES), shape, dtype=np.uint16))


def correlations(preset: Preset, distance: int) -> list[tuple[float, float]]:
    """Return (probability, correlation of states `distance` tokens apart) for each number of topic changes between
    them."""
    result = []
    for changes in range(distance + 1):
        likely = math.comb(distance, changes) * preset.pj**changes * (1 - preset.pj) ** (distance - changes)
        topic_memory = preset.keep**changes
        fast_share = 1 - preset.a - preset.b
        result.append(
            (likely, preset.a + topic_memory * (preset.b * preset.rb**distance + fast_share * preset.re**distance))
        )
    return result
