"""What the plan expects of a test, under the names that a row has for what was measured; and how far off it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from neuronpipe.launch.bench.cases import Case
from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.cost.activation_rates import rates
from neuronpipe.plans.cost.token_time import expected
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Expected, Plan
from neuronpipe.plans.plan.memory_budget import peak_bytes

MAX_FRACTION = 1.05  # of what memory was measured to do: runs and measurements differ by as much
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
    """For the texts that this test has, at the positions where it decodes. before: the tests that the run has had, as
    these count for its memory; heat: of the package. A figure that is not planned, or that nothing was measured for, is
    absent: what a prompt reads is not planned, only its time."""
    one = expected(
        manifest,
        rates(manifest, plan.compute.mode, frequencies),
        plan.compute,
        plan.memory,
        plan.flash,
        device.flash,
        device.memory_speed,
        device.profile,
        batch=batch,
        position_tokens=case.prompt_tokens + case.decode_tokens // 2,
        prompt_tokens=case.prompt_tokens,
    )
    figures: dict[str, float | None] = {
        "tokens_per_s": _tokens_per_s(case, one),
        "first_token_ms": one.first_token_ms,
        "peak_memory_bytes": max(_held_bytes(manifest, plan, one, batch) for one in (case, *before)),
    }
    if case.prefill_tokens:
        figures["prefill_tokens_per_s"] = one.prefill_tokens_per_s
    else:
        figures |= {
            "miss_rate": one.miss_rate,
            "flash_reads_per_token": one.flash_reads_per_token,
            "flash_bytes_per_token": one.flash_bytes_per_token,
            "dram_bytes_per_token": one.dram_bytes_per_token,
            "exposed_io_share": _exposed_share(one),
        }
    return {name: value for name, value in figures.items() if value is not None}


def _held_bytes(manifest: Manifest, plan: Plan, case: Case, batch: int) -> int:
    return peak_bytes(
        manifest, plan, sequences=batch, sequence_tokens=case.context_tokens, prompt_tokens=case.prompt_tokens
    )


def errors(measured: Mapping[str, Any], plan: Mapping[str, float]) -> dict[str, float | None]:
    """(planned - measured) / measured, for every figure that was planned: above zero where the plan says too much.
    None where nothing was measured, or zero was and not planned."""
    return {name: relative_error(value, measured.get(name)) for name, value in plan.items()}


def beaten(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return which test was faster than the device's figures allow, in a few words; None: none was.

    Reading more than memory was measured to read says that the figure is too low. So does a test that waits for no
    flash and is clearly faster than planned.
    """
    for row in rows:
        fraction, error = row["dram_limit_fraction"], row["error"].get("tokens_per_s")
        if fraction is not None and fraction > MAX_FRACTION:
            return f"{row['test']} read memory at {fraction:.0%} of the speed that was measured"
        if not row["flash_bytes_per_token"] and error is not None and error < MIN_ERROR:
            return f"{row['test']} was {1 / (1 + error):.1f} times as fast as planned"
    return None


def relative_error(planned_value: float, measured_value: float | None) -> float | None:
    """The same of one figure."""
    if planned_value == measured_value:
        return 0.0
    return (planned_value - measured_value) / measured_value if measured_value else None


def _tokens_per_s(case: Case, one: Expected) -> float | None:
    """What the test counts: a prompt, decoded tokens, or both."""
    if not case.prefill_tokens:
        return one.tokens_per_s
    if not case.decode_tokens:
        return one.prefill_tokens_per_s
    if one.tokens_per_s is None or one.first_token_ms is None:
        return None
    time_s = one.first_token_ms / 1e3 + case.decode_tokens / one.tokens_per_s
    return (case.prefill_tokens + case.decode_tokens) / time_s


def _exposed_share(one: Expected) -> float | None:
    if one.tokens_per_s is None or one.exposed_flash_ms_per_token is None:
        return None
    return one.exposed_flash_ms_per_token * one.tokens_per_s / 1e3
