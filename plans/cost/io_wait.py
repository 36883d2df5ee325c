"""How long workers wait for reads, by when these are named: what of the flash's time no work hides."""

from __future__ import annotations

import enum
import math

from neuronpipe.plans.cost.work_cost import WorkCost
from neuronpipe.protocol.frozen import frozen


class IssueTime(enum.Enum):
    """When workers name the reads of a layer: with how much of the work flash time then overlaps."""

    AHEAD = "while the layer before is computed: the same for every token"
    TOGETHER = "before the layer's neurons are computed"
    ONE_BY_ONE = "while they are computed: a gate that fires names its values"


@frozen
class Reads:
    """Reads of a step. hidden_ms: of all layers, the work that goes on from when the first ones are named."""

    named: IssueTime
    reads: int
    read_bytes: int
    hidden_ms: float | None


@frozen
class IoWait:
    """For the reads of a step of so many layers, so many of them under way."""

    cost: WorkCost
    layers: int
    depth: int

    def at_once(self, found: Reads) -> float:
        """How many are asked for together."""
        return found.reads if found.named == IssueTime.AHEAD else max(1.0, found.reads / self.layers)

    def flash_ms(self, found: Reads) -> float | None:
        """The time of the storage for all of them, or of a loader on a core of its own where that is longer."""
        return self.cost.storage_ms(found.reads, found.read_bytes, self.at_once(found), self.depth)

    def exposed_ms(self, found: Reads, delay_ms: float | None = None) -> float | None:
        """Of the flash time, what nothing hides: layer by layer, but for what is read ahead. delay_ms: of a read in a
        run (default: what the device profile has).

        Reads named together are now many, now few. With a time spread as widely as its mean (exponentially), what
        exceeds the time that hides it is the mean times exp(-hidden / mean). Of those named one by one while a layer is
        computed, the last is named just before its end, behind others; and where flash cannot keep up, all that is left
        is waited for.
        """
        flash_ms = self.flash_ms(found)
        if flash_ms is None or found.hidden_ms is None:
            return None
        if found.named == IssueTime.AHEAD or not found.reads:
            return max(0.0, flash_ms - found.hidden_ms)
        layers = self.layers * (1 - math.exp(-found.reads / self.layers))  # those in which something misses
        each_ms, hidden_ms = flash_ms / layers, found.hidden_ms / self.layers
        if delay_ms is None:
            delay_ms = self.cost.read_delay_ms(together=found.named == IssueTime.TOGETHER)
        if found.named == IssueTime.TOGETHER:
            left_ms = hidden_ms - delay_ms
            return layers * (each_ms * math.exp(-max(0.0, left_ms) / each_ms) + max(0.0, -left_ms))
        reads, size_bytes = found.reads / layers, found.read_bytes // found.reads
        one_ms = self.cost.flash_ms(1, size_bytes, 1, 1)
        busy_ms = self.cost.read_service_ms(size_bytes, reads, self.depth, in_groups=False)
        least_ms = self.cost.read_service_ms(size_bytes, reads, self.depth, in_groups=True)
        assert one_ms is not None
        assert busy_ms is not None
        assert least_ms is not None
        if self.cost.shares_core:
            takes_ms = queued_read_time(one_ms + delay_ms, reads, busy_ms, least_ms, hidden_ms)
        else:
            left_ms = min(backlog(reads, busy_ms, hidden_ms), reads * least_ms)
            takes_ms = one_ms + delay_ms + left_ms
        last_ms = wait_for_last_read(takes_ms, hidden_ms / (1 + reads))
        return layers * max(last_ms, each_ms + delay_ms - hidden_ms)

    def delay_ms(self, found: Reads, exposed_ms: float) -> float | None:
        """The delay of a read with which these reads are waited for so long: by halving what lies between."""
        if found.hidden_ms is None or self.flash_ms(found) is None:
            return None
        least_ms, most_ms = 0.0, exposed_ms + found.hidden_ms
        for _ in range(40):
            middle_ms = (least_ms + most_ms) / 2
            waited_ms = self.exposed_ms(found, middle_ms)
            assert waited_ms is not None
            if waited_ms < exposed_ms:
                least_ms = middle_ms
            else:
                most_ms = middle_ms
        return most_ms


def queued_read_time(alone: float, reads: float, busy: float, least_busy: float, within: float) -> float:
    """How long a read takes among so many that come at random times within some time, where it takes `alone` by itself
    and each of the others keeps it waiting for `busy`: longer by the share of the time that these take (as in an M/M/1
    queue), and at most as if it came after all of them, which then queue and are done in groups, in `least_busy` each.
    In any unit of time."""
    after_all, idle = alone + reads * least_busy, 1 - reads * busy / within if within else 0.0
    return after_all if idle <= 0 else min(after_all, alone / idle)


def backlog(reads: float, busy: float, within: float) -> float:
    """Return the mean work that is left, in the unit of time of `busy` and `within`, after so many reads have come at
    random times within some time, each of which keeps a server of its own busy for so long.

    This is the mean maximum of a Brownian motion over that time, with the mean and the variance of the work that comes
    less what is served: the heavy-traffic limit of the queue M/D/1 that begins empty. A loader that works on a core of
    its own serves reads while the workers compute; one that shares a core does not, see `queued`.
    """
    if reads <= 0 or busy <= 0:
        return 0.0
    mean, deviation = reads * busy - within, busy * math.sqrt(reads)
    x = mean / deviation
    below, density = 0.5 * math.erfc(-x / math.sqrt(2)), math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    overshoot = density if abs(x) < 1e-6 else (below - 0.5) / x
    return max(0.0, mean * below + deviation * (density + overshoot))


def wait_for_last_read(takes: float, before_end: float) -> float:
    """How long a read is waited for that takes so long and is named so long before the end of all other work: on the
    average where the latter is spread exponentially. In any unit of time."""
    return takes - before_end * (1 - math.exp(-takes / before_end)) if before_end else takes
