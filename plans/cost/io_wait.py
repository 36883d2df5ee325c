"""Time that workers wait for reads: flash time that no work overlaps, by when the reads are issued."""

from __future__ import annotations

import enum
import math

from neuronpipe.plans.cost.work_cost import WorkCost
from neuronpipe.protocol.frozen import frozen


class IssueTime(enum.Enum):
    """The moment at which workers issue the reads of a layer, which decides how much work overlaps with them."""

    AHEAD = "while the layer before is computed: the same for every token"
    TOGETHER = "before the layer's neurons are computed"
    ONE_BY_ONE = "while they are computed: an active gate needs its values"


@frozen
class Reads:
    """Reads of a step.

    hidden_ms: work of all layers that continues after the first reads are issued, and so overlaps with flash time
    """

    issued: IssueTime
    reads: int
    read_bytes: int
    hidden_ms: float | None


@frozen
class IoWait:
    """The waiting for the reads of a step with this many layers.

    depth: maximum of reads in flight
    """

    cost: WorkCost
    layers: int
    depth: int

    def at_once(self, batch: Reads) -> float:
        """Return how many reads are issued together."""
        return batch.reads if batch.issued == IssueTime.AHEAD else max(1.0, batch.reads / self.layers)

    def flash_ms(self, batch: Reads) -> float | None:
        """Return the time of the storage for all reads, or of a loader on a core of its own if that is longer."""
        return self.cost.storage_ms(batch.reads, batch.read_bytes, self.at_once(batch), self.depth)

    def exposed_ms(self, batch: Reads, delay_ms: float | None = None) -> float | None:
        """Return the flash time that no work overlaps: layer by layer, except for reads that are issued ahead.

        The number of reads issued together varies. If their time is distributed exponentially, the part that exceeds
        the overlapping work has the mean: mean time x exp(-hidden / mean time). Of reads issued one by one while a
        layer is computed, the last is issued just before the layer ends, behind others; and where flash cannot keep up,
        all remaining reads are waited for.

        delay_ms: delay of a read in a run (default: the device profile's)
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
        if batch.issued == IssueTime.TOGETHER:
            left_ms = hidden_ms - delay_ms
            return layers * (each_ms * math.exp(-max(0.0, left_ms) / each_ms) + max(0.0, -left_ms))
        reads, size_bytes = batch.reads / layers, batch.read_bytes // batch.reads
        one_ms = self.cost.flash_ms(1, size_bytes, 1, 1)
        service_ms = self.cost.read_service_ms(size_bytes, reads, self.depth, in_groups=False)
        grouped_service_ms = self.cost.read_service_ms(size_bytes, reads, self.depth, in_groups=True)
        assert one_ms is not None
        assert service_ms is not None
        assert grouped_service_ms is not None
        if self.cost.shares_core:
            read_ms = queued_read_time(one_ms + delay_ms, reads, service_ms, grouped_service_ms, hidden_ms)
        else:
            left_ms = min(backlog(reads, service_ms, hidden_ms), reads * grouped_service_ms)
            read_ms = one_ms + delay_ms + left_ms
        last_ms = wait_for_last_read(read_ms, hidden_ms / (1 + reads))
        return layers * max(last_ms, each_ms + delay_ms - hidden_ms)

    def delay_ms(self, batch: Reads, exposed_ms: float) -> float | None:
        """Return the delay of a read with which these reads would be waited for this long: the inverse of
        exposed_ms, by bisection."""
        if batch.hidden_ms is None or self.flash_ms(batch) is None:
            return None
        low_ms, high_ms = 0.0, exposed_ms + batch.hidden_ms
        for _ in range(40):
            middle_ms = (low_ms + high_ms) / 2
            waited_ms = self.exposed_ms(batch, middle_ms)
            assert waited_ms is not None
            if waited_ms < exposed_ms:
                low_ms = middle_ms
            else:
                high_ms = middle_ms
        return high_ms


def queued_read_time(alone: float, reads: float, service: float, grouped_service: float, period: float) -> float:
    """Return how long one of `reads` reads takes that are issued at random times within a period. In any unit of time.

    By itself a read takes `alone`. Each other read keeps the server busy for `service`, so it takes longer by the share
    of time that these take (as in an M/M/1 queue), and at most as if it came after all of them, which then queue and
    are done in groups, in `grouped_service` each.
    """
    after_all, idle = alone + reads * grouped_service, 1 - reads * service / period if period else 0.0
    return after_all if idle <= 0 else min(after_all, alone / idle)


def backlog(reads: float, service: float, period: float) -> float:
    """Return the mean work that remains after reads were issued at random times within a period, in its unit of time.

    Each read keeps a server of its own busy for `service`. The result is the mean maximum of a Brownian motion over the
    period, with the mean and the variance of the arriving work less the served work: the heavy-traffic limit of an
    M/D/1 queue that begins empty. A loader on a core of its own serves reads while the workers compute; one that shares
    a core does not, see `queued_read_time`.
    """
    if reads <= 0 or service <= 0:
        return 0.0
    mean, deviation = reads * service - period, service * math.sqrt(reads)
    x = mean / deviation
    below, density = 0.5 * math.erfc(-x / math.sqrt(2)), math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    overshoot = density if abs(x) < 1e-6 else (below - 0.5) / x
    return max(0.0, mean * below + deviation * (density + overshoot))


def wait_for_last_read(read_time: float, before_end: float) -> float:
    """Return how long a read is waited for that is issued `before_end` before the end of all other work, on average.

    before_end is a mean of exponentially distributed times. In any unit of time.
    """
    return read_time - before_end * (1 - math.exp(-read_time / before_end)) if before_end else read_time
