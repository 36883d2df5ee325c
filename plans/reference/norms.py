"""Norms over the last axis, in float32."""

from __future__ import annotations

import numpy as np
from neuronpipe.plans.reference.weights import Array


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Return x / rms(x) * weight over the last axis."""
    mean: Array = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
    normed: Array = x / np.sqrt(mean + np.float32(epsilon)) * weight
    return normed


def layer_norm(x: Array, weight: Array, bias: Array, epsilon: float) -> Array:
    """Return (x - mean) / deviation * weight + bias over the last axis."""
    centred = x - np.mean(x, axis=-1, keepdims=True, dtype=np.float32)
    return rms_norm(centred, weight, epsilon) + bias
