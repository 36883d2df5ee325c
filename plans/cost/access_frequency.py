"""Access frequencies of a package's clusters, from the bins of its activity profile, for steps of one to four
sequences."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from neuronpipe.plans.cost.cluster_ranking import Bins, Ranking
from neuronpipe.plans.package.activity_profile import BATCHES, Activity, ProfileMode, neuron_bin_ends
from neuronpipe.plans.package.manifest import Manifest


class AccessFrequencies:
    """Access frequencies of a package whose first neurons are its hottest. Rankings are computed on first use."""

    def __init__(self, manifest: Manifest, activity: Activity) -> None:
        self._manifest, self._activity = manifest, activity
        self._rankings: dict[tuple[ProfileMode, bool, int], Ranking] = {}
        ends = [end // manifest.layout.cluster_neurons for end in neuron_bin_ends(manifest.model.neurons)]
        ends[-1] = manifest.layout.clusters
        self._bin_clusters = [end - start for start, end in itertools.pairwise(ends)]

    @classmethod
    def of(cls, manifest: Manifest, read: Callable[[], Activity]) -> AccessFrequencies | None:
        """Return the frequencies of a package.

        None if its neurons are not ordered by frequency, or if it has no activity profile of its own: what runs have
        counted has no frequencies.

        read: loads the activity profile; called only if it is needed
        """
        stored = tuple(profile for profile in manifest.profiles if profile.source != "counted")
        if manifest.layout.neuron_order != "frequency" or not stored:
            return None
        return cls(dataclasses.replace(manifest, profiles=stored), read())

    def ranking(
        self, mode: ProfileMode, batch: int, measured: Callable[[float], float], *, whole_experts: bool = False
    ) -> Ranking | None:
        """Return the ranking for steps of `batch` sequences, with the frequencies of at most max(BATCHES) sequences.

        Frequencies of exact mode stand in for those of an unmeasured mode. None if neither was measured.

        measured: miss rate by resident share, for the Ranking of one sequence
        whole_experts: a chosen expert is read whole
        """
        profile = self._manifest.profile(mode) or self._manifest.profile("exact")
        if profile is None:
            return None
        key = profile.mode, whole_experts, min(batch, max(BATCHES))
        if key not in self._rankings:
            of_one_sequence = None if key[2] == 1 else self.ranking(mode, 1, measured, whole_experts=whole_experts)
            self._rankings[key] = Ranking(list(self._ffns(*key)), of_one_sequence or measured)
        return self._rankings[key]

    def _ffns(self, mode: ProfileMode, whole_experts: bool, batch: int) -> Iterator[Bins]:
        model, neurons = self._manifest.model, self._manifest.layout.cluster_neurons
        for layer, expert in model.places:
            chosen = self._activity.expert(mode, batch, layer, expert)
            if whole_experts or not chosen:
                yield [(chosen, self._manifest.layout.clusters)]
                continue
            bins = self._activity.bins(mode, batch, layer, expert)
            frequencies = (chosen * (1 - (1 - min(1.0, each / chosen)) ** neurons) for each in bins)
            yield list(zip(frequencies, self._bin_clusters, strict=True))
