"""The reads of missing clusters: when a plan issues them, and how many they are, of which size."""

from __future__ import annotations

from neuronpipe.plans.cost.expected_misses import joined_reads
from neuronpipe.plans.cost.io_wait import IssueTime, known_before_attention
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Compute, Flash, Memory
from neuronpipe.protocol.frozen import frozen

# Value parts that are read alone, for each missed bundle: both parts are read together but evicted separately, the
# value part sooner if the neuron was predicted and not active. Measured: 0.15 to 0.29 (1B and 7B, 40 to 75 % resident).
VALUES_ALONE = 0.2


@frozen
class ReadOrder:
    """The reads that one plan issues in decode steps.

    Misses and numbers of clusters, `among`, are those of a layer or of a whole step. Results are (reads, bytes). All
    are means.
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
        layout, clusters = self.manifest.layout, misses if self.in_order else among
        if not self.flash.bundle:
            return self._joined(misses, clusters, layout.trigger_part_bytes)
        reads, read_bytes = self._joined(misses, clusters, layout.cluster_stride_bytes)
        alone = 0.0 if self.in_order else misses * VALUES_ALONE
        return reads + alone, read_bytes + alone * layout.value_part_bytes

    def values(self, misses: float, among: float) -> tuple[float, float]:
        """Return the reads for missing values that are read apart from triggers."""
        return self._joined(misses, among, self.manifest.layout.value_read_bytes(moved=self.memory.are_scales_moved))

    def _joined(self, misses: float, among: float, part_bytes: int) -> tuple[float, float]:
        return joined_reads(misses, among, part_bytes, self.manifest.layout.cluster_stride_bytes, self.flash)
