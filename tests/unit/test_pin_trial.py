"""What a run misses beside what its plan expects, and whether pins that make it worse are let go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from neuronpipe.launch.verbs.runs.status import show_misses
from neuronpipe.plans.plan.document import Plan
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.protocol.messages.client import Pins, Status
from neuronpipe.services.cache.cache_service import Pinning
from neuronpipe.services.cache.residency import PinTrial
from neuronpipe.services.runtime.miss_counts import Misses, MissesOfRun, is_far_above, misses_of

from tests.unit.test_planner import device, manifest

WANTED = 1000.0  # cluster parts of a step


class Run:
    """Steps that miss as many as a rule says; the cache looks after every one."""

    def __init__(self, trial: PinTrial, rate: Callable[[bool, int], float]) -> None:
        self.trial, self._rate, self._sums = trial, rate, Misses()
        self.changes: list[int] = []

    def go(self, steps: int) -> None:
        for _ in range(steps):
            missed = WANTED * self._rate(self.trial.holds, int(self._sums.steps))
            self._sums += Misses(steps=1, wanted=WANTED, missed=missed)
            if self.trial.look(self._sums):
                self.changes.append(int(self._sums.steps))


def test_pins_that_starve_the_cache_are_let_go_once() -> None:
    run = Run(PinTrial(0.42), lambda holds, step: 0.891 if holds else 0.53)
    run.go(1000)
    assert run.trial.state == PinTrial.LET_GO
    assert len(run.changes) == 1
    assert run.changes[0] < 2 * PinTrial.STEPS


def test_pins_come_back_where_more_is_missed_without_them_and_stay() -> None:
    """A text of another kind: nothing is wrong with the pins."""
    run = Run(PinTrial(0.1), lambda holds, step: 0.4 if holds else 0.6)
    run.go(5000)
    assert run.trial.holds
    assert run.trial.state == PinTrial.PROVED
    assert len(run.changes) == 2


def test_a_cache_that_follows_slowly_is_not_judged_by_its_first_steps() -> None:
    let_go_at: list[int] = []

    def rate(holds: bool, step: int) -> float:
        if holds:
            return 0.9
        let_go_at.append(step)
        return 1.0 if step < let_go_at[0] + PinTrial.SETTLING_STEPS else 0.5

    run = Run(PinTrial(0.42), rate)
    run.go(1000)
    assert run.trial.state == PinTrial.LET_GO


@pytest.mark.parametrize(("measured", "expected"), [(0.5, 0.42), (0.08, 0.01), (0.891, 0.891), (0.0, 0.0)])
def test_misses_near_the_plan_change_nothing(measured: float, expected: float) -> None:
    run = Run(PinTrial(expected), lambda holds, step: measured)
    run.go(1000)
    assert run.changes == []
    assert run.trial.state == PinTrial.HOLD


def test_a_coordinator_that_starts_again_begins_the_sums_anew() -> None:
    trial = PinTrial(0.1)
    assert not trial.look(Misses(steps=500, wanted=1e6, missed=9e5))
    assert not trial.look(Misses(steps=3, wanted=6e3, missed=6e3))
    assert trial.look(Misses(steps=3 + PinTrial.STEPS, wanted=6e4, missed=6e4))


@pytest.mark.parametrize(
    ("left", "holds"),
    [(PinTrial.HOLD, True), (PinTrial.TRIAL, True), (PinTrial.LET_GO, False), (PinTrial.PROVED, True)],
)
def test_a_cache_that_starts_again_goes_on_with_what_was_decided(left: int, holds: bool) -> None:
    trial = PinTrial(0.1, left)
    assert trial.holds is holds
    if left in (PinTrial.LET_GO, PinTrial.PROVED):
        run = Run(trial, lambda holds, step: 1.0)
        run.go(500)
        assert run.changes == []


def pinning(made: Plan) -> Pinning:
    return Pinning(manifest(), made.memory, made.memory.moving_slots)


def test_let_go_pins_nothing_unless_everything_has_a_slot() -> None:
    m, made = manifest(), make_plan(manifest(), device(), PlanOptions(ffn_resident_share=0.7))
    pins, slots = pinning(made), (made.memory.trigger_slots, made.memory.value_slots)
    pins.fit(slots)
    held = pins.counts(0)
    assert any(held[0])
    pins.fit(slots, pin=False)
    expected = held[0] if slots[0] == m.clusters else (0,) * m.model.ffns
    assert pins.counts(0) == (expected, (0,) * m.model.ffns)
    pins.fit((m.clusters, m.clusters), pin=False)
    assert pins.counts(0)[0] == made.memory.pins[0].counts(m.model.ffns)[0]


def test_misses_are_counted_as_plans_count_them() -> None:
    counters = {"trigger_clusters": 100.0, "trigger_missed": 20.0, "value_clusters": 50.0, "value_missed": 5.0}
    assert misses_of(counters, whole=True) == Misses(steps=1, wanted=100, missed=20)
    assert misses_of(counters, whole=False) == Misses(steps=1, wanted=150, missed=25)
    ahead = {**counters, "foreseen": 10.0, "foreseen_missed": 9.0}
    assert misses_of(ahead, whole=True).missed == pytest.approx(90)
    assert misses_of({}, whole=True).rate == 0


def test_the_last_steps_tell_how_a_run_is() -> None:
    run = MissesOfRun()
    for _ in range(MissesOfRun.RECENT_STEPS):
        run.add(Misses(steps=1, wanted=10, missed=9))
    assert run.recent.rate == pytest.approx(0.9)
    for _ in range(MissesOfRun.RECENT_STEPS):
        total = run.add(Misses(steps=1, wanted=10, missed=1))
    assert run.recent.rate == pytest.approx(0.1)
    assert total.rate == pytest.approx(0.5)


STATUS = Status(
    run="r", ready=True, plan="p", mode="exact", processes=(), memory_bytes=0, memory_peak_bytes=0,
    memory_limit_bytes=0, sequences_active=0, max_sequences=1, sequences_waiting=0, steps=0, tokens=0, uptime_s=0.0,
    planned_miss_rate=0.42,
)  # fmt: skip


@pytest.mark.parametrize(
    ("rate", "pins", "line"),
    [
        (0.45, "held", ""),
        (0.891, "held", "89% of the clusters that tokens need, the plan expects 42%"),
        (0.891, "tried", "under way"),
        (0.53, "let_go", "53% of the clusters that tokens need, the plan expects 42%; the plan's pins were released"),
    ],
)
def test_a_run_that_misses_far_more_than_planned_is_told_in_one_line(rate: float, pins: Pins, line: str) -> None:
    shown = show_misses(dataclasses.replace(STATUS, miss_rate=rate, pins=pins))
    assert line in shown
    assert bool(shown) is bool(line)
    assert "\n" not in shown


def test_far_above_takes_a_ratio_and_a_difference() -> None:
    assert is_far_above(0.9, 0.42)
    assert not is_far_above(0.09, 0.01)  # nine times as many, of hardly any
    assert not is_far_above(0.95, 0.8)
