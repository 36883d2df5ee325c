"""The sizes of layers that carry a recurrent state from token to token instead of keys and values.

A recurrent layer has channels, which a causal convolution mixes over a few tokens, and heads with a memory each: a
matrix that a token's key and value change and its query reads. Gated DeltaNet, Kimi delta attention (KDA) and Mamba-2
differ in how:

    decayed     D = exp(decay * time) * memory, with time = softplus(rate + time_bias)
    deltanet    memory = D + key (x) (value - D^T key) * sigmoid(second rate);  queries and keys have length 1
    kda         likewise, but each row of a memory, which is a channel of keys, has a time and a decay of its own. These
                rates and the gate are products with two vectors of `state_rank` elements
    mamba2      memory = D + key (x) value * time;                              output + skip * value
    output      memory^T query, normed and multiplied by silu(gate), in KDA by sigmoid(gate); Mamba-2 multiplies first,
                and norms by groups
    convolution the layer has channels only: gate * convolution(first * second)
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

Mixer = Literal["attention", "deltanet", "mamba2", "convolution", "none", "kda"]
DELTA_RULE: tuple[Mixer, ...] = ("deltanet", "kda")
WITH_MEMORY: tuple[Mixer, ...] = (*DELTA_RULE, "mamba2")
RECURRENT: tuple[Mixer, ...] = (*WITH_MEMORY, "convolution")


class RecurrentSizes:
    """The part of ModelSpec that computes the sizes of recurrent layers. ModelSpec has the fields."""

    width: int
    layer_kinds: tuple[Any, ...]
    draft_layers: int
    state_heads: int
    state_key_heads: int
    state_key_width: int
    state_value_width: int
    state_norm_groups: int
    state_rank: int
    convolution_tokens: int
    convolution_bias: bool

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixer of each layer."""
        return tuple(kind.mixer for kind in self.layer_kinds for _ in range(kind.layers))

    @property
    def is_recurrent(self) -> bool:
        """True if a layer has a recurrent state."""
        return any(mixer in RECURRENT for mixer in self.mixers)

    @property
    def state_keys_width(self) -> int:
        """Number of channels that are keys, and of those that are queries."""
        return self.state_key_heads * self.state_key_width

    @property
    def state_values_width(self) -> int:
        """Number of channels that are values, and of elements of the gate and the output."""
        return self.state_heads * self.state_value_width

    def channels(self, layer: int) -> int:
        """Return the number of channels of a layer that its convolution mixes: queries, keys, values; 0: none."""
        if self.mixers[layer] in WITH_MEMORY:
            return 2 * self.state_keys_width + self.state_values_width
        return self.width if self.mixers[layer] == "convolution" else 0

    def gate_width(self, layer: int) -> int:
        """Return the number of elements of a recurrent layer's gate and of the input of its output matrix."""
        return self.state_values_width if self.mixers[layer] in WITH_MEMORY else self.width

    def recurrent_rows(self, layer: int) -> int:
        """Return the rows of `recurrent_input`: the channels, twice if two are multiplied, and the gate; in KDA the
        inputs of decays and gate instead of the gate."""
        if self.mixers[layer] == "kda":
            return self.channels(layer) + 2 * self.state_rank
        times = 2 if self.mixers[layer] == "convolution" else 1
        return times * self.channels(layer) + self.gate_width(layer)

    def rates(self, layer: int) -> int:
        """Return the rows of `recurrent_rates`: one for each head, with DeltaNet two."""
        times = {"deltanet": 2, "kda": 1, "mamba2": 1}
        return times.get(self.mixers[layer], 0) * self.state_heads

    def decays_width(self, layer: int) -> int:
        """Return the number of decays of a layer's memories: one for each, in KDA one for each of its rows."""
        return self.state_heads * (self.state_key_width if self.mixers[layer] == "kda" else 1)

    @property
    def raised_rows(self) -> int:
        """Number of rows of `recurrent_decays` and `recurrent_gates` together, in a layer with KDA."""
        return self.state_heads * self.state_key_width + self.state_values_width

    @cached_property
    def recurrent_width(self) -> int:
        """Number of products of a token with the matrices of a recurrent layer's input, the most of all layers."""
        layers = (layer for layer, mixer in enumerate(self.mixers) if mixer in RECURRENT)
        return max((self.recurrent_rows(layer) + self.rates(layer) for layer in layers), default=0)

    @cached_property
    def recurrent_weights(self) -> int:
        """Number of weights of recurrent layers' matrices, in all layers."""
        layers = (layer for layer, mixer in enumerate(self.mixers) if mixer in RECURRENT)
        rows = sum(self.recurrent_rows(layer) + self.rates(layer) + self.gate_width(layer) for layer in layers)
        return self.width * rows + self.mixers.count("kda") * self.state_rank * self.raised_rows

    def state_elements(self, layer: int) -> int:
        """Return the number of elements of a layer's state: earlier inputs of the convolution, and the memories; of the
        draft layer the last hidden state."""
        if layer >= len(self.mixers) - self.draft_layers:
            return self.width
        mixer = self.mixers[layer]
        memories = self.state_heads * self.state_key_width * self.state_value_width if mixer in WITH_MEMORY else 0
        return max(0, self.convolution_tokens - 1) * self.channels(layer) + memories

    @cached_property
    def all_state_elements(self) -> int:
        """Number of elements of the state of all layers, of one sequence."""
        return sum(map(self.state_elements, range(len(self.mixers))))

    def state_before(self, layer: int) -> int:
        """Return the number of state elements of the layers before this one."""
        return sum(map(self.state_elements, range(layer)))

    def recurrent_fault(self) -> tuple[str, str] | None:
        """Return the field of a recurrent layer that is contradicted by another, and how; None if none is."""
        with_memory = any(mixer in WITH_MEMORY for mixer in self.mixers)
        sizes = ("state_heads", "state_key_heads", "state_key_width", "state_value_width")
        for field in sizes:
            if (getattr(self, field) > 0) != with_memory:
                return field, f"{getattr(self, field)}, but {'a' if with_memory else 'no'} layer has memories"
        if with_memory and self.state_heads % self.state_key_heads:
            return "state_heads", f"{self.state_heads} is no multiple of state_key_heads, {self.state_key_heads}"
        has_kda = "kda" in self.mixers
        if (self.state_rank > 0) != has_kda:
            return "state_rank", f"{self.state_rank}, but {'a' if has_kda else 'no'} layer has Kimi delta attention"
        if has_kda and self.state_heads != self.state_key_heads:
            return "state_key_heads", f"{self.state_key_heads} for {self.state_heads} memories: not supported in KDA"
        if (self.convolution_tokens > 0) != self.is_recurrent:
            return "convolution_tokens", f"{self.convolution_tokens} does not go with the layers"
        if self.convolution_bias and not self.is_recurrent:
            return "convolution_bias", "there is no convolution"
        has_mamba = "mamba2" in self.mixers
        if (self.state_norm_groups > 0) != has_mamba or (
            has_mamba and self.state_values_width % self.state_norm_groups
        ):
            return "state_norm_groups", f"{self.state_norm_groups} groups of {self.state_values_width} elements"
        return None
