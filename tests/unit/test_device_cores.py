"""Who sits on which core, on phones and on machines whose cores are all alike."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from neuronpipe.plans.device.cores import Core, assign_cores, classify, default_decode_workers

# Capacities by core id: a phone of 2023 (2 little, 5 mid, 1 prime), one without little cores (6 mid, 2 prime).
PRIME_1_MID_5_LITTLE_2 = {0: 325, 1: 325, 2: 830, 3: 830, 4: 830, 5: 900, 6: 900, 7: 1024}
PRIME_2_MID_6 = {**dict.fromkeys(range(6), 780), 6: 1024, 7: 1024}

CONFINED = """
import os
from neuronpipe.services.runtime.core_pinning import pin, unpinned

def cores(): print(len(os.sched_getaffinity(0)))

pin(min(os.sched_getaffinity(0)))
cores()
with unpinned(): cores()
cores()
"""


def cores_of(capacities: dict[int, int], allowed: set[int] | None = None) -> tuple[Core, ...]:
    return classify(capacities, "capacity", capacities.keys() if allowed is None else allowed)


def test_a_phone_has_three_kinds_of_cores() -> None:
    kinds = [core.kind for core in cores_of(PRIME_1_MID_5_LITTLE_2)]
    assert kinds == ["little"] * 2 + ["mid"] * 5 + ["big"]


def test_clocks_alone_still_tell_little_from_mid() -> None:
    clocks_khz = {0: 2_265_600, 1: 3_148_800, 2: 3_302_400}
    assert [core.kind for core in classify(clocks_khz, "frequency", {0, 1, 2})] == ["little", "big", "big"]


def test_decode_takes_the_fast_cores_of_a_phone_and_messages_pass_on_the_slow_ones() -> None:
    assert assign_cores(cores_of(PRIME_1_MID_5_LITTLE_2), 5) == {
        **{"decode.0": 5, "decode.1": 6, "decode.2": 2, "decode.3": 3, "decode.4": 4},
        **{"loader": 7, "prefill": 7, "coordinator": 0, "cache": 1, "gateway": 1},
    }


def test_the_loader_shares_its_core_only_when_every_fast_core_decodes() -> None:
    roles = assign_cores(cores_of(PRIME_2_MID_6), 8)
    assert roles["loader"] == roles["decode.7"] == 7
    assert roles["prefill"] == 6
    assert roles["coordinator"] is None


def test_workers_take_one_of_each_physical_core_before_its_siblings() -> None:
    cores = tuple(Core(id=id, capacity=1024, kind="big", physical=id // 2 * 2) for id in range(8))
    roles = assign_cores(cores, 4)
    assert [roles[f"decode.{number}"] for number in range(4)] == [0, 2, 4, 6]
    assert roles["loader"] == 7  # a sibling of the last worker, whose core would else be shared
    assert [assign_cores(cores, 7)[f"decode.{number}"] for number in range(4, 7)] == [1, 3, 5]


def test_two_equal_cores_both_decode() -> None:
    assert assign_cores(cores_of({0: 1024, 1: 1024}), 2) == {
        **{"decode.0": 0, "decode.1": 1, "loader": 1, "prefill": 0},
        **{"coordinator": None, "cache": None, "gateway": None},
    }


def test_one_core_carries_everything() -> None:
    roles = assign_cores(cores_of({3: 512}), 2)
    assert {role for role, core in roles.items() if core == 3} == {"decode.0", "decode.1", "loader", "prefill"}


def test_a_process_confined_to_little_cores_uses_them_as_fast_ones() -> None:
    roles = assign_cores(cores_of(PRIME_1_MID_5_LITTLE_2, allowed={0, 1}), 2)
    assert (roles["decode.0"], roles["decode.1"], roles["coordinator"]) == (0, 1, None)


def test_workers_beyond_the_fast_cores_go_on_to_the_slow_ones() -> None:
    roles = assign_cores(cores_of(PRIME_1_MID_5_LITTLE_2), 9)
    assert [roles[f"decode.{i}"] for i in range(9)] == [5, 6, 2, 3, 4, 7, 0, 1, 5]


@pytest.mark.parametrize(
    ("capacities", "quota", "workers"),
    [
        (PRIME_1_MID_5_LITTLE_2, None, 5),
        (PRIME_2_MID_6, None, 7),
        ({0: 1024, 1: 1024}, None, 2),
        ({0: 1024}, None, 1),
        (PRIME_2_MID_6, 2.5, 2),
        (PRIME_2_MID_6, 0.5, 1),
    ],
)
def test_the_default_number_of_decode_workers_leaves_the_loader_a_core_where_there_are_plenty(
    capacities: dict[int, int], quota: float | None, workers: int
) -> None:
    assert default_decode_workers(cores_of(capacities), quota) == workers


def test_no_allowed_core_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 allowed cores"):
        assign_cores(cores_of({0: 1024}, allowed=set()), 1)


@given(
    capacities=st.dictionaries(st.integers(0, 15), st.integers(1, 1024), min_size=1, max_size=12),
    workers=st.integers(1, 20),
    data=st.data(),
)
def test_only_allowed_cores_are_named_and_none_twice_while_there_are_enough(
    capacities: dict[int, int], workers: int, data: st.DataObject
) -> None:
    allowed = data.draw(st.sets(st.sampled_from(sorted(capacities)), min_size=1))
    roles = assign_cores(cores_of(capacities, allowed), workers)
    assert {core for core in roles.values() if core is not None} <= allowed
    decode = [roles[f"decode.{i}"] for i in range(workers)]
    assert len(set(decode)) == min(workers, len(allowed))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_a_process_with_one_core_may_use_its_parents_for_a_while() -> None:
    """Fixed tensors are read and hashed at once, in a process that the plan gave one core."""
    seen = subprocess.run([sys.executable, "-c", CONFINED], check=True, capture_output=True, text=True).stdout
    assert seen.split() == ["1", str(len(os.sched_getaffinity(0))), "1"]
