"""One layer's random weights, shaped step by step by what the quantized computation makes of the calibration tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import GROUP_WEIGHTS
from neuronpipe.plans.package.writer import Rows
from neuronpipe.plans.reference.engine import attend, rotate
from neuronpipe.plans.reference.quantized import product
from neuronpipe.plans.synth import codes, firing
from neuronpipe.plans.synth.shapes import Coordinates
from numpy.typing import NDArray

Array = NDArray[np.float32]

ATTENTION_POWER, FEED_FORWARD_POWER = 0.006, 0.014  # written by a layer, as a share of the state's squared length
QUERY_DEVIATION = 0.7  # scores of this size squared: attention looks at everything, at some of it more
GROUP_NEURONS, GROUP_LOADING = 16, 0.3  # co-activation: neurons of a group share this part of their rows
CORRECTIONS = 4


@dataclass(frozen=True)
class Drawn:
    """A matrix of random rows and what it makes of the calibration tokens."""

    rows: Rows
    values: Array


class LayerMaker:
    """Makes layers of one shape. `sequences` are the lengths of the calibration texts, `independent` the tokens whose
    states are independent: their statistics are those of every preset over all contexts."""

    def __init__(
        self, model: ModelSpec, places: Coordinates, inverse_frequency: Array, sequences: list[int], independent: slice
    ) -> None:
        self._model, self._places = model, places
        self._frequency, self._sequences, self._independent = inverse_frequency, sequences, independent

    def _scales(self, rows: int, columns: int, where: slice, scale: NDArray[np.floating] | float) -> Array:
        scales = np.zeros((rows, columns // GROUP_WEIGHTS), dtype=np.float32)
        scales[:, codes.code_groups(where)] = scale
        return scales

    def attention(self, normed: Array, state_power: float, random: np.random.Generator) -> tuple[Rows, Rows, Array]:
        """qkv and attention_output, and what they add to the residual stream [tokens, width]."""
        model, state = self._model, self._places.state
        quants = np.full((model.qkv_rows, model.width // 2), codes.ZEROS)
        quants[:, codes.code_bytes(state)] = codes.random_codes(model.qkv_rows, state.stop - state.start, random)
        unit = 1 / (codes.DEVIATION * float(np.sqrt(np.square(normed[:, state]).sum(axis=1).mean())))
        parts = np.full((model.qkv_rows, 1), unit * QUERY_DEVIATION)
        parts[(model.query_heads + model.key_heads) * model.head_width :] = unit
        qkv = Rows(quants, codes.scale_bytes_of(self._scales(model.qkv_rows, model.width, state, parts)))
        values = product("q4", qkv, normed).reshape(len(normed), -1, model.head_width)
        mixed = np.concatenate([self._attend(text) for text in np.split(values, np.cumsum(self._sequences)[:-1])])
        written = self._places.attention
        output = np.full((model.width, model.query_width // 2), codes.ZEROS)
        output[written] = codes.random_codes(written.stop - written.start, model.query_width, random)
        scales = np.zeros((model.width, model.query_width // GROUP_WEIGHTS), dtype=np.float32)
        scales[written] = 1.0
        plain = product("q4", Rows(output[written], codes.scale_bytes_of(scales[written])), mixed)
        scales *= np.sqrt(ATTENTION_POWER * state_power / plain.var(axis=0).sum())
        rows = Rows(output, codes.scale_bytes_of(scales))
        change = np.zeros_like(normed)
        change[:, written] = product("q4", Rows(rows.quants[written], rows.scales[written]), mixed)
        return qkv, rows, change

    def _attend(self, heads: Array) -> Array:
        model = self._model
        queries, keys, values = np.split(heads, (model.query_heads, model.query_heads + model.key_heads), axis=1)
        angles = np.arange(len(heads), dtype=np.float32)[:, None] * self._frequency
        return attend(rotate(queries, angles), rotate(keys, angles), values, window_tokens=0).reshape(len(heads), -1)

    def gate_and_up(
        self, normed: Array, shares: NDArray[np.float64], random: np.random.Generator
    ) -> tuple[Drawn, Drawn]:
        """Rows whose biases make neuron i active in a share p_i of the independent tokens, and their values."""
        model, neurons = self._model, self._model.neurons
        read = slice(self._places.attention.start, model.width)
        columns = read.stop - read.start
        groups = random.permutation(neurons) // GROUP_NEURONS
        base = codes.random_codes(-(-neurons // GROUP_NEURONS), columns, random)
        gate_codes = codes.mixed(codes.random_codes(neurons, columns, random), base[groups], GROUP_LOADING)
        up_codes = codes.mixed(codes.random_codes(neurons, columns, random), gate_codes, firing.SHARED)
        gate, up = (self._unbiased(code, read, normed) for code in (gate_codes, up_codes))
        steady = normed[:, self._places.steady].sum(axis=1)
        lines = [self._line(drawn.values, steady) for drawn in (gate, up)]
        cuts = firing.thresholds(shares)
        shift = 0.0
        for _ in range(CORRECTIONS):  # what is not quite normal moves the mean; the shape of the curve stays
            biases = [-(mean + deviation * (cut + shift)) for (mean, deviation), cut in zip(lines, cuts, strict=True)]
            some = self._independent
            above = [d.values[some] + steady[some, None] * b > 0 for d, b in zip((gate, up), biases, strict=True)]
            found = float((above[0] & above[1]).mean())
            shift += 0.5 * (found - float(shares.mean())) / max(float(shares.mean()), 1e-3)
        return self._biased(gate, biases[0], steady), self._biased(up, biases[1], steady)

    def _unbiased(self, code: codes.Bytes, read: slice, normed: Array) -> Drawn:
        quants = np.full((len(code), self._model.width // 2), codes.ZEROS)
        quants[:, codes.code_bytes(read)] = code
        quants[:, codes.code_bytes(self._places.steady)] = codes.ONES
        size = float(np.sqrt(np.square(normed[:, self._places.state]).sum(axis=1).mean()))
        scales = self._scales(len(code), self._model.width, read, 1 / (codes.DEVIATION * size))
        rows = Rows(quants, codes.scale_bytes_of(scales))
        return Drawn(rows, product("q4", rows, normed))

    def _line(self, values: Array, steady: Array) -> tuple[Array, Array]:
        """Mean and deviation of value / steady over the independent tokens, float32 [neurons]."""
        ratio = values[self._independent] / steady[self._independent, None]
        return ratio.mean(axis=0), ratio.std(axis=0)

    def _biased(self, drawn: Drawn, bias: NDArray[np.floating], steady: Array) -> Drawn:
        scales = drawn.rows.scales.view("<f2").copy()
        scales[:, codes.code_groups(self._places.steady)] = bias[:, None]
        stored = scales[:, codes.code_groups(self._places.steady)][:, 0].astype(np.float32)
        drawn.values[...] += steady[:, None] * stored
        return Drawn(Rows(drawn.rows.quants, scales.view(np.uint8)), drawn.values)

    def down(self, inner: Array, state_power: float, random: np.random.Generator) -> tuple[Rows, Array]:
        """Transposed Down, and what the layer adds to the residual stream [tokens, width]. A neuron that fires often
        has smaller weights, so that what changes from token to token is as large as what does not."""
        neurons, written = self._model.neurons, self._places.feed_forward
        quants = np.full((neurons, self._model.width // 2), codes.ZEROS)
        drawn = codes.random_codes(neurons, written.stop - written.start, random)
        quants[:, codes.code_bytes(written)] = drawn
        size = inner.std(axis=0) / np.maximum(np.sqrt(np.square(inner).mean(axis=0)), 1e-6)
        weights = _decoded(drawn) * size[:, None]
        plain = inner @ weights
        factor = np.sqrt(FEED_FORWARD_POWER * state_power / plain.var(axis=0).sum())
        scales = codes.scale_bytes_of(self._scales(neurons, self._model.width, written, (size * factor)[:, None]))
        stored = (size * factor).astype("<f2").astype(np.float32)
        change = np.zeros((len(inner), self._model.width), dtype=np.float32)
        change[:, written] = inner @ (_decoded(drawn) * stored[:, None])
        return Rows(quants, scales), change


def _decoded(quants: codes.Bytes) -> Array:
    packed = quants.reshape(len(quants), -1, codes.HALF_GROUP)
    weights = np.concatenate((packed & 15, packed >> 4), axis=2).astype(np.float32) - 8
    return weights.reshape(len(quants), -1)
