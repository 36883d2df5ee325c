"""The planner: from a package, a device and a limit to a plan. Pure: no files, no clock, no measuring.

Memory is filled by worth per byte. In exact mode every gate is read for every token, so a resident gate saves its bytes
with certainty, and a resident up/down part only as often as its neurons fire: gates first, then up/down parts.
"""

from __future__ import annotations

import dataclasses

from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.account import MIB, account, least_limit_bytes, least_slots_bytes, usable_bytes
from neuronpipe.plans.plan.plan import VERSION, Compute, Expected, Flash, Memory, Plan, Seat
from neuronpipe.protocol.errors import UserError

# Prefill keeps one partial sum per block and token; its chunk is cut so that these stay below this.
PREFILL_PARTIALS_BYTES = 16 * MIB
ASSUMED_ACTIVITY = 0.1  # share of neurons that fire, when the package does not state a measurement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the user asks for. Bytes and shares are limits; None leaves the choice to the planner."""

    memory_bytes: int | None = None
    ffn_resident_share: float | None = None  # 0..1 of all feed-forward bytes
    context_tokens: int | None = None
    sequences: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What the planner needs to know of a device."""

    id: str
    memory_bytes: int  # what the run may take when the user names no limit
    flash_engine: str
    flash_bytes_per_s: float  # random reads of about one cluster part at the depth used
    seats: tuple[Seat, ...]


def plan(manifest: Manifest, device: DeviceFacts, wanted: Wanted) -> Plan:
    """Make a plan. Raises UserError when the limit is below the least possible, saying what the least is and why."""
    shape, layout = manifest.shape, manifest.layout
    reasons: list[str] = []
    context_tokens = shape.context_tokens if wanted.context_tokens is None else wanted.context_tokens
    if not 1 <= context_tokens <= shape.context_tokens:
        raise UserError(f"--context {context_tokens}: this package's context is {shape.context_tokens} tokens")
    workers = sum(seat.role == "decode" for seat in device.seats)
    gate_bytes, rest_bytes = layout.gate_part_bytes, layout.rest_part_bytes
    ffn_bytes = manifest.words * (gate_bytes + rest_bytes)

    chunk = max(1, min(64, context_tokens, PREFILL_PARTIALS_BYTES // (layout.blocks * shape.width * 4)))
    logit_rows = max(8, wanted.sequences)
    others = account(
        manifest,
        processes=len(device.seats),
        workers=workers,
        sequences=wanted.sequences,
        context_tokens=context_tokens,
        prefill_chunk_tokens=chunk,
        logit_rows=logit_rows,
    )

    limit = wanted.memory_bytes if wanted.memory_bytes is not None else device.memory_bytes
    usable = usable_bytes(limit) - others.total_bytes()
    budget = usable
    if wanted.ffn_resident_share is not None:
        budget = min(budget, int(wanted.ffn_resident_share * ffn_bytes))
        reasons.append(f"feed-forward residency is limited to {wanted.ffn_resident_share:.0%} by request")

    slots = _fill(
        layout.blocks,
        layout.block_neurons // layout.cluster_neurons,
        layout.clusters,
        shape.layers,
        gate_bytes,
        rest_bytes,
        workers,
        budget,
        manifest.layout.neuron_order == "frequency",
    )
    least = least_limit_bytes(others, layout, workers)
    if slots is None:
        _refuse(limit, least, wanted, ffn_bytes, least_slots_bytes(layout, workers), others.total_bytes(), usable)
    assert slots is not None
    reasons += slots.reasons
    memory = Memory(
        limit_bytes=limit,
        **dataclasses.asdict(others),
        gate_slots=slots.gates,
        rest_slots=slots.rests,
        slots_bytes=slots.gates * gate_bytes + slots.rests * rest_bytes,
        ffn_bytes=ffn_bytes,
        pinned_gates_per_layer=slots.pinned_gates,
        pinned_rests_per_layer=slots.pinned_rests,
        least_bytes=least,
    )
    reasons.append(
        f"prefill takes {chunk} tokens at a time, so that "
        f"its partial sums stay below {PREFILL_PARTIALS_BYTES // MIB} MiB"
    )
    return Plan(
        version=VERSION,
        package_id=manifest.id,
        device_id=device.id,
        compute=Compute(
            mode="exact",
            seats=device.seats,
            sequences=wanted.sequences,
            context_tokens=context_tokens,
            prefill_chunk_tokens=chunk,
            logit_rows=logit_rows,
            decode_window_blocks=slots.window,
            prefill_window_blocks=min(layout.blocks, slots.window * workers),
            spin_us=50,
        ),
        memory=memory,
        flash=Flash(engine=device.flash_engine, depth=64, stock_gates=slots.stock_gates, stock_rests=slots.stock_rests),
        expected=_expected(manifest, memory, device),
        reasons=tuple(reasons),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Slots:
    gates: int
    rests: int
    pinned_gates: int
    pinned_rests: int
    window: int
    stock_gates: int
    stock_rests: int
    reasons: tuple[str, ...]


def _fill(
    blocks: int,
    per_block: int,
    clusters: int,
    layers: int,
    gate_bytes: int,
    rest_bytes: int,
    workers: int,
    budget: int,
    by_frequency: bool,
) -> _Slots | None:
    """Share `budget` bytes out between gate and rest slots; None when it is too small for one block per worker."""
    all_clusters = layers * clusters
    if budget >= all_clusters * (gate_bytes + rest_bytes):
        own = -(-blocks // workers)
        return _Slots(
            gates=all_clusters,
            rests=all_clusters,
            pinned_gates=clusters,
            pinned_rests=clusters,
            window=own,
            stock_gates=0,
            stock_rests=0,
            reasons=("everything is resident: nothing is read after start-up",),
        )
    window = -(-blocks // workers)
    while window > 1 and 2 * window * workers * per_block * (gate_bytes + rest_bytes) > budget // 3:
        window = (window + 1) // 2
    moving = 2 * window * workers * per_block  # clusters that may be open, as many again free or arriving
    if moving >= all_clusters:
        moving, window = max(2 * workers * per_block, all_clusters // 2), 1
    if budget < moving * (gate_bytes + rest_bytes):
        return None
    reasons = [f"{window} of {blocks} blocks open per decode worker at once: {moving} clusters may be moving"]
    if budget >= all_clusters * gate_bytes + moving * rest_bytes:
        rests = min(all_clusters, (budget - all_clusters * gate_bytes) // rest_bytes)
        pinned_rests = (rests - moving) // 2 // layers if by_frequency else 0
        reasons.append(
            f"all gates are resident; {rests} of {all_clusters} up/down parts fit, "
            f"the {pinned_rests} hottest of each layer stay"
        )
        return _Slots(
            gates=all_clusters,
            rests=rests,
            pinned_gates=clusters,
            pinned_rests=pinned_rests,
            window=window,
            stock_gates=0,
            stock_rests=moving // 2,
            reasons=tuple(reasons),
        )
    gates = (budget - moving * rest_bytes) // gate_bytes
    pinned = max(0, gates - moving) // layers
    reasons.append(
        f"{pinned} of {clusters} gates per layer stay, the others are read for every token: "
        "memory does not hold all gates"
    )
    return _Slots(
        gates=gates,
        rests=moving,
        pinned_gates=pinned,
        pinned_rests=0,
        window=window,
        stock_gates=moving // 2,
        stock_rests=moving // 2,
        reasons=tuple(reasons),
    )


def _refuse(limit: int, least: int, wanted: Wanted, ffn_bytes: int, slots: int, others: int, usable: int) -> None:
    if wanted.ffn_resident_share is not None and usable >= slots:
        raise UserError(
            f"--ffn-resident {wanted.ffn_resident_share:.1%}: the least for this package is {slots / ffn_bytes:.1%} "
            f"({slots:,} bytes): one block of neurons per worker must be open, and as much arriving"
        )
    raise UserError(
        f"--memory {limit:,}: the least for this package is {least:,} bytes ({least / MIB:.0f} MiB): "
        f"{others:,} for interpreters, fixed "
        f"tensors, KV cache and exchange, {slots:,} for the neurons being computed; a smaller --context needs less"
    )


def _expected(manifest: Manifest, memory: Memory, device: DeviceFacts) -> Expected:
    """Bytes and flash time of one decode token."""
    shape, layout = manifest.shape, manifest.layout
    activity = _mean_activity(manifest)
    if manifest.activation == "silu":
        activity = 1.0
    touched = 1 - (1 - activity) ** layout.cluster_neurons  # of the rest parts, if neurons fired independently
    clusters = shape.layers * shape.experts * layout.clusters
    gate_misses = clusters - memory.gate_slots if memory.gate_slots < clusters else 0
    rest_misses = int(touched * clusters * max(0.0, 1 - memory.rest_slots / clusters))
    flash = gate_misses * layout.gate_part_bytes + rest_misses * layout.rest_part_bytes
    row_bytes = (layout.gate_part_bytes + layout.rest_part_bytes) / 3 / layout.cluster_neurons
    dram = memory.fixed_bytes + int(clusters * layout.cluster_neurons * row_bytes * (1 + 2 * activity))
    looked_up = clusters * (1 + touched)
    return Expected(
        dram_bytes_per_token=dram,
        flash_bytes_per_token=flash,
        flash_ms_per_token=round(1000 * flash / device.flash_bytes_per_s, 3) if device.flash_bytes_per_s else 0.0,
        miss_rate=round((gate_misses + rest_misses) / looked_up, 4),
    )


def _mean_activity(manifest: Manifest) -> float:
    by_layer = manifest.activity_by_layer
    return sum(by_layer) / len(by_layer) if by_layer else ASSUMED_ACTIVITY
