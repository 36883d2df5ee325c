"""Adds to a plan the ranges of its expected speeds, and the reason for their width."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.cost.activation_rates import rates
from neuronpipe.plans.cost.speed_range import Speeds, are_misses_assumed, is_brief, range_reason, speed_ranges
from neuronpipe.plans.cost.token_time import Measurements, expected
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Expected, Plan

SPEEDS = ("tokens_per_s", "prefill_tokens_per_s")


def with_ranges(plan: Plan, manifest: Manifest, frequencies: AccessFrequencies | None, measured: Measurements) -> Plan:
    """Return the plan with the ranges of its speeds. A search adds them only to its result, because they cost as much
    time as a dozen expectations.

    measured: the measurements that the plan was made from
    """
    expectation = expectation_of(plan, manifest, frequencies)

    def speeds(facts: Measurements) -> Speeds:
        expected_figures = expectation(facts)
        return {name: getattr(expected_figures, name) for name in SPEEDS}

    ranges = speed_ranges(speeds, measured, are_misses_assumed=are_plan_misses_assumed(plan, manifest))
    changes: dict[str, Any] = {f"{name}_range": speed_range for name, (speed_range, _) in ranges.items()}
    reasons = plan.reasons
    if "tokens_per_s" in ranges:
        reasons += (range_reason(*ranges["tokens_per_s"], is_brief=is_brief(measured)),)
    return dataclasses.replace(plan, expected=dataclasses.replace(plan.expected, **changes), reasons=reasons)


def expectation_of(
    plan: Plan,
    manifest: Manifest,
    frequencies: AccessFrequencies | None,
    *,
    batch: int = 1,
    position_tokens: int | None = None,
    prompt_tokens: int | None = None,
) -> Callable[[Measurements], Expected]:
    """Return a function from measurements of a device to what a plan expects there; parameters as in `expected`."""
    plan_rates = rates(manifest, plan.compute.mode, frequencies)

    def expectation(facts: Measurements) -> Expected:
        where: dict[str, Any] = {"batch": batch, "position_tokens": position_tokens, "prompt_tokens": prompt_tokens}
        return expected(manifest, plan_rates, plan.compute, plan.memory, plan.flash, *facts, **where)

    return expectation


def are_plan_misses_assumed(plan: Plan, manifest: Manifest) -> bool:
    """Return True if the misses that the plan expects come from other models."""
    all_resident = min(plan.memory.trigger_slots, plan.memory.value_slots) >= manifest.clusters
    return are_misses_assumed(manifest, plan.compute.mode, all_resident=all_resident)
