"""Log-probabilities of the tokens of a scored sequence: native memory that the engine fills, and their message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.protocol.messages.outcome import Rating


class Ratings:
    """The scores of target tokens, each with the `likely` most likely tokens at its position.

    native: the np_token_scores that a step's participants fill, valid as long as this object
    """

    def __init__(self, targets: Sequence[int], likely: int) -> None:
        self._count, self._columns = len(targets), 1 + likely
        self._ids: Any = ffi.new("int32_t[]", self._count * self._columns)
        # NaN until they are filled, so that a backend that fills none is noticed.
        self._logs: Any = ffi.new("double[]", [math.nan] * (self._count * self._columns))
        for row, target in enumerate(targets):
            self._ids[row * self._columns] = target
        self.native: Any = ffi.new(
            "np_token_scores *", {"count": self._count, "likely": likely, "ids": self._ids, "logs": self._logs}
        )

    def read(self, logits: memoryview, vocabulary: int, first: int, tokens: int) -> None:
        """Fill the scores of `tokens` tokens from `first` on from their logits, as the native engine does.

        logits: float32 rows of `vocabulary`, beginning with that of the first token. The last token of a
        sequence has no target, so its row is not read.
        """
        rows = ffi.from_buffer("float[]", logits)
        for row in range(min(tokens, self._count - first)):
            place, likely = (first + row) * self._columns, self._columns - 1
            lib.np_greatest(rows + row * vocabulary, vocabulary, likely, self._ids + place + 1)
            lib.np_log_probabilities(
                rows + row * vocabulary, vocabulary, self._ids + place, self._columns, self._logs + place
            )

    def ratings(self) -> tuple[Rating, ...]:
        """Return the scores as `Prefilled` carries them. Call it when the step is done."""
        ids, logs, columns = list(self._ids), list(self._logs), self._columns
        return tuple(
            Rating(
                logprob=logs[first],
                likely=tuple(ids[first + 1 : first + columns]),
                logprobs=tuple(logs[first + 1 : first + columns]),
            )
            for first in range(0, self._count * columns, columns)
        )
