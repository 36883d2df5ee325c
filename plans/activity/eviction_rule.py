"""The cache's rule of eviction, as the cache service and the simulator use it: CLOCK with usage counts, or for experts
of which a token uses all clusters LFU with ageing (native/residency/clock.c, frequency.c)."""

from __future__ import annotations

from array import array
from typing import Any, Final

from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.activity_profile import ProfileMode
from neuronpipe.plans.package.manifest import Manifest

HALF_LIFE_TOKENS: Final = 16
"""The weight of a use halves while so many tokens use experts. Of recorded routes of Qwen3-30B-A3B and Gemma-4-26B-A4B
as much is missed with 8 and 32, of gpt-oss-120b up to 3 % less with 8 and 7 % more with 32."""


def whole_experts_of_token(manifest: Manifest, mode: ProfileMode) -> int:
    """Return how many experts a token uses with all of their clusters; 0 if it uses single clusters of them."""
    if manifest.model.experts == 1:
        return 0
    return manifest.model.active_ffns if manifest.layout.down_by_output or mode == "exact" else 0


def whole_experts_by_part(manifest: Manifest, mode: ProfileMode, *, reads_whole: bool) -> tuple[int, int]:
    """Return the same for the trigger parts and for the value parts.

    reads_whole: whether value parts are read with their trigger parts; otherwise a token uses those of firing neurons
    """
    experts = whole_experts_of_token(manifest, mode)
    return experts, experts if reads_whole or manifest.layout.down_by_output else 0


class EvictionRule:
    """The state of the rule for one part of the clusters.

    entries: number of residency entries of the part
    experts_of_token: how many experts a token uses with all of their clusters; 0: it uses single clusters
    expert_clusters: number of clusters of an expert
    """

    def __init__(self, entries: int, experts_of_token: int, expert_clusters: int) -> None:
        self._entries = entries
        self._hand: Any = ffi.new("size_t *")
        self._uses: Any = None
        if experts_of_token:
            experts = entries // expert_clusters
            sums, empty = ffi.new("double[]", experts), ffi.new("uint8_t[]", experts)
            growth = 2 ** (1 / (HALF_LIFE_TOKENS * experts_of_token))
            uses = {"clusters": expert_clusters, "sums": sums, "empty": empty, "weight": 1.0, "growth": growth}
            self._uses, self._keep = ffi.new("np_uses *", uses), (sums, empty)

    def take(self, words: Any, count: int, windows: Any = ffi.NULL, window_count: int = 0) -> array[int]:
        """Evict up to `count` clusters and return the slots that this freed.

        words: the residency entries, a uint32_t *
        windows: the windows of the workers, a uint64_t *
        """
        slots: Any = ffi.new("uint32_t[]", count)
        to = (windows, window_count, count, slots)
        if self._uses is None:
            evicted = lib.np_clock_take(words, self._entries, self._hand, *to)
        else:
            evicted = lib.np_least_used_take(words, self._entries, self._uses, *to)
        return array("I", bytes(ffi.buffer(slots, 4 * evicted)))
