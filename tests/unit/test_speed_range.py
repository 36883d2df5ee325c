"""Ranges of expected speeds: what widens them, and how a plan, `bench` and a table show them."""

from __future__ import annotations

import dataclasses
import json

import pytest
from neuronpipe.launch.bench.cases import parse_cases
from neuronpipe.launch.bench.planned import planned, planned_ranges
from neuronpipe.launch.bench.report import planned_lines
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.search import Subject, search_plan
from neuronpipe.launch.planning.shapes import no_activity
from neuronpipe.plans.cost.speed_range import MODEL_SPREAD, fact_groups, range_reason, speed_ranges
from neuronpipe.plans.cost.token_time import Measurements
from neuronpipe.plans.device.cores import Core
from neuronpipe.plans.device.device import Device, FlashCurve
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.number_format import show_range
from neuronpipe.plans.plan.document import Plan, SpeedRange, parse_plan
from neuronpipe.plans.plan.report import explain

from tests.unit.test_device_profile import profile
from tests.unit.test_held_plan import CURVE, SPEED
from tests.unit.test_planner import manifest

BRIEF = profile(steps=(), read_delays=(), read_factors=(), flash=None)
MODEL = manifest(neurons=1024, layers=8)


def device(measured: Measurements) -> Device:
    curve, speed, figures = measured
    return Device(
        architecture="x86_64", instruction_set="avx2", cores=(Core(id=0, capacity=1024, kind="big"),), cpu_quota=None,
        memory_total_bytes=1 << 34, memory_available_bytes=1 << 34, page_bytes=4096, memlock_bytes=None, io_uring=True,
        flash=curve, memory_speed=speed, profile=figures,
    )  # fmt: skip


def planned_on(measured: Measurements, resident: float = 1.0) -> Plan:
    subject = Subject(manifest=MODEL, read_activity=no_activity, device=device(measured))
    options = PlanOptions(ffn_resident_share=resident, context_tokens=64, workers=1, mode="exact")
    return search_plan(subject, options, several=False, gateway=False)[2]


def width(plan: Plan) -> float:
    speeds = plan.expected.tokens_per_s_range
    assert speeds is not None
    assert speeds.low < (plan.expected.tokens_per_s or 0) < speeds.high
    return speeds.high / speeds.low


def with_spread(figures: DeviceProfile, spread: float) -> DeviceProfile:
    points = (
        dataclasses.replace(point, bytes_per_s=Figure(median=point.bytes_per_s.median, spread=spread))
        for point in figures.dram
    )
    return dataclasses.replace(figures, dram=tuple(points))


def test_a_profile_with_runs_has_a_narrower_range_than_a_brief_one() -> None:
    full, brief = planned_on((CURVE, SPEED, profile())), planned_on((CURVE, SPEED, BRIEF))
    assert width(full) < width(brief)
    assert not any("measured briefly" in reason for reason in full.reasons)
    (reason,) = (reason for reason in brief.reasons if "measured briefly" in reason)
    assert "`neuronpipe profile device` narrows the range" in reason


def test_repetitions_that_lie_apart_widen_the_range() -> None:
    steady, unsteady = (planned_on((CURVE, SPEED, with_spread(BRIEF, spread))) for spread in (0.0, 0.4))
    assert width(unsteady) > width(steady)


def test_an_unsteady_disk_widens_the_range_only_of_a_plan_that_reads_it() -> None:
    def wide(spread: float, resident: float) -> float:
        return width(planned_on((dataclasses.replace(CURVE, spread=spread), SPEED, profile()), resident))

    assert wide(0.8, 0.3) > 1.1 * wide(0.0, 0.3)
    assert wide(0.8, 1.0) == wide(0.0, 1.0)


def test_groups_of_facts_add_in_quadrature_to_the_error_of_the_model() -> None:
    """The speed is that of the slower of both in this model, so only flash counts."""

    def speed_of_flash(measured: Measurements) -> dict[str, float | None]:
        curve = measured[0]
        return {"tokens_per_s": None if curve is None else curve.bytes_per_s(4096, 1) / 1e6, "unknown": None}

    ranges = speed_ranges(speed_of_flash, (CURVE, SPEED, None), are_misses_assumed=False)
    assert ranges.keys() == {"tokens_per_s"}
    speeds, widenings = ranges["tokens_per_s"]
    median = CURVE.bytes_per_s(4096, 1) / 1e6
    assert speeds.high / median == pytest.approx(median / speeds.low, rel=1e-3)
    assert widenings[0].name == "the speed of flash"
    assert speeds.high / median > 1 + widenings[0].above > 1 + MODEL_SPREAD
    wider, _ = speed_ranges(speed_of_flash, (CURVE, SPEED, None), are_misses_assumed=True)["tokens_per_s"]
    assert wider.low < speeds.low


@pytest.mark.parametrize("figures", [profile(), BRIEF, None])
def test_every_group_has_a_slow_and_a_fast_end_with_the_same_conditions(figures: DeviceProfile | None) -> None:
    groups = list(fact_groups((CURVE, SPEED, figures), are_misses_assumed=True))
    names = [group.name for group in groups]
    assert len(set(names)) == len(names) >= 3
    for group in groups:
        assert group.slow != group.fast
        for measured in (group.slow, group.fast):
            if figures is not None and measured[2] is not None:
                assert measured[2].steps == () or len(measured[2].steps) == len(figures.steps)
                assert [point.kind for point in measured[2].decode] == [point.kind for point in figures.decode]


def test_a_step_is_never_assumed_shorter_than_its_kernels() -> None:
    (steps,) = (g for g in fact_groups((None, None, BRIEF), are_misses_assumed=False) if "time of a step" in g.name)
    fast = steps.fast[2]
    assert fast is not None
    for before, after in zip(BRIEF.decode, fast.decode, strict=True):
        assumed = 1.1 if before.workers == 1 else 1.3
        assert after.bytes_per_s.median <= assumed * before.bytes_per_s.median * (1 + 1e-9)


def test_figures_at_the_end_of_what_is_plausible_stay_valid() -> None:
    points = tuple(
        dataclasses.replace(point, bytes_per_s=Figure(median=median, spread=10.0))
        for point, median in zip(BRIEF.decode[:2], (1e14, 1.0), strict=True)
    )
    extreme = dataclasses.replace(BRIEF, decode=points)
    assert len(list(fact_groups((None, None, extreme), are_misses_assumed=False))) == 2


def test_nothing_measured_has_no_range() -> None:
    plan = planned_on((None, None, None))
    assert plan.expected.tokens_per_s_range is plan.expected.prefill_tokens_per_s_range is None
    assert "not measured" in explain(plan)


def test_a_plan_shows_its_range_and_is_read_back_with_it() -> None:
    plan = planned_on((CURVE, SPEED, BRIEF))
    speeds = plan.expected.tokens_per_s_range
    assert speeds is not None
    assert f"expects  {show_range(speeds.low, speeds.high)} tokens/s, most likely" in explain(plan)
    content = json.loads(plan.to_json())
    assert content["expected"]["tokens_per_s_range"] == {"low": speeds.low, "high": speeds.high}
    assert parse_plan(plan.to_json().encode(), "plan.json") == plan


@pytest.mark.parametrize(
    ("test", "names"), [("tg16", {"tokens_per_s"}), ("pp32", {"tokens_per_s", "prefill_tokens_per_s"})]
)
def test_bench_plans_a_range_for_each_speed_of_a_test(test: str, names: set[str]) -> None:
    measured = (CURVE, SPEED, BRIEF)
    plan, (case,) = planned_on(measured), parse_cases(test)
    figures = planned(MODEL, plan, device(measured), case, 1)
    ranges = planned_ranges(MODEL, plan, device(measured), case, 1)
    assert ranges.keys() == names
    for name, speeds in ranges.items():
        assert speeds.low < figures[name] < speeds.high
    row = {
        "test": test, "tokens_per_s": 1.0, "prefill_tokens_per_s": 1.0, "planned": {"tokens_per_s": 13.4},
        "planned_range": {"tokens_per_s": {"low": 11.8, "high": 15.2}}, "error": {"tokens_per_s": 12.4},
    }  # fmt: skip
    assert planned_lines([row])[0][3] == "13.4 (12 to 15)"


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (11.8, 15.2, "12 to 15"),
        (0.94, 1.83, "0.94 to 1.8"),
        (2149.0, 2851.0, "2,100 to 2,900"),
        (9.96, 10.2, "10"),
        (0.0, 1.0, "0 to 1.0"),
    ],
)
def test_a_range_has_two_significant_digits(low: float, high: float, text: str) -> None:
    assert show_range(low, high) == text


def test_the_reason_names_what_widens_the_range_most() -> None:
    def evaluate(measured: Measurements) -> dict[str, float | None]:
        curve: FlashCurve | None = measured[0]
        return {"tokens_per_s": None if curve is None else curve.bytes_per_s(4096, 1)}

    unsteady = dataclasses.replace(CURVE, spread=0.5)
    _, widenings = speed_ranges(evaluate, (unsteady, None, None), are_misses_assumed=False)["tokens_per_s"]
    reason = range_reason(SpeedRange(low=12.0, high=15.0), widenings, is_brief=False)
    assert reason.startswith("four of five runs should reach 12 to 15 tokens/s: the speed of flash by 50%")
