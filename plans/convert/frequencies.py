"""Measured firing shares of neurons: they decide the order in which a package stores the neurons."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.protocol.errors import UserError, named
from numpy.typing import NDArray


def read_frequencies(path: Path, model: ModelSpec) -> NDArray[np.float32]:
    """Firing shares 0..1 of every neuron from a .npy file, [layers, experts, neurons] in the source's order."""
    expected = (model.layers, model.experts, model.neurons)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers that only an old numpy reads: an error follows, or none
            # The file is mapped first: a damaged header may promise more than there is memory.
            shares = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy raises whatever Python's own parser makes of the header
        raise UserError(f"{path}: not a .npy file of firing shares: {named(str(error))}") from None
    if not isinstance(shares, np.ndarray) or shares.dtype.kind != "f" or shares.shape != expected:
        raise UserError(f"{path}: expected floating-point firing shares of shape {list(expected)}")
    if not ((shares >= 0) & (shares <= 1)).all():
        raise UserError(f"{path}: firing shares lie between 0 and 1")
    return np.asarray(shares, dtype=np.float32)


def hot_first(shares: NDArray[np.float32]) -> NDArray[np.int64]:
    """Neuron numbers by falling share; among equals the order of the source."""
    return np.argsort(-shares, kind="stable")
