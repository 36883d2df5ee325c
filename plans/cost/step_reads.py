"""The reads of missing clusters: when a plan issues them, and how many they are, of which size."""

from __future__ import annotations

from neuronpipe.plans.cost.expected_misses import joined_reads
from neuronpipe.plans.cost.io_wait import IssueTime, known_before_attention
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Compute, Flash, Memory
from neuronpipe.protocol.frozen import frozen

# Value parts that are read alone, for each missed bundle: both parts are read together but evicted separately. About as
# many missed bundles find their value part, and read the trigger part alone. Counted in runs of a 1B and of a mixture
# of 2B: 0.09 to 0.11 with 25 % resident, 0.22 to 0.24 with 75 %.
VALUES_ALONE, VALUES_ALONE_OF_RESIDENT = 0.05, 0.23
# Misses of a mixture's token are denser than if they were spread over all of its experts, since those of an expert that
# was not used lately come together: with few misses by this factor. Counted in the same runs: 2.0 to 2.3 with 25 to
# 60 % resident.
DENSITY_IN_EXPERTS = 2.0


@frozen
class ReadOrder:
    """The reads that one plan issues in decode steps.

    `misses` and `among`, the clusters that tokens may access, are those of a layer or of a whole step. Results are
    (reads, bytes). All are means.
    """

    manifest: Manifest
    compute: Compute
    memory: Memory
    flash: Flash

    @property
    def in_order(self) -> bool:
        """True if every token reads all triggers of its experts, so that missing ones are contiguous."""
        return self.compute.mode != "predicted"

    @property
    def first_issued(self) -> IssueTime:
        """The time at which the first reads of a layer are issued: those of triggers or of whole clusters."""
        return IssueTime.AHEAD if self.in_order and self.manifest.model.experts == 1 else IssueTime.TOGETHER

    @property
    def before_attention(self) -> bool:
        """True if the first reads of a layer are issued before its attention."""
        return self.compute.prefetch and known_before_attention(self.manifest, self.compute)

    def first(self, misses: float, among: float) -> tuple[float, float]:
        """Return the reads for missing triggers, or for missing clusters if both parts are read together."""
        layout, clusters = self.manifest.layout, misses if self.in_order else self._missing_among(misses, among)
        if not self.flash.bundle:
            return self._joined(misses, clusters, layout.trigger_part_bytes)
        reads, read_bytes = self._joined(misses, clusters, layout.cluster_stride_bytes)
        resident_share = self.memory.value_slots / self.manifest.clusters
        alone = 0.0 if self.in_order else VALUES_ALONE + VALUES_ALONE_OF_RESIDENT * min(1.0, resident_share)
        return reads + misses * alone, read_bytes

    def values(self, misses: float, among: float) -> tuple[float, float]:
        """Return the reads for missing values that are read apart from triggers."""
        size_bytes = self.manifest.layout.value_read_bytes(moved=self.memory.are_scales_moved)
        return self._joined(misses, self._missing_among(misses, among), size_bytes)

    def _missing_among(self, misses: float, clusters: float) -> float:
        """Return the number of clusters, of those that tokens may access, among which these misses are."""
        if self.manifest.model.experts == 1 or not misses:
            return clusters
        density: float = 1 - (1 - min(1.0, misses / clusters)) ** DENSITY_IN_EXPERTS
        return misses / density

    def _joined(self, misses: float, among: float, part_bytes: int) -> tuple[float, float]:
        return joined_reads(misses, among, part_bytes, self.manifest.layout.cluster_stride_bytes, self.flash)
