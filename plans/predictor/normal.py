"""Quantiles of the normal distribution on arrays, without a library for it."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_POINTS = np.linspace(-6.0, 6.0, 4801)
_SHARES = np.array([NormalDist().cdf(point) for point in _POINTS])


def quantile(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """The point below which the share lies; minus or plus infinity at 0 and 1."""
    return np.asarray(np.interp(shares, _SHARES, _POINTS, left=-np.inf, right=np.inf))


def share_below(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """P(z < point); beyond six deviations 0 or 1."""
    return np.asarray(np.interp(points, _POINTS, _SHARES, left=0.0, right=1.0))
