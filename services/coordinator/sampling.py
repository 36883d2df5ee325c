"""From rows of logits to tokens, and to the likelihood of tokens that are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.services.coordinator.events import Draw


class Sampler:
    """Reads the exchange segment's logits [rows, vocabulary], of a step that is done."""

    def __init__(self, logits: memoryview, vocabulary: int) -> None:
        self._logits = ffi.from_buffer("float[]", logits)
        self._vocabulary = vocabulary
        self._scratch = ffi.new("int32_t[]", 2 * vocabulary)

    def draw(self, draw: Draw) -> int:
        """The token, the same for the same draw of the same logits; negative when a logit is no number."""
        uniform = lib.np_uniform(draw.seed & (2**64 - 1), draw.counter)
        token = lib.np_sample(
            self._row(draw.row), self._vocabulary, draw.temperature, draw.top_k, draw.top_p, uniform, self._scratch
        )
        return int(token)

    def negative_log_likelihoods(self, targets: Sequence[int]) -> tuple[float, ...]:
        """Nats of each target, by the row of its number."""
        return tuple(
            -lib.np_log_probability(self._row(row), self._vocabulary, target) for row, target in enumerate(targets)
        )

    def _row(self, row: int) -> Any:
        return self._logits + row * self._vocabulary
