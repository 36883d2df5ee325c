"""Ratings of a given text's tokens: where the native engine writes them, and how they are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neuronpipe.native import ffi
from neuronpipe.protocol.messages.outcome import Rating


class Ratings:
    """Of these targets, each with its `likely` most likely tokens. native: np_ratings for a step's participants, good
    as long as this is."""

    def __init__(self, targets: Sequence[int], likely: int) -> None:
        self._count, self._columns = len(targets), 1 + likely
        self._ids: Any = ffi.new("int32_t[]", self._count * self._columns)
        self._logs: Any = ffi.new("double[]", self._count * self._columns)
        for row, target in enumerate(targets):
            self._ids[row * self._columns] = target
        self.native: Any = ffi.new(
            "np_ratings *", {"count": self._count, "likely": likely, "ids": self._ids, "logs": self._logs}
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
