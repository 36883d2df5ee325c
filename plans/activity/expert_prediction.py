"""What one layer tells of the next: how many of a token's experts can be guessed before the layer's router is asked.

For each pair of layers a table of experts x experts is counted on the first part of a text, and judged on the rest:
from the experts that the token chose in the layer before, as many of the next are guessed as it will choose. Beside it
what guessing the most frequent ones finds. Of the tables only these shares are kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_TOKENS = 1 << 15  # experts x experts are counted well by far fewer
HELD_OUT_PART = 4  # the last one in so many tokens judges
PRIOR_TOKENS = 4.0  # a row counts as if so many tokens had chosen by frequency alone

Shares = tuple[float, ...]


def guessed_experts(chosen: NDArray[np.int32], experts: int) -> tuple[Shares, Shares]:
    """Of the experts that each token chose [tokens, layers, chosen], shares by layer that are among as many guesses: by
    how often each is chosen, and by those of the layer before. The first layer's are the same in both."""
    chosen = chosen[:MAX_TOKENS]
    cut = len(chosen) - len(chosen) // HELD_OUT_PART
    by_frequency: list[float] = []
    by_layer_before: list[float] = []
    before: NDArray[np.float32] | None = None
    for layer in range(chosen.shape[1]):
        hits = (chosen[:, layer, :, None] == np.arange(experts)).any(axis=1).astype(np.float32)
        frequency, judged = hits[:cut].mean(axis=0), hits[cut:]
        constant = np.broadcast_to(frequency, judged.shape)
        by_frequency.append(_found(constant, judged, chosen.shape[2]))
        scores = constant if before is None else before[cut:] @ _following(before[:cut], hits[:cut], frequency)
        by_layer_before.append(_found(scores, judged, chosen.shape[2]))
        before = hits
    return tuple(by_frequency), tuple(by_layer_before)


def _following(
    before: NDArray[np.float32], hits: NDArray[np.float32], frequency: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The table: of the tokens that chose an expert before, the shares that choose each of these."""
    together = before.T @ hits + PRIOR_TOKENS * frequency
    return np.asarray(together / (before.sum(axis=0)[:, None] + PRIOR_TOKENS), np.float32)


def _found(scores: NDArray[np.float32], judged: NDArray[np.float32], guesses: int) -> float:
    best = np.argsort(-scores, axis=1, kind="stable")[:, :guesses]
    wanted = float(judged.sum())
    return float(np.take_along_axis(judged, best, axis=1).sum()) / wanted if wanted else 0.0
