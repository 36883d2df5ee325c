"""What `models` makes of the planner's figures: the order, the first choice, the lines and the JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from neuronpipe.launch.catalog.estimates import (
    MAX_USABLE_FIRST_TOKEN_S,
    MIN_USABLE_TOKENS_PER_S,
    Estimate,
    best,
    sorted_by_use,
)
from neuronpipe.launch.catalog.table import COLUMNS, as_json, table_lines
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.search import Subject, quick_plan
from neuronpipe.launch.planning.shapes import no_activity
from neuronpipe.plans.lab.devices.device_description import planner_device
from neuronpipe.plans.lab.devices.device_file import read_device
from neuronpipe.plans.lab.shapes.pulled_manifest import manifest_of_pulled
from neuronpipe.plans.lab.shapes.shape_manifest import with_file_lengths
from neuronpipe.plans.package.layout import compute_layout
from neuronpipe.plans.plan.document import SpeedRange
from neuronpipe.plans.pull.catalog import catalog

GIB = 1 << 30
FAST, SLOW = 2 * MIN_USABLE_TOKENS_PER_S, MIN_USABLE_TOKENS_PER_S / 2


def made(
    name: str, tokens_per_s: float | None, first_token_s: float | None = 2.0, *, problem: str | None = None
) -> Estimate:
    return Estimate(
        model=dataclasses.replace(catalog()["qwen3-4b"], name=name),
        parameters=30_500_000_000,
        active_parameters=3_000_000_000,
        context_tokens=4096,
        package_bytes=3 * GIB,
        limit_bytes=8 * GIB,
        min_memory_bytes=2 * GIB,
        resident_share=0.5,
        tokens_per_s=tokens_per_s,
        tokens_per_s_range=None
        if tokens_per_s is None
        else SpeedRange(low=0.9 * tokens_per_s, high=1.2 * tokens_per_s),
        first_token_s=first_token_s,
        problem=problem,
    )


def names(estimates: Sequence[Estimate]) -> list[str]:
    return [estimate.model.name for estimate in estimates]


def test_the_most_capable_usable_model_is_first_then_the_slow_ones_by_speed_then_what_does_not_run() -> None:
    catalog_order = [
        made("large", None, problem="needs 60.00 GiB of memory"),
        made("slower", SLOW / 2),
        made("capable", FAST),
        made("slow", SLOW),
        made("small", 10 * FAST),
        made("unknown", None),
    ]
    assert names(sorted_by_use(catalog_order)) == ["capable", "small", "slow", "slower", "unknown", "large"]


@pytest.mark.parametrize(
    ("tokens_per_s", "first_token_s", "is_usable"),
    [
        (MIN_USABLE_TOKENS_PER_S, MAX_USABLE_FIRST_TOKEN_S, True),
        (MIN_USABLE_TOKENS_PER_S - 0.01, 1.0, False),
        (FAST, MAX_USABLE_FIRST_TOKEN_S + 0.1, False),
        (FAST, None, False),
        (None, 1.0, False),
    ],
)
def test_usable_is_what_reads_along_and_begins_soon(
    tokens_per_s: float | None, first_token_s: float | None, is_usable: bool
) -> None:
    assert made("a", tokens_per_s, first_token_s).is_usable == is_usable


def test_nothing_that_is_slow_or_does_not_run_is_the_best() -> None:
    assert best([made("slow", SLOW), made("large", FAST, problem="needs more")][:1]) is None
    assert best([]) is None


def test_the_best_fits_on_the_disk_with_its_file_beside_it() -> None:
    larger = dataclasses.replace(made("larger", FAST), package_bytes=10 * GIB)
    small = made("small", FAST)
    assert best([larger, small], free_bytes=None) is larger
    assert best([larger, small], free_bytes=10 * GIB) is small
    assert best([larger, small], free_bytes=small.disk_bytes - 1) is None
    assert best([larger, small], free_bytes=0, pulled={larger.model.name}) is larger
    assert small.disk_bytes == small.package_bytes + small.model.download_bytes
    by_shards = dataclasses.replace(small, model=dataclasses.replace(small.model, file=None))
    assert by_shards.disk_bytes == small.package_bytes


def test_the_lines_fit_a_terminal_and_say_why_something_does_not_run() -> None:
    estimates = [
        *(made(name, FAST) for name in catalog()),
        made("slow", SLOW),
        made("unknown", None, None),
        made("large", None, problem="needs 60.00 GiB of memory"),
    ]
    lines = [line.text for line in table_lines(estimates, frozenset({"slow"}), shows_others=True)]
    assert max(map(len, lines)) <= COLUMNS
    by_name = {line.split()[0]: line for line in lines if line.strip()}
    assert by_name["slow"].split() == ["slow", "pulled", "2.00", "GiB", "50%", "1.8-2.4", "2.0", "s"]
    assert by_name["unknown"].split()[-2:] == ["?", "?"]
    assert lines[-1].endswith("needs 60.00 GiB of memory")
    assert not any("60.00 GiB" in line.text for line in table_lines(estimates, frozenset(), shows_others=False))


def test_the_json_of_a_model_has_bytes_seconds_and_null_for_what_is_not_known() -> None:
    fields = as_json(made("a", 12.5, 3.25), is_pulled=True)
    assert fields == {
        "name": "a",
        "note": catalog()["qwen3-4b"].note,
        "reference": "Qwen/Qwen3-4B-GGUF:Qwen3-4B-Q4_K_M.gguf",
        "licence": "Apache-2.0",
        "parameters": 30_500_000_000,
        "active_parameters": 3_000_000_000,
        "download_bytes": 2_497_280_256,
        "package_bytes": 3 * GIB,
        "pulled": True,
        "runs": True,
        "usable": True,
        "problem": None,
        "min_memory_bytes": 2 * GIB,
        "resident_share": 0.5,
        "tokens_per_s": 12.5,
        "tokens_per_s_range": {"low": 11.25, "high": 15.0},
        "first_token_s": 3.25,
    }
    unknown = as_json(made("b", None, None, problem="needs more"), is_pulled=False)
    assert (unknown["runs"], unknown["usable"], unknown["tokens_per_s"]) == (False, False, None)


def test_neurons_of_experts_without_a_gate_lie_in_clusters_that_waste_no_pages() -> None:
    """Of ReLU² all Up rows are needed. In clusters of two neurons a fifth of the pages was padding."""
    large, phone = manifest_of_pulled(catalog()["nemotron-3-nano"]), read_device("oneplus-12")
    spec, down = large.model, large.row_quantization("down")
    clusters = compute_layout(
        large.quantization, spec.width, spec.neurons, spec.ffn_matrices, "source", differing={"down": down}
    )
    small = with_file_lengths(dataclasses.replace(large, layout=clusters))
    assert (small.layout.cluster_neurons, large.layout.cluster_neurons) == (2, 12)
    assert large.size_bytes < 0.85 * small.size_bytes
    for fired in (0.4, 0.1):
        tokens_per_s = []
        for layout in (small, large):
            manifest = dataclasses.replace(layout, fired_by_layer=(fired,) * spec.layers)
            subject = Subject(manifest=manifest, read_activity=no_activity, device=planner_device(phone, manifest))
            plan, _ = quick_plan(subject, PlanOptions(context_tokens=2048, mode="exact"), 8_000_000_000)
            tokens_per_s.append(plan.expected.tokens_per_s or 0.0)
        assert tokens_per_s[1] > 1.1 * tokens_per_s[0]
