"""Recurrent layers as their description defines them (plans/models/recurrent_sizes.py), token by token in float32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from neuronpipe.plans.models.recurrent_sizes import DELTA_RULE, WITH_MEMORY
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.reference.weights import Array

LENGTH_EPSILON = np.float32(1e-6)  # of the lengths of DeltaNet's queries and keys, in every model


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)), without overflow."""
    return np.asarray((1 + np.tanh(x / 2)) / 2, dtype=np.float32)


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    """Return log(1 + exp(x)), without overflow."""
    return np.asarray(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), dtype=np.float32)


class RecurrentLayer:
    """The mixer of one recurrent layer.

    product: (name of a matrix of the layer, vectors) -> their products
    vector: name of a vector of the layer -> its values
    """

    def __init__(
        self, model: ModelSpec, layer: int, product: Callable[[str, Array], Array], vector: Callable[[str], Array]
    ) -> None:
        self._model, self._layer, self._mixer = model, layer, model.mixers[layer]
        self._product, self._vector = product, vector

    def mix(self, normed: Array) -> Array:
        """Return what the layer adds for the tokens of one sequence, [tokens, width]. normed: [tokens, width]"""
        model, channels = self._model, self._model.channels(self._layer)
        products = self._product("recurrent_input", normed)
        if self._mixer == "kda":
            return self._mix_by_channel(normed, products)
        inputs, gate = products[:, : -model.gate_width(self._layer)], products[:, -model.gate_width(self._layer) :]
        if self._mixer == "convolution":
            return self._product(
                "recurrent_output", gate * self._convolved(inputs[:, :channels] * inputs[:, channels:])
            )
        mixed = silu(self._convolved(inputs))
        return self._product("recurrent_output", self._remember(mixed, gate, self._product("recurrent_rates", normed)))

    def _mix_by_channel(self, normed: Array, products: Array) -> Array:
        """Return what a layer with Kimi delta attention adds. products: those with `recurrent_input`"""
        channels = self._model.channels(self._layer)
        inputs, of_decays, of_gate = np.split(products, (channels, channels + self._model.state_rank), axis=1)
        decays, gate = self._product("recurrent_decays", of_decays), self._product("recurrent_gates", of_gate)
        rates = np.concatenate((decays, self._product("recurrent_rates", normed)), axis=1)
        return self._product("recurrent_output", self._remember(silu(self._convolved(inputs)), gate, rates))

    def _convolved(self, inputs: Array) -> Array:
        taps = self._vector("convolution").reshape(self._model.convolution_tokens, -1)
        padded = np.concatenate((np.zeros((len(taps) - 1, inputs.shape[1]), np.float32), inputs))
        total = np.zeros_like(inputs)
        for number, weights in enumerate(taps):
            total = total + weights * padded[number : number + len(inputs)]
        return total + self._vector("convolution.bias") if self._model.convolution_bias else total

    def _remember(self, mixed: Array, gate: Array, rates: Array) -> Array:
        """Return the input of the output matrix.

        mixed: [tokens, channels]
        rates: [tokens, decays_width and, with the delta rule, state_heads]
        """
        model, tokens = self._model, len(mixed)
        assert self._mixer in WITH_MEMORY
        is_delta = self._mixer in DELTA_RULE
        queries, keys, values = np.split(mixed, (model.state_keys_width, 2 * model.state_keys_width), axis=1)
        share = model.state_heads // model.state_key_heads
        queries, keys = (
            np.repeat(part.reshape(tokens, model.state_key_heads, -1), share, axis=1) for part in (queries, keys)
        )
        values = values.reshape(tokens, model.state_heads, -1)
        if is_delta:
            queries, keys = (
                part / np.sqrt(np.square(part).sum(axis=2, keepdims=True, dtype=np.float32) + LENGTH_EPSILON)
                for part in (queries, keys)
            )
            queries = queries / np.float32(np.sqrt(model.state_key_width))
        count = model.decays_width(self._layer)
        times = softplus(rates[:, :count] + self._vector("time_bias"))
        times = np.maximum(times, np.float32(model.min_time_step))
        decays = np.exp(times.reshape(tokens, model.state_heads, -1) * self._vector("decay")[:, None])
        shares = sigmoid(rates[:, count:]) if is_delta else times
        memory = np.zeros((model.state_heads, model.state_key_width, model.state_value_width), np.float32)
        outputs = np.empty_like(values)
        for token in range(tokens):
            memory = memory * decays[token, :, :, None]  # of each row in KDA, otherwise of the whole
            recalled = np.einsum("hkv,hk->hv", memory, keys[token]) if is_delta else np.float32(0)
            change = (values[token] - recalled) * shares[token, :, None]
            memory = memory + keys[token, :, :, None] * change[:, None, :]
            outputs[token] = np.einsum("hkv,hk->hv", memory, queries[token])
        weights = self._vector("recurrent_norm")
        if is_delta:
            normed = self._normed(outputs) * weights
            return normed.reshape(tokens, -1) * (sigmoid(gate) if self._mixer == "kda" else silu(gate))
        outputs = outputs + self._vector("skip")[:, None] * values
        gated = outputs.reshape(tokens, -1) * silu(gate)
        return self._normed(gated.reshape(tokens, model.state_norm_groups, -1)).reshape(tokens, -1) * weights

    def _normed(self, x: Array) -> Array:
        mean = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
        return np.asarray(x / np.sqrt(mean + np.float32(self._model.norm_epsilon)), dtype=np.float32)
