"""The simulated cache policies keep the rules that every cache keeps, and LRU is the least recently used."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from neuronpipe.plans.activity.replacement_policies import Clock, Ids, Lfu, Lru, Optimal, Policy, Static
from neuronpipe.plans.lab.simulate.__main__ import POLICIES, miss_rate, workload
from neuronpipe.plans.lab.synth.trajectory import PRESETS

CLUSTERS, ROOM = 24, 12
ORDER = np.arange(CLUSTERS)
steps = st.lists(st.sets(st.integers(0, CLUSTERS - 1), min_size=1, max_size=4), max_size=40)


def ids(wanted: set[int]) -> Ids:
    return np.array(sorted(wanted), dtype=np.intp)


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())
@given(steps=steps)
def test_a_pool_stays_full_holds_what_was_just_looked_up_and_what_is_pinned(
    make: Callable[[Ids, int, list[list[Ids]]], Policy], steps: list[set[int]]
) -> None:
    policy = make(ORDER, ROOM, [[ids(wanted)] for wanted in steps] or [[ORDER]])
    for wanted in steps:
        absent = int(np.count_nonzero(~policy.resident[ids(wanted)]))
        assert policy.step(ids(wanted)) == absent
        assert policy.resident.sum() == ROOM
        assert policy.resident[policy.pinned].all()
        assert isinstance(policy, Static) or policy.resident[ids(wanted)].all()


@given(steps=steps)
def test_lru_lets_go_of_what_was_used_longest_ago(steps: list[set[int]]) -> None:
    policy, used = Lru(ORDER, ROOM), {n: -n for n in range(CLUSTERS)}
    resident = set(range(ROOM))
    for now, wanted in enumerate(steps, 1):
        used |= dict.fromkeys(wanted, now)
        for _ in wanted - resident:
            resident.remove(min(resident - wanted, key=used.__getitem__))
            resident.add(min(wanted - resident))
        policy.step(ids(wanted))
        for went, stayed in ((a, b) for a in set(range(CLUSTERS)) - resident for b in resident):
            assert used[went] <= used[stayed]
        resident = {int(n) for n in np.flatnonzero(policy.resident)}  # among equals either may go


def test_the_hand_spares_what_was_looked_up_and_takes_a_guess_that_was_not() -> None:
    clock = Clock(ORDER, 4)
    clock.step(ids({0, 1, 2, 3}))
    clock.step(ids({10}))  # goes round once, and takes the first
    assert list(np.flatnonzero(clock.resident)) == [1, 2, 3, 10]
    clock.step(ids({2}))
    clock.step(ids({11}))  # 2 was looked up again, 1 was not
    assert list(np.flatnonzero(clock.resident)) == [2, 3, 10, 11]


def test_the_hand_counts_uses_and_keeps_what_has_more_of_them() -> None:
    clock = Clock(ORDER, 4, max_uses=7)
    for wanted in ({0, 1, 2, 3}, {10}, {1}, {11}, {1}, {12}):  # every other step is a miss: the hand moves
        clock.step(ids(wanted))
    assert 1 in np.flatnonzero(clock.resident)  # used three times
    plain = Clock(ORDER, 4)
    for wanted in ({0, 1, 2, 3}, {10}, {1}, {11, 12, 13, 14}, {15, 16, 17, 18}):
        plain.step(ids(wanted))
    assert 1 not in np.flatnonzero(plain.resident)


def test_lfu_forgets_slowly_and_lru_at_once() -> None:
    often, once = [{0, 1}] * 8, [{n} for n in range(4, 12)]
    lfu, lru = Lfu(ORDER, 4, half_life_steps=32), Lru(ORDER, 4)
    for wanted in often + once:
        lfu.step(ids(wanted))
        lru.step(ids(wanted))
    assert {0, 1} <= set(np.flatnonzero(lfu.resident))
    assert not {0, 1} & set(np.flatnonzero(lru.resident))


@given(steps=steps.filter(bool))
def test_no_policy_misses_less_than_the_optimal_one(steps: list[set[int]]) -> None:
    wanted = [ids(step) for step in steps]
    best = sum(map(Optimal(ORDER, ROOM, wanted).step, wanted))
    for make in POLICIES.values():
        if not isinstance(policy := make(ORDER, ROOM, [[step] for step in wanted]), Static):
            assert best <= sum(map(policy.step, wanted))


def test_the_default_workload_misses_what_it_was_published_to_miss() -> None:
    order, tokens = workload(PRESETS["default"], seed=1)
    assert 0.03 < miss_rate(Lru(order, len(order) // 2), tokens) < 0.07  # 5 % on Bamboo, half resident
