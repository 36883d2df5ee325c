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


class AttentionMaker:
    """A maker of the attention of layers.

    frequency: frequencies of rotary positions, [head_width / 2]
    """

    def __init__(
        self,
        model: ModelSpec,
        places: Coordinates,
        frequency: Array,
        sequences: CalibrationSequences,
        seed: int,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._model, self._places, self._frequency = model, places, frequency
        self._sequences, self._seed, self._pool = sequences, seed, pool

    @property
    def head_norm(self) -> Array:
        """Weights of the norm of one head of queries or keys, for models with these norms."""
        return np.full(self._model.head_width, QUERY_DEVIATION, dtype=np.float32)

    def layer(self, layer: int, normed: Array) -> Attention:
        """Return a layer's attention. normed: its inputs for the calibration tokens [tokens, width]."""
        model, state, random = self._model, self._places.state, codes.generator(self._seed, 1, layer)
        qkv = codes.zero_rows(model.qkv_rows, model.width)
        qkv.quants[:, codes.code_bytes(state)] = codes.random_codes(model.qkv_rows, state.stop - state.start, random)
        unit = codes.unit_scale(normed[:, state])
        parts = np.full((model.qkv_rows, 1), unit * QUERY_DEVIATION)
        parts[(model.query_heads + model.key_heads) * model.head_width :] = unit
        qkv.scales.view(Half)[:, codes.code_groups(state)] = parts
        values = product("q4", qkv, normed).reshape(len(normed), -1, model.head_width)
        sequences = np.split(values, len(self._sequences.ids))
        mixed = np.concatenate(list(self._pool.map(partial(self._attend, layer), sequences)))
        written = self._places.attention
        output = codes.zero_rows(model.width, model.query_width)
        output.quants[written] = codes.random_codes(written.stop - written.start, model.query_width, random)
        scales = output.scales.view(Half)
        scales[written] = 1.0
        rows = Rows(output.quants[written], output.scales[written])
        plain = product("q4", rows, mixed)
        scales[written] = np.sqrt(ATTENTION_POWER * STATE_POWER * model.width / plain.var(axis=0).sum())
        change = np.zeros_like(normed)
        change[:, written] = plain * scales[written][0, 0].astype(np.float32)
        return Attention(qkv, output, change)

    def _attend(self, layer: int, heads: Array) -> Array:
        model = self._model
        queries, keys, values = np.split(heads, (model.query_heads, model.query_heads + model.key_heads), axis=1)
        if model.head_norm:
            queries, keys = (rms_norm(part, self.head_norm, model.norm_epsilon) for part in (queries, keys))
        if model.joint_norm:
            queries, keys = (self._norm_jointly(part) for part in (queries, keys))
        if model.rotary_layers[layer]:
            angles = np.arange(len(heads), dtype=np.float32)[:, None] * self._frequency
            queries, keys = rotate(queries, angles), rotate(keys, angles)
        return attend(queries, keys, values, model.windows_tokens[layer]).reshape(len(heads), -1)

    def _norm_jointly(self, heads: Array) -> Array:
        weights = np.full(heads[0].size, QUERY_DEVIATION, dtype=np.float32)
        return rms_norm(heads.reshape(len(heads), -1), weights, self._model.norm_epsilon).reshape(heads.shape)
