"""Attention as its description defines it (plans/models/spec.py), in float32: norms, positions, heads, and latents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.reference.weights import Array

LATENT_EPSILON = 1e-6  # of the norms of latents, in every model


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Return x / rms(x) * weight over the last axis."""
    mean: Array = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
    normed: Array = x / np.sqrt(mean + np.float32(epsilon)) * weight
    return normed


def layer_norm(x: Array, weight: Array, bias: Array, epsilon: float) -> Array:
    """Return (x - mean) / deviation * weight + bias over the last axis."""
    centred = x - np.mean(x, axis=-1, keepdims=True, dtype=np.float32)
    return rms_norm(centred, weight, epsilon) + bias


def rotate(heads: Array, angles: Array) -> Array:
    """Return heads [tokens, heads, head_width] rotated by angles [tokens, head_width / 2]. Elements j and j +
    head_width / 2 are a pair."""
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high = np.split(heads, 2, axis=-1)
    return np.concatenate((low * cosine - high * sine, high * cosine + low * sine), axis=-1)


def rotated(heads: Array, frequency: Array, scale: float = 1.0) -> Array:
    """Return the heads of one sequence [tokens, heads, width] at their positions, from 0 on.

    frequency: the table of rotary positions [width / 2]
    scale: the field `rotary_scale` of ModelSpec
    """
    turned = rotate(heads, np.arange(len(heads), dtype=np.float32)[:, None] * frequency)
    scales = np.where(frequency != 0, np.float32(scale), np.float32(1))
    scaled: Array = turned * np.tile(scales, 2)
    return scaled


def query_factors(model: ModelSpec, tokens: int) -> Array:
    """Return the factors of rotated queries at the first positions [tokens, 1, 1], by the fields `query_growth` and
    `query_growth_tokens` of ModelSpec."""
    times = np.arange(tokens) // (model.query_growth_tokens or tokens)
    factors: Array = (1 + model.query_growth * np.log1p(times)).astype(np.float32)[:, None, None]
    return factors


def capped(x: Array, cap: float) -> Array:
    """Return cap * tanh(x / cap); x itself if the cap is 0."""
    return np.asarray(np.float32(cap) * np.tanh(x / np.float32(cap)), dtype=np.float32) if cap else x


def clipped(x: Array, limit: float) -> Array:
    """Return x with elements of at most this magnitude; x itself if the limit is 0."""
    return np.clip(x, np.float32(-limit), np.float32(limit)) if limit else x


def attend(
    queries: Array, keys: Array, values: Array, window_tokens: int, sinks: Array | None = None, score_cap: float = 0.0
) -> Array:
    """Return causal attention, [tokens, query_heads, width of a value].

    keys, values: [tokens, key_heads, width]; each serves query_heads / key_heads consecutive query heads
    window_tokens: field of LayerKind
    score_cap: field of ModelSpec
    sinks: [query_heads] scores that join each softmax and whose shares are dropped
    """
    tokens, query_heads, head_width = queries.shape
    group = query_heads // keys.shape[1]
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    is_visible = (distance >= 0) & ((distance < window_tokens) if window_tokens else True)
    result = np.empty((tokens, query_heads, values.shape[2]), dtype=np.float32)
    for head in range(query_heads):
        scores = queries[:, head] @ keys[:, head // group].T / np.float32(np.sqrt(head_width))
        scores = np.where(is_visible, capped(scores, score_cap), -np.inf)
        sink = -np.inf if sinks is None else sinks[head]
        greatest = np.maximum(scores.max(axis=1, keepdims=True), np.float32(sink))
        weights = np.exp(scores - greatest)
        total = weights.sum(axis=1, keepdims=True) + np.exp(np.float32(sink) - greatest)
        result[:, head] = weights / total @ values[:, head // group]
    return result


class LatentAttention:
    """Multi-head latent attention of one layer: keys and values of all heads are products with the normed latent. A key
    ends with the rotated part, which all heads share.

    product: (name of a matrix of the layer, vectors) -> their products
    vector: name of a vector of the layer -> its values
    frequency: the table of rotary positions; None: heads are not rotated
    """

    def __init__(
        self,
        model: ModelSpec,
        layer: int,
        product: Callable[[str, Array], Array],
        vector: Callable[[str], Array],
        frequency: Array | None,
    ) -> None:
        self._model, self._window_tokens = model, model.windows_tokens[layer]
        self._product, self._vector, self._frequency = product, vector, frequency

    def mix(self, normed: Array, lengths: Sequence[int]) -> Iterator[Array]:
        """Yield the inputs of attention_output for each sequence, [its tokens, query_heads * value_width].

        normed: the inputs of the layer [tokens of all sequences, width]
        lengths: tokens of each sequence
        """
        model, ends = self._model, np.cumsum(lengths)[:-1]
        down = self._product("latent_down", normed)
        latent = self._norm("latent_norm", down[:, : model.latent_width])
        query_input = normed
        if model.query_rank:
            query_input = self._norm("query_down_norm", self._product("query_down", normed))
        inputs = ("query", query_input), ("key_up", latent), ("value_up", latent)
        products = [self._product(name, x).reshape(len(normed), model.query_heads, -1) for name, x in inputs]
        parts = [np.split(part, ends) for part in (*products, down[:, None, model.latent_width :])]
        for queries, keys, values, end_of_keys in zip(*parts, strict=True):
            unrotated, end_of_queries = np.split(queries, [model.unrotated_width], axis=2)
            all_queries = np.concatenate((unrotated, self._rotated(end_of_queries)), axis=2)
            all_queries = all_queries * np.float32(model.attention_scale) * query_factors(model, len(queries))
            shared = np.repeat(self._rotated(end_of_keys), model.query_heads, axis=1)
            all_keys = np.concatenate((keys, shared), axis=2)
            heads = attend(all_queries, all_keys, values, self._window_tokens, score_cap=model.score_cap)
            yield heads.reshape(len(heads), -1)

    def _norm(self, name: str, x: Array) -> Array:
        return rms_norm(x, self._vector(name), LATENT_EPSILON)

    def _rotated(self, heads: Array) -> Array:
        return heads if self._frequency is None else rotated(heads, self._frequency, self._model.rotary_scale)
