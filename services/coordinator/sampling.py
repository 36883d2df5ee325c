"""From rows of logits to tokens, and to the likelihood of tokens that are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.services.coordinator.events import Draw, Rating, Sampled


class Sampler:
    """Reads the exchange segment's logits [rows, vocabulary], of a step that is done."""

    def __init__(self, logits: memoryview, vocabulary: int) -> None:
        self._logits = ffi.from_buffer("float[]", logits)
        self._vocabulary = vocabulary
        self._scratch = ffi.new("int32_t[]", 3 * vocabulary)
        self._how = ffi.new("np_sampling *")

    def draw(self, draw: Draw) -> int:
        """The token, the same for the same draw of the same logits; BROKEN or BANNED of `Sampled`."""
        ask, how = draw.ask, self._how
        how.temperature, how.top_k, how.top_p, how.min_p = ask.temperature, ask.top_k, ask.top_p, ask.min_p
        how.repetition_penalty = ask.repetition_penalty
        how.frequency_penalty, how.presence_penalty = ask.frequency_penalty, ask.presence_penalty
        keep = []  # what `how` points to, until the call is over
        how.text_tokens, how.prompt_tokens, how.biased_count, how.allowed = 0, 0, 0, ffi.NULL
        if draw.text:
            keep.append(text := ffi.new("int32_t[]", draw.text))
            how.text, how.text_tokens, how.prompt_tokens = text, len(draw.text), draw.prompt_tokens
        if draw.biases:
            keep.append(biased := ffi.new("int32_t[]", [token for token, _ in draw.biases]))
            keep.append(biases := ffi.new("float[]", [bias for _, bias in draw.biases]))
            how.biased, how.biases, how.biased_count = biased, biases, len(draw.biases)
        if draw.allowed is not None:
            keep.append(allowed := ffi.from_buffer("uint8_t[]", draw.allowed))
            how.allowed = allowed
        uniform = lib.np_uniform(ask.seed & (2**64 - 1), draw.counter)
        token = int(lib.np_sample(self._row(draw.row), self._vocabulary, how, uniform, self._scratch))
        if token >= 0:
            return token
        return Sampled.BANNED if token == lib.NP_E_BANNED else Sampled.BROKEN

    def rate(self, draw: Draw, token: int) -> Rating:
        """How likely the model finds the token, and which it finds likeliest, whatever the options of the draw."""
        row, count = self._row(draw.row), min(draw.ask.logprobs or 0, self._vocabulary)
        ids = ffi.new("int32_t[]", 1 + count)
        logs = ffi.new("double[]", 1 + count)
        ids[0] = token
        lib.np_greatest(row, self._vocabulary, count, ids + 1)
        lib.np_log_probabilities(row, self._vocabulary, ids, 1 + count, logs)
        return Rating(logs[0], tuple(zip(ids, logs, strict=True))[1:])

    def negative_log_likelihoods(self, targets: Sequence[int]) -> tuple[float, ...]:
        """Nats of each target, by the row of its number."""
        one = ffi.new("double *")
        nll = []
        for row, target in enumerate(targets):
            lib.np_log_probabilities(self._row(row), self._vocabulary, ffi.new("int32_t *", target), 1, one)
            nll.append(-one[0])
        return tuple(nll)

    def _row(self, row: int) -> Any:
        return self._logits + row * self._vocabulary
