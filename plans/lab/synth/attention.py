"""A layer's attention: random rows that read the state, with an output of a fixed share of the state's power."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
from neuronpipe.plans.lab.synth import codes
from neuronpipe.plans.lab.synth.shapes import Coordinates
from neuronpipe.plans.lab.synth.tokens import STATE_POWER, CalibrationSequences
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.writer import Rows
from neuronpipe.plans.reference.engine import attend, rms_norm, rotate
from neuronpipe.plans.reference.quantized import product
from neuronpipe.plans.reference.recurrent import sigmoid
from numpy.typing import NDArray

Array = NDArray[np.float32]
Half = np.dtype("<f2")

ATTENTION_POWER = 0.006  # of a layer's output, as a share of the state's squared length
QUERY_DEVIATION = 0.7  # scores have its square as deviation, so that attention is spread unevenly over all positions


class Attention(NamedTuple):
    """The matrices of a layer's attention, and its output for the calibration tokens.

    change: what it adds to the residual stream [tokens, width]
    """

    qkv: Rows
    output: Rows
    change: Array


def output_rows(width: int, written: slice, mixed: Array, random: np.random.Generator) -> tuple[Rows, Array]:
    """Return a random output matrix [width, n] of which only some rows are not 0, and its products with vectors.

    written: these rows
    mixed: the vectors [tokens, n]
    """
    columns = mixed.shape[1]
    output = codes.zero_rows(width, columns)
    output.quants[written] = codes.random_codes(written.stop - written.start, columns, random)
    scales = output.scales.view(Half)
    scales[written] = 1.0
    plain = product("q4", Rows(output.quants[written], output.scales[written]), mixed)
    scales[written] = np.sqrt(ATTENTION_POWER * STATE_POWER * width / plain.var(axis=0).sum())
    change = np.zeros((len(mixed), width), dtype=np.float32)
    change[:, written] = plain * scales[written][0, 0].astype(np.float32)
    return output, change


class AttentionMaker:
    """A maker of the attention of layers.

    frequencies: tables of rotary positions, [head_width / 2]: of layers without local positions, and of those with them
    """

    def __init__(
        self,
        model: ModelSpec,
        places: Coordinates,
        frequencies: tuple[Array, Array | None],
        sequences: CalibrationSequences,
        seed: int,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._model, self._places, self._frequencies = model, places, frequencies
        self._sequences, self._seed, self._pool = sequences, seed, pool

    def head_norm(self, layer: int) -> Array:
        """Return the weights of the norm of one head of queries or keys, for models with these norms."""
        deviation = QUERY_DEVIATION / np.sqrt(self._scale(layer))
        return np.full(self._model.layer_heads[layer].width, deviation, dtype=np.float32)

    def _scale(self, layer: int) -> float:
        model = self._model
        return model.local_attention_scale if model.local_layers[layer] else model.attention_scale

    def layer(self, layer: int, normed: Array) -> Attention:
        """Return a layer's attention. normed: its inputs for the calibration tokens [tokens, width]."""
        model, state, random = self._model, self._places.state, codes.generator(self._seed, 1, layer)
        heads = model.layer_heads[layer]
        qkv = codes.zero_rows(heads.qkv_rows, model.width)
        qkv.quants[:, codes.code_bytes(state)] = codes.random_codes(heads.qkv_rows, state.stop - state.start, random)
        unit = codes.unit_scale(normed[:, state])
        parts = np.full((heads.qkv_rows, 1), unit * QUERY_DEVIATION)
        parts[heads.query_width + heads.key_width :] = unit
        qkv.scales.view(Half)[:, codes.code_groups(state)] = parts
        values = product("q4", qkv, normed).reshape(len(normed), -1, heads.width)
        sequences = np.split(values, len(self._sequences.ids))
        mixed = np.concatenate(list(self._pool.map(partial(self._attend, layer), sequences)))
        output, change = output_rows(model.width, self._places.attention, mixed, random)
        return Attention(qkv, output, change)

    def _attend(self, layer: int, products: Array) -> Array:
        model, heads = self._model, self._model.layer_heads[layer]
        first = heads.query_heads + heads.key_heads
        last = first + heads.key_heads
        queries, keys, values, gates = np.split(products, (heads.query_heads, first, last), axis=1)
        values = keys if heads.value_from_key else values
        if model.value_norm:
            values = rms_norm(values, np.ones(heads.width, dtype=np.float32), model.norm_epsilon)
        if model.head_norm:
            queries, keys = (rms_norm(part, self.head_norm(layer), model.norm_epsilon) for part in (queries, keys))
        if model.joint_norm:
            queries, keys = (self._norm_jointly(part) for part in (queries, keys))
        if model.rotary_layers[layer]:
            frequency = self._frequencies[model.local_layers[layer]]
            assert frequency is not None
            angles = np.arange(len(products), dtype=np.float32)[:, None] * frequency
            queries, keys = rotate(queries, angles), rotate(keys, angles)
        queries = queries * np.float32(self._scale(layer))
        mixed = attend(queries, keys, values, model.windows_tokens[layer]).reshape(len(products), -1)
        return mixed * sigmoid(gates.reshape(len(products), -1)) if model.gated_attention else mixed

    def _norm_jointly(self, heads: Array) -> Array:
        weights = np.full(heads[0].size, QUERY_DEVIATION, dtype=np.float32)
        return rms_norm(heads.reshape(len(heads), -1), weights, self._model.norm_epsilon).reshape(heads.shape)
