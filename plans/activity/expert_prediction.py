"""Prediction of a layer's experts from the experts of the layer before.

For each pair of layers an experts x experts table is counted on the first part of a recording and evaluated on the last
part: for each token as many experts are predicted as it will choose. The baseline predicts the most frequent experts.
Only the resulting shares are stored, not the tables.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_TOKENS = 1 << 15  # far fewer are enough to count experts x experts
HELD_OUT_PART = 4  # the last 1 / HELD_OUT_PART of the tokens is held out
PRIOR_TOKENS = 4.0  # weight of the frequencies as a prior of each row, in tokens

Shares = tuple[float, ...]


def guessed_experts(chosen: NDArray[np.int32], experts: int) -> tuple[Shares, Shares]:
    """Return (by frequency, by the layer before): per layer the share of chosen experts that are predicted.

    chosen: int32 [tokens, layers, experts per token]. As many experts are predicted as a token chooses. The first layer
    has the same share in both.
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
    """Return the table [experts, experts]: the share of tokens with an expert in the layer before that choose each
    expert."""
    together = before.T @ hits + PRIOR_TOKENS * frequency
    return np.asarray(together / (before.sum(axis=0)[:, None] + PRIOR_TOKENS), np.float32)


def _recall(scores: NDArray[np.float32], held_out: NDArray[np.float32], count: int) -> float:
    predicted = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    chosen_count = float(held_out.sum())
    return float(np.take_along_axis(held_out, predicted, axis=1).sum()) / chosen_count if chosen_count else 0.0
