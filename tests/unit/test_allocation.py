"""Which clusters stay: by worth per byte where the package was measured, by the curve where it was not."""

from __future__ import annotations

import dataclasses
import itertools
import random
from array import array
from collections.abc import Callable, Sequence

import highspy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.cost.activation_rates import rates
from neuronpipe.plans.cost.cluster_ranking import (
    ALIKE,
    ALIKE_RATE,
    LEFT_TO_CLOCK,
    TIMES,
    Bins,
    Ranking,
    merge_rising_bins,
    miss_frequency,
    residency_probability,
    whole_steps,
)
from neuronpipe.plans.cost.expected_misses import ResidentSlots, part_accesses
from neuronpipe.plans.cost.token_time import expected
from neuronpipe.plans.package.activity_profile import (
    ALWAYS,
    BATCHES,
    BINS,
    EDGES,
    Activity,
    ActivityProfile,
    ProfileMode,
    activity_bytes,
)
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Plan
from neuronpipe.plans.plan.pinned_clusters import Pins, read_counts, write_counts
from neuronpipe.plans.planner.candidates import Space
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.plans.planner.search import Search
from neuronpipe.plans.planner.validation import validate

from tests.cpu_time import takes_fewer_loops
from tests.unit.test_planner import device, manifest, predicted

INDEPENDENT = ((0.0, 1.0), (0.25, 0.41), (0.5, 0.18), (0.75, 0.06), (1.0, 0.0))
BY_TOPIC = ((0.0, 1.0), (0.25, 0.02), (0.5, 0.003), (0.75, 0.001), (1.0, 0.0))
SKEWED = tuple(0.9 * (1 - edge) ** 6 + 0.01 for edge in EDGES[:-1])
HOTTER = tuple(0.95 * (1 - edge) ** 3 + 0.01 for edge in EDGES[:-1])


def profiled(
    plain: Manifest,
    mode: ProfileMode = "predicted",
    *,
    misses: tuple[tuple[float, float], ...] = INDEPENDENT,
    bins: Callable[[int, int], Sequence[float]] = lambda batch, ffn: SKEWED,
    chosen: Callable[[int, int], float] = lambda batch, ffn: 1.0,
) -> tuple[Manifest, AccessFrequencies]:
    """The package in the order of frequencies, with a profile. bins, chosen: of a batch and a feed-forward."""
    model, unit = plain.model, "bundle" if mode == "predicted" else "value"
    profile = ActivityProfile(
        mode=mode,
        source="measured",
        text="t",
        tokens=1000,
        curve=((0.0, 0.0), (0.2, 0.6), (1.0, 1.0)),
        wanted_by_layer=(0.2,) * model.layers,
        misses={unit: {"clock": misses}, "expert": {"clock": misses}},  # type: ignore[dict-item]
    )
    made = dataclasses.replace(
        plain, profiles=(profile,), layout=dataclasses.replace(plain.layout, neuron_order="frequency")
    )
    places = list(itertools.product(BATCHES, range(model.ffns)))
    head = [chosen(*place) for place in places] + [one for place in places for one in bins(*place)]
    data = array("H", (round(ALWAYS * min(1.0, value)) for value in head)).tobytes()
    data += bytes(activity_bytes(model, 1) - len(data))
    frequencies = AccessFrequencies.of(made, lambda: Activity(model, made.profiles, data))
    assert frequencies is not None
    return made, frequencies


def several(batch: int, bins: Sequence[float]) -> tuple[float, ...]:
    """Of texts that choose independently."""
    return tuple(1 - (1 - one) ** batch for one in bins)


# ---- the ranking -------------------------------------------------------------------------------------------------
def test_with_nothing_pinned_the_misses_are_those_that_were_measured() -> None:
    ranking = Ranking([[(0.9, 10), (0.2, 40), (0.01, 50)]] * 4, lambda share: (1 - share) ** 2)
    for slots in (100, 200, 300):
        assert ranking.miss_rate(slots, 0) == pytest.approx((1 - slots / 400) ** 2, abs=0.02)


def test_where_a_token_wants_more_than_memory_holds_all_that_may_stay_does() -> None:
    """Four fifths are wanted, half fit: what is not pinned is gone before its next turn."""
    ranking = Ranking([[(0.95, 40), (0.8, 60)]] * 8, lambda share: 1.0 if share < 0.9 else 0.0)
    assert ranking.miss_rate(400, 0) == pytest.approx(1.0)
    assert ranking.best_pinned(400, 350) == 350
    assert ranking.miss_rate(400, 350) == pytest.approx(
        1 - (320 * 0.95 + 30 * 0.8) / (320 * 0.95 + 480 * 0.8), abs=0.01
    )


def test_where_clock_follows_the_text_nothing_is_pinned() -> None:
    """A static set of the hottest misses many times as much as CLOCK does where texts have topics."""
    bins = [[(one, 50) for one in SKEWED]] * 4
    profile = ActivityProfile(
        "exact", "measured", "t", 1, ((0, 0), (1, 1)), (0.1,), misses={"value": {"clock": BY_TOPIC}}
    )
    by_topic = Ranking(bins, lambda share: profile.miss_rate("value", share) or 0.0)
    slots = by_topic.clusters // 2
    assert by_topic.best_pinned(slots, slots) < 0.9 * slots
    assert by_topic.miss_rate(slots, slots) > 10 * by_topic.miss_rate(slots, 0)


def test_bins_that_rise_are_taken_together() -> None:
    assert merge_rising_bins([(0.5, 2), (0.1, 3), (0.3, 1), (0.0, 0), (0.05, 4)]) == [
        (0.5, 2),
        (pytest.approx(0.15), 4),
        (0.05, 4),
    ]


frequencies = st.lists(st.integers(8, 60).map(lambda n: 2 ** (-n / 8)), min_size=1, max_size=4, unique=True)
ffns = st.lists(frequencies.map(lambda ones: sorted(ones, reverse=True)), min_size=1, max_size=4)


def exact(bins: Sequence[Bins], time_steps: float, slots: int, most: int) -> float | None:
    """The least misses of a step by an exact solver, CLOCK holding what was wanted for so long; None where no choice
    fits. The problem as cluster_ranking.py states it: whole clusters, of each feed-forward the first ones."""
    solver = highspy.Highs()
    solver.silent()
    costs, counts = [], []
    for ffn in bins:
        fuller = None
        for frequency, clusters in ffn:
            count = solver.addIntegral(lb=0, ub=clusters)
            if fuller is not None:
                whole = solver.addBinary()
                solver.addConstr(count <= clusters * whole)
                solver.addConstr(fuller[0] >= fuller[1] * whole)
            fuller = count, clusters
            counts.append(count)
            costs.append(
                (miss_frequency(frequency, time_steps), residency_probability(frequency, time_steps), clusters)
            )
    there = sum(size * held for _, held, size in costs)
    if there > slots:
        return None
    solver.addConstr(
        solver.qsum((1 - held) * count for count, (_, held, _) in zip(counts, costs, strict=True)) <= slots - there
    )
    solver.addConstr(solver.qsum(counts) <= most)
    solver.maximize(solver.qsum(cost * count for count, (cost, _, _) in zip(counts, costs, strict=True)))
    return float(sum(cost * size for cost, _, size in costs) - solver.getObjectiveValue())


def of_pins(bins: Sequence[Bins], pinned: Sequence[int], value: Callable[[float], float]) -> float:
    """The sum over clusters that are not pinned."""
    total = 0.0
    for ffn, count in zip(bins, pinned, strict=True):
        for frequency, clusters in ffn:
            total += value(frequency) * (clusters - min(clusters, count))
            count -= min(clusters, count)
    return total


@settings(max_examples=15, deadline=None)
@given(shape=ffns, sizes=st.randoms(use_true_random=False), share=st.floats(0.05, 0.95), free=st.integers(0, 8))
def test_greedy_is_within_one_cluster_of_an_exact_solver(
    shape: list[list[float]], sizes: random.Random, share: float, free: int
) -> None:
    bins = [[(frequency, sizes.randint(1, 9)) for frequency in ffn] for ffn in shape]
    ranking = Ranking(bins, lambda share: (1 - share) ** 3)
    slots = max(1, int(share * ranking.clusters))
    most, best = max(0, slots - free), float("inf")
    for n, time_steps in list(enumerate(TIMES[:30]))[::3]:
        least = exact(bins, time_steps, slots, most)
        count = ranking.pinned_at(n, slots)
        assert (least is None) == (count is None)
        if least is None or count is None or count > most:
            continue  # what may stay is less than fills the slots: then T is longer
        pinned = ranking.pins(int(count + 1e-9))
        greedy = of_pins(bins, pinned, lambda f, at=time_steps: miss_frequency(f, at))  # type: ignore[misc]
        there = sum(pinned) + of_pins(bins, pinned, lambda f, at=time_steps: residency_probability(f, at))  # type: ignore[misc]
        one_cluster = max(miss_frequency(frequency, time_steps) for ffn in bins for frequency, _ in ffn)
        assert there <= slots + 1e-6
        assert least - 1e-6 <= greedy <= least + one_cluster + 1e-6
        computed = of_pins(bins, (0,) * len(bins), lambda f, at=time_steps: miss_frequency(f, at))  # type: ignore[misc]
        held = of_pins(bins, (0,) * len(bins), lambda f, at=time_steps: residency_probability(f, at))  # type: ignore[misc]
        measured = (1 - held / ranking.clusters) ** 3 * ranking.accesses / computed if computed else 0.0
        measured = measured if whole_steps(time_steps) else 1.0
        best = min(best, measured * (least + one_cluster))
    chosen = ranking.miss_rate(slots, ranking.best_pinned(slots, most)) * ranking.accesses
    alike = max(best * (1 + ALIKE), best + ALIKE_RATE * ranking.accesses, LEFT_TO_CLOCK * ranking.accesses)
    assert chosen <= alike + 1e-6


# ---- plans -------------------------------------------------------------------------------------------------------
def counts(made: Plan, m: Manifest, entry: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return made.memory.pins[entry].counts(m.model.ffns)


def test_layers_whose_neurons_are_hotter_keep_more_of_them() -> None:
    m, frequencies = profiled(
        predicted(manifest(width=2048, neurons=4096, layers=8)),
        bins=lambda batch, ffn: several(batch, HOTTER if ffn < 4 else SKEWED),
    )
    made = make_plan(m, device(), PlanOptions(mode="predicted", ffn_resident_share=0.4), frequencies=frequencies)
    triggers, values = counts(made, m)
    assert triggers == values
    assert min(triggers[:4]) > max(triggers[4:])
    assert any("by worth per byte" in reason for reason in made.reasons)


def test_of_a_mixture_the_experts_that_are_chosen_most_stay() -> None:
    plain = manifest(width=2048, neurons=512, layers=4)
    model = dataclasses.replace(
        plain.model, experts=8, experts_per_token=2, activation="silu", router="softmax", router_reads="feed_forward"
    )
    m, frequencies = profiled(
        dataclasses.replace(plain, model=model),
        "exact",
        misses=((0.0, 1.0), (0.9, 0.99), (1.0, 0.0)),
        chosen=lambda batch, ffn: 0.9 if ffn % 8 == 3 else 0.15,
        bins=lambda batch, ffn: (0.9 if ffn % 8 == 3 else 0.15,) * BINS,
    )
    made = make_plan(m, device(1), PlanOptions(ffn_resident_share=0.5), frequencies=frequencies)
    triggers, _ = counts(made, m)
    assert triggers[3::8] == (m.layout.clusters,) * 4
    assert made.expected.miss_rate < make_plan(m, device(1), PlanOptions(ffn_resident_share=0.5)).expected.miss_rate
    validate(with_any_core(made), m, "plan.json")


def test_more_texts_keep_more_where_that_saves_misses_and_it_is_said() -> None:
    m, frequencies = profiled(
        predicted(manifest(width=2048, neurons=4096, layers=16)),
        misses=BY_TOPIC,
        bins=lambda batch, ffn: several(batch, SKEWED),
    )
    made = make_plan(
        m, device(), PlanOptions(mode="predicted", ffn_resident_share=0.2, sequences=4), frequencies=frequencies
    )
    texts = [entry.texts for entry in made.memory.pins]
    pinned = [sum(counts(made, m, n)[0]) for n in range(len(texts))]
    assert texts[0] == 1
    assert len(texts) > 1
    assert pinned == sorted(pinned)
    assert sum("texts in a step" in reason for reason in made.reasons) == len(texts) - 1
    validate(with_any_core(made), m, "plan.json")


def test_where_a_table_is_worth_nothing_the_plan_has_one_entry_and_says_so() -> None:
    m, frequencies = profiled(predicted(manifest(width=2048, neurons=4096, layers=8)))
    made = make_plan(
        m, device(), PlanOptions(mode="predicted", ffn_resident_share=0.5, sequences=4), frequencies=frequencies
    )
    assert len(made.memory.pins) == 1
    assert any("pins of their own would save less than" in reason for reason in made.reasons)


def test_without_a_profile_a_token_that_wants_more_than_fits_has_pinned_what_may_stay() -> None:
    """The predictor names a sixth of the neurons, and of nearly every cluster of twelve one: measured on the demo, half
    resident, everything missed."""
    m = predicted(manifest(order="frequency"))
    made = make_plan(m, device(), PlanOptions(mode="predicted", ffn_resident_share=0.5))
    moving = 2 * m.layout.clusters
    assert sum(counts(made, m)[0]) > made.memory.trigger_slots - moving - m.model.ffns
    assert made.expected.miss_rate == pytest.approx(1 - sum(counts(made, m)[0]) / m.clusters, abs=0.2)
    assert any("a token wants more than fits" in reason for reason in made.reasons)


def mixture(experts: int, experts_per_token: int, activation: str = "silu") -> Manifest:
    plain = manifest(width=1024, neurons=768, layers=16)
    model = dataclasses.replace(
        plain.model,
        experts=experts,
        experts_per_token=experts_per_token,
        activation=activation,  # type: ignore[arg-type]
        router="softmax",
        router_reads="feed_forward",
    )
    return dataclasses.replace(plain, model=model)


@pytest.mark.parametrize(("activation", "share"), [("silu", 0.2), ("silu", 0.5), ("relu", 0.2), ("relu", 0.3)])
def test_of_a_mixture_that_was_not_measured_nothing_is_pinned(activation: str, share: float) -> None:
    """Slices of every expert were, although most are idle for any token; what was left to the cache held less than a
    token wants, so that it hit nothing: a run missed 89 % where it was to miss 42 %, and 53 % without pins."""
    m = mixture(32, 4, activation)
    made = make_plan(m, device(1), PlanOptions(ffn_resident_share=share, bundle=True))
    assert counts(made, m) == ((0,) * m.model.ffns,) * 2
    assert made.expected.miss_rate < 0.6


def test_pins_that_starve_the_cache_of_a_mixture_are_expected_to_miss_all_the_others() -> None:
    m = mixture(32, 4)
    made = make_plan(m, device(1), PlanOptions(ffn_resident_share=0.2, bundle=True))
    each = int(0.1 * m.layout.clusters)
    pins = (dataclasses.replace(made.memory.pins[0], triggers=str(each), values=str(each)),)

    def rate(slots: float, pins: tuple[Pins, ...]) -> float:
        count = int(slots * m.clusters)
        memory = dataclasses.replace(made.memory, pins=pins, trigger_slots=count, value_slots=count)
        flash = dataclasses.replace(made.flash, reserved_triggers=0, reserved_values=0)
        return expected(m, rates(m, "exact"), made.compute, memory, flash, None, None).miss_rate

    unpinned = 1 - each / m.layout.clusters
    assert rate(0.2, pins) == pytest.approx(unpinned, abs=0.01)  # a tenth is left, and a token wants an eighth of it
    assert rate(0.32, pins) < 0.5 * unpinned
    assert rate(0.2, made.memory.pins) < 0.6
    nothing = made.memory.pins
    assert rate(0.1, nothing) == pytest.approx(1.0, abs=0.001)  # less than a token wants
    assert rate(0.14, nothing) < 0.7


def with_any_core(made: Plan) -> Plan:
    anywhere = tuple(dataclasses.replace(process, core=None) for process in made.compute.processes)
    return dataclasses.replace(made, compute=dataclasses.replace(made.compute, processes=anywhere))


@settings(max_examples=40, deadline=None)
@given(share=st.floats(0.3, 0.99), texts=st.integers(1, 5), workers=st.integers(1, 3), layers=st.integers(3, 9))
def test_every_plan_by_a_profile_is_accepted(share: float, texts: int, workers: int, layers: int) -> None:
    m, frequencies = profiled(predicted(manifest(layers=layers)), bins=lambda batch, ffn: several(batch, SKEWED))
    made = make_plan(
        m,
        device(workers),
        PlanOptions(mode="predicted", ffn_resident_share=share, sequences=texts),
        frequencies=frequencies,
    )
    validate(with_any_core(made), m, "plan.json")


def test_the_expected_misses_of_a_batch_are_those_of_its_pins() -> None:
    m, frequencies = profiled(
        predicted(manifest(width=2048, neurons=4096, layers=8)), bins=lambda batch, ffn: several(batch, SKEWED)
    )
    made = make_plan(
        m, device(), PlanOptions(mode="predicted", ffn_resident_share=0.45, sequences=4), frequencies=frequencies
    )
    unpinned = dataclasses.replace(
        made.memory, pins=(dataclasses.replace(made.memory.pins[0], triggers="0", values="0"),)
    )
    with_pins, without = (
        expected(m, rates(m, "predicted", frequencies), made.compute, memory, made.flash, None, None, batch=4).miss_rate
        for memory in (made.memory, unpinned)
    )
    assert with_pins < without


def test_texts_that_want_the_same_read_it_once() -> None:
    plain = predicted(manifest(width=2048, neurons=2048, layers=4))
    reads = []
    for bins in (lambda batch, ffn: SKEWED, lambda batch, ffn: several(batch, SKEWED)):
        m, frequencies = profiled(plain, bins=bins)
        made = make_plan(
            m, device(1), PlanOptions(mode="predicted", ffn_resident_share=0.5, sequences=4), frequencies=frequencies
        )
        one, four = (
            expected(
                m, rates(m, "predicted", frequencies), made.compute, made.memory, made.flash, None, None, batch=batch
            ).flash_reads_per_token
            for batch in (1, 4)
        )
        reads.append(four / one)
    assert reads[0] == pytest.approx(1 / 4, rel=0.2)
    assert reads[1] > 2 * reads[0]


def test_a_long_prompt_finds_the_experts_that_are_resident() -> None:
    """It evicts what it has read itself: prompts were planned at 24 tokens/s and ran at 44."""
    m = mixture(32, 4)
    half = ResidentSlots(occupied=m.clusters // 2, pinned=0)
    long, short = (part_accesses(m, rates(m, "exact"), "exact", 1.0, half, n, all_accessed=True) for n in (512, 16))
    assert long.misses == pytest.approx(long.accesses / 2, rel=0.01)
    assert short.misses == pytest.approx(short.accesses, rel=0.01)


@pytest.mark.slow
@pytest.mark.alone  # it measures time
def test_a_47b_with_a_profile_is_searched_in_seconds() -> None:
    """3.7 million clusters, 256 feed-forwards, two modes, four fast cores, four texts."""
    plain = predicted(manifest(width=4096, neurons=14336, layers=32))
    model = dataclasses.replace(
        plain.model, experts=8, experts_per_token=2, router="softmax", router_reads="feed_forward"
    )
    m, frequencies = profiled(
        dataclasses.replace(plain, model=model),
        chosen=lambda batch, ffn: 1 - 0.75**batch,
        bins=lambda batch, ffn: several(batch, [0.25 * one for one in SKEWED]),
    )
    assert m.clusters > 3_000_000
    space = Space(modes=("exact", "predicted"), workers=(1, 2, 3, 4), place=lambda count: device(count, 12 << 30))

    def search_all() -> None:
        search = Search(m, space, PlanOptions(sequences=4), frequencies=frequencies)
        for limit in search.limits_bytes():
            search.within(limit)

    assert takes_fewer_loops(search_all, 100)  # some five seconds


# ---- counts ------------------------------------------------------------------------------------------------------
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_counts_are_read_as_they_were_written(made: list[int]) -> None:
    assert read_counts(write_counts(made), len(made)) == tuple(made)


def test_alike_counts_are_one_number() -> None:
    assert (write_counts([12] * 400), write_counts([12, 12, 0])) == ("12", "12x2 0x1")


@pytest.mark.parametrize("text", ["", "1x2", "1x4", "1x99999999", "-1", "1x2  1x1", "1x2\n1x1", "ax3", "1.5"])
def test_counts_of_other_feed_forwards_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"feed-forwards|neither a number"):
        read_counts(text, 3)
