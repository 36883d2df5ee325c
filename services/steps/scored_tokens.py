"""Ratings of a given text's tokens: where the native engine writes them, and how they are told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.protocol.messages.outcome import Rating


class Ratings:
    """Of these targets, each with its `likely` most likely tokens. native: np_ratings for a step's participants, good
    as long as this is."""

    def __init__(self, targets: Sequence[int], likely: int) -> None:
        self._count, self._columns = len(targets), 1 + likely
        self._ids: Any = ffi.new("int32_t[]", self._count * self._columns)
        # No numbers until they are rated: who fills none is noticed.
        self._logs: Any = ffi.new("double[]", [math.nan] * (self._count * self._columns))
        for row, target in enumerate(targets):
            self._ids[row * self._columns] = target
        self.native: Any = ffi.new(
            "np_ratings *", {"count": self._count, "likely": likely, "ids": self._ids, "logs": self._logs}
        )

    def read(self, logits: memoryview, vocabulary: int, first: int, tokens: int) -> None:
        """Fill the rows of so many tokens from the first on, as the native engine does, from their logits, which are in
        rows 0.. of these; the last token of a text has no row."""
        rows = ffi.from_buffer("float[]", logits)
        for row in range(min(tokens, self._count - first)):
            place, likely = (first + row) * self._columns, self._columns - 1
            lib.np_greatest(rows + row * vocabulary, vocabulary, likely, self._ids + place + 1)
            lib.np_log_probabilities(
                rows + row * vocabulary, vocabulary, self._ids + place, self._columns, self._logs + place
            )

    def told(self) -> tuple[Rating, ...]:
        """As in `Prefilled`, once the step is done."""
        ids, logs, columns = list(self._ids), list(self._logs), self._columns
        return tuple(
            Rating(
                logprob=logs[first],
                likely=tuple(ids[first + 1 : first + columns]),
                logprobs=tuple(logs[first + 1 : first + columns]),
            )
            for first in range(0, self._count * columns, columns)
        )
