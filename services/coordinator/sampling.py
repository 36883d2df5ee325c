"""Sampling of tokens from rows of logits, and log-probabilities of given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.protocol.messages.outcome import Rating
from neuronpipe.protocol.messages.request import SAMPLING_OPTIONS
from neuronpipe.services.coordinator.scheduling.events import Logprobs, SampleRow, TokensSampled

# np_sampling has a field of the same name for each option but `ignore_end`, which becomes biases of end tokens.
_NATIVE = [option.name for option in SAMPLING_OPTIONS if option.name != "ignore_end"]


class Sampler:
    """A reader of the exchange segment's logits [rows, vocabulary] of a finished step."""

    def __init__(self, logits: memoryview, vocabulary: int) -> None:
        self.logits = ffi.from_buffer("float[]", logits)
        self.scratch = ffi.new("int32_t[]", 3 * vocabulary)
        self._vocabulary = vocabulary
        self._how = ffi.new("np_sampling *")

    def sample_all(self, rows: Sequence[SampleRow]) -> tuple[tuple[int, ...], dict[int, Logprobs]]:
        """Return `tokens` and `logprobs` of `TokensSampled` for these rows."""
        tokens = tuple(map(self.sample, rows))
        logprobs = {
            number: self.logprobs(row, token)
            for number, (row, token) in enumerate(zip(rows, tokens, strict=True))
            if row.ask.logprobs is not None and token >= 0
        }
        return tokens, logprobs

    def sample(self, row: SampleRow) -> int:
        """Return a token, always the same for equal rows and logits; or NOT_A_NUMBER or ALL_BANNED of
        `TokensSampled`."""
        keep = _fill(self._how[0], row)  # `_how` points into these arrays
        token = int(lib.np_sample(self._row(row.row), self._vocabulary, self._how, _uniform(row), self.scratch))
        del keep
        if token >= 0:
            return token
        return TokensSampled.ALL_BANNED if token == lib.NP_E_BANNED else TokensSampled.NOT_A_NUMBER

    def prepare(self, rows: Sequence[SampleRow]) -> tuple[Any, Any, list[Any]]:
        """Return np_sampling[] and a random number for each row, for native code to sample; and the arrays to which
        np_sampling points."""
        how = ffi.new("np_sampling[]", len(rows))
        keep = [array for number, row in enumerate(rows) for array in _fill(how[number], row)]
        return how, ffi.new("double[]", list(map(_uniform, rows))), keep

    def logprobs(self, row: SampleRow, token: int) -> Logprobs:
        """Return the log-probabilities of the token and of the most likely tokens, before any sampling option."""
        return self._rate(row.row, token, row.ask.logprobs or 0)

    def rate_all(self, targets: Sequence[int], likely: int) -> tuple[Logprobs, ...]:
        """Return the log-probability of target n in row n, for each n, with the `likely` most likely tokens of the
        row."""
        return tuple(self._rate(row, target, likely) for row, target in enumerate(targets))

    def _rate(self, row: int, token: int, likely: int) -> Logprobs:
        logits, count = self._row(row), min(likely, self._vocabulary)
        ids = ffi.new("int32_t[]", 1 + count)
        logs = ffi.new("double[]", 1 + count)
        ids[0] = token
        lib.np_greatest(logits, self._vocabulary, count, ids + 1)
        lib.np_log_probabilities(logits, self._vocabulary, ids, 1 + count, logs)
        return Logprobs(logs[0], tuple(zip(ids, logs, strict=True))[1:])

    def _row(self, row: int) -> Any:
        return self.logits + row * self._vocabulary


def as_logprobs(ratings: Sequence[Rating]) -> tuple[Logprobs, ...]:
    return tuple(
        Logprobs(rating.logprob, tuple(zip(rating.likely, rating.logprobs, strict=False))) for rating in ratings
    )


def _fill(how: Any, row: SampleRow) -> list[Any]:
    """Copy the options of a row into an np_sampling; return the arrays that it points to."""
    ask = row.ask
    for name in _NATIVE:
        setattr(how, name, getattr(ask, name))
    how.text_tokens, how.prompt_tokens, how.biased_count, how.allowed = 0, 0, 0, ffi.NULL
    keep = []
    if row.text:
        keep.append(text := ffi.new("int32_t[]", row.text))
        how.text, how.text_tokens, how.prompt_tokens = text, len(row.text), row.prompt_tokens
    if row.biases:
        keep.append(biased := ffi.new("int32_t[]", [token for token, _ in row.biases]))
        keep.append(biases := ffi.new("float[]", [bias for _, bias in row.biases]))
        how.biased, how.biases, how.biased_count = biased, biases, len(row.biases)
    if row.allowed is not None:
        keep.append(allowed := ffi.from_buffer("uint8_t[]", row.allowed))
        how.allowed = allowed
    return keep


def _uniform(row: SampleRow) -> float:
    return float(lib.np_uniform(row.ask.seed & (2**64 - 1), row.counter))
