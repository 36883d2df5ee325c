"""`bench` beside the plan: what is planned for a test, how far off it is, and how that is shown."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
from neuronpipe.launch.bench.cases import parse_cases
from neuronpipe.launch.bench.planned import errors, planned
from neuronpipe.launch.bench.report import planned_table
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.cost.expected_misses import joined_reads
from neuronpipe.plans.device.device import Device, FlashCurve, MemorySpeed
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan, ProcessSpec
from neuronpipe.plans.planner.device_facts import DeviceFacts
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan

from tests.unit.test_held_plan import CURVE, SPEED

MANIFEST = Package.open(DEMO).manifest
DECODED = {
    "tokens_per_s", "miss_rate", "flash_reads_per_token", "flash_bytes_per_token", "dram_bytes_per_token",
    "exposed_io_share", "peak_memory_bytes", "first_token_ms",
}  # fmt: skip
READ = {"tokens_per_s", "prefill_tokens_per_s", "first_token_ms", "peak_memory_bytes"}


def device(flash: FlashCurve | None = CURVE, speed: MemorySpeed | None = SPEED) -> Device:
    return Device(
        architecture="x86_64", instruction_set="avx2", cores=(), cpu_quota=None, memory_total_bytes=1 << 34,
        memory_available_bytes=1 << 34, page_bytes=4096, memlock_bytes=None, io_uring=True, flash=flash,
        memory_speed=speed,
    )  # fmt: skip


def made(workers: int = 2, sequences: int = 1, resident: float = 0.5, **wishes: Any) -> Plan:
    roles = [("coordinator", 0), ("loader", 0), ("cache", 0), ("prefill", 0), *(("decode", n) for n in range(workers))]
    processes = tuple(ProcessSpec(role=role, index=index, core=None) for role, index in roles)
    facts = DeviceFacts(
        id="d", memory_bytes=1 << 31, flash_engine="io_uring", processes=processes, flash=CURVE, memory_speed=SPEED
    )
    return make_plan(MANIFEST, facts, PlanOptions(sequences=sequences, ffn_resident_share=resident, **wishes))


def figures(test: str, plan: Plan, device: Device, batch: int = 1) -> dict[str, float]:
    (case,) = parse_cases(test)
    return planned(MANIFEST, plan, device, case, batch)


def test_what_is_planned_depends_on_what_a_test_counts() -> None:
    assert figures("tg64", made(), device()).keys() == DECODED
    prompt = figures("pp64", made(), device())
    assert prompt.keys() == READ
    assert prompt["tokens_per_s"] == prompt["prefill_tokens_per_s"]
    assert prompt["first_token_ms"] == pytest.approx(64 / prompt["prefill_tokens_per_s"] * 1e3, rel=1e-2)
    both, decode = figures("pp64+tg16", made(), device()), figures("tg16", made(), device())
    time_s = 64 / both["prefill_tokens_per_s"] + 16 / decode["tokens_per_s"]
    assert both["tokens_per_s"] == pytest.approx(80 / time_s, rel=1e-2)


def test_nothing_is_planned_of_what_was_not_measured() -> None:
    assert figures("tg64", made(), device(None, None)).keys() == DECODED - {
        "tokens_per_s",
        "first_token_ms",
        "exposed_io_share",
    }
    assert figures("pp64", made(), device(None, None)).keys() == {"peak_memory_bytes"}


def test_a_plan_made_where_nothing_was_measured_is_judged_by_what_is_known_now() -> None:
    old = made()
    old = dataclasses.replace(old, expected=dataclasses.replace(old.expected, tokens_per_s=None))
    assert figures("tg64", old, device())["tokens_per_s"] > 0


@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_texts_at_once_share_what_they_read(mode: str) -> None:
    plan = made(sequences=4, mode=mode)
    one, four = figures("tg64", plan, device()), figures("tg64", plan, device(), batch=4)
    assert one["flash_bytes_per_token"] / 4 <= four["flash_bytes_per_token"] < one["flash_bytes_per_token"]
    assert one["dram_bytes_per_token"] / 4 < four["dram_bytes_per_token"] < one["dram_bytes_per_token"]
    assert one["tokens_per_s"] < four["tokens_per_s"] <= 4 * one["tokens_per_s"]
    assert one["peak_memory_bytes"] < four["peak_memory_bytes"] < plan.memory.total_bytes()


def test_memory_is_planned_for_the_texts_that_a_run_has_had() -> None:
    plan, (long,) = made(), parse_cases("pp512+tg64")
    short, full = figures("tg64", plan, device()), planned(MANIFEST, plan, device(), long, 1)
    (tg64,) = parse_cases("tg64")
    after = planned(MANIFEST, plan, device(), tg64, 1, [long])
    kv_bytes_per_token = plan.memory.kv_bytes // plan.compute.context_tokens
    assert short["peak_memory_bytes"] + 500 * kv_bytes_per_token < full["peak_memory_bytes"]
    assert after["peak_memory_bytes"] == full["peak_memory_bytes"] <= plan.memory.total_bytes()


@pytest.mark.parametrize("missed", [200, 4000, 30_000])
def test_neighbours_that_miss_are_read_together_with_the_gap_between_them(missed: int) -> None:
    clusters, stride, part = 100_000, 8192, 4096
    flash = dataclasses.replace(made().flash, merge_gap_bytes=28 << 10, most_read_bytes=1 << 20)
    places = sorted(random.Random(missed).sample(range(clusters), missed))
    gaps = [(after - before) * stride - part for before, after in itertools.pairwise(places)]
    joined = [gap for gap in gaps if gap <= flash.merge_gap_bytes]
    reads, read_bytes = joined_reads(missed, clusters, part, stride, flash)
    assert reads == pytest.approx(missed - len(joined), rel=0.05)
    assert read_bytes == pytest.approx(missed * part + sum(joined), rel=0.05)


def test_a_longer_text_reads_more_keys_and_values() -> None:
    short, long = figures("tg8", made(), device()), figures("tg128", made(), device())
    model = MANIFEST.model
    position_bytes = model.layers * model.key_heads * 2 * model.head_width * 2
    assert long["dram_bytes_per_token"] - short["dram_bytes_per_token"] == (128 - 8) // 2 * position_bytes


def test_one_worker_reads_memory_as_fast_as_one_thread_does() -> None:
    one, two = (figures("pp64", made(workers), device())["tokens_per_s"] for workers in (1, 2))
    assert one <= two
    one, two = (figures("tg64", made(workers, resident=1.0), device())["tokens_per_s"] for workers in (1, 2))
    assert one == pytest.approx(two * 10 / 16, rel=1e-3)


def test_the_error_is_relative_to_what_was_measured() -> None:
    measured = {"tokens_per_s": 10.0, "miss_rate": 0.0, "exposed_io_share": 0.0, "first_token_ms": None}
    plan = {"tokens_per_s": 12.0, "miss_rate": 0.0, "exposed_io_share": 0.5, "first_token_ms": 3.0}
    assert errors(measured, plan) == {
        "tokens_per_s": pytest.approx(0.2),
        "miss_rate": 0.0,
        "exposed_io_share": None,
        "first_token_ms": None,
    }


ROW: dict[str, Any] = {"test": "tg8", "tokens_per_s": 10.0, "miss_rate": 0.0, "prefill_tokens_per_s": None}


def test_the_table_shows_each_planned_figure_with_its_error() -> None:
    plan = {"tokens_per_s": 12.0, "miss_rate": 0.1}
    shown = planned_table([{**ROW, "planned": plan, "error": errors(ROW, plan)}]).splitlines()
    assert [line.split("  ")[0] for line in shown[2:]] == ["tokens/s", "miss rate"]
    assert shown[2].split()[-3:] == ["10.0", "12.0", "+20%"]
    assert shown[3].split()[-3:] == ["0.0%", "10.0%", "-"]
    far = {"tokens_per_s": 250.0}
    assert planned_table([{**ROW, "planned": far, "error": errors(ROW, far)}]).split()[-1] == "x25"


def test_a_row_without_planned_figures_has_no_line() -> None:
    assert len(planned_table([{**ROW, "planned": {}, "error": {}}]).splitlines()) == 2
