"""Requested activity of each neuron, from measured curves, and the thresholds of gate and up that follow from it.

The curves are those of Bamboo-7B (32 layers, about a million tokens), read off a figure published in
https://github.com/SJTU-IPADS/Bamboo (Apache-2.0, Copyright 2024 SJTU-IPADS).
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
from neuronpipe.plans.lab.synth.trajectory import Preset, correlations
from neuronpipe.plans.models.spec import Activation, ModelSpec
from neuronpipe.plans.predictor.fit import quantile, share_below
from numpy.typing import NDArray

CURVES = Path(__file__).with_name("bamboo_activation_cdf.json")
CURVES_MEAN_ACTIVITY = 0.1475  # their steepest slope is 6.78: a neuron that always fires
MEAN_ACTIVITY, MIN_ACTIVITY, MAX_ACTIVITY = 0.10, 0.06, 0.22
RELU_ACTIVITY = 0.4  # SmallThinker: over 60 % of an expert's neurons are 0, more in the first layers. Assumed of ReLU²
RELU_EARLY_LAYERS, RELU_EARLY_ACTIVITY = 2, 0.06
MIN_P, MAX_P = 1e-4, 0.9995
UP_GIVEN_GATE = 0.8  # published: if a neuron's gate fires, its up fires in 80 % of the cases
SHARED = 0.7  # correlation of a neuron's up value with its gate value
BISECTIONS = 40

Shares = NDArray[np.float64]


def firing_by_layer(layers: int, random: np.random.Generator) -> Shares:
    """Return the mean share of firing neurons of each layer: MIN_ACTIVITY in the first, MAX_ACTIVITY in the last, and
    MEAN_ACTIVITY on average."""
    inner = np.sort(random.beta(1.0, 3.4, layers))
    middle = random.permutation(inner[1:-1]) if layers > 2 else inner[1:-1]
    low, high = 0.0, 4.0
    for _ in range(BISECTIONS):
        power = (low + high) / 2
        shares = MIN_ACTIVITY + (MAX_ACTIVITY - MIN_ACTIVITY) * np.concatenate(([0.0], middle**power, [1.0]))
        low, high = (power, high) if shares.mean() > MEAN_ACTIVITY else (low, power)
    return np.asarray(shares[:layers])


def active_shares(layer: int, layers: int, neurons: int, mean: float) -> Shares:
    """Return the requested activity of each neuron of a layer, [neurons], hottest first. mean: of all neurons."""
    curves = json.loads(CURVES.read_text())
    curve = curves[round(layer * (len(curves) - 1) / max(1, layers - 1))]
    y = np.asarray(curve["y"])
    mass = np.interp(np.arange(neurons + 1) / neurons, curve["x"], (y - y[0]) / (y[-1] - y[0]))
    p = np.sort(np.clip(CURVES_MEAN_ACTIVITY * neurons * np.diff(mass), MIN_P, MAX_P))[::-1]
    points, low, high = quantile(p), -3.0, 3.0
    for _ in range(BISECTIONS):
        shift = (low + high) / 2
        moved = share_below(points + shift)
        low, high = (shift, high) if moved.mean() < mean else (low, shift)
    return np.clip(moved, MIN_P, MAX_P)


def requested_by_layer(model: ModelSpec, seed: int) -> Shares:
    """Return the requested mean share of firing neurons of each layer; in a mixture, of a chosen expert's neurons."""
    if model.all_neurons_fire:
        return np.ones(model.layers)
    if model.activation == "relu2":
        return np.full(model.layers, RELU_ACTIVITY)
    if model.activation == "relu":
        early = np.arange(model.layers) < min(RELU_EARLY_LAYERS, model.layers - 1)
        return np.where(early, RELU_EARLY_ACTIVITY, RELU_ACTIVITY)
    return firing_by_layer(model.layers, np.random.default_rng(seed))


def cuts(activation: Activation, p: Shares) -> list[Shares]:
    """Return the thresholds, in standard deviations, that values of Gate, or of Gate and Up, exceed if a neuron fires;
    empty if all neurons fire. p: requested activity."""
    if activation in ("silu", "clamped_swiglu", "gelu", "gelu_erf"):
        return []
    return [-quantile(p)] if activation in ("relu", "relu2") else list(thresholds(p))


def thresholds(p: Shares) -> tuple[Shares, Shares]:
    """Return thresholds of gate and up values in standard deviations, [neurons].

    Both are exceeded in a share p of the tokens, and up's in UP_GIVEN_GATE of the tokens that exceed the gate's; more
    for neurons that nearly always fire.
    """
    gate = -quantile(p / _together(p))
    return gate, np.interp(p, *_up_curve())


def _together(p: Shares) -> Shares:
    return np.maximum(UP_GIVEN_GATE, np.sqrt(p))


@functools.cache
def _up_curve() -> tuple[Shares, Shares]:
    """Return values of p, and up's threshold for each of them."""
    p = np.unique(np.concatenate((np.geomspace(MIN_P, 0.5, 60), 1 - np.geomspace(1 - MAX_P, 0.5, 60))))[:, None]
    gate = p / _together(p)
    points = np.linspace(-6.0, 6.0, 601)
    above = np.exp(-np.square(points) / 2) * (points > -quantile(gate))
    above *= gate / above.sum(axis=1, keepdims=True)
    low, high = np.full_like(p, -8.0), np.full_like(p, 8.0)
    for _ in range(BISECTIONS // 2):
        cut = (low + high) / 2
        joint = (above * share_below((SHARED * points - cut) / np.sqrt(1 - SHARED**2))).sum(axis=1, keepdims=True)
        low, high = np.where(joint > p, cut, low), np.where(joint > p, high, cut)
    return p[:, 0], ((low + high) / 2)[:, 0]


def overlap(p: Shares, preset: Preset, distance: int) -> float:
    """Return the requested overlap: the share of active neurons that were active `distance` tokens before. Exact if a
    neuron is active when a single value, with the preset's autocorrelation, exceeds a threshold."""
    points = np.linspace(-6.0, 6.0, 601)
    density = np.exp(-np.square(points) / 2)
    density /= density.sum()
    grid = np.unique(np.concatenate((np.geomspace(MIN_P, 0.5, 40), 1 - np.geomspace(1 - MAX_P, 0.5, 40))))
    cuts = -quantile(grid)
    joint = np.zeros(len(grid))
    for likely, correlation in correlations(preset, distance):
        noise = max(1e-3, np.sqrt(max(0.0, 1 - correlation**2)))
        active_again = share_below((correlation * points - cuts[:, None]) / noise)
        joint += likely * (density * (points > cuts[:, None]) * active_again).sum(axis=1)
    return float(np.interp(p, grid, joint).sum() / p.sum())
