"""Exposed flash time: how long workers wait for reads, by when the reads are issued."""

from __future__ import annotations

import enum
import math

from neuronpipe.plans.cost.work_cost import WorkCost
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Compute
from neuronpipe.plans.plan.segment_sizes import embedding_row_bytes
from neuronpipe.protocol.frozen import frozen


class IssueTime(enum.Enum):
    """The time at which the reads of a layer are issued, which decides how much work overlaps with them."""

    AHEAD = "while the layer before is computed: the same for every token"
    TOGETHER = "before the layer's neurons are computed"
    ONE_BY_ONE = "while the layer's neurons are computed: an active gate needs its values"


@frozen
class Reads:
    """The reads of a step that are issued in the same way.

    reads, read_bytes: mean number and bytes in all layers
    hidden_ms: time of the work in all layers that overlaps with flash time; None if it is not known
    group_reads: reads that come together, since whole experts are missed; 1: each read comes by itself
    layer_groups: such groups that a layer accesses, missed or not
    """

    issued: IssueTime
    reads: float
    read_bytes: float
    hidden_ms: float | None
    group_reads: float = 1.0
    layer_groups: float = 1.0


@frozen
class IoWait:
    """The model of waiting for reads.

    layers: number of layers that have a feed-forward
    depth: maximum of reads in flight
    """

    cost: WorkCost
    layers: int
    depth: int

    def at_once(self, batch: Reads) -> float:
        """Return the mean number of reads that are issued together: those of a step (ahead) or of a layer."""
        if batch.issued == IssueTime.AHEAD:
            return batch.reads
        return max(1.0, batch.group_reads, batch.reads / self.layers)

    def flash_ms(self, batch: Reads) -> float | None:
        """Return the time of the storage for all reads, or of a loader on a core of its own if that is longer.

        None if flash was not measured.
        """
        return self.cost.storage_ms(batch.reads, batch.read_bytes, self.at_once(batch), self.depth)

    def exposed_ms(self, batch: Reads, delay_ms: float | None = None) -> float | None:
        """Return the flash time of a step that no work overlaps; None if flash or the work was not measured.

        Reads issued ahead overlap with the whole step, other reads with the work of their own layer. The number of
        reads issued together varies: if their time is distributed exponentially, the mean of the part that exceeds the
        overlapping work is mean time x exp(-hidden / mean time). Of whole experts few are missed at once: their number
        is distributed binomially. Of reads issued one by one, workers wait for the last, which is issued shortly before
        the layer ends and queues behind others; if flash is slower than the work, they wait for all that is left. A
        loader on a core of theirs slows the work down, and serves reads meanwhile.

        delay_ms: delay of a read in a run (default: by the device profile)
        """
        flash_ms = self.flash_ms(batch)
        if flash_ms is None or batch.hidden_ms is None:
            return None
        if batch.issued == IssueTime.AHEAD or not batch.reads:
            return max(0.0, flash_ms - batch.hidden_ms)
        layers = self.layers * (1 - math.exp(-batch.reads / self.layers))  # expected layers with a miss
        each_ms, hidden_ms = flash_ms / layers, batch.hidden_ms / self.layers
        if delay_ms is None:
            delay_ms = self.cost.read_delay_ms(together=batch.issued == IssueTime.TOGETHER)
        if batch.issued == IssueTime.TOGETHER and batch.group_reads > 1:
            groups, of_layer = batch.reads / batch.group_reads, max(1, math.ceil(batch.layer_groups - 1e-9))
            shares = binomial(of_layer, min(1.0, groups / (self.layers * of_layer)))
            waits_ms = (max(0.0, n * flash_ms / groups + delay_ms - hidden_ms) for n in range(1, of_layer + 1))
            return self.layers * sum(share * wait_ms for share, wait_ms in zip(shares[1:], waits_ms, strict=True))
        if batch.issued == IssueTime.TOGETHER:
            left_ms = hidden_ms - delay_ms
            return layers * (each_ms * math.exp(-max(0.0, left_ms) / each_ms) + max(0.0, -left_ms))
        reads, size_bytes = batch.reads / layers, int(batch.read_bytes / batch.reads)
        one_ms = self.cost.flash_ms(1, size_bytes, 1, 1)
        service_ms = self.cost.read_service_ms(size_bytes, reads, self.depth, in_groups=False)
        grouped_service_ms = self.cost.read_service_ms(size_bytes, reads, self.depth, in_groups=True)
        assert one_ms is not None
        assert service_ms is not None
        assert grouped_service_ms is not None
        loader_ms = self.cost.loader_ms(reads, reads * size_bytes, reads)
        period_ms = hidden_ms + self.cost.stolen_ms(loader_ms, hidden_ms)
        left_ms = min(backlog(reads, service_ms, period_ms), max(0.0, reads - 1) * grouped_service_ms)
        read_ms = one_ms + delay_ms + left_ms
        last_ms = wait_for_last_read(read_ms, hidden_ms / (1 + reads))
        return layers * max(last_ms, each_ms + delay_ms - period_ms)

    def delay_ms(self, batch: Reads, exposed_ms: float) -> float | None:
        """Return the delay of a read with which `exposed_ms` gives this result, by bisection.

        None if flash or the work was not measured.
        """
        if batch.hidden_ms is None or self.flash_ms(batch) is None:
            return None
        loader_ms = self.cost.loader_ms(batch.reads, batch.read_bytes, self.at_once(batch))
        low_ms, high_ms = 0.0, exposed_ms + batch.hidden_ms + self.cost.stolen_ms(loader_ms, batch.hidden_ms)
        for _ in range(40):
            middle_ms = (low_ms + high_ms) / 2
            waited_ms = self.exposed_ms(batch, middle_ms)
            assert waited_ms is not None
            if waited_ms < exposed_ms:
                low_ms = middle_ms
            else:
                high_ms = middle_ms
        return high_ms


def known_before_attention(manifest: Manifest, compute: Compute) -> bool:
    """Return True if a predictor or a router chooses a layer's neurons or experts before its attention."""
    if compute.mode == "predicted" and manifest.predictor is not None:
        return manifest.predictor.reads == "attention"
    return manifest.model.router_reads == "layer"


def embedding_ms(manifest: Manifest, compute: Compute, cost: WorkCost, tokens: int) -> float | None:
    """Return the time to read these tokens' rows of an embedding on flash; 0 if it is in memory, None if flash was not
    measured. Each participant reads the rows of its share one after the other, before the first layer."""
    if not compute.embedding_on_flash:
        return 0.0
    rows = -(-tokens // len(compute.decode_workers()))  # prefill has as many threads
    one_ms = cost.flash_ms(1, embedding_row_bytes(manifest), 1, 1)
    return None if one_ms is None else rows * one_ms


def binomial(count: int, share: float) -> list[float]:
    """Return the probabilities of 0 to `count` events, if each has this probability."""
    return [math.comb(count, n) * share**n * (1 - share) ** (count - n) for n in range(count + 1)]


def backlog(reads: float, service: float, period: float) -> float:
    """Return the mean work that is left at the end of `period`, if `reads` reads are issued at random times within it.

    Each read keeps the server, the loader, busy for `service`. The result, in the unit of the arguments, is the mean
    maximum of a Brownian motion over the period, with mean and variance of the arriving work less the served work: the
    heavy-traffic limit of an M/D/1 queue that begins empty.
    """
    if reads <= 0 or service <= 0:
        return 0.0
    mean, deviation = reads * service - period, service * math.sqrt(reads)
    x = mean / deviation
    below, density = 0.5 * math.erfc(-x / math.sqrt(2)), math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    overshoot = density if abs(x) < 1e-6 else (below - 0.5) / x
    return max(0.0, mean * below + deviation * (density + overshoot))


def wait_for_last_read(read_time: float, before_end: float) -> float:
    """Return the mean wait for a read after the end of all other work, in the unit of the arguments.

    before_end: mean time from issuing the read to that end, which is distributed exponentially
    """
    return read_time - before_end * (1 - math.exp(-read_time / before_end)) if before_end else read_time
