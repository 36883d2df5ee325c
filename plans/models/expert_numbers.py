"""The experts of a model by number: how many each layer has, and which compute a token."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from functools import cached_property
from typing import Any


class ExpertNumbers:
    """The part of ModelSpec that numbers experts. ModelSpec has the fields.

    A feed-forward of a dense layer counts as its only expert. The experts of a layer are those that its router chooses
    from, then those that compute every token.
    """

    experts: int
    experts_per_token: int
    shared_experts: int
    layer_kinds: tuple[Any, ...]

    @cached_property
    def expert_counts(self) -> tuple[int, ...]:
        """The number of experts of each layer, shared ones included."""
        routed = self.experts + self.shared_experts
        counts = ((kind.dense_experts or routed if kind.feed_forward else 0, kind.layers) for kind in self.layer_kinds)
        return tuple(count for count, layers in counts for _ in range(layers))

    @cached_property
    def first_ffns(self) -> tuple[int, ...]:
        """The number of the first feed-forward of each layer, and the number of all feed-forwards."""
        return (0, *itertools.accumulate(self.expert_counts))

    @property
    def ffns(self) -> int:
        """Number of feed-forwards in all layers. Each expert is one."""
        return self.first_ffns[-1]

    def ffns_of(self, layer: int) -> range:
        """Return the numbers of a layer's feed-forwards: experts among which the router chooses, then shared ones."""
        return range(self.first_ffns[layer], self.first_ffns[layer + 1])

    def place_of(self, ffn: int) -> tuple[int, int]:
        """Return (layer, expert) of a feed-forward."""
        layer = bisect.bisect_right(self.first_ffns, ffn) - 1
        return layer, ffn - self.first_ffns[layer]

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """(layer, number of the first expert, how many) of all experts of a layer that its router chooses from, and of
        those that compute every token; in ascending order."""
        runs: list[tuple[int, int, int]] = []
        for layer, experts in enumerate(self.expert_counts):
            routed = self.routed_experts(layer)
            runs += [(layer, 0, routed)] if routed else []
            runs += [(layer, routed, experts - routed)] if experts > routed else []
        return tuple(runs)

    def run_of(self, layer: int, expert: int) -> int:
        """Return the number of the run in `runs` that an expert belongs to."""
        return next(
            number
            for number, (of, first, count) in enumerate(self.runs)
            if of == layer and first <= expert < first + count
        )

    @property
    def places(self) -> Iterator[tuple[int, int]]:
        """(layer, expert) of every feed-forward, in ascending order."""
        return ((layer, expert) for layer, experts in enumerate(self.expert_counts) for expert in range(experts))

    def name_of(self, layer: int, expert: int) -> str:
        """Return the name of a feed-forward for messages."""
        return f"layer {layer}" if self.experts == 1 else f"layer {layer}, expert {expert}"

    def routed_experts(self, layer: int) -> int:
        """Return how many of a layer's experts its router chooses from: all but the last ones."""
        return 0 if self.experts == 1 or self.dense_layers[layer] or not self.expert_counts[layer] else self.experts

    def active_experts(self, layer: int) -> int:
        """Return how many experts of a layer compute a token."""
        routed = self.routed_experts(layer)
        return self.expert_counts[layer] - routed + (self.experts_per_token if routed else 0)

    @cached_property
    def dense_layers(self) -> tuple[bool, ...]:
        """For each layer of a mixture, True if it has no router."""
        return tuple(kind.dense_experts > 0 for kind in self.layer_kinds for _ in range(kind.layers))

    @property
    def experts_differ(self) -> bool:
        """True if layers have different numbers of experts, or experts that no router chooses beside others."""
        return self.shared_experts > 0 or any(self.dense_layers) or 0 in self.expert_counts

    @cached_property
    def most_experts(self) -> int:
        """The most experts of a layer."""
        return max(self.expert_counts)

    @cached_property
    def most_active_experts(self) -> int:
        """The most experts of a layer that compute a token."""
        return max(map(self.active_experts, range(len(self.expert_counts))))

    @cached_property
    def active_ffns(self) -> int:
        """Number of feed-forwards in all layers that compute a token."""
        return sum(map(self.active_experts, range(len(self.expert_counts))))

    @property
    def mean_active_experts(self) -> float:
        """The number of experts of a layer that compute a token, a mean over the layers."""
        return self.active_ffns / len(self.expert_counts)

    @cached_property
    def always_active_ffns(self) -> int:
        """Number of feed-forwards in all layers that compute every token."""
        return sum(self.expert_counts[layer] - self.routed_experts(layer) for layer in range(len(self.expert_counts)))
