"""Flash reads of a plan, by the measured curve: how many at once, how large, and whether clusters are read as bundles
or in parts."""

from __future__ import annotations

from typing import Any

from neuronpipe.plans.cost.activation_rates import ActivationRates, miss_rate, rates, touched_share
from neuronpipe.plans.device.device import FlashCurve
from neuronpipe.plans.package.layout import PAGE_BYTES, Layout
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Mode
from neuronpipe.plans.plan.memory_budget import MIN_DEPTH, largest_read_bytes
from neuronpipe.protocol.frozen import frozen

KNEE = 0.9  # the smallest depth and size are chosen that reach this share of the best speed
MAX_READ_BYTES = 1 << 20
LONG_READ_BYTES = 256 << 10  # maximum where neighbours are read together; an expert takes a few such reads
# Number of long reads in warm-up. They are the fastest, even if a brief curve does not show it, and cost the least
# processor time per byte.
WARM_UP_READS = 16
# Longer reads of whole experts go to flash in pieces of this size, all at once: NP_PIECE_BYTES of the loader.
PIECE_BYTES = 1 << 20
NEARLY_EQUAL = 1.01  # ratio of times that a curve does not tell apart
PREFETCH_SHARE = 0.5  # of the depth; the rest is for reads that a worker waits for
UNMEASURED_DEPTH = 32  # reads at once if flash was not measured


@frozen(kw_only=True)
class ClusterDemand:
    """The bytes that a token needs of a chosen feed-forward, and which share of it is in memory.

    in_order: the token needs all trigger parts in order, so that neighbours are read together
    values_per_trigger: share of the needed trigger parts whose value part is needed too
    triggers_stay, values_stay: shares found in memory if the two parts are read separately
    pairs_stay: share found in memory if both parts are read together
    moved: scales are co-located, so that more of both parts stays, and a value part is read with its trigger part
    """

    in_order: bool
    values_per_trigger: float
    triggers_stay: float = 0.0
    values_stay: float = 0.0
    pairs_stay: float = 0.0
    moved: bool = False

    @classmethod
    def of(
        cls, manifest: Manifest, rates: ActivationRates, slots_bytes: int, mode: Mode = "exact"
    ) -> tuple[ClusterDemand, ...]:
        """Return the demand for each layout of slots that the package allows: without and with co-located scales.

        slots_bytes: memory for slots
        """
        values_per_trigger = rates.value_read / rates.trigger_read if rates.trigger_read else 1.0
        if rates.trigger_read < 1.0:
            return (cls(in_order=False, values_per_trigger=values_per_trigger),)
        per_trigger = touched_share(values_per_trigger, manifest.layout.cluster_neurons)
        layouts = (False, True) if manifest.slots(moved=True).moved_bytes else (False,)
        return tuple(cls._gates_first(manifest, rates, slots_bytes, mode, per_trigger, moved) for moved in layouts)

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
        pairs_stay = min(1.0, slots_bytes / (triggers_bytes + values_bytes))
        if rates.value_read >= rates.trigger_read:  # both parts are always used together: slots are divided equally
            stay = dict.fromkeys(("triggers_stay", "values_stay", "pairs_stay"), pairs_stay)
            return cls(in_order=True, values_per_trigger=values_per_trigger, moved=moved, **stay)
        share = min(1.0, max(0, slots_bytes - triggers_bytes) / values_bytes)
        return cls(
            in_order=True,
            values_per_trigger=values_per_trigger,
            triggers_stay=min(1.0, slots_bytes / triggers_bytes),
            # Hits of the hottest clusters if they are pinned, or of the cache: a plan uses what is better.
            values_stay=max(rates.activations_within(share), 1 - miss_rate(manifest, mode, share)),
            pairs_stay=pairs_stay,
            moved=moved,
        )


@frozen(kw_only=True)
class ClusterReadCost:
    """Mean time of flash for one cluster of a chosen feed-forward, less the share that is in memory.

    both_us: one read of both parts
    trigger_us, value_us: separate reads of the trigger part, and of the value part where it is needed
    values_per_trigger: share of the clusters whose value part is needed
    planes_us: separate reads if the package had planes: all trigger parts of a feed-forward, then all value parts
    """

    both_us: float
    trigger_us: float
    value_us: float
    values_per_trigger: float
    planes_us: float

    @classmethod
    def of(cls, layout: Layout, curve: FlashCurve, demand: ClusterDemand, depth: int) -> ClusterReadCost:
        both_us, trigger_us, value_us = (
            _read_us(curve, size, depth)
            for size in (
                layout.cluster_stride_bytes,
                layout.trigger_part_bytes,
                layout.value_read_bytes(moved=demand.moved),
            )
        )
        in_plane_us = trigger_us
        if demand.in_order:  # a cluster takes its share of a long read, which includes value parts between the gates
            long_bytes_per_us = curve.bytes_per_s(_knee_size(curve, depth), depth) / 1e6
            both_us = layout.cluster_stride_bytes / long_bytes_per_us
            in_plane_us = layout.trigger_part_bytes / long_bytes_per_us
            trigger_us = min(trigger_us, both_us)
        value_us *= 1 - demand.values_stay
        return cls(
            both_us=both_us * (1 - demand.pairs_stay),
            trigger_us=trigger_us * (1 - demand.triggers_stay),
            value_us=value_us,
            values_per_trigger=demand.values_per_trigger,
            planes_us=in_plane_us * (1 - demand.triggers_stay) + demand.values_per_trigger * value_us,
        )

    @property
    def apart_us(self) -> float:
        """Time of separate reads of both parts, the value part only where it is needed."""
        return self.trigger_us + self.values_per_trigger * self.value_us

    @property
    def whole(self) -> bool:
        """True if reading both parts together takes no longer than reading them separately."""
        return self.both_us <= NEARLY_EQUAL * self.apart_us


@frozen(kw_only=True)
class ReadSizes:
    """The reads of a plan: the fields of `Flash` except the engine and the reserved slots, and what follows from
    them."""

    depth: int
    bundle: bool
    moved_scales: bool  # scales are co-located
    merge_gap_bytes: int
    most_read_bytes: int
    prefetch_depth: int
    warm_up_reads: int
    warm_up_read_bytes: int
    # Bytes that slots do not get: staging, and what is left of its share because it fills no whole buffer. Without the
    # latter, slots could shrink while the limit grows.
    set_aside_bytes: int
    reasons: tuple[str, ...]

    @property
    def staging_bytes(self) -> int:
        """Size of the buffers where the bytes of reads are checked before they are copied."""
        return self.depth * self.most_read_bytes + self.warm_up_reads * self.warm_up_read_bytes


def choose_read_sizes(
    layout: Layout,
    curve: FlashCurve | None,
    *,
    demands: tuple[ClusterDemand, ...],
    bundle: bool | None,
    depth: int | None,
    prefetch: bool,
    max_staging_bytes: int,
) -> ReadSizes:
    """Return the reads of a plan.

    demands: result of `ClusterDemand.of`; the layout of slots that needs the least flash time is chosen
    bundle: read both parts together (None: if that is no slower by the curve)
    depth: maximum of reads at once (None: as many as come close to the best speed)
    prefetch: False: nothing is read ahead
    max_staging_bytes: maximum of the staging buffers, at least MIN_DEPTH times the longest read of one cluster
    """
    reasons = []
    knee = _knee_depth(curve, layout.value_part_bytes) if curve else UNMEASURED_DEPTH
    demand = demands[-1] if curve is None else _best_layout(layout, curve, demands, knee, bundle)
    if curve:
        cost = ClusterReadCost.of(layout, curve, demand, knee)
        bundle = cost.whole if bundle is None else bundle
        if bundle == cost.whole and demand.pairs_stay < 1.0:  # otherwise nothing is read after warm-up
            reasons.append(_reason(cost, demand))
    elif bundle is None:
        bundle = not demand.in_order or demand.values_per_trigger == 1.0
    # If nothing is read, scales are co-located: gates without other scales between them are computed faster.
    if demand.pairs_stay >= 1.0:
        demand = demands[-1]
    elif bundle:
        demand = demands[0]
    cluster_read_bytes = largest_read_bytes(layout, bundle=bundle or demand.moved)
    # With Down by output a read never has two clusters: experts in place are no neighbours, and slices are long.
    may_join = not layout.down_by_output
    is_long = curve is not None and bundle and demand.in_order and may_join
    if curve and is_long:  # neighbours are read together: fewer and longer reads
        knee = _knee_depth(curve, _longest(curve))
    if curve and not may_join:
        pieces = -(-cluster_read_bytes // PIECE_BYTES)
        knee = max(MIN_DEPTH, -(-_knee_depth(curve, min(cluster_read_bytes, PIECE_BYTES)) // pieces))
    depth = max(1, min(knee if depth is None else depth, max_staging_bytes // cluster_read_bytes))
    target_bytes = cluster_read_bytes
    if curve and may_join:
        target_bytes = _longest(curve) if is_long else _knee_size(curve, depth)
    max_read_bytes = max(
        cluster_read_bytes, min(target_bytes, max_staging_bytes // depth // PAGE_BYTES * PAGE_BYTES, MAX_READ_BYTES)
    )
    gap_bytes = min(_gap_bytes(curve, depth), max_read_bytes - cluster_read_bytes) if curve and may_join else 0
    if curve:
        kib = (max_read_bytes if is_long else layout.value_part_bytes) >> 10
        reasons.append(
            f"{depth} reads at once reach {_share_of_best(curve, kib << 10, depth):.0%} of what the storage gives at "
            f"{kib} KiB; a gap of {gap_bytes >> 10} KiB costs less than another read"
        )
    else:
        reasons.append("flash was not measured: the file is too small to tell; neighbours are not read together")
    warm_up_bytes = (max_staging_bytes - depth * max_read_bytes) // WARM_UP_READS // PAGE_BYTES * PAGE_BYTES
    warm_up_read_bytes = min(warm_up_bytes, MAX_READ_BYTES) if warm_up_bytes > max_read_bytes and may_join else 0
    return ReadSizes(
        depth=depth,
        bundle=bundle,
        moved_scales=demand.moved,
        merge_gap_bytes=gap_bytes,
        most_read_bytes=max_read_bytes,
        prefetch_depth=max(1, int(PREFETCH_SHARE * depth)) if prefetch else 0,
        warm_up_reads=WARM_UP_READS if warm_up_read_bytes else 0,
        warm_up_read_bytes=warm_up_read_bytes,
        set_aside_bytes=min(
            max_staging_bytes,
            depth * max(cluster_read_bytes, target_bytes) + (WARM_UP_READS * MAX_READ_BYTES if may_join else 0),
        ),
        reasons=tuple(reasons),
    )


def _best_layout(
    layout: Layout, curve: FlashCurve, demands: tuple[ClusterDemand, ...], depth: int, bundle: bool | None
) -> ClusterDemand:
    """Return the demand whose separate reads take the least time, the first of equals.

    The size of bundles does not depend on the layout of slots.
    """
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
    """Return the time that each of many reads adds, with `depth` in flight."""
    return 1e6 * size_bytes / curve.bytes_per_s(size_bytes, depth)


def _knee_depth(curve: FlashCurve, size_bytes: int) -> int:
    """Return the smallest measured number of reads at once that reaches KNEE of the best speed, at least MIN_DEPTH."""
    speeds = {depth: curve.bytes_per_s(size_bytes, depth) for depth in sorted({point.depth for point in curve.points})}
    best = max(speeds.values())
    return max(MIN_DEPTH, next(depth for depth, speed in speeds.items() if speed >= KNEE * best))


def _share_of_best(curve: FlashCurve, size_bytes: int, depth: int) -> float:
    """Return the share of the best speed of this size that `depth` reads at once reach."""
    best = max(curve.bytes_per_s(size_bytes, measured) for measured in {point.depth for point in curve.points})
    return min(1.0, curve.bytes_per_s(size_bytes, depth) / best)


def depths(curve: FlashCurve) -> tuple[int, ...]:
    """Return the numbers of reads at once that may be planned, ascending: the measured ones, at least MIN_DEPTH."""
    return tuple(sorted({max(MIN_DEPTH, point.depth) for point in curve.points}))


def _longest(curve: FlashCurve) -> int:
    """Return the size of the longest measured read in whole pages, at most LONG_READ_BYTES.

    Few long reads cost less processor time than many short ones.
    """
    return max(min(point.request_bytes, LONG_READ_BYTES) for point in curve.points) // PAGE_BYTES * PAGE_BYTES


def _knee_size(curve: FlashCurve, depth: int) -> int:
    """Return the smallest measured size that reaches KNEE of the best speed, in whole pages."""
    sizes = sorted({point.request_bytes for point in curve.points})
    best = max(curve.bytes_per_s(size, depth) for size in sizes)
    knee = next(size for size in sizes if curve.bytes_per_s(size, depth) >= KNEE * best)
    return knee // PAGE_BYTES * PAGE_BYTES


def _gap_bytes(curve: FlashCurve, depth: int) -> int:
    """Return the number of bytes, in whole pages, that take as long as the fixed cost of a read.

    The time of a read is taken as fixed + bytes / speed: a line through the times of the smallest measured size and of
    the one nearest to 64 KiB. MAX_READ_BYTES if the larger one takes no longer.
    """
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
    """Return, as JSON values, what is read together from this flash, and the time if the package had planes.

    There is a row for each mode and each of RESIDENT_SHARES; predicted mode has one row for all shares.
    """
    depth = _knee_depth(curve, manifest.layout.value_part_bytes)
    slots_bytes = manifest.clusters * (manifest.trigger_slot_bytes + manifest.value_slot_bytes)
    modes: tuple[Mode, ...] = ("exact", "predicted") if manifest.predictor is not None else ("exact",)
    rows = []
    for mode in modes:
        token_rates = rates(manifest, mode)
        for share in RESIDENT_SHARES if token_rates.trigger_read == 1.0 else (0.0,):
            demands = ClusterDemand.of(manifest, token_rates, int(share * slots_bytes), mode)
            demand = _best_layout(manifest.layout, curve, demands, depth, None)
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
