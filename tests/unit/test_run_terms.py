"""A run is compared with its plan term by term, and one wrong fact is one term."""

from __future__ import annotations

import dataclasses
import logging
from array import array

import pytest
from neuronpipe.plans.history.run_terms import (
    COUNTERS,
    FIGURES,
    MIN_TOKENS,
    RunTerms,
    TokenTerms,
    deviations,
    measured_terms,
    planned_terms,
    sentence,
)
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.protocol.layouts.run import BOARD_TERMS
from neuronpipe.services.coordinator.plan_check import SETTLING_TOKENS, PlanCheck

from tests.unit.test_planner import GIB, SPEED, device, manifest, predicted

PLANNED = TokenTerms(miss_rate=0.08, flash_bytes=8 << 20, wait_ms=10.0, compute_ms=40.0, ms=51.0)
M = predicted(manifest(width=4096, neurons=14336, order="frequency"))
PLAN = make_plan(
    M,
    dataclasses.replace(device(memory_bytes=8 * GIB), memory_speed=SPEED),
    PlanOptions(mode="predicted", ffn_resident_share=0.4),
)


def measured(**factors: float) -> TokenTerms:
    """What a run measures where these figures are other than planned by a factor."""
    return dataclasses.replace(PLANNED, **{name: factor * getattr(PLANNED, name) for name, factor in factors.items()})


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize(
    ("term", "figures"),
    [
        ("misses", ("miss_rate", "flash_bytes", "wait_ms")),  # as many bytes and waits follow from the misses
        ("flash bytes", ("flash_bytes", "wait_ms")),
        ("reads", ("wait_ms",)),
        ("kernels", ("compute_ms",)),
    ],
)
def test_a_planted_factor_of_two_is_one_term_and_its_ratio(term: str, figures: tuple[str, ...], factor: float) -> None:
    (deviation,) = deviations(PLANNED, measured(**dict.fromkeys(figures, factor)))
    assert deviation.term == term
    assert deviation.ratio == pytest.approx(factor)


@pytest.mark.parametrize(("kernels", "reads", "terms"), [(2.0, 0.5, 1), (0.5, 2.0, 1), (2.0, 2.0, 2), (0.5, 0.5, 2)])
def test_waiting_that_kernels_hide_or_expose_is_no_term_of_its_own(kernels: float, reads: float, terms: int) -> None:
    differing = deviations(PLANNED, measured(compute_ms=kernels, wait_ms=reads))
    assert [deviation.term for deviation in differing] == ["reads", "kernels"][2 - terms :]


def test_two_wrong_facts_are_two_terms() -> None:
    run = measured(miss_rate=2.0, flash_bytes=2.0, wait_ms=2.0, compute_ms=2.0)
    assert [deviation.term for deviation in deviations(PLANNED, run)] == ["misses", "kernels"]


def test_a_deviation_is_said_in_words() -> None:
    run = measured(miss_rate=2.6, flash_bytes=2.6, wait_ms=5.2)
    assert sentence(deviations(PLANNED, run)) == (
        "misses: planned 8.0%, measured 21%; reads: planned 10.0 ms a token, measured 52.0 ms"
    )


@pytest.mark.parametrize("factor", [0.81, 1.0, 1.24])
def test_what_is_within_a_quarter_is_as_planned(factor: float) -> None:
    names = ("miss_rate", "flash_bytes", "wait_ms", "compute_ms")
    assert all(not deviations(PLANNED, measured(**{name: factor})) for name in names)


def test_differences_that_cost_nothing_are_left_out() -> None:
    few = dataclasses.replace(PLANNED, miss_rate=0.001, flash_bytes=1000.0, wait_ms=0.1)
    assert not deviations(few, dataclasses.replace(few, miss_rate=0.003, flash_bytes=3000.0, wait_ms=0.3))


def test_misses_where_none_were_planned_are_blamed_alone() -> None:
    nothing = dataclasses.replace(PLANNED, miss_rate=0.0, flash_bytes=0.0, wait_ms=0.0)
    assert [deviation.term for deviation in deviations(nothing, PLANNED)] == ["misses"]


def test_times_that_the_plan_does_not_have_are_not_compared() -> None:
    unknown = dataclasses.replace(PLANNED, wait_ms=None, compute_ms=None, ms=None)
    assert not deviations(unknown, PLANNED)


@pytest.mark.parametrize(("compute_ms", "is_near"), [(30.0, True), (41.0, True), (20.0, False), (52.0, False)])
def test_time_at_barriers_excuses_kernels_that_seem_fast_and_blames_none(compute_ms: float, is_near: bool) -> None:
    """Half of the kernels' time: it may be part of what was planned, or wait for another participant's read."""
    run = dataclasses.replace(PLANNED, compute_ms=compute_ms, barrier_ms=11.0)
    assert (not deviations(PLANNED, run)) is is_near


def test_times_are_means_over_the_participants() -> None:
    """Two steps of two participants."""
    counters = {"answers": 4.0, "step_ms": 40.0, "flash_ms": 12.0, "barrier_ms": 8.0}
    figures = {"ms": 22.0, "tokens": 2, "positions": 19, "read_bytes": 8192, "lookups": 2000.0, "missed": 200.0}
    sums = dict.fromkeys((*COUNTERS, *FIGURES), 0.0) | counters | figures
    assert measured_terms(RunTerms.of_steps(sums)) == TokenTerms(
        miss_rate=0.1, flash_bytes=4096, wait_ms=3.0, compute_ms=5.0, ms=11.0, barrier_ms=2.0
    )


def test_a_token_near_the_start_is_planned_without_the_keys_that_it_does_not_read() -> None:
    start, half = (planned_terms(PLAN, M, position) for position in (0, PLAN.compute.context_tokens // 2))
    assert start.compute_ms is not None
    assert half.compute_ms is not None
    assert half.compute_ms == pytest.approx(
        (PLAN.expected.sequential_ms_per_token or 0) + (PLAN.expected.neuron_ms_per_token or 0)
    )
    assert 0.5 * half.compute_ms < start.compute_ms < half.compute_ms


def add_step(check: PlanCheck, misses: float = 1.0) -> None:
    """A step of the plan's terms, with so many times the misses, their bytes and waits."""
    terms = planned_terms(PLAN, M, 9)
    assert terms.compute_ms is not None
    assert terms.wait_ms is not None
    wait_ms = misses * terms.wait_ms
    check.add(
        {"answers": 1.0, "step_ms": terms.compute_ms + wait_ms, "flash_ms": wait_ms},
        position=9,
        ms=terms.ms or 0.0,
        read_bytes=misses * terms.flash_bytes,
        lookups=1000.0,
        missed=1000 * misses * terms.miss_rate,
    )


def plan_check(words: array[int]) -> PlanCheck:
    return PlanCheck(PLAN, M, memoryview(words))


def test_a_run_says_within_two_hundred_tokens_what_is_off_and_logs_it_once(caplog: pytest.LogCaptureFixture) -> None:
    words = array("Q", bytes(8 * 16))
    check, tokens = plan_check(words), 0
    with caplog.at_level(logging.WARNING):
        while not check.sentence:
            add_step(check, 2.0)
            tokens += 1
            assert tokens <= 200
        assert tokens == SETTLING_TOKENS + MIN_TOKENS
        for _ in range(3 * MIN_TOKENS):
            add_step(check, 2.0)
    rate = PLAN.expected.miss_rate
    assert check.sentence == f"misses: planned {100 * rate:.1f}%, measured {200 * rate:.0f}%"
    assert [record.getMessage() for record in caplog.records] == [check.sentence]
    assert words[BOARD_TERMS.index("tokens")] == 4 * MIN_TOKENS


def test_a_run_as_planned_says_nothing_and_one_that_recovers_says_nothing_more() -> None:
    check = plan_check(array("Q", bytes(8 * 16)))
    has_sentence = set()
    for misses in (1.0, 2.0, 1.0):
        for _ in range(SETTLING_TOKENS + MIN_TOKENS):
            add_step(check, misses)
        has_sentence.add(bool(check.sentence))
    assert has_sentence == {False, True}
    for _ in range(MIN_TOKENS):
        add_step(check)
    assert not check.sentence


def test_a_new_coordinator_goes_on_with_the_sums_of_the_one_before() -> None:
    words = array("Q", bytes(8 * 16))
    for _ in range(2):
        check = plan_check(words)
        for _ in range(SETTLING_TOKENS + 10):
            add_step(check)
    assert words[BOARD_TERMS.index("tokens")] == 20
