"""From how soon clusters are used again follows what a cache of any size misses."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
from neuronpipe.native import ffi, lib
from neuronpipe.plans.activity.replacement_policies import Clock
from neuronpipe.plans.history.use_gaps import UseGaps, bucket, longest_gap
from neuronpipe.plans.package.activity_profile import MAX_POINTS, interpolated
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.layouts.weights import MAX_SAMPLED_CLUSTERS, REUSE_BUCKETS, sampling_stride
from numpy.typing import NDArray

from tests.conformance.participants import Participants

LAYERS, EXPERTS, CHOSEN = 6, 64, 4
Routes = NDArray[np.intp]


@cache
def routes(tokens: int, seed: int = 1) -> Routes:
    """Experts of a mixture with hot ones, as real routers choose: half of a token's are those of the token before.
    [tokens, LAYERS * CHOSEN], numbers of all layers"""
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, EXPERTS + 1) ** 0.7
    order = np.array([random.permutation(EXPERTS) for _ in range(LAYERS)])
    chosen, before = [], [np.arange(CHOSEN)] * LAYERS
    for _ in range(tokens):
        for layer in range(LAYERS):
            stays = random.choice(before[layer], CHOSEN // 2, replace=False)
            free = np.setdiff1d(np.arange(EXPERTS), stays)
            share = weights[np.argsort(order[layer])][free]
            new = random.choice(free, CHOSEN - len(stays), replace=False, p=share / share.sum())
            before[layer] = np.concatenate([stays, new])
        chosen.append(np.concatenate([layer * EXPERTS + experts for layer, experts in enumerate(before)]))
    return np.array(chosen)


def counted(chosen: Routes) -> UseGaps:
    """What runs count of these routes."""
    gaps, last = [0] * REUSE_BUCKETS, [0] * (LAYERS * EXPERTS)
    for number, experts in enumerate(chosen.tolist(), 1):
        for expert in experts:
            gaps[bucket(number - last[expert]) if last[expert] else 0] += 1
            last[expert] = number
    return UseGaps.of_run(gaps, last, len(chosen), len(last))


def simulated(chosen: Routes, share: float) -> float:
    """The miss rate of the cache's policy, after a first part that fills it."""
    policy = Clock(np.arange(LAYERS * EXPERTS), round(share * LAYERS * EXPERTS), max_uses=7)
    misses = [policy.step(step) for token in chosen for step in np.split(token, LAYERS)]
    later = misses[len(misses) // 4 :]
    return sum(later) / (len(later) * CHOSEN)


@pytest.mark.parametrize("share", [0.15, 0.2, 0.3, 0.4, 0.5, 0.6])
def test_a_cache_of_experts_misses_what_their_gaps_say(share: float) -> None:
    chosen = routes(1500)
    assert interpolated(counted(chosen).miss_curve(), share) == pytest.approx(simulated(chosen, share), rel=0.2)


def test_a_short_run_says_about_what_a_long_one_does() -> None:
    """Uses whose cluster was not used again before the end are no misses and no hits: without them the tail would be
    missing."""
    long, short = (counted(routes(tokens)).miss_curve() for tokens in (2000, 150))
    for share in (0.15, 0.3, 0.45):
        assert interpolated(short, share) == pytest.approx(interpolated(long, share), rel=0.2)


def test_buckets_are_those_of_the_engine_and_each_gap_is_in_one() -> None:
    gaps = [*range(1, 5000), *(1 << n for n in range(13, 32)), 0xFFFFFFFF]
    for gap in gaps:
        assert bucket(gap) == lib.np_reuse_bucket(gap) < REUSE_BUCKETS == lib.NP_REUSE_BUCKETS
        assert longest_gap(bucket(gap) - 1) < gap <= longest_gap(bucket(gap))


def test_a_curve_falls_from_all_to_nothing_whatever_was_counted() -> None:
    random = np.random.default_rng(3)
    for steps in (0, 1, 50, 4000):
        gaps = random.integers(0, 1 + steps, REUSE_BUCKETS).tolist()
        last = random.integers(0, 1 + steps, 300).tolist()
        points = UseGaps.of_run(gaps, last, steps, 300).miss_curve()
        shares, misses = zip(*points, strict=True)
        assert (points[0], points[-1]) == ((0, 1), (1, 0))
        assert len(points) <= MAX_POINTS
        assert all(a < b for a, b in itertools.pairwise(shares))
        assert all(a >= b >= 0 for a, b in itertools.pairwise(misses))


def test_older_counts_fade_and_newer_ones_stay() -> None:
    old, new = counted(routes(900)), counted(routes(300, seed=2))
    both = old.plus(new, max_steps=100)
    assert both.steps == 400
    assert both.uses == pytest.approx(old.uses / 9 + new.uses, rel=0.01)
    assert old.plus(new, max_steps=10_000).uses == old.uses + new.uses


@pytest.mark.parametrize("clusters", [1, 688, 4096, 4097, 6144, 458_752, 3_670_016, 1 << 25])
def test_a_sample_has_a_bounded_size_and_an_odd_stride(clusters: int) -> None:
    stride = sampling_stride(clusters, 1)
    assert stride % 2 == 1
    assert min(clusters, MAX_SAMPLED_CLUSTERS // 4) <= -(-clusters // stride) <= MAX_SAMPLED_CLUSTERS


@pytest.mark.parametrize(
    ("ffns", "of_ffn"), [(256, 14336), (32, 14336), (24, 2752), (160, 896), (6144, 48), (1024, 55), (1024, 32768)]
)
def test_a_sample_has_as_many_hot_clusters_as_there_are(ffns: int, of_ffn: int) -> None:
    """A 47B's had half of its clusters from the hottest twentieth of their experts, where half a stride was half a
    feed-forward, so plans with counts expected half of the misses."""
    places = np.arange(0, ffns * of_ffn, sampling_stride(ffns * of_ffn, ffns)) % of_ffn / of_ffn
    for share in (0.04, 0.1, 0.25, 0.5, 0.75):
        assert np.mean(places < share) == pytest.approx(share, abs=0.06)


class Reuse:
    """The memory of an np_reuse."""

    def __init__(self, clusters: int, stride: int) -> None:
        sampled = -(-clusters // stride)
        self.last_uses = np.zeros((2, sampled), np.uint32)
        self.gaps, self.steps = np.zeros((2, REUSE_BUCKETS), np.uint64), np.zeros(1, np.uint64)
        self.native = ffi.new(
            "np_reuse *",
            {
                "last_uses": ffi.from_buffer("uint32_t[]", self.last_uses.ravel()),
                "gaps": ffi.from_buffer("uint64_t[]", self.gaps.ravel()),
                "steps": ffi.from_buffer("uint64_t[]", self.steps),
                "sampled": sampled,
                "stride": stride,
            },
        )


@pytest.mark.parametrize("recipe", ["relu2", "qwen3moe"])
def test_the_engine_counts_a_use_once_whoever_computes_and_of_its_sample_alone(recipe: str, converted: Any) -> None:
    package: Package = converted(recipe, "q8")
    clusters, tokens = package.manifest.clusters, list(range(1, 13))
    every, third = Reuse(clusters, 1), Reuse(clusters, 3)
    for reuse in (every, third):
        participants = Participants(package, count=2, max_tokens=1, reuse=reuse.native)
        participants.run(tokens, 1)
        assert reuse.steps[0] == len(tokens)
    assert (third.last_uses == every.last_uses[:, ::3]).all()
    assert every.gaps[:, 0].tolist() == np.count_nonzero(every.last_uses, axis=1).tolist()  # first uses
    assert 0 < third.gaps.sum() < every.gaps.sum() <= 2 * clusters * len(tokens)
    dense = package.manifest.model.experts == 1
    if dense:  # exact mode reads every trigger for every token
        assert every.gaps[0, 1] == clusters * (len(tokens) - 1)


def test_steps_of_several_tokens_are_not_counted_but_remembered(converted: Any) -> None:
    package: Package = converted("relu2", "q8")
    reuse = Reuse(package.manifest.clusters, 1)
    Participants(package, count=1, max_tokens=4, reuse=reuse.native).run(list(range(1, 9)), 4)
    assert reuse.steps[0] == reuse.gaps.sum() == 0
    assert (reuse.last_uses[0] == 5).all()  # the second step has the number 4
