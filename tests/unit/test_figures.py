"""Small figures keep their digits, wherever speeds are shown."""

from __future__ import annotations

import dataclasses

import pytest
from neuronpipe.launch.bench import report
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.number_format import show_number
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import ProcessSpec
from neuronpipe.plans.plan.report import explain
from neuronpipe.plans.planner.device_facts import DeviceFacts
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan

from tests.service_job import ROLES


@pytest.mark.parametrize(
    ("value", "decimals", "shown"),
    [
        (1234.56, 1, "1,234.6"),
        (14.2, 0, "14"),
        (9.97, 0, "10.0"),
        (4.21, 0, "4.2"),
        (0.42, 1, "0.42"),
        (0.0421, 0, "0.042"),
        (0, 0, "0"),
        (0.0, 1, "0.0"),
        (1e-12, 1, "0.000000"),
        (-0.05, 1, "-0.050"),
        (float("inf"), 1, "inf"),
    ],
)
def test_small_figures_get_digits(value: float, decimals: int, shown: str) -> None:
    assert show_number(value, decimals) == shown


def test_a_plan_expects_a_slow_model_to_be_slow_and_not_still() -> None:
    processes = tuple(ProcessSpec(role=name, index=0, core=None) for name in ROLES)
    device = DeviceFacts(id="d", memory_bytes=1 << 31, flash_engine="threads", processes=processes)
    made = make_plan(Package.open(DEMO).manifest, device, PlanOptions(ffn_resident_share=0.5))
    slow = dataclasses.replace(made, expected=dataclasses.replace(made.expected, tokens_per_s=0.031))
    assert "0.031 tokens/s" in explain(slow)


def test_a_table_of_bench_shows_a_slow_model() -> None:
    where = dict.fromkeys((
        "dram_limit_fraction", "flash_reads_per_token", "flash_limit_fraction", "active_share", "miss_rate",
        "late_rate", "late_rate_of_activated", "exposed_io_share", "coordination_share", "barrier_share",
        "message_share", "hints_per_token", "hints_right", "tbt_most_ms", "first_token_ms", "joules_per_token",
        "workload",
    ))  # fmt: skip
    row = {
        "guessed_right_share": None,
        "experts_guessed_per_token": 0.0,
        "model": "m", "model_bytes": 1, "quantization": "q4", "test": "tg8", "mode": "exact", "workers": 2,
        "ffn_resident": 0.5, "limit_memory_bytes": 1, "peak_memory_bytes": 1, "tokens_per_s": 0.042, "repetitions": 1,
        "tokens_per_s_least": 0.041, "tokens_per_s_most": 0.043, "dram_bytes_per_token": 1, "flash_bytes_per_token": 1,
        "first_tokens_per_s": 0.031, "tbt_ms": {"p50": None},
        "batch": 1, "planned": {}, "error": {},
    }  # fmt: skip
    shown = report.render([where | row])
    for figure in ("0.042", "0.041 .. 0.043", "0.031"):
        assert figure in shown
