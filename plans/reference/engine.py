"""Logits of a token list, straight from the definition: dense, float32, one layer after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from neuronpipe.plans.package.manifest import Activation, Shape
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.reference.weights import Array, PackageWeights
from neuronpipe.protocol.errors import UserError


class Result(NamedTuple):
    """logits float32 [tokens, vocabulary]; fired int64 [layers, neurons]: for how many tokens each neuron fired.

    Neurons are counted in the package's order; only a package in the source's order gives frequencies for `convert`.
    """

    logits: Array
    fired: np.ndarray


def _relu(x: Array) -> Array:
    return np.maximum(x, np.float32(0))


# The inner activations of a neuron from its gate and up values. A neuron fires when the result is not zero.
ACTIVATION: dict[Activation, Callable[[Array, Array], Array]] = {
    "relu": lambda gate, up: _relu(gate) * up,
    "drelu": lambda gate, up: _relu(gate) * _relu(up),
    "relu2": lambda gate, up: np.square(_relu(gate)) * up,
    "silu": lambda gate, up: gate * (1 + np.tanh(gate / 2)) / 2 * up,  # gate * sigmoid(gate), without overflow
}


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """x / rms(x) * weight over the last axis."""
    mean: Array = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
    normed: Array = x / np.sqrt(mean + np.float32(epsilon)) * weight
    return normed


def rotate(heads: Array, angles: Array) -> Array:
    """Rotate [tokens, heads, head_width] by [tokens, head_width/2]: element j turns with element j + head_width/2."""
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high = np.split(heads, 2, axis=-1)
    return np.concatenate((low * cosine - high * sine, high * cosine + low * sine), axis=-1)


def attend(queries: Array, keys: Array, values: Array, window_tokens: int) -> Array:
    """Causal attention [tokens, query_heads, head_width]; a key head serves query_heads/key_heads heads in a row."""
    tokens, query_heads, head_width = queries.shape
    group = query_heads // keys.shape[1]
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    seen = (distance >= 0) & ((distance < window_tokens) if window_tokens else True)
    result = np.empty_like(queries)
    for head in range(query_heads):
        scores = queries[:, head] @ keys[:, head // group].T / np.float32(np.sqrt(head_width))
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        result[:, head] = weights / weights.sum(axis=1, keepdims=True) @ values[:, head // group]
    return result


class ReferenceEngine:
    """Computes with a package's decoded weights, a layer at a time."""

    def __init__(self, package: Package) -> None:
        self._manifest, self._weights = package.manifest, PackageWeights(package)

    def run(self, tokens: Sequence[int]) -> Result:
        """Logits after each token of one text, from its start; and the firing counts."""
        shape = self._manifest.shape
        self._check(tokens, shape)
        x = self._weights.matrix("embedding")[np.asarray(tokens)]
        angles = np.arange(len(tokens), dtype=np.float32)[:, None] * self._weights.vector("rope.inverse_frequency")
        fired = np.empty((shape.layers, shape.neurons), dtype=np.int64)
        for layer in range(shape.layers):
            x = x + self._attention(layer, x, angles)
            change, fired[layer] = self._feed_forward(layer, x)
            x = x + change
        x = rms_norm(x, self._weights.vector("output_norm"), shape.norm_epsilon)
        output = self._weights.matrix("embedding" if self._manifest.tied_embeddings else "output")
        return Result(x @ output.T, fired)

    def _check(self, tokens: Sequence[int], shape: Shape) -> None:
        if not 1 <= len(tokens) <= shape.context_tokens:
            raise UserError(f"{len(tokens)} tokens: this package takes 1 to {shape.context_tokens}")
        for token in tokens:
            if not 0 <= token < shape.vocabulary:
                raise UserError(f"token {token}: this package has ids 0 to {shape.vocabulary - 1}")

    def _attention(self, layer: int, x: Array, angles: Array) -> Array:
        shape, weights, name = self._manifest.shape, self._weights, f"layers.{layer}"
        normed = rms_norm(x, weights.vector(f"{name}.attention_norm"), shape.norm_epsilon)
        qkv = normed @ weights.matrix(f"{name}.qkv").T
        if self._manifest.attention_bias:
            qkv = qkv + weights.vector(f"{name}.qkv.bias")
        heads = qkv.reshape(len(x), -1, shape.head_width)
        queries, keys, values = np.split(heads, (shape.query_heads, shape.query_heads + shape.key_heads), axis=1)
        mixed = attend(rotate(queries, angles), rotate(keys, angles), values, shape.window_tokens)
        return mixed.reshape(len(x), -1) @ weights.matrix(f"{name}.attention_output").T

    def _feed_forward(self, layer: int, x: Array) -> tuple[Array, np.ndarray]:
        name = f"layers.{layer}.ffn_norm"
        normed = rms_norm(x, self._weights.vector(name), self._manifest.shape.norm_epsilon)
        gate, up, down = self._weights.neurons(layer)
        inner = ACTIVATION[self._manifest.activation](normed @ gate.T, normed @ up.T)
        return inner @ down, np.count_nonzero(inner, axis=0)
