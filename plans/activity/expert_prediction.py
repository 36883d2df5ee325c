"""Prediction of a layer's experts from the experts of the layer before.

For each pair of consecutive layers, a table [experts, experts] is counted on the first part of a recording and
evaluated on the last part. As many experts are predicted as a token chooses. The baseline predicts the most frequent
experts. Packages store only the resulting shares.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_TOKENS = 1 << 15  # more than enough to count the tables
HELD_OUT_PART = 4  # the last 1 / HELD_OUT_PART of the tokens is held out
PRIOR_TOKENS = 4.0  # weight of the frequencies as a prior of each row, in tokens

Shares = tuple[float, ...]


def guessed_experts(chosen: NDArray[np.int32], experts: int) -> tuple[Shares, Shares]:
    """Return the share of chosen experts that are predicted in each layer: by frequency, and by the layer before. Both
    are equal in the first layer.

    chosen: numbers of experts [tokens, layers, experts per token]
    """
    chosen = chosen[:MAX_TOKENS]
    first_held_out = len(chosen) - len(chosen) // HELD_OUT_PART
    by_frequency: list[float] = []
    by_layer_before: list[float] = []
    hits_before: NDArray[np.float32] | None = None
    for layer in range(chosen.shape[1]):
        hits = (chosen[:, layer, :, None] == np.arange(experts)).any(axis=1).astype(np.float32)
        frequency, held_out = hits[:first_held_out].mean(axis=0), hits[first_held_out:]
        frequency_scores = np.broadcast_to(frequency, held_out.shape)
        by_frequency.append(_recall(frequency_scores, held_out, chosen.shape[2]))
        scores = (
            frequency_scores
            if hits_before is None
            else hits_before[first_held_out:]
            @ _conditional_shares(hits_before[:first_held_out], hits[:first_held_out], frequency)
        )
        by_layer_before.append(_recall(scores, held_out, chosen.shape[2]))
        hits_before = hits
    return tuple(by_frequency), tuple(by_layer_before)


def _conditional_shares(
    before: NDArray[np.float32], hits: NDArray[np.float32], frequency: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the table [expert of the layer before, expert of the layer]: of the tokens that chose the first expert,
    the share that chooses the second one."""
    together = before.T @ hits + PRIOR_TOKENS * frequency
    return np.asarray(together / (before.sum(axis=0)[:, None] + PRIOR_TOKENS), np.float32)


def _recall(scores: NDArray[np.float32], held_out: NDArray[np.float32], count: int) -> float:
    predicted = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    chosen_count = float(held_out.sum())
    return float(np.take_along_axis(held_out, predicted, axis=1).sum()) / chosen_count if chosen_count else 0.0
