"""How flash is read, from the measured curve: how many reads at once, how large, and whether bundles are worth it."""

from __future__ import annotations

import dataclasses

from neuronpipe.plans.device.device import FlashCurve
from neuronpipe.plans.package.layout import PAGE_BYTES, Layout
from neuronpipe.plans.plan.budget import MIN_DEPTH, largest_read_bytes

KNEE = 0.9  # of the best speed is enough, for depth and for size
MAX_READ_BYTES = 1 << 20
# Of warm-up: long reads are the fastest whatever a brief curve says, and cost the least processor time a byte.
WARM_UP_READS = 16
PREFETCH_SHARE = 0.5  # of the depth: guesses leave room for what is waited for
UNMEASURED_DEPTH = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demand:
    """What a token wants of the clusters of a chosen feed-forward, and how much of that memory would hold. Shares.

    in_order: every trigger part is wanted, one after the other: neighbours are read together. Else those of neurons
    that lie anywhere. values_per_trigger: of the trigger parts wanted, those whose value part is wanted too.
    triggers_stay, values_stay: resident if either part is read by itself; pairs_stay: if both are read together.
    """

    in_order: bool
    values_per_trigger: float
    triggers_stay: float = 0.0
    values_stay: float = 0.0
    pairs_stay: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """The plan's `flash`, less the engine and the reserves."""

    depth: int
    bundle: bool
    merge_gap_bytes: int
    most_read_bytes: int
    prefetch_depth: int
    warm_up_reads: int
    warm_up_read_bytes: int
    reasons: tuple[str, ...]

    @property
    def staging_bytes(self) -> int:
        """Where reads land before their bytes are checked and copied."""
        return self.depth * self.most_read_bytes + self.warm_up_reads * self.warm_up_read_bytes


def reading(
    layout: Layout,
    curve: FlashCurve | None,
    *,
    demand: Demand,
    bundle: bool,
    prefetch: bool,
    staging_most_bytes: int,
) -> Reading:
    """bundle: False when bundles are out of the question. staging_most_bytes: at least MIN_DEPTH times the longest read
    of one cluster."""
    reasons = []
    depth = _knee_depth(curve, layout.value_part_bytes) if curve else UNMEASURED_DEPTH
    if bundle and curve:
        bundle, reason = _whole(layout, curve, demand, depth)
        reasons.append(reason)
    elif bundle:
        bundle = not demand.in_order or demand.values_per_trigger == 1.0
    least = largest_read_bytes(layout, bundle=bundle)
    depth = max(1, min(depth, staging_most_bytes // least))
    wanted = _knee_size(curve, depth) if curve else least
    most = max(least, min(wanted, staging_most_bytes // depth // PAGE_BYTES * PAGE_BYTES, MAX_READ_BYTES))
    gap = min(_gap_bytes(curve, depth), most - least) if curve else 0
    if curve:
        reasons.append(
            f"{depth} reads at once reach {KNEE:.0%} of what the storage gives at {layout.value_part_bytes >> 10} KiB; "
            f"a gap of {gap >> 10} KiB costs less than another read"
        )
    else:
        reasons.append("flash was not measured: the file is too small to tell; neighbours are not read together")
    left = (staging_most_bytes - depth * most) // WARM_UP_READS // PAGE_BYTES * PAGE_BYTES
    warm_up_read = min(left, MAX_READ_BYTES) if left > most else 0
    return Reading(
        depth=depth,
        bundle=bundle,
        merge_gap_bytes=gap,
        most_read_bytes=most,
        prefetch_depth=max(1, int(PREFETCH_SHARE * depth)) if prefetch else 0,
        warm_up_reads=WARM_UP_READS if warm_up_read else 0,
        warm_up_read_bytes=warm_up_read,
        reasons=tuple(reasons),
    )


def _whole(layout: Layout, curve: FlashCurve, demand: Demand, depth: int) -> tuple[bool, str]:
    """Whether both parts of a cluster are read together, by the time that flash takes for a cluster of a chosen
    feed-forward; and why."""
    both, trigger, value = (
        _read_us(curve, size, depth)
        for size in (layout.cluster_stride_bytes, layout.trigger_part_bytes, layout.value_part_bytes)
    )
    if demand.in_order:  # of long reads each cluster takes its share, and gates bring what lies between them
        both = 1e6 * layout.cluster_stride_bytes / curve.bytes_per_s(_knee_size(curve, depth), depth)
        trigger = min(trigger, both)
    both *= 1 - demand.pairs_stay
    trigger *= 1 - demand.triggers_stay
    value *= 1 - demand.values_stay
    whole = both <= trigger + demand.values_per_trigger * value
    unit = f"{'feed-forwards' if demand.in_order else 'bundles'} are read whole"
    return whole, (
        f"{unit if whole else 'the trigger part is read first, the value part if it fired'}: flash takes {both:.1f} us "
        f"for both parts of a cluster, {trigger:.1f} + {demand.values_per_trigger:.2f} x {value:.1f} us one after the "
        f"other{', less what stays' if demand.in_order else ''}"
    )


def _read_us(curve: FlashCurve, size_bytes: int, depth: int) -> float:
    """What one of many reads costs."""
    return 1e6 * size_bytes / curve.bytes_per_s(size_bytes, depth)


def _knee_depth(curve: FlashCurve, size_bytes: int) -> int:
    """The fewest reads at once that come close to the best."""
    speeds = {depth: curve.bytes_per_s(size_bytes, depth) for depth in sorted({point.depth for point in curve.points})}
    best = max(speeds.values())
    return max(MIN_DEPTH, next(depth for depth, speed in speeds.items() if speed >= KNEE * best))


def _knee_size(curve: FlashCurve, depth: int) -> int:
    """The smallest measured size that comes close to the best, in whole pages."""
    sizes = sorted({point.request_bytes for point in curve.points})
    best = max(curve.bytes_per_s(size, depth) for size in sizes)
    knee = next(size for size in sizes if curve.bytes_per_s(size, depth) >= KNEE * best)
    return knee // PAGE_BYTES * PAGE_BYTES


def _gap_bytes(curve: FlashCurve, depth: int) -> int:
    """Bytes that take as long as a read costs by itself: time of a read = own + bytes / speed, through two sizes."""
    sizes = sorted({point.request_bytes for point in curve.points})
    small, large = sizes[0], min(sizes, key=lambda size: abs(size - (64 << 10)))
    if small == large:
        return 0
    small_us, large_us = _read_us(curve, small, depth), _read_us(curve, large, depth)
    if large_us <= small_us:
        return MAX_READ_BYTES
    bytes_per_us = (large - small) / (large_us - small_us)
    return max(0, int(small_us * bytes_per_us) - small) // PAGE_BYTES * PAGE_BYTES
