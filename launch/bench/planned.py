"""The figures that the plan expects of a test, under the names of the measured figures, and their errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from neuronpipe.launch.bench.cases import Case
from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.cost.speed_range import Speeds, speed_ranges
from neuronpipe.plans.cost.token_time import Measurements
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Expected, Plan, SpeedRange
from neuronpipe.plans.plan.memory_budget import peak_bytes
from neuronpipe.plans.planner.planned_range import are_plan_misses_assumed, expectation_of

MAX_FRACTION = 1.05  # of the measured memory speed: runs and measurements differ by that much
MIN_ERROR = -0.25


def planned(
    manifest: Manifest,
    plan: Plan,
    device: Device,
    case: Case,
    batch: int,
    before: Sequence[Case] = (),
    frequencies: AccessFrequencies | None = None,
) -> dict[str, float]:
    """Return the planned figures of a test, for its batch and at the positions where it decodes.

    before: the tests that the run has had, which count in its peak memory
    frequencies: access frequencies of the package

    Figures that the plan does not have are absent; of a prompt only the time is planned, not its reads.
    """
    expectation = _expectation(manifest, plan, case, batch, frequencies)(measurements(device))
    figures: dict[str, float | None] = {
        "tokens_per_s": _tokens_per_s(case, expectation),
        "first_token_ms": expectation.first_token_ms,
        "peak_memory_bytes": max(_peak_bytes(manifest, plan, test, batch) for test in (case, *before)),
    }
    if case.prefill_tokens:
        figures["prefill_tokens_per_s"] = expectation.prefill_tokens_per_s
    else:
        figures |= {
            "miss_rate": expectation.miss_rate,
            "flash_reads_per_token": expectation.flash_reads_per_token,
            "flash_bytes_per_token": expectation.flash_bytes_per_token,
            "dram_bytes_per_token": expectation.dram_bytes_per_token,
            "exposed_io_share": _exposed_share(expectation),
        }
    return {name: value for name, value in figures.items() if value is not None}


def planned_ranges(
    manifest: Manifest,
    plan: Plan,
    device: Device,
    case: Case,
    batch: int,
    frequencies: AccessFrequencies | None = None,
) -> dict[str, SpeedRange]:
    """Return the ranges of the planned speeds of a test. Parameters are those of `planned`."""
    expectation = _expectation(manifest, plan, case, batch, frequencies)

    def speeds(measured: Measurements) -> Speeds:
        expected_figures = expectation(measured)
        of_prompt = {"prefill_tokens_per_s": expected_figures.prefill_tokens_per_s} if case.prefill_tokens else {}
        return {"tokens_per_s": _tokens_per_s(case, expected_figures), **of_prompt}

    is_assumed = are_plan_misses_assumed(plan, manifest)
    ranges = speed_ranges(speeds, measurements(device), are_misses_assumed=is_assumed)
    return {name: speed_range for name, (speed_range, _) in ranges.items()}


def measurements(device: Device) -> Measurements:
    return device.flash, device.memory_speed, device.profile


def _expectation(
    manifest: Manifest, plan: Plan, case: Case, batch: int, frequencies: AccessFrequencies | None
) -> Callable[[Measurements], Expected]:
    """Return a function from measurements of a device to what the plan expects of a test there."""
    return expectation_of(
        plan,
        manifest,
        frequencies,
        batch=batch,
        position_tokens=case.prompt_tokens + case.decode_tokens // 2,
        prompt_tokens=case.prompt_tokens,
    )


def _peak_bytes(manifest: Manifest, plan: Plan, case: Case, batch: int) -> int:
    return peak_bytes(
        manifest, plan, sequences=batch, sequence_tokens=case.context_tokens, prompt_tokens=case.prompt_tokens
    )


def errors(measured: Mapping[str, Any], plan: Mapping[str, float]) -> dict[str, float | None]:
    """Return (planned - measured) / measured for every planned figure.

    None if the figure was not measured, or if zero was measured and not planned.
    """
    return {name: relative_error(value, measured.get(name)) for name, value in plan.items()}


def beaten(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return which test was faster than the device's figures allow, in a few words; None if none was.

    A test that reads faster than the measured memory speed shows that this figure is too low. So does a test that does
    not wait for flash and is clearly faster than planned.
    """
    for row in rows:
        fraction, error = row["dram_limit_fraction"], row["error"].get("tokens_per_s")
        if fraction is not None and fraction > MAX_FRACTION:
            return f"{row['test']} read memory at {fraction:.0%} of the speed that was measured"
        if not row["flash_bytes_per_token"] and error is not None and error < MIN_ERROR:
            return f"{row['test']} was {1 / (1 + error):.1f} times as fast as planned"
    return None


def flash_beaten(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return which test read faster than the measured flash in all of its time, in a few words; None if none did."""
    for row in rows:
        fraction = row["flash_limit_fraction"]
        if fraction is not None and fraction > MAX_FRACTION:
            return f"{row['test']} read flash at {fraction:.0%} of the speed that was measured"
    return None


def relative_error(planned_value: float, measured_value: float | None) -> float | None:
    """Return (planned - measured) / measured; None if that is not defined."""
    if planned_value == measured_value:
        return 0.0
    return (planned_value - measured_value) / measured_value if measured_value else None


def _tokens_per_s(case: Case, expectation: Expected) -> float | None:
    """Return the planned speed of what the test counts: prompt tokens, decoded tokens, or both."""
    if not case.prefill_tokens:
        return expectation.tokens_per_s
    if not case.decode_tokens:
        return expectation.prefill_tokens_per_s
    if expectation.tokens_per_s is None or expectation.first_token_ms is None:
        return None
    time_s = expectation.first_token_ms / 1e3 + case.decode_tokens / expectation.tokens_per_s
    return (case.prefill_tokens + case.decode_tokens) / time_s


def _exposed_share(expectation: Expected) -> float | None:
    if expectation.tokens_per_s is None or expectation.exposed_flash_ms_per_token is None:
        return None
    return expectation.exposed_flash_ms_per_token * expectation.tokens_per_s / 1e3
