"""The search over plans, on devices that are made up: what is chosen, when the rules stay, what a speed takes."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from neuronpipe.plans.models.spec import LayerKind
from neuronpipe.plans.package.layout import compute_layout
from neuronpipe.plans.package.manifest import FileEntry, Manifest
from neuronpipe.plans.plan import search as searching
from neuronpipe.plans.plan.plan import Mode, Plan
from neuronpipe.plans.plan.planner import DeviceFacts, LimitTooSmall, Wanted, plan
from neuronpipe.plans.plan.quality import allowed_modes
from neuronpipe.plans.plan.search import MIN_GAIN, PRECISION, Search, Space
from neuronpipe.plans.plan.tradeoffs import binds, describe, render
from neuronpipe.protocol.errors import UserError

from tests.unit.test_planner import GIB, MIB, device, manifest, predicted, thresholded

LARGE = manifest(width=2048, neurons=8192, layers=16, order="frequency")


def space(*workers: int, modes: tuple[Mode, ...] = ("exact",), memory_bytes: int = GIB, measured: bool = True) -> Space:
    def place(count: int) -> DeviceFacts:
        facts = device(count, memory_bytes)
        return facts if measured else dataclasses.replace(facts, flash=None, memory_speed=None)

    return Space(
        modes=modes, workers=workers or (2, 1), place=place, more=lambda count: place(count) if count <= 4 else None
    )


def search(made_for: Manifest = LARGE, wanted: Wanted | None = None, **of_space: Any) -> Search:
    return Search(made_for, space(**of_space), wanted or Wanted())


def speed(made: Plan) -> float:
    assert made.expected.tokens_per_s is not None
    return made.expected.tokens_per_s


def with_loss(plain: Manifest, predicted_perplexity: float) -> Manifest:
    guessed = predicted(plain)
    assert guessed.predictor is not None
    measured = dataclasses.replace(
        guessed.predictor,
        text="text",
        held_out_tokens=250,
        exact_perplexity=10.0,
        predicted_perplexity=predicted_perplexity,
    )
    return dataclasses.replace(guessed, predictor=measured)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_target_is_reached_with_the_smallest_memory_to_one_percent(share: float) -> None:
    one = search(modes=("exact", "predicted"), made_for=predicted(LARGE))
    least, most = one.bounds_bytes()
    slow, fast = (speed(one.within(limit).chosen.plan) for limit in (least, most))
    target = slow + share * (fast - slow)
    found = one.reaching(target).chosen.plan
    assert speed(found) >= target
    assert speed(one.within(int(found.memory.limit_bytes / (1 + PRECISION)) - 1).chosen.plan) < target
    assert found == one.within(found.memory.limit_bytes).chosen.plan


def test_a_higher_target_never_takes_less_memory() -> None:
    one = search()
    least, most = one.bounds_bytes()
    slow, fast = (speed(one.within(limit).chosen.plan) for limit in (least, most))
    limits = [one.reaching(slow + n / 20 * (fast - slow)).chosen.plan.memory.limit_bytes for n in range(20)]
    assert limits == sorted(limits)
    assert limits[0] == least < limits[-1] <= most


def test_a_target_out_of_reach_is_told_the_most_and_what_it_takes() -> None:
    one = search()
    _, most = one.bounds_bytes()
    fastest = speed(one.within(most).chosen.plan)
    with pytest.raises(UserError, match=rf"--target-speed 1000: the most .* is {fastest:.1f} tokens/s, with .*exact"):
        one.reaching(1000.0)
    with pytest.raises(UserError, match=r"up to 400 MiB is .*; a larger --memory may reach more"):
        one.reaching(1000.0, 400 * MIB)
    with pytest.raises(LimitTooSmall, match="the least for this package"):
        one.reaching(1000.0, MIB)


def test_a_target_needs_measurements_and_says_so() -> None:
    with pytest.raises(UserError, match=r"--target-speed 10: no speed can be expected, .*; take --memory"):
        search(measured=False).reaching(10.0)


def test_without_measurements_the_rules_decide_and_it_is_said() -> None:
    one = search(measured=False)
    found = one.within(GIB)
    assert found.chosen is found.rules
    assert found.reason() is None
    assert found.chosen.plan == plan(LARGE, one.space.place(2), Wanted(memory_bytes=GIB, mode="exact"))
    assert "so nothing can be compared: the rules decide" in render(describe(one, found))


@pytest.mark.parametrize(("slower", "kept"), [(1 / (1 + 0.9 * MIN_GAIN), True), (1 / (1 + 1.5 * MIN_GAIN), False)])
def test_the_plan_of_the_rules_stays_unless_another_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, slower: float, kept: bool
) -> None:
    """What speed.py expects is replaced, so that the difference is what the name says."""

    def expecting(made_for: Manifest, facts: DeviceFacts, wanted: Wanted) -> Plan:
        made = plan(made_for, facts, wanted)
        tokens_per_s = 10.0 * (slower if len(made.compute.decode_workers()) == 2 else 1.0)
        return dataclasses.replace(made, expected=dataclasses.replace(made.expected, tokens_per_s=tokens_per_s))

    monkeypatch.setattr(searching, "plan", expecting)
    found = search().within(GIB)
    assert (found.chosen is found.rules) is kept
    assert found.chosen.workers == (2 if kept else 1)
    assert (found.reason() is None) is kept


def test_of_choices_that_are_alike_the_one_with_fewer_workers_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread reaches 28 of the 33 GB/s that two reach; a third and a fourth add nothing."""
    monkeypatch.setattr(searching, "MIN_GAIN", 0.1)
    found = Search(manifest(), space(1, 2, 3, 4), Wanted()).within(GIB)
    speeds = {one.workers: one.tokens_per_s for one in found.candidates}
    assert speeds[2] == speeds[3] == speeds[4]
    assert found.chosen.workers == 2
    assert "2 workers" in str(found.reason())


def test_a_limit_that_is_too_small_for_the_workers_of_the_rules_is_met_with_fewer() -> None:
    one = search()
    least, _ = one.bounds_bytes()
    found = one.within(least)
    assert (found.rules, found.chosen.workers) == (None, 1)
    assert "the limit is too small for what is chosen otherwise" in str(found.reason())
    with pytest.raises(LimitTooSmall, match=f"{least:,} bytes"):
        one.within(least - 1)


def test_how_clusters_are_read_is_tried_both_ways_unless_it_was_left_out() -> None:
    half = Wanted(ffn_resident_share=0.3)
    assert {one.plan.flash.bundle for one in search(wanted=half).within(None).candidates} == {True, False}
    for wanted in (dataclasses.replace(half, without=frozenset({"bundle"})), dataclasses.replace(half, bundle=False)):
        assert {one.plan.flash.bundle for one in search(wanted=wanted).within(None).candidates} == {False}


def test_no_candidate_is_faster_by_more_than_it_takes_to_leave_the_rules() -> None:
    one = search(modes=("exact", "predicted"), made_for=predicted(LARGE))
    for limit in one.limits_bytes():
        found = one.within(limit)
        fastest = max(candidate.tokens_per_s or 0.0 for candidate in found.candidates)
        assert speed(found.chosen.plan) * (1 + MIN_GAIN) >= fastest


def test_predicted_mode_is_chosen_where_it_is_allowed_and_faster() -> None:
    m = predicted(LARGE)
    assert search(m, modes=allowed_modes(m, "exact")).within(GIB // 2).chosen.plan.compute.mode == "exact"
    assert search(m, modes=allowed_modes(m, "predicted")).within(GIB // 2).chosen.plan.compute.mode == "predicted"


def test_quality_says_which_modes_may_be_chosen() -> None:
    plain, silent = manifest(), thresholded(manifest(), 0.5)  # which costs 2 %
    assert [allowed_modes(plain, quality) for quality in ("exact", "predicted", 0.01)] == [("exact",)] * 3  # type: ignore[arg-type]
    assert allowed_modes(predicted(plain), "predicted") == ("exact", "predicted")
    assert allowed_modes(with_loss(plain, 10.1), 0.011) == ("exact", "predicted")
    assert allowed_modes(with_loss(plain, 10.1), 0.009) == ("exact",)
    assert allowed_modes(silent, 0.03) == ("exact", "thresholded")
    assert allowed_modes(silent, 0.01) == allowed_modes(silent, "predicted") == ("exact",)


def test_a_loss_that_was_never_measured_is_refused_with_the_command_that_measures_it() -> None:
    with pytest.raises(UserError, match=r"--quality 1%: .* 'm' .* never measured.*`neuronpipe profile PACKAGE --calib"):
        allowed_modes(predicted(manifest()), 0.01)


def test_the_page_names_what_was_tried_what_binds_and_what_more_would_buy() -> None:
    one = search(modes=("exact", "predicted"), made_for=predicted(LARGE))
    found = one.within(400 * MIB)
    described = describe(one, found)
    assert len(described["candidates"]) == len(found.candidates)
    assert [row["chosen"] for row in described["candidates"]].count(True) == 1
    speeds = [row["expected_tokens_per_s"] for row in described["candidates"]]
    assert speeds == sorted(speeds, reverse=True)
    assert described["one_more_gib"]["limit_bytes"] == 400 * MIB + GIB
    assert described["one_more_gib"]["expected_tokens_per_s"] > speed(found.chosen.plan)
    assert described["one_more_core"]["workers"] == found.chosen.workers + 1
    curve = described["speed_over_memory"]
    assert 10 <= len(curve) <= 12
    assert (curve[0]["limit_bytes"], curve[-1]["limit_bytes"]) == one.bounds_bytes()
    assert (curve[0]["binds"], curve[-1]["binds"]) == ("flash", "DRAM")
    page = render(described)
    assert "<- chosen" in page
    assert "<- this plan" in page
    assert page.count("█") > 40


def test_there_is_no_core_to_add_where_all_compute() -> None:
    one = Search(LARGE, space(4), Wanted())
    described = describe(one, one.within(GIB))
    assert described["one_more_core"] is None
    assert "there is none that computes as fast" in render(described)


def test_what_neither_memory_nor_flash_explains_is_computing() -> None:
    expected = plan(LARGE, device(memory_bytes=8 * GIB), Wanted()).expected
    assert binds(expected) == "DRAM"
    assert expected.tokens_per_s is not None
    assert binds(dataclasses.replace(expected, tokens_per_s=expected.tokens_per_s / 3)) == "compute"
    assert binds(dataclasses.replace(expected, sequential_ms_per_token=None)) is None


def test_a_47b_is_searched_in_seconds() -> None:
    """3.7 million clusters; on a machine with eight fast cores, two modes, and all that `neuronpipe plan` shows."""
    plain = manifest(width=4096, neurons=14336, layers=32)
    model = dataclasses.replace(
        plain.model, layer_kinds=(LayerKind(32),), experts=8, experts_per_token=2, router="softmax"
    )
    layout = compute_layout("q4", 4096, 14336, model.ffn_matrices, "frequency")
    files = {**plain.files, "fixed.safetensors": FileEntry(2 * GIB, "0" * 64)}
    large = predicted(dataclasses.replace(plain, model=model, quantization="q4", layout=layout, files=files))
    assert large.clusters > 3_600_000
    one = Search(large, space(7, 1, 2, 3, 4, 5, 6, 8, modes=("exact", "predicted"), memory_bytes=16 * GIB), Wanted())
    began = time.process_time()
    describe(one, one.reaching(1.0))
    assert time.process_time() - began < 5
