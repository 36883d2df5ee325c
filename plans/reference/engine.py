"""Computes a model as its description defines it: dense, in float32, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from neuronpipe.plans.convert.checkpoint import ffn_name
from neuronpipe.plans.models.spec import Activation, ModelSpec
from neuronpipe.plans.package.manifest import PredictorInput
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.tensors import DRAFT_INPUT
from neuronpipe.plans.reference.attention import (
    LatentAttention,
    attend,
    capped,
    clipped,
    layer_norm,
    query_factors,
    rms_norm,
    rotated,
)
from neuronpipe.plans.reference.expert_shares import expert_shares
from neuronpipe.plans.reference.recurrent import RecurrentLayer, sigmoid
from neuronpipe.plans.reference.weights import Array, PackageWeights, Weights
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen


class Result(NamedTuple):
    """The result of a run.

    logits: [tokens, vocabulary]
    fired: number of tokens for which each neuron fired [feed-forwards, neurons], in the order of the weights
    """

    logits: Array
    fired: np.ndarray


CLAMPED_SWIGLU_GAIN = np.float32(1.702)
GELU_SCALE, GELU_CUBE = np.float32(math.sqrt(2 / math.pi)), np.float32(0.044715)


def _relu(x: Array) -> Array:
    return np.maximum(x, np.float32(0))


def gelu(x: Array) -> Array:
    value: Array = x * (1 + np.tanh(GELU_SCALE * (x + GELU_CUBE * x**3))) / 2
    return value


def gelu_erf(x: Array) -> Array:
    """Return x times the normal distribution up to x, an element after the other: numpy has no error function."""
    shares = np.fromiter((math.erfc(-value * math.sqrt(0.5)) / 2 for value in x.flat), np.float32, count=x.size)
    return x * shares.reshape(x.shape)


# The value of a neuron from its gate and up products, or from its up product. The neuron fires if it is not 0.
GATED: dict[Activation, Callable[[Array, Array], Array]] = {
    "relu": lambda gate, up: _relu(gate) * up,
    "drelu": lambda gate, up: _relu(gate) * _relu(up),
    "relu2": lambda gate, up: np.square(_relu(gate)) * up,
    "gelu": lambda gate, up: gelu(gate) * up,
    "gelu_erf": lambda gate, up: gelu_erf(gate) * up,
    "silu": lambda gate, up: gate * (1 + np.tanh(gate / 2)) / 2 * up,  # gate * sigmoid(gate), without overflow
}


def gated_values(model: ModelSpec, gate: Array, up: Array) -> Array:
    """Return the values of neurons with a gate, from their gate and up products."""
    if model.activation != "clamped_swiglu":
        return GATED[model.activation](gate, up)
    limit = np.float32(model.activation_limit)
    below = np.minimum(gate, limit)
    shares = (1 + np.tanh(CLAMPED_SWIGLU_GAIN * below / 2)) / 2
    return np.asarray((np.clip(up, -limit, limit) + 1) * (below * shares), dtype=np.float32)


UNGATED: dict[Activation, Callable[[Array], Array]] = {
    "relu": _relu,
    "relu2": lambda up: np.square(_relu(up)),
    "gelu": gelu,
    "gelu_erf": gelu_erf,
}


def inner_values(model: ModelSpec, values: Mapping[str, Array]) -> Array:
    """Return the values of neurons from their products with the matrices before Down, by the names of these."""
    if model.gated:
        return gated_values(model, values["gate"], values["up"])
    return UNGATED[model.activation](values["up"])


@frozen
class LayerRun:
    """The computation of a feed-forward, of a layer or of an expert.

    ffn: number of the feed-forward, counted through all layers
    tokens: indices of its tokens; in a mixture of those that chose the expert
    attention_input: normed input of the layer's attention [tokens, width]
    residual: input of the feed-forward's norm [tokens, width]
    feed_forward_input: output of that norm [tokens, width]
    weights: the matrices `gate` (if any) and `up`, [neurons, width]
    values: their products with feed_forward_input, bias included [tokens, neurons]
    inner: values of the neurons [tokens, neurons]; 0 if a neuron did not fire
    """

    ffn: int
    layer: int
    tokens: np.ndarray
    attention_input: Array
    residual: Array
    feed_forward_input: Array
    weights: Mapping[str, Array]
    values: Mapping[str, Array]
    inner: Array

    def read_by(self, reads: PredictorInput) -> Array:
        """Return the vectors [tokens, width] that a predictor reads."""
        inputs = {"attention": self.attention_input, "residual": self.residual}
        return inputs.get(reads, self.feed_forward_input)


Mask = Callable[[LayerRun], np.ndarray]


class ReferenceEngine:
    """Computes sequences with decoded weights, a layer at a time.

    observe: receives every feed-forward
    observe_inputs: receives the name of a matrix, as in a Checkpoint, and its input vectors [tokens, columns]; for all
        matrices of layers
    mask: returns a mask [tokens, neurons] of the neurons of a feed-forward that are computed
    attended: receives a layer and the number of tokens that have passed its attention
    """

    def __init__(
        self,
        model: Package | Weights,
        *,
        observe: Callable[[LayerRun], None] | None = None,
        observe_inputs: Callable[[str, Array], None] = lambda matrix, inputs: None,
        mask: Mask | None = None,
        attended: Callable[[int, int], None] = lambda layer, tokens: None,
    ) -> None:
        self._weights: Weights = PackageWeights(model) if isinstance(model, Package) else model
        self._model = self._weights.model
        self._observe, self._observe_inputs, self._mask, self._attended = observe, observe_inputs, mask, attended

    def run(self, tokens: Sequence[int]) -> Result:
        """Return the logits after each token of a sequence, and the firing counts. Raises UserError as `hidden`."""
        hidden, fired = self.hidden([tokens])
        return Result(self.logits(hidden), fired)

    def hidden(self, sequences: Sequence[Sequence[int]]) -> tuple[Array, np.ndarray]:
        """Return the residual stream after the last text layer [tokens of all sequences, width], and the firing counts
        of Result. Raises UserError for token ids that the model lacks, and for empty or too long sequences.

        sequences: token ids of each sequence, from position 0 on
        """
        model = self._model
        for tokens in sequences:
            self._check(tokens, model)
        x = self._weights.rows("embedding", np.concatenate([np.asarray(tokens) for tokens in sequences]))
        x = x * np.float32(model.embedding_scale)
        if model.positions == "learned":
            table = self._weights.vector("position_embedding").reshape(-1, model.width)
            x = x + np.concatenate([table[: len(tokens)] for tokens in sequences])
        fired = np.zeros((model.ffns, model.neurons), dtype=np.int64)
        for layer in range(model.text_layers):
            x = self._layer(layer, x, [len(tokens) for tokens in sequences], fired)
        return x, fired

    def draft_logits(self, tokens: Sequence[int], drafted: Sequence[int] = ()) -> Array:
        """Return the logits [tokens - 1 + drafted, vocabulary] of the draft layer, which reads each token but the first
        and the last hidden state of the token before it.

        drafted: further tokens, for which the layer reads its own hidden state instead
        """
        layer, norm = self._model.text_layers, f"layers.{self._model.text_layers}.draft_output_norm"
        hidden, fired = self.hidden([tokens])
        inputs = self._draft_inputs(tokens[1:], self._normed("output_norm", hidden[:-1]))
        states = self._layer(layer, inputs, [len(inputs)], fired)
        for token in drafted:
            inputs = np.concatenate((inputs, self._draft_inputs([token], self._normed(norm, states[-1:]))))
            states = self._layer(layer, inputs, [len(inputs)], fired)
        return self._logits_of(self._normed(norm, states) * np.float32(self._model.logit_scale))

    def _draft_inputs(self, tokens: Sequence[int], hidden: Array) -> Array:
        """Return the residual stream before the draft layer. hidden: for each token a hidden state"""
        model, name = self._model, f"layers.{self._model.text_layers}"
        embedded: Array = self._weights.rows("embedding", np.asarray(tokens)) * np.float32(model.embedding_scale)
        halves = (
            self._normed(f"{name}.draft_embedding_norm", embedded),
            self._normed(f"{name}.draft_hidden_norm", hidden),
        )
        return self._product(model.text_layers, DRAFT_INPUT, np.concatenate(halves, axis=1))

    def logits(self, hidden: Array) -> Array:
        """Return logits [tokens, vocabulary]. hidden: residual stream after the last layer."""
        return self._logits_of(self.output_inputs(hidden))

    def _logits_of(self, inputs: Array) -> Array:
        output = self._weights.matrix("embedding" if self._model.tied_embeddings else "output")
        logits: Array = inputs @ output.T
        if self._model.logit_bias:
            logits = logits + self._weights.vector("output.bias")
        return capped(logits, self._model.logit_cap)

    def _layer(self, layer: int, x: Array, lengths: Sequence[int], fired: np.ndarray) -> Array:
        """Return the residual stream after a layer. Sets the firing counts."""
        model, scale = self._model, np.float32(self._model.residual_scale)
        attention_input, layer_input = x, x
        if model.mixers[layer] != "none":
            attention_input = self._input(f"layers.{layer}.attention_norm", x)
            attention = self._mix(layer, attention_input, lengths)
            x = x + scale * self._output(f"layers.{layer}.attention_output_norm", attention)
        if not model.ffn_layers[layer]:
            return x
        residual = layer_input if model.parallel else x
        inputs = attention_input, residual, self._input(f"layers.{layer}.ffn_norm", residual)
        change = self._experts(layer, inputs, layer_input, fired)
        x = x + scale * self._output(f"layers.{layer}.ffn_output_norm", change)
        return x * self._weights.vector(f"layers.{layer}.scale") if model.layer_scales else x

    def output_inputs(self, hidden: Array) -> Array:
        """Return the input vectors [tokens, width] of the output matrix."""
        normed: Array = self._normed("output_norm", hidden) * np.float32(self._model.logit_scale)
        return normed

    def _input(self, norm: str, x: Array) -> Array:
        """Return what attention or a feed-forward reads. norm: name of the norm before it, if the model has one"""
        return self._normed(norm, x) if self._model.norms_before else x

    def _output(self, norm: str, change: Array) -> Array:
        """Return what is added to the residual stream. norm: name of the norm of it, if the model has one"""
        return self._normed(norm, change) if self._model.norms_after else change

    def _normed(self, name: str, x: Array) -> Array:
        model, weight = self._model, self._weights.vector(name)
        if model.norm == "layer":
            return layer_norm(x, weight, self._weights.vector(f"{name}.bias"), model.norm_epsilon)
        return rms_norm(x, weight, model.norm_epsilon)

    def _check(self, tokens: Sequence[int], model: ModelSpec) -> None:
        if not 1 <= len(tokens) <= model.context_tokens:
            raise UserError(f"{len(tokens)} tokens: this package takes 1 to {model.context_tokens}")
        for token in tokens:
            if not 0 <= token < model.vocabulary:
                raise UserError(f"token {token}: this package has ids 0 to {model.vocabulary - 1}")

    def _mix(self, layer: int, normed: Array, lengths: Sequence[int]) -> Array:
        """Return what the layer's mixer adds to the residual stream, [tokens of all sequences, width]."""
        if self._model.mixers[layer] == "attention":
            return self._attention(layer, normed, lengths)
        recurrent = RecurrentLayer(
            self._model,
            layer,
            lambda name, x: self._product(layer, name, x),
            lambda name: self._weights.vector(f"layers.{layer}.{name}"),
        )
        ends = np.cumsum(lengths)
        mixed = [recurrent.mix(part) for part in np.split(normed, ends[:-1])]
        self._attended(layer, int(ends[-1]))
        return np.concatenate(mixed)

    def _attention(self, layer: int, normed: Array, lengths: Sequence[int]) -> Array:
        model, weights, name = self._model, self._weights, f"layers.{layer}"
        heads = model.layer_heads[layer]
        if model.latent_width:
            return self._latent_attention(layer, normed, lengths)
        qkv = self._product(layer, "qkv", normed)
        if model.qkv_bias:
            qkv = qkv + weights.vector(f"{name}.qkv.bias")
        sinks = weights.vector(f"{name}.sinks") if model.attention_sinks else None
        gates: Array | np.float32 = np.float32(1)
        if model.gated_attention:
            qkv, gate_products = np.split(qkv, [-heads.query_width], axis=1)
            gates = sigmoid(gate_products)
        mixed = []
        ends = np.cumsum(lengths)
        all_heads = np.split(qkv.reshape(len(normed), -1, heads.width), ends[:-1])
        for end, part in zip(ends, all_heads, strict=True):
            queries, keys, values = np.split(part, (heads.query_heads, heads.query_heads + heads.key_heads), axis=1)
            values = keys if heads.value_from_key else values
            if model.value_norm:
                values = rms_norm(values, np.ones(heads.width, dtype=np.float32), model.norm_epsilon)
            values = clipped(values, model.qkv_limit)
            scale = model.local_attention_scale if model.local_layers[layer] else model.attention_scale
            queries = self._placed(layer, "query_norm", queries) * np.float32(scale)
            queries = queries * query_factors(model, len(queries))
            keys = self._placed(layer, "key_norm", keys)
            mixed.append(attend(queries, keys, values, model.windows_tokens[layer], sinks, model.score_cap))
            self._attended(layer, int(end))
        heads_together = np.concatenate(mixed).reshape(len(normed), -1) * gates
        attention = self._product(layer, "attention_output", heads_together)
        return attention + weights.vector(f"{name}.attention_output.bias") if model.output_bias else attention

    def _latent_attention(self, layer: int, normed: Array, lengths: Sequence[int]) -> Array:
        name = f"layers.{layer}"
        latents = LatentAttention(
            self._model,
            layer,
            lambda matrix, x: self._product(layer, matrix, x),
            lambda vector: self._weights.vector(f"{name}.{vector}"),
            self._frequency(layer),
        )
        mixed, last = [], 0
        for heads in latents.mix(normed, lengths):
            mixed.append(heads)
            last += len(heads)
            self._attended(layer, last)
        attention = self._product(layer, "attention_output", np.concatenate(mixed))
        bias = self._weights.vector(f"{name}.attention_output.bias") if self._model.output_bias else np.float32(0)
        return attention + bias

    def _product(self, layer: int, name: str, x: Array) -> Array:
        self._observe_inputs(f"layers.{layer}.{name}", x)
        product: Array = x @ self._weights.matrix(f"layers.{layer}.{name}").T
        return product

    def _placed(self, layer: int, norm: str, heads: Array) -> Array:
        """Return queries or keys [tokens, heads, head_width] after norm, limit and rotation, if the model has them."""
        model, norm = self._model, f"layers.{layer}.{norm}"
        if model.norm_after_rotation:
            rotated = self._rotated(layer, clipped(heads, model.qkv_limit))
            return rms_norm(rotated, self._weights.vector(norm), model.norm_epsilon)
        if model.head_norm:
            heads = rms_norm(heads, self._weights.vector(norm), model.norm_epsilon)
        if model.joint_norm:
            joint = rms_norm(heads.reshape(len(heads), -1), self._weights.vector(norm), model.norm_epsilon)
            heads = joint.reshape(heads.shape)
        return self._rotated(layer, clipped(heads, model.qkv_limit))

    def _rotated(self, layer: int, heads: Array) -> Array:
        frequency = self._frequency(layer)
        return heads if frequency is None else rotated(heads, frequency, self._model.rotary_scale)

    def _frequency(self, layer: int) -> Array | None:
        """Return the table of a layer's rotary positions; None if heads are not rotated."""
        model = self._model
        name = f"rope.{'local_' if model.local_layers[layer] else ''}inverse_frequency"
        return self._weights.vector(name) if model.rotary_layers[layer] else None

    def _experts(self, layer: int, inputs: tuple[Array, Array, Array], layer_input: Array, fired: np.ndarray) -> Array:
        """Return what the feed-forward adds to the residual stream, before its norm. Sets the firing counts.

        inputs: attention_input, residual and feed_forward_input of LayerRun
        """
        model, (attention_input, residual, normed) = self._model, inputs
        shares = self._route(layer, normed if model.router_reads == "feed_forward" else layer_input, residual)
        shared = np.zeros_like(residual)
        routed = np.zeros_like(residual) if model.branch_norms else shared
        routed_input = self._normed(f"layers.{layer}.routed_norm", residual) if model.branch_norms else normed
        for expert, ffn in enumerate(model.ffns_of(layer)):
            is_routed = expert < model.routed_experts(layer)
            if len(chosen := np.flatnonzero(shares[:, expert])):
                read = (attention_input[chosen], residual[chosen], (routed_input if is_routed else normed)[chosen])
                change, fired[ffn] = self._feed_forward(layer, expert, read, chosen)
                (routed if is_routed else shared)[chosen] += shares[chosen, expert, None] * change
        if not model.branch_norms:
            return shared
        routed = self._normed(f"layers.{layer}.routed_output_norm", routed)
        return self._normed(f"layers.{layer}.shared_output_norm", shared) + routed

    def _route(self, layer: int, x: Array, residual: Array) -> Array:
        """Return the factor of each expert's output for each token, [tokens, experts of the layer]."""
        model = self._model
        always = np.ones((len(x), model.expert_counts[layer] - model.routed_experts(layer)), dtype=np.float32)
        if not model.routed_experts(layer):
            return always
        if model.shared_gate:
            gate = x @ self._weights.vector(f"layers.{layer}.shared_gate")
            always *= (1 / (1 + np.exp(-gate)))[:, None]
        if model.router_norm:
            x = rms_norm(residual, self._weights.vector(f"layers.{layer}.router_norm"), model.norm_epsilon)
        router = self._weights.vector(f"layers.{layer}.router").reshape(model.experts, model.width)
        values = x @ router.T
        if model.router_bias:
            values = values + self._weights.vector(f"layers.{layer}.router.bias")
        bias = self._weights.vector(f"layers.{layer}.router.choosing_bias") if model.choosing_bias else None
        shares = expert_shares(model, values, bias)
        if model.expert_scales:
            shares = shares * self._weights.vector(f"layers.{layer}.expert_scales")
        return np.concatenate((shares, always), axis=1)

    def _feed_forward(
        self, layer: int, expert: int, inputs: tuple[Array, Array, Array], tokens: np.ndarray
    ) -> tuple[Array, np.ndarray]:
        """Return the output [tokens, width] and the firing counts [neurons].

        inputs: attention_input, residual and feed_forward_input of LayerRun
        """
        model, name = self._model, f"layers.{layer}"
        normed = inputs[-1]
        *before, down = self._weights.neurons(layer, expert)
        weights = dict(zip(model.ffn_matrices, before, strict=False))
        for matrix in weights:
            self._observe_inputs(ffn_name(model, name, expert, matrix), normed)
        values = {matrix: normed @ rows.T for matrix, rows in weights.items()}
        for matrix in values if model.ffn_bias else ():
            values[matrix] = values[matrix] + self._bias(f"{name}.{matrix}.bias", expert)
        inner = inner_values(model, values)
        if model.activation_threshold:
            inner = np.where(values[model.trigger] > np.float32(model.activation_threshold), inner, np.float32(0))
        run = LayerRun(model.first_ffns[layer] + expert, layer, tokens, *inputs, weights, values, inner)
        if self._observe is not None:
            self._observe(run)
        if self._mask is not None:
            inner = np.where(self._mask(run), inner, np.float32(0))
        self._observe_inputs(ffn_name(model, name, expert, "down"), inner)
        change = inner @ down
        if model.ffn_bias:
            change = change + self._bias(f"{name}.down.bias", expert)
        return change, np.count_nonzero(inner, axis=0)

    def _bias(self, name: str, expert: int) -> Array:
        """Return the bias of one expert's matrix."""
        bias: Array = self._weights.vector(name).reshape(self._model.most_experts, -1)[expert]
        return bias
