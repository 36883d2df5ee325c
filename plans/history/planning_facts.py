"""The facts that a plan is made with, as a history corrects them: a package's activity and a device's speeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

from neuronpipe.plans.cost.activation_rates import HOTTEST
from neuronpipe.plans.device.device import Device, FlashCurve, MemorySpeed
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.history.history import Counts, History
from neuronpipe.plans.history.use_gaps import UseGaps
from neuronpipe.plans.package.activity_profile import ActivityProfile, Points, Policy, Unit
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Corrections

MIN_COUNTED_TOKENS: Final = 1000
"""With fewer counted tokens, a plan is made as without."""


def usable_counts(history: History) -> tuple[Counts, ...]:
    """Return the counts that are numerous enough for a plan."""
    return tuple(counts for counts in history.counts if counts.tokens >= MIN_COUNTED_TOKENS)


def counted_manifest(manifest: Manifest, history: History) -> Manifest:
    """Return a package's manifest, with the misses and activity that its runs have counted. The id stays.

    Counted misses replace those of an activity profile, which is of another text. Its frequencies stay: pins are chosen
    by them, and counts have none. Without a profile the assumed curve of activations stays, too.
    """
    for counts in usable_counts(history):
        misses = dict(_misses(manifest, counts))
        if misses:
            before = manifest.profile(counts.mode)
            profile = (
                dataclasses.replace(before, misses={**(before.misses or {}), **misses})
                if before is not None
                else _new_profile(manifest, counts, misses)
            )
            of_other_modes = (each for each in manifest.profiles if each.mode != counts.mode)
            manifest = dataclasses.replace(manifest, profiles=(*of_other_modes, profile))
        if counts.mode == "exact" and counts.neurons and manifest.fired_by_layer is None:
            shares = [round(count / counts.neurons, 6) for count in (counts.active, counts.fired)]
            active, fired = ((share,) * manifest.model.layers for share in shares)
            manifest = dataclasses.replace(manifest, fired_by_layer=active, trigger_fired_by_layer=fired)
    return manifest


def _misses(manifest: Manifest, counts: Counts) -> Iterator[tuple[Unit, dict[Policy, Points]]]:
    """Yield the units of residency that a mode looks up, and their counted misses."""
    parts: list[tuple[Unit, UseGaps]] = []
    if counts.mode == "predicted":
        parts.append(("bundle", counts.triggers))
    else:
        parts.append(("value", counts.values))
        if manifest.model.experts > 1:  # every trigger of a chosen expert is needed
            parts.append(("expert", counts.triggers))
    for unit, gaps in parts:
        if gaps.uses:
            yield unit, {"clock": gaps.miss_curve()}


def _new_profile(manifest: Manifest, counts: Counts, misses: dict[Unit, dict[Policy, Points]]) -> ActivityProfile:
    share = counts.active / counts.neurons if counts.neurons else 0.0
    return ActivityProfile(
        mode=counts.mode,
        source="counted",
        text="your own runs",
        tokens=counts.tokens,
        curve=HOTTEST,
        wanted_by_layer=(share,) * manifest.model.layers,
        misses=misses,
    )


def corrected_device(device: Device, corrections: Corrections) -> Device:
    """Return a device whose speeds are those that runs have measured: kernels of decode steps and memory together, and
    flash. Speeds of prompts and costs of reads and barriers stay."""
    flash, speed, profile = device.flash, device.memory_speed, device.profile
    if flash is not None and corrections.reads != 1.0:
        flash = _scaled_flash(flash, 1 / corrections.reads)
    if corrections.kernels != 1.0:
        speed = None if speed is None else _scaled_memory(speed, 1 / corrections.kernels)
        profile = None if profile is None else _scaled_kernels(profile, 1 / corrections.kernels)
    return dataclasses.replace(device, flash=flash, memory_speed=speed, profile=profile)


def _scaled_flash(curve: FlashCurve, factor: float) -> FlashCurve:
    points = (dataclasses.replace(point, bytes_per_s=factor * point.bytes_per_s) for point in curve.points)
    return dataclasses.replace(curve, points=tuple(points))


def _scaled_memory(speed: MemorySpeed, factor: float) -> MemorySpeed:
    pieces = (dataclasses.replace(piece, bytes_per_s=factor * piece.bytes_per_s) for piece in speed.pieces)
    return dataclasses.replace(
        speed,
        one_thread_bytes_per_s=factor * speed.one_thread_bytes_per_s,
        sequential_bytes_per_s=factor * speed.sequential_bytes_per_s,
        pieces=tuple(pieces),
    )


def _scaled_kernels(profile: DeviceProfile, factor: float) -> DeviceProfile:
    def scaled(figure: Figure) -> Figure:
        return dataclasses.replace(figure, median=factor * figure.median)

    return dataclasses.replace(
        profile,
        decode=tuple(dataclasses.replace(point, bytes_per_s=scaled(point.bytes_per_s)) for point in profile.decode),
        dram=tuple(dataclasses.replace(point, bytes_per_s=scaled(point.bytes_per_s)) for point in profile.dram),
    )


def history_reasons(history: History, manifest: Manifest) -> tuple[str, ...]:
    """Return the sentences of a plan on what it takes from a history; empty if that is nothing."""
    lines = []
    for counts in usable_counts(history):
        if dict(_misses(manifest, counts)):
            lines.append(f"misses in {counts.mode} mode: from {counts.tokens:,} tokens of your own")
    used = history.corrections
    for term, factor in (("kernels", used.kernels), ("waiting for reads", used.reads)):
        if factor != 1.0:
            lines.append(f"{term}: {factor:g} times the time that the device's measurements give, by earlier runs")
    return tuple(lines)
