"""Inverse frequencies: each scaling against its definition, position by position."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from neuronpipe.plans.convert.rope import attention_scale, paired_order, scaled_frequencies
from neuronpipe.plans.models.llama import LLAMA_DEFAULTS
from neuronpipe.plans.reference.attention import rotate
from neuronpipe.plans.strict_json import Record

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def table(**config: Any) -> list[float]:
    """The table of a config.json with heads of 64."""
    record = Record(config, "config.json").over(LLAMA_DEFAULTS, "LlamaConfig")
    return [float(value) for value in scaled_frequencies(record, 64)]


def plain(theta: float) -> list[float]:
    """The definition."""
    return [theta ** (-2 * j / 64) for j in range(32)]


def test_without_scaling_only_theta_counts() -> None:
    assert table() == pytest.approx(plain(10_000))
    assert table(rope_theta=5e5) == pytest.approx(plain(5e5))
    assert table(rope_theta=1e6, rope_scaling=None) == pytest.approx(plain(1e6))
    assert table(rope_parameters={"rope_type": "default", "rope_theta": 7e4}) == pytest.approx(plain(7e4))


def test_linear_scaling_slows_everything_down() -> None:
    expected = [value / 4 for value in plain(10_000)]
    assert table(rope_scaling={"type": "linear", "factor": 4.0}) == pytest.approx(expected)
    assert table(rope_theta=1e4, rope_parameters={"rope_type": "linear", "factor": 4}) == pytest.approx(expected)


def test_llama3_scaling_is_its_three_cases() -> None:
    found = table(rope_theta=5e5, rope_scaling=LLAMA3)
    cases = set()
    for before, after in zip(plain(5e5), found, strict=True):
        length = 2 * math.pi / before
        if length > 8192 / 1:
            case, expected = "long", before / 8
        elif length < 8192 / 4:
            case, expected = "short", before
        else:
            share = (8192 / length - 1) / (4 - 1)
            case, expected = "between", (1 - share) * before / 8 + share * before
        cases.add(case)
        assert after == pytest.approx(expected, rel=1e-6)
    assert cases == {"long", "between", "short"}
    assert np.all(np.diff(found) < 0)


@pytest.mark.parametrize("rotated", [12, 24, 44])
def test_a_part_of_a_head_rotates_alone_once_its_elements_are_paired(rotated: int) -> None:
    random = np.random.default_rng(1)
    heads, angles = random.standard_normal((3, 2, 48)), random.standard_normal((3, rotated // 2))
    expected = np.concatenate((rotate(heads[..., :rotated], angles), heads[..., rotated:]), axis=-1)
    order = paired_order(1, 48, rotated)
    still = np.zeros((3, 24 - rotated // 2))
    found = rotate(heads[..., order], np.concatenate((angles, still), axis=-1))
    assert np.array_equal(found, expected[..., order])
    assert np.array_equal(paired_order(2, 48, rotated), np.concatenate((order, order + 48)))


YARN = {"rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096}


def test_yarn_scaling_is_its_three_cases() -> None:
    """Pairs of more than 32 turns in 4096 positions stay, of less than one are slowed down, by the pair's number."""
    found, cases = table(rope_theta=10_000.0, rope_scaling=YARN), set()
    first = math.floor(64 * math.log(4096 / (32 * 2 * math.pi)) / (2 * math.log(10_000)))
    last = math.ceil(64 * math.log(4096 / (2 * math.pi)) / (2 * math.log(10_000)))
    for pair, (before, after) in enumerate(zip(plain(10_000), found, strict=True)):
        share = (pair - first) / (last - first)
        cases.add("kept" if share <= 0 else "slow" if share >= 1 else "between")
        share = min(max(share, 0), 1)
        assert after == pytest.approx(before * (1 - share) + before / 20 * share, rel=1e-6)
    assert cases == {"kept", "between", "slow"}
    assert np.all(np.diff(table(rope_scaling=YARN | {"truncate": False, "beta_fast": 8, "beta_slow": 2})) < 0)


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        ({}, 0.1 * math.log(20) + 1),
        ({"factor": 0.5}, 1),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 2.0}, 0.1 * math.log(20) + 1),
        ({"mscale": 2.0, "mscale_all_dim": 0.5}, (0.2 * math.log(20) + 1) / (0.05 * math.log(20) + 1)),
        ({"rope_type": "linear", "attention_factor": 1.5}, 1),
    ],
)
def test_yarns_factor_on_queries_and_keys_is_squared_on_scores(scaling: dict[str, Any], factor: float) -> None:
    config = Record({"rope_scaling": YARN | scaling}, "config.json")
    assert attention_scale(config) == pytest.approx(factor**2)
    assert attention_scale(Record({}, "config.json")) == 1
