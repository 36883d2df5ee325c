"""How flash is read, from the measured curve: how many reads at once, how large, and whether bundles are worth it."""

from __future__ import annotations

from typing import Any

from neuronpipe.plans.cost.activation_rates import ActivationRates, miss_rate, rates, touched_share
from neuronpipe.plans.device.device import FlashCurve
from neuronpipe.plans.package.layout import PAGE_BYTES, Layout
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Mode
from neuronpipe.plans.plan.memory_budget import MIN_DEPTH, largest_read_bytes
from neuronpipe.protocol.frozen import frozen

KNEE = 0.9  # of the best speed is enough, for depth and for size
MAX_READ_BYTES = 1 << 20
LONG_READ_BYTES = 256 << 10  # where neighbours are wanted together; of an expert a few such reads
# Of warm-up: long reads are the fastest whatever a brief curve says, and cost the least processor time a byte.
WARM_UP_READS = 16
PREFETCH_SHARE = 0.5  # of the depth: what nobody waits for yet leaves room for what is waited for
UNMEASURED_DEPTH = 32


@frozen(kw_only=True)
class ClusterDemand:
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
    moved: bool = False  # value slots hold the scales of their rows: more of both parts stays, and a value part is read
    # with its trigger part

    @classmethod
    def of(
        cls, manifest: Manifest, rates: ActivationRates, slots_bytes: int, mode: Mode = "exact"
    ) -> tuple[ClusterDemand, ...]:
        """With so many bytes for slots, gates first or pairs; one for each way to lay slots out that there is."""
        values_per_trigger = rates.value_read / rates.trigger_read if rates.trigger_read else 1.0
        if rates.trigger_read < 1.0:
            return (cls(in_order=False, values_per_trigger=values_per_trigger),)
        per_trigger = touched_share(values_per_trigger, manifest.layout.cluster_neurons)
        ways = (False, True) if manifest.slots(moved=True).moved_bytes else (False,)
        return tuple(cls._gates_first(manifest, rates, slots_bytes, mode, per_trigger, moved) for moved in ways)

    @classmethod
    def _gates_first(
        cls,
        manifest: Manifest,
        rates: ActivationRates,
        slots_bytes: int,
        mode: Mode,
        values_per_trigger: float,
        moved: bool,
    ) -> ClusterDemand:
        places = manifest.slots(moved=moved)
        triggers_bytes = manifest.clusters * places.trigger_bytes
        values_bytes = manifest.clusters * places.value_bytes
        share = min(1.0, max(0, slots_bytes - triggers_bytes) / values_bytes)
        return cls(
            in_order=True,
            values_per_trigger=values_per_trigger,
            triggers_stay=min(1.0, slots_bytes / triggers_bytes),
            # What the hottest make if they stay, or what the cache finds: a plan takes the better of both.
            values_stay=max(rates.activations_within(share), 1 - miss_rate(manifest, mode, share)),
            pairs_stay=min(1.0, slots_bytes / (triggers_bytes + values_bytes)),
            moved=moved,
        )


@frozen(kw_only=True)
class ClusterReadCost:
    """Microseconds of flash for a cluster of a chosen feed-forward: of both parts in one read, or of the trigger part
    and a value part one after the other. As planes: if the trigger parts of a feed-forward lay together, and then the
    value parts, nothing between them would be read, and no read would bring both."""

    both_us: float
    trigger_us: float
    value_us: float
    values_per_trigger: float
    planes_us: float

    @classmethod
    def of(cls, layout: Layout, curve: FlashCurve, demand: ClusterDemand, depth: int) -> ClusterReadCost:
        """By the curve, with so many reads at once."""
        both, trigger, value = (
            _read_us(curve, size, depth)
            for size in (
                layout.cluster_stride_bytes,
                layout.trigger_part_bytes,
                layout.value_read_bytes(moved=demand.moved),
            )
        )
        in_plane = trigger
        if demand.in_order:  # of long reads each cluster takes its share, and gates bring what lies between them
            long_bytes_per_us = curve.bytes_per_s(_knee_size(curve, depth), depth) / 1e6
            both = layout.cluster_stride_bytes / long_bytes_per_us
            in_plane = layout.trigger_part_bytes / long_bytes_per_us
            trigger = min(trigger, both)
        value *= 1 - demand.values_stay
        return cls(
            both_us=both * (1 - demand.pairs_stay),
            trigger_us=trigger * (1 - demand.triggers_stay),
            value_us=value,
            values_per_trigger=demand.values_per_trigger,
            planes_us=in_plane * (1 - demand.triggers_stay) + demand.values_per_trigger * value,
        )

    @property
    def apart_us(self) -> float:
        """The trigger part first, the value part where it is wanted."""
        return self.trigger_us + self.values_per_trigger * self.value_us

    @property
    def whole(self) -> bool:
        """Whether both parts are read together."""
        return self.both_us <= self.apart_us


@frozen(kw_only=True)
class ReadSizes:
    """The plan's `flash`, less the engine and the reserves."""

    depth: int
    bundle: bool
    moved_scales: bool  # value slots hold the scales of their rows
    merge_gap_bytes: int
    most_read_bytes: int
    prefetch_depth: int
    warm_up_reads: int
    warm_up_read_bytes: int
    set_aside_bytes: int  # staging, and what was meant for it but makes no whole buffers: so that more memory for it
    # never takes neurons' slots by leaps
    reasons: tuple[str, ...]

    @property
    def staging_bytes(self) -> int:
        """Where reads land before their bytes are checked and copied."""
        return self.depth * self.most_read_bytes + self.warm_up_reads * self.warm_up_read_bytes


def choose_read_sizes(
    layout: Layout,
    curve: FlashCurve | None,
    *,
    demands: tuple[ClusterDemand, ...],
    bundle: bool | None,
    depth: int | None,
    prefetch: bool,
    staging_most_bytes: int,
) -> ReadSizes:
    """demands: as `Demand.of` makes them; with slots laid out as the one that takes flash the least time.
    bundle: whether both parts are read together; None: where the curve says that it pays.
    depth: reads at once at most; None: as many as the curve says that it takes.
    staging_most_bytes: at least MIN_DEPTH times the longest read of one cluster."""
    reasons = []
    knee = _knee_depth(curve, layout.value_part_bytes) if curve else UNMEASURED_DEPTH
    demand = demands[-1] if curve is None else _laid_out(layout, curve, demands, knee, bundle)
    if curve:
        cost = ClusterReadCost.of(layout, curve, demand, knee)
        bundle = cost.whole if bundle is None else bundle
        if bundle == cost.whole and demand.pairs_stay < 1.0:  # else nothing is read after warm-up
            reasons.append(_reason(cost, demand))
    elif bundle is None:
        bundle = not demand.in_order or demand.values_per_trigger == 1.0
    if demand.pairs_stay >= 1.0:  # nothing is read: gates without others' scales between them are read faster
        demand = demands[-1]
    elif bundle:
        demand = demands[0]
    least = largest_read_bytes(layout, bundle=bundle or demand.moved)
    long = curve is not None and bundle and demand.in_order
    if curve and long:  # neighbours come together: fewer and longer reads
        knee = _knee_depth(curve, _longest(curve))
    depth = max(1, min(knee if depth is None else depth, staging_most_bytes // least))
    wanted = least if curve is None else _longest(curve) if long else _knee_size(curve, depth)
    most = max(least, min(wanted, staging_most_bytes // depth // PAGE_BYTES * PAGE_BYTES, MAX_READ_BYTES))
    gap = min(_gap_bytes(curve, depth), most - least) if curve else 0
    if curve:
        kib = (most if long else layout.value_part_bytes) >> 10
        reasons.append(
            f"{depth} reads at once reach {_share_of_best(curve, kib << 10, depth):.0%} of what the storage gives at "
            f"{kib} KiB; a gap of {gap >> 10} KiB costs less than another read"
        )
    else:
        reasons.append("flash was not measured: the file is too small to tell; neighbours are not read together")
    left = (staging_most_bytes - depth * most) // WARM_UP_READS // PAGE_BYTES * PAGE_BYTES
    warm_up_read = min(left, MAX_READ_BYTES) if left > most else 0
    return ReadSizes(
        depth=depth,
        bundle=bundle,
        moved_scales=demand.moved,
        merge_gap_bytes=gap,
        most_read_bytes=most,
        prefetch_depth=max(1, int(PREFETCH_SHARE * depth)) if prefetch else 0,
        warm_up_reads=WARM_UP_READS if warm_up_read else 0,
        warm_up_read_bytes=warm_up_read,
        set_aside_bytes=min(staging_most_bytes, depth * max(least, wanted) + WARM_UP_READS * MAX_READ_BYTES),
        reasons=tuple(reasons),
    )


def _laid_out(
    layout: Layout, curve: FlashCurve, demands: tuple[ClusterDemand, ...], depth: int, bundle: bool | None
) -> ClusterDemand:
    """The one whose reads take the least time, the first of equals. Read whole, a cluster is as large in any."""
    if bundle:
        return demands[0]
    return min(demands, key=lambda demand: ClusterReadCost.of(layout, curve, demand, depth).apart_us)


def _reason(cost: ClusterReadCost, demand: ClusterDemand) -> str:
    unit = f"{'feed-forwards' if demand.in_order else 'bundles'} are read whole"
    return (
        f"{unit if cost.whole else 'the trigger part is read first, the value part if it fired'}: flash takes "
        f"{cost.both_us:.1f} us for both parts of a cluster, {cost.trigger_us:.1f} + {cost.values_per_trigger:.2f} x "
        f"{cost.value_us:.1f} us one after the other{', less what stays' if demand.in_order else ''}"
    )


def _read_us(curve: FlashCurve, size_bytes: int, depth: int) -> float:
    """What one of many reads costs."""
    return 1e6 * size_bytes / curve.bytes_per_s(size_bytes, depth)


def _knee_depth(curve: FlashCurve, size_bytes: int) -> int:
    """The fewest reads at once that come close to the best."""
    speeds = {depth: curve.bytes_per_s(size_bytes, depth) for depth in sorted({point.depth for point in curve.points})}
    best = max(speeds.values())
    return max(MIN_DEPTH, next(depth for depth, speed in speeds.items() if speed >= KNEE * best))


def _share_of_best(curve: FlashCurve, size_bytes: int, depth: int) -> float:
    """Of the speed of this size, what so many reads at once reach."""
    best = max(curve.bytes_per_s(size_bytes, one) for one in {point.depth for point in curve.points})
    return min(1.0, curve.bytes_per_s(size_bytes, depth) / best)


def depths(curve: FlashCurve) -> tuple[int, ...]:
    """The numbers of reads at once that were measured and may be planned, fewest first."""
    return tuple(sorted({max(MIN_DEPTH, point.depth) for point in curve.points}))


def _longest(curve: FlashCurve) -> int:
    """The longest read that was measured, up to LONG_READ_BYTES: each costs processor time, too."""
    return max(min(point.request_bytes, LONG_READ_BYTES) for point in curve.points) // PAGE_BYTES * PAGE_BYTES


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


RESIDENT_SHARES = (0.1, 0.3, 0.5, 0.75)


def read_units(manifest: Manifest, curve: FlashCurve) -> list[dict[str, Any]]:
    """How the neurons of a package are read from this flash, and what planes would take, as JSON values: a row for each
    mode and resident share."""
    depth = _knee_depth(curve, manifest.layout.value_part_bytes)
    slots_bytes = manifest.clusters * (manifest.trigger_slot_bytes + manifest.value_slot_bytes)
    modes: tuple[Mode, ...] = ("exact", "predicted") if manifest.predictor is not None else ("exact",)
    rows = []
    for mode in modes:
        wanted = rates(manifest, mode)
        for share in RESIDENT_SHARES if wanted.trigger_read == 1.0 else (0.0,):
            demands = ClusterDemand.of(manifest, wanted, int(share * slots_bytes), mode)
            demand = _laid_out(manifest.layout, curve, demands, depth, None)
            cost = ClusterReadCost.of(manifest.layout, curve, demand, depth)
            whole = "feed-forward" if demand.in_order else "cluster"
            rows.append(
                {
                    "mode": mode,
                    "resident_share": share if demand.in_order else None,
                    "unit": whole if cost.whole else "part",
                    "interleaved_us": round(min(cost.both_us, cost.apart_us), 2),
                    "planes_us": round(cost.planes_us, 2),
                }
            )
    return rows
