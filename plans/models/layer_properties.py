"""The properties of layers, norms and neurons, which follow from the fields of a ModelSpec."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from statistics import fmean
from typing import Any, Literal


class LayerProperties:
    """The part of ModelSpec that describes layers, norms and neurons. ModelSpec has the fields."""

    width: int
    experts: int
    layer_kinds: tuple[Any, ...]
    positions: Literal["rotary", "learned"]
    norms: Literal["before", "after", "both"]
    branch_norms: bool
    activation: str
    gated: bool

    @cached_property
    def windows_tokens(self) -> tuple[int, ...]:
        """Attention window of each layer in tokens; 0: none."""
        return tuple(kind.window_tokens for kind in self.layer_kinds for _ in range(kind.layers))

    @property
    def rotary_layers(self) -> tuple[bool, ...]:
        """For each layer, True if its heads are rotated."""
        rotary = self.positions == "rotary"
        return tuple(
            rotary and kind.rotary and kind.mixer == "attention"
            for kind in self.layer_kinds
            for _ in range(kind.layers)
        )

    @cached_property
    def ffn_layers(self) -> tuple[bool, ...]:
        """For each layer, True if it has a feed-forward."""
        return tuple(kind.feed_forward for kind in self.layer_kinds for _ in range(kind.layers))

    def ffn_mean(self, by_layer: Sequence[float] | None) -> float | None:
        """Return the mean of a figure over the layers that have a feed-forward; None if it is not known.

        by_layer: the figure of each layer, the others included
        """
        return None if by_layer is None else fmean(itertools.compress(by_layer, self.ffn_layers))

    @cached_property
    def local_layers(self) -> tuple[bool, ...]:
        """For each layer, True if its heads are rotated by the local table."""
        return tuple(kind.local_positions for kind in self.layer_kinds for _ in range(kind.layers))

    @property
    def norms_before(self) -> bool:
        """True if attention and feed-forward read the normed residual stream."""
        return self.norms != "after"

    @property
    def norms_after(self) -> bool:
        """True if the outputs of attention and feed-forward are normed before they are added."""
        return self.norms != "before"

    @property
    def change_width(self) -> int:
        """Number of a token's values that are normed before they are added to the residual stream."""
        return self.width * (2 if self.branch_norms else 1) if self.norms_after else 0

    @property
    def read_whole(self) -> bool:
        """True if reading an expert's clusters together costs less than reading those of fired neurons. With SiLU every
        neuron fires; with ReLU in the small experts of SmallThinker about 40 % do, which touches almost every page. Of
        ReLU² without a gate all Up rows are needed, and reads of single Down rows pay below a tenth, if at all
        (tests/bench/results: reading-by-neuron)."""
        return self.all_neurons_fire or (self.activation in ("relu", "relu2") and self.experts > 1)

    @property
    def all_neurons_fire(self) -> bool:
        """True if no neuron has a value of exactly 0, so that every neuron of a chosen expert is needed."""
        return self.activation in ("silu", "clamped_swiglu", "gelu", "gelu_erf")

    @property
    def ffn_matrices(self) -> tuple[str, ...]:
        """The matrices of the feed-forward, the trigger first."""
        return ("gate", "up", "down") if self.gated else ("up", "down")

    @property
    def trigger(self) -> Literal["gate", "up"]:
        """The matrix whose row decides whether a neuron fires."""
        return "gate" if self.gated else "up"
