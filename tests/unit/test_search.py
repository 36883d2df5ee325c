"""The search over plans, on devices that are made up: what is chosen, when the rules stay, what a speed takes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from neuronpipe.plans.device.device import FlashPoint
from neuronpipe.plans.models.spec import LayerKind
from neuronpipe.plans.package.layout import compute_layout
from neuronpipe.plans.package.manifest import FileEntry, Manifest
from neuronpipe.plans.plan.document import Mode, Plan
from neuronpipe.plans.plan.memory_budget import Budgets
from neuronpipe.plans.planner import search as searching
from neuronpipe.plans.planner.candidates import ANSWER, USUAL, Request, Space
from neuronpipe.plans.planner.device_facts import DeviceFacts
from neuronpipe.plans.planner.mode_choice import allowed_modes
from neuronpipe.plans.planner.plan_options import LimitTooSmall, PlanOptions, size_to_type
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.plans.planner.search import PRECISION, PROMPT_ALLOWANCE, Search
from neuronpipe.plans.planner.tradeoffs import binds, describe, render
from neuronpipe.plans.planner.validation import validate
from neuronpipe.protocol.errors import UserError

from tests.cpu_time import takes_fewer_loops
from tests.unit.test_planner import CURVE, GIB, MIB, device, manifest, predicted, thresholded

LARGE = manifest(width=2048, neurons=8192, layers=16, order="frequency")


def space(*workers: int, modes: tuple[Mode, ...] = ("exact",), memory_bytes: int = GIB, measured: bool = True) -> Space:
    def place(count: int) -> DeviceFacts:
        facts = device(count, memory_bytes)
        return facts if measured else dataclasses.replace(facts, flash=None, memory_speed=None)

    return Space(
        modes=modes, workers=workers or (2, 1), place=place, more=lambda count: place(count) if count <= 4 else None
    )


def search(
    made_for: Manifest = LARGE, wanted: PlanOptions | None = None, request: Request = USUAL, **of_space: Any
) -> Search:
    return Search(made_for, space(**of_space), wanted or PlanOptions(), request)


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


def mixture_of_3_700_000_clusters() -> Manifest:
    plain = manifest(width=4096, neurons=14336, layers=32)
    model = dataclasses.replace(
        plain.model, layer_kinds=(LayerKind(32),), experts=8, experts_per_token=2, router="softmax"
    )
    layout = compute_layout("q4", 4096, 14336, model.ffn_matrices, "frequency")
    files = {**plain.files, "fixed.safetensors": FileEntry(2 * GIB, "0" * 64)}
    return predicted(dataclasses.replace(plain, model=model, quantization="q4", layout=layout, files=files))


PACKAGES = {
    "small": (manifest(), ("exact",)),
    "large": (LARGE, ("exact",)),
    "predicted": (predicted(LARGE), ("predicted",)),
    "both modes": (predicted(LARGE), ("exact", "predicted")),
    "thresholded": (thresholded(LARGE, 0.5), ("thresholded",)),
    "mixture": (mixture_of_3_700_000_clusters(), ("exact", "predicted")),
}
IN_EVERY_RUN = (("small", ANSWER), ("thresholded", USUAL), ("mixture", USUAL))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "request_of"),
    [
        pytest.param(name, request, marks=[] if (name, request) in IN_EVERY_RUN else pytest.mark.nightly)
        for request in (USUAL, ANSWER)
        for name in PACKAGES
    ],
    ids=lambda case: case if isinstance(case, str) else "usual" if case == USUAL else "answer",
)
def test_more_memory_is_never_expected_to_be_slower(name: str, request_of: Request) -> None:
    made_for, modes = PACKAGES[name]
    one = search(made_for, modes=modes, request=request_of)
    least, *_, most = one.limits_bytes()
    limits = {int(least * (most / least) ** (n / 20)) for n in range(21)} | {*one.limits_bytes()}
    found = [one.best(limit) for limit in sorted(limits)]
    for less, more in itertools.pairwise(found):
        assert one.ms(more) <= one.ms(less), (less.plan.memory.limit_bytes, more.plan.memory.limit_bytes)
    assert one.ms(found[-1]) < one.ms(found[0]) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("small", marks=pytest.mark.nightly), "predicted", "mixture"])
def test_chunks_that_are_not_tried_would_not_be_faster(name: str) -> None:
    made_for, modes = PACKAGES[name]
    one = search(made_for, modes=modes)
    skipped = 0
    for limit in one.limits_bytes()[::4]:
        for candidate in one.within(limit).candidates:
            every, few = one.refinements(candidate), one.refinements(candidate, math.inf)
            skipped += len(every) - len(few)
            assert min(map(one.ms, few)) == min(map(one.ms, every)), (limit, candidate.variant)
    assert skipped


@pytest.mark.parametrize("step", [2, 8, 15, -1])
def test_the_choice_alone_takes_fewer_plans_than_the_fastest_of_every_variant(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []

    def counted(*arguments: Any) -> Plan:
        plans.append(1)
        return make_plan(*arguments)

    monkeypatch.setattr(searching, "make_plan", counted)
    alone, whole = search(), search()
    limit_bytes = search().limits_bytes()[step]
    plans.clear()
    chosen = alone.best(limit_bytes)
    alone_plans = len(plans)
    assert chosen.plan == whole.within(limit_bytes).chosen.plan
    assert alone_plans < len(plans) - alone_plans
    assert chosen.plan.memory.total_bytes() <= limit_bytes


def test_a_plan_of_less_memory_is_kept_where_more_is_expected_to_be_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as much memory is made to be slower, as a step of the cost model would."""
    limit = 2 * search().limits_bytes()[0]

    def expecting(
        made_for: Manifest,
        facts: DeviceFacts,
        options: PlanOptions,
        budgets: Budgets | None = None,
        frequencies: None = None,
    ) -> Plan:
        made = make_plan(made_for, facts, options, budgets)
        is_slow = (options.memory_bytes or 0) >= limit
        expected = dataclasses.replace(made.expected, tokens_per_s=speed(made) * (0.01 if is_slow else 1.0))
        return dataclasses.replace(made, expected=expected)

    monkeypatch.setattr(searching, "make_plan", expecting)
    one = search()
    result = one.within(limit)
    assert result.chosen.plan.memory.limit_bytes == limit
    assert result.chosen in result.candidates
    assert "MiB is kept" in result.reasons()[-1]
    assert one.ms(result.chosen) <= min(one.ms(one.best(less)) for less in one.limits_bytes() if less < limit)
    assert one.best(limit).plan == result.chosen.plan
    validate(result.chosen.plan, LARGE, "plan.json", cores=range(8))


def test_the_fastest_variant_is_chosen_at_every_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker is far faster in little memory, then less and less so; the rules' two are ahead in the end."""
    least, *_, most = search().limits_bytes()

    def expecting(
        made_for: Manifest,
        facts: DeviceFacts,
        wanted: PlanOptions,
        budgets: Budgets | None = None,
        frequencies: None = None,
    ) -> Plan:
        made = make_plan(made_for, facts, wanted, budgets)
        share = math.log((wanted.memory_bytes or 1) / least) / math.log(most / least)
        tokens_per_s = 20 + 10 * share if len(made.compute.decode_workers()) == 1 else 10 + 22 * share
        expected = dataclasses.replace(made.expected, tokens_per_s=tokens_per_s, prefill_tokens_per_s=1e9)
        return dataclasses.replace(made, expected=expected)

    monkeypatch.setattr(searching, "make_plan", expecting)
    one = search()
    found = [one.within(int(least * (most / least) ** (n / 12))) for n in range(13)]
    assert [each.chosen.workers for each in found] == [
        1 if 20 + 10 * n / 12 > 10 + 22 * n / 12 else 2 for n in range(13)
    ]
    speeds = [speed(each.chosen.plan) for each in found]
    assert speeds == sorted(speeds)


def test_a_chunk_of_prompts_is_small_where_its_memory_is_worth_more_to_neurons() -> None:
    one = search()
    least, *_, most = one.limits_bytes()
    tight, everything = one.within(int(1.3 * least)).chosen, one.within(2 * most).chosen
    assert tight.plan.compute.prefill_chunk_tokens < 512 == everything.plan.compute.prefill_chunk_tokens
    for limit in one.limits_bytes()[3:]:
        found = one.within(limit)
        by_rules = make_plan(
            LARGE, found.chosen.device, PlanOptions(memory_bytes=limit, bundle=found.chosen.plan.flash.bundle)
        )
        assert one.ms(found.chosen) <= USUAL.ms(by_rules.expected)


def test_more_reads_at_once_are_planned_where_they_are_worth_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rules eight: they reach 90 % of the best. What staging takes is set aside either way."""
    points = [
        FlashPoint(request_bytes=size, depth=depth, bytes_per_s=share * 1e9)
        for size in (4096, 65536)
        for depth, share in ((8, 0.92), (64, 1.0))
    ]
    curve = dataclasses.replace(CURVE, points=tuple(points))

    def place(count: int) -> DeviceFacts:
        return dataclasses.replace(device(count, GIB), flash=curve)

    one = Search(LARGE, dataclasses.replace(space(2), place=place), PlanOptions())
    found = one.within(300 * MIB)
    assert found.by_rules is not None
    assert found.by_rules.plan.flash.depth == 8
    assert found.chosen.plan.flash.depth == 64
    assert any("64 reads at once" in reason for reason in found.reasons())


def test_of_plans_with_equal_chunks_and_depths_the_fastest_counts() -> None:
    """Staging depends on the chunk that was asked for, also where memory reduces it."""
    one = search()
    for limit in one.limits_bytes()[1:]:
        start = one.within(limit).by_rules
        assert start is not None
        for candidate in one.refinements(start):
            compute, flash = candidate.plan.compute, candidate.plan.flash
            asked = dataclasses.replace(
                start.options,
                bundle=flash.bundle,
                prefill_chunk_tokens=compute.prefill_chunk_tokens,
                depth=flash.depth,
            )
            assert one.ms(candidate) <= USUAL.ms(make_plan(LARGE, start.device, asked).expected), limit


def test_a_usual_request_is_its_prompt_and_its_answer() -> None:
    expected = make_plan(LARGE, device(memory_bytes=8 * GIB), PlanOptions()).expected
    known = dataclasses.replace(expected, tokens_per_s=10.0, prefill_tokens_per_s=100.0)
    assert Request(prompt_tokens=200, answer_tokens=50).ms(known) == pytest.approx(2000 + 5000)
    assert ANSWER.ms(known) == pytest.approx(100)
    assert USUAL.ms(dataclasses.replace(known, prefill_tokens_per_s=None)) == math.inf
    assert ANSWER.ms(dataclasses.replace(known, tokens_per_s=None)) == math.inf


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_target_is_reached_with_the_smallest_memory_and_a_little_for_prompts(share: float) -> None:
    one = search(modes=("exact", "predicted"), made_for=predicted(LARGE), request=ANSWER)
    least, *_, most = one.limits_bytes()
    slow, fast = (speed(one.best(limit).plan) for limit in (least, most))
    target = slow + share * (fast - slow)
    found = one.reaching(target).chosen.plan
    assert speed(found) >= target
    too_little = int(found.memory.limit_bytes / (1 + PROMPT_ALLOWANCE) / (1 + PRECISION)) - 1
    assert speed(one.within(too_little).chosen.plan) < target
    within = one.within(found.memory.limit_bytes).chosen.plan
    assert USUAL.ms(found.expected) <= USUAL.ms(within.expected)
    assert speed(within) >= target


def test_a_higher_target_never_takes_less_memory() -> None:
    one = search(request=ANSWER)
    least, *_, most = one.limits_bytes()
    slow, fast = (speed(one.best(limit).plan) for limit in (least, most))
    limits = [one.reaching(slow + n / 10 * (fast - slow)).chosen.plan.memory.limit_bytes for n in range(10)]
    assert limits == sorted(limits)
    assert limits[0] <= (1 + PROMPT_ALLOWANCE) * least < limits[-1] <= most


def test_a_target_out_of_reach_is_told_the_most_and_what_it_takes() -> None:
    one = search(request=ANSWER)
    most = one.limits_bytes()[-1]
    fastest = speed(one.within(most).chosen.plan)
    with pytest.raises(UserError, match=rf"--target-speed 1000: the most .* is {fastest:.1f} tokens/s, mode exact"):
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
    assert found.reasons() == ()
    assert found.chosen.plan == make_plan(LARGE, one.space.place(2), PlanOptions(memory_bytes=GIB, mode="exact"))
    assert "so nothing can be compared: the rules decide" in render(describe(one, found))


@pytest.mark.parametrize(
    ("slower", "is_described", "kept"),
    [
        (1.01, True, True),
        (0.99, True, False),
        (0.5, True, False),
        (0.99, False, True),
        (0.8, False, True),
        (0.7, False, False),
    ],
)
def test_the_plan_of_the_rules_stays_unless_another_is_faster(
    monkeypatch: pytest.MonkeyPatch, slower: float, is_described: bool, kept: bool
) -> None:
    """What plans/cost/token_time.py expects is replaced, so that the difference is what the name says."""

    def expecting(
        made_for: Manifest,
        facts: DeviceFacts,
        wanted: PlanOptions,
        budgets: Budgets | None = None,
        frequencies: None = None,
    ) -> Plan:
        made = make_plan(made_for, facts, wanted, budgets)
        tokens_per_s = 10.0 * (slower if len(made.compute.decode_workers()) == 2 else 1.0)
        return dataclasses.replace(made, expected=dataclasses.replace(made.expected, tokens_per_s=tokens_per_s))

    monkeypatch.setattr(searching, "make_plan", expecting)
    here = space()

    def place(count: int) -> DeviceFacts:
        return dataclasses.replace(here.place(count), is_described=is_described)

    one = Search(LARGE, dataclasses.replace(here, place=place), PlanOptions(), ANSWER)
    found = one.within(one.limits_bytes()[-1])  # where everything is resident
    assert (found.chosen is found.rules) is kept
    assert found.chosen.workers == (2 if kept else 1)
    assert any("by the rules alone" in reason for reason in found.reasons()) is not kept


def test_of_choices_that_are_alike_the_one_with_fewer_workers_is_taken() -> None:
    """One thread reaches 28 of the 33 GB/s that two reach; a third and a fourth add nothing."""
    found = Search(manifest(), space(1, 2, 3, 4), PlanOptions(), ANSWER).within(GIB)
    speeds = {one.workers: one.tokens_per_s for one in found.candidates}
    assert speeds[2] == speeds[3] == speeds[4]
    assert found.chosen.workers == 2
    assert "2 workers" in found.reasons()[0]


def test_a_limit_that_is_too_small_for_the_workers_of_the_rules_is_met_with_fewer() -> None:
    one = search()
    least = one.limits_bytes()[0]
    found = one.within(least)
    assert (found.rules, found.chosen.workers) == (None, 1)
    assert "the limit is too small for what is chosen otherwise" in found.reasons()[0]
    with pytest.raises(LimitTooSmall, match=f"{size_to_type(least, 'MiB')}: "):
        one.within(least - 1)


def test_how_clusters_are_read_is_tried_both_ways_unless_it_was_left_out() -> None:
    half = PlanOptions(ffn_resident_share=0.3)
    assert {one.plan.flash.bundle for one in search(wanted=half).within(None).candidates} == {True, False}
    for wanted in (dataclasses.replace(half, without=frozenset({"bundle"})), dataclasses.replace(half, bundle=False)):
        assert {one.plan.flash.bundle for one in search(wanted=wanted).within(None).candidates} == {False}


def test_no_candidate_is_faster_than_the_chosen_one() -> None:
    one = search(modes=("exact", "predicted"), made_for=predicted(LARGE))
    for limit in one.limits_bytes():
        found = one.within(limit)
        assert one.ms(found.chosen) == min(map(one.ms, found.candidates))


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
    requests_s = [row["usual_request_s"] for row in described["candidates"]]
    assert requests_s == sorted(requests_s)
    shares = [(row["prefill_chunk_tokens"], row["depth"]) for row in described["candidates"] if row["chosen"]]
    assert shares == [(found.chosen.plan.compute.prefill_chunk_tokens, found.chosen.plan.flash.depth)]
    assert described["one_more_gib"]["limit_bytes"] == 400 * MIB + GIB
    assert described["one_more_gib"]["expected_tokens_per_s"] > speed(found.chosen.plan)
    assert described["one_more_core"]["workers"] == found.chosen.workers + 1
    curve = described["speed_over_memory"]
    assert 10 <= len(curve) <= 12
    assert (curve[0]["limit_bytes"], curve[-1]["limit_bytes"]) == (one.limits_bytes()[0], one.limits_bytes()[-1])
    bars = [line.count("█") for line in render(described).split("requests over memory")[1].splitlines()]
    assert bars == sorted(bars)
    assert (curve[0]["binds"], curve[-1]["binds"]) == ("flash", "DRAM")
    page = render(described)
    assert "<- chosen" in page
    assert "<- this plan" in page
    assert page.count("█") > 40


@pytest.mark.slow
def test_with_a_target_more_memory_buys_faster_requests_too() -> None:
    """The answer alone decided what a GiB more would be used for, with prompts cut as small as that likes."""
    one = search(mixture_of_3_700_000_clusters(), request=ANSWER, modes=("exact", "predicted"), memory_bytes=16 * GIB)
    least, *_, most = (speed(one.best(limit).plan) for limit in one.limits_bytes())
    target = least + 0.2 * (most - least)
    found = one.reaching(target)
    more = describe(one, found)["one_more_gib"]
    assert more["usual_request_s"] < USUAL.ms(found.chosen.plan.expected) / 1e3
    assert more["expected_tokens_per_s"] >= target


def test_a_core_that_makes_requests_slower_is_said_to_buy_nothing() -> None:
    one = search()
    described = describe(one, one.within(400 * MIB))
    described["one_more_core"] |= {"usual_request_s": 900.0, "expected_tokens_per_s": 100.0}
    assert "1 core more         nothing: 100.0 tokens/s" in render(described)
    assert "but a request 900.00 instead of" in render(described)


def test_there_is_no_core_to_add_where_all_compute() -> None:
    one = Search(LARGE, space(4), PlanOptions())
    described = describe(one, one.within(GIB))
    assert described["one_more_core"] is None
    assert "there is none that computes as fast" in render(described)


def test_what_neither_memory_nor_flash_explains_is_computing() -> None:
    expected = make_plan(LARGE, device(memory_bytes=8 * GIB), PlanOptions()).expected
    assert binds(expected) == "DRAM"
    assert expected.tokens_per_s is not None
    assert binds(dataclasses.replace(expected, tokens_per_s=expected.tokens_per_s / 3)) == "compute"
    assert binds(dataclasses.replace(expected, sequential_ms_per_token=None)) is None


@pytest.mark.slow
def test_a_47b_is_searched_in_seconds() -> None:
    """3.7 million clusters; on a machine with four fast cores, two modes, and all that `neuronpipe plan` shows."""
    large = mixture_of_3_700_000_clusters()
    assert large.clusters > 3_600_000
    of_space: dict[str, Any] = {"modes": ("exact", "predicted"), "memory_bytes": 16 * GIB}
    described: dict[str, Any] = {}

    def search_all() -> None:
        one = Search(large, space(3, 1, 2, 4, **of_space), PlanOptions(), ANSWER)
        described.update(describe(one, one.reaching(1.0)))

    assert takes_fewer_loops(search_all, 100)  # some five seconds
    assert described["plans_compared"] > 100
