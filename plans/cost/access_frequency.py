"""How often a step wants each cluster of a package: from the bins of its activity profile, for one to four texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from neuronpipe.plans.cost.cluster_ranking import Bins, Ranking
from neuronpipe.plans.package.activity_profile import BATCHES, Activity, ProfileMode, neuron_bin_ends
from neuronpipe.plans.package.manifest import Manifest


class AccessFrequencies:
    """Of a package whose first neurons are its hottest. Rankings are made when they are first asked for."""

    def __init__(self, manifest: Manifest, activity: Activity) -> None:
        self._manifest, self._activity = manifest, activity
        self._rankings: dict[tuple[ProfileMode, bool, int], Ranking] = {}
        ends = [end // manifest.layout.cluster_neurons for end in neuron_bin_ends(manifest.model.neurons)]
        ends[-1] = manifest.layout.clusters
        self._bin_clusters = [end - start for start, end in itertools.pairwise(ends)]

    @classmethod
    def of(cls, manifest: Manifest, read: Callable[[], Activity]) -> AccessFrequencies | None:
        """None for a package whose order does not tell, or which was not measured: then nothing is read."""
        ordered = manifest.layout.neuron_order == "frequency" and bool(manifest.profiles)
        return cls(manifest, read()) if ordered else None

    def ranking(
        self, mode: ProfileMode, texts: int, measured: Callable[[float], float], *, whole_experts: bool = False
    ) -> Ranking | None:
        """Of steps of so many texts, of more as of the most that were measured; None where neither this mode nor exact
        was measured. whole_experts: a chosen expert is wanted whole. measured: as a Ranking takes it."""
        profile = self._manifest.profile(mode) or self._manifest.profile("exact")
        if profile is None:
            return None
        key = profile.mode, whole_experts, min(texts, max(BATCHES))
        if key not in self._rankings:
            one = None if key[2] == 1 else self.ranking(mode, 1, measured, whole_experts=whole_experts)
            self._rankings[key] = Ranking(list(self._ffns(*key)), one or measured)
        return self._rankings[key]

    def _ffns(self, mode: ProfileMode, whole_experts: bool, texts: int) -> Iterator[Bins]:
        model, neurons = self._manifest.model, self._manifest.layout.cluster_neurons
        for layer in range(model.layers):
            for expert in range(model.experts):
                chosen = self._activity.expert(mode, texts, layer, expert)
                if whole_experts or not chosen:
                    yield [(chosen, self._manifest.layout.clusters)]
                    continue
                bins = self._activity.bins(mode, texts, layer, expert)
                wanted = (chosen * (1 - (1 - min(1.0, each / chosen)) ** neurons) for each in bins)
                yield list(zip(wanted, self._bin_clusters, strict=True))
