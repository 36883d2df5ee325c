"""A layer's attention: random rows that read the state, with an output of a fixed share of the state's power."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
from neuronpipe.plans.lab.synth import codes
from neuronpipe.plans.lab.synth.shapes import Coordinates
from neuronpipe.plans.lab.synth.tokens import STATE_POWER, CalibrationSequences
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.tensors import latent_matrices
from neuronpipe.plans.package.writer import Rows
from neuronpipe.plans.reference.attention import LatentAttention, attend, rms_norm, rotated
from neuronpipe.plans.reference.quantized import product
from neuronpipe.plans.reference.recurrent import sigmoid
from numpy.typing import NDArray

Array = NDArray[np.float32]
Half = np.dtype("<f2")

ATTENTION_POWER = 0.006  # of a layer's output, as a share of the state's squared length
QUERY_DEVIATION = 0.7  # scores have its square as deviation, so that attention is spread unevenly over all positions


class Mixer(NamedTuple):
    """The tensors of a layer's mixer by their names after its prefix, and its output for the calibration tokens.

    vectors: those of a recurrent layer; attention has only norms
    change: what it adds to the residual stream [tokens, width]
    """

    matrices: dict[str, Rows]
    vectors: dict[str, Array]
    change: Array


def output_rows(model: ModelSpec, written: slice, mixed: Array, random: np.random.Generator) -> tuple[Rows, Array]:
    """Return a random output matrix [width, n] of which only some rows are not 0, and what it adds to the residual
    stream for some vectors.

    written: these rows
    mixed: the vectors [tokens, n]
    """
    width, columns = model.width, mixed.shape[1]
    output = codes.zero_rows(width, columns)
    output.quants[written] = codes.random_codes(written.stop - written.start, columns, random)
    scales = output.scales.view(Half)
    scales[written] = 1.0
    plain = product("q4", Rows(output.quants[written], output.scales[written]), mixed)
    scales[written] = np.sqrt(ATTENTION_POWER * STATE_POWER * width / plain.var(axis=0).sum()) / model.residual_scale
    change = np.zeros((len(mixed), width), dtype=np.float32)
    change[:, written] = plain * (scales[written][0, 0].astype(np.float32) * np.float32(model.residual_scale))
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
        return np.full(self._model.layer_heads[layer].width, self._deviation(layer), dtype=np.float32)

    def _deviation(self, layer: int) -> float:
        """Return the deviation of queries and keys."""
        return QUERY_DEVIATION / math.sqrt(self._scale(layer))

    def _scale(self, layer: int) -> float:
        model = self._model
        return model.local_attention_scale if model.local_layers[layer] else model.attention_scale

    def layer(self, layer: int, normed: Array) -> Mixer:
        """Return a layer's attention. normed: its inputs for the calibration tokens [tokens, width]."""
        random = codes.generator(self._seed, 1, layer)
        matrices, mixed = (self._latents if self._model.latent_width else self._heads)(layer, normed, random)
        output, change = output_rows(self._model, self._places.attention, mixed, random)
        return Mixer(matrices | {"attention_output": output}, {}, change)

    def _heads(self, layer: int, normed: Array, random: np.random.Generator) -> tuple[dict[str, Rows], Array]:
        heads = self._model.layer_heads[layer]
        deviations = np.full(heads.qkv_rows, self._deviation(layer))
        deviations[heads.query_width + heads.key_width :] = 1
        qkv = codes.reading_rows(normed, self._places.state, deviations, random)
        values = product("q4", qkv, normed).reshape(len(normed), -1, heads.width)
        sequences = np.split(values, len(self._sequences.ids))
        return {"qkv": qkv}, np.concatenate(list(self._pool.map(partial(self._attend, layer), sequences)))

    def _latents(self, layer: int, normed: Array, random: np.random.Generator) -> tuple[dict[str, Rows], Array]:
        """Return the matrices of attention with latents. Each is made when its inputs are known."""
        model, matrices, deviation = self._model, dict[str, Rows](), self._deviation(layer)
        rows = {name: count for name, count, _ in latent_matrices(model)}

        def read(name: str, x: Array) -> Array:
            deviations = np.full(rows[name], deviation if name in ("query", "key_up") else 1.0)
            if name == "latent_down":
                deviations[model.latent_width :] = deviation  # of the rotated part of keys
            columns = self._places.state if x is normed else slice(0, x.shape[1])
            matrices[name] = codes.reading_rows(x, columns, deviations, random)
            return product("q4", matrices[name], x)

        def norm(name: str) -> Array:
            return np.ones(model.latent_width if name == "latent_norm" else model.query_rank, dtype=np.float32)

        frequency = self._frequencies[0] if model.rotary_layers[layer] else None
        lengths = [len(ids) for ids in self._sequences.ids]
        heads = LatentAttention(model, layer, read, norm, frequency).mix(normed, lengths)
        return matrices, np.concatenate(list(heads))

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
            queries, keys = (rotated(part, frequency, model.rotary_scale) for part in (queries, keys))
        queries = queries * np.float32(self._scale(layer))
        mixed = attend(queries, keys, values, model.windows_tokens[layer]).reshape(len(products), -1)
        return mixed * sigmoid(gates.reshape(len(products), -1)) if model.gated_attention else mixed

    def _norm_jointly(self, heads: Array) -> Array:
        weights = np.full(heads[0].size, QUERY_DEVIATION, dtype=np.float32)
        return rms_norm(heads.reshape(len(heads), -1), weights, self._model.norm_epsilon).reshape(heads.shape)
