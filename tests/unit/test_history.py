"""What runs counted and measured corrects the next plan, is bounded, and can be forgotten."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.verbs.packages import rm
from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.cost.activation_rates import miss_rate, was_measured
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.history import history_file
from neuronpipe.plans.history.history import MAX_RUNS, MAX_TOKENS, VERSION, History, RunResult, with_run
from neuronpipe.plans.history.history_file import forget_history, history_folder, read_history, write_history
from neuronpipe.plans.history.history_report import counted_line, runs_table
from neuronpipe.plans.history.planning_facts import (
    MIN_COUNTED_TOKENS,
    corrected_device,
    counted_manifest,
    history_reasons,
)
from neuronpipe.plans.history.run_terms import RunTerms, planned_terms
from neuronpipe.plans.history.use_gaps import UseGaps
from neuronpipe.plans.measure.probe import this_device
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import MAX_CORRECTION, Corrections, Plan
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.plans.pull.package_library import VARIABLE, packages_folder
from neuronpipe.protocol.layouts.weights import REUSE_BUCKETS
from neuronpipe.protocol.schema import from_json, to_json

from tests.unit.test_device_profile import profile
from tests.unit.test_planner import CURVE, GIB, SPEED, manifest, predicted
from tests.unit.test_planner import device as planner_device

M = predicted(manifest(width=4096, neurons=14336, order="frequency"))
DEVICE = dataclasses.replace(this_device(), flash=CURVE, memory_speed=SPEED)
EMPTY = History(version=VERSION, package_id=M.id, device_id="d")


def plan_for(device: Device, history: History = EMPTY, subject: Manifest = M) -> Plan:
    """The plan that a start makes on a device with a history."""
    device, subject = corrected_device(device, history.corrections), counted_manifest(subject, history)
    facts = dataclasses.replace(
        planner_device(memory_bytes=8 * GIB),
        flash=device.flash,
        memory_speed=device.memory_speed,
        profile=device.profile,
    )
    plan = make_plan(subject, facts, PlanOptions(mode="predicted", ffn_resident_share=0.4))
    return dataclasses.replace(plan, corrections=history.corrections)


def use_gaps(steps: int, sampled: int = 500) -> UseGaps:
    """Counts of a model of which a token uses a tenth, half of it again in the next step, the rest after 20 steps."""
    gaps = [0] * REUSE_BUCKETS
    gaps[1] = gaps[17] = steps * sampled // 20
    return UseGaps(sampled=sampled, steps=steps, gaps=tuple(gaps), last_uses=(0,) * REUSE_BUCKETS)


def run(plan: Plan, *, tokens: int = 200, kernels: float = 1.0, reads: float = 1.0, steps: int = 0) -> RunResult:
    """A run whose times are such multiples of those that its plan expects."""
    terms = planned_terms(plan, M, 256)
    assert terms.compute_ms is not None
    assert terms.wait_ms is not None
    sums = RunTerms(
        tokens=tokens,
        positions=256 * tokens,
        total_ns=round(1e6 * tokens * (kernels * terms.compute_ms + reads * terms.wait_ms)),
        compute_ns=round(1e6 * tokens * kernels * terms.compute_ms),
        wait_ns=round(1e6 * tokens * reads * terms.wait_ms),
        read_bytes=round(tokens * terms.flash_bytes),
        lookups=10_000 * tokens,
        missed=round(10_000 * tokens * terms.miss_rate),
        neurons=1000 * tokens,
        fired=120 * tokens,
        active=100 * tokens,
    )
    return RunResult(plan=plan, terms=sums, triggers=use_gaps(steps), values=use_gaps(steps), ended_at=1_800_000_000)


def truth(device: Device, plan: Plan) -> tuple[float, float]:
    """What kernels and waits take on a device, as multiples of what the plan expects."""
    real, expected = plan_for(device).expected, plan.expected
    return (
        (real.neuron_ms_per_token or 0) / (expected.neuron_ms_per_token or 0),
        (real.exposed_flash_ms_per_token or 0) / (expected.exposed_flash_ms_per_token or 0),
    )


@pytest.mark.parametrize("planted", [Corrections(kernels=2.0), Corrections(reads=2.0), Corrections(kernels=0.5)])
def test_a_planted_factor_of_two_is_corrected_for_the_next_start(planted: Corrections) -> None:
    """The device is slower or faster than was measured."""
    real, history = corrected_device(DEVICE, planted), EMPTY
    for _ in range(3):
        plan = plan_for(DEVICE, history)
        kernels, reads = truth(real, plan)
        history = with_run(history, M, run(plan, kernels=kernels, reads=reads))
    kernels, reads = truth(real, plan_for(DEVICE, history))
    assert kernels == pytest.approx(1, abs=0.25)
    assert reads == pytest.approx(1, abs=0.25)


def test_a_run_as_planned_changes_no_plan() -> None:
    history = with_run(EMPTY, M, run(plan_for(DEVICE)))
    assert history.corrections == Corrections()
    assert plan_for(DEVICE, history) == plan_for(DEVICE)


def test_corrections_are_bounded_and_short_runs_make_none() -> None:
    plan = plan_for(DEVICE)
    assert with_run(EMPTY, M, run(plan, kernels=100.0)).corrections.kernels == MAX_CORRECTION
    assert with_run(EMPTY, M, run(plan, kernels=0.001)).corrections.kernels == 1 / MAX_CORRECTION
    history = with_run(EMPTY, M, run(plan, tokens=99, kernels=2.0))
    assert (history.corrections, history.runs) == (Corrections(), ())


def test_a_device_profile_is_corrected_as_the_brief_measurement_is() -> None:
    measured = dataclasses.replace(DEVICE, profile=profile())
    plans = [plan_for(measured, dataclasses.replace(EMPTY, corrections=Corrections(kernels=k))) for k in (1.0, 2.0)]
    before, after = (plan.expected.neuron_ms_per_token for plan in plans)
    assert before
    assert after == pytest.approx(2 * before, rel=0.01)


# ---- what runs counted -------------------------------------------------------------------------------------------
def counted(tokens: int, mode: str = "predicted") -> History:
    plan = plan_for(DEVICE)
    plan = dataclasses.replace(plan, compute=dataclasses.replace(plan.compute, mode=mode))
    return with_run(EMPTY, M, run(plan, tokens=tokens, steps=tokens))


def test_a_plan_is_made_from_counts_and_says_so() -> None:
    history = counted(14_000)
    assert history_reasons(history, M) == ("misses in predicted mode: from 14,000 tokens of your own",)
    subject = counted_manifest(M, history)
    assert subject.id == M.id
    assert not was_measured(M, "predicted")
    assert was_measured(subject, "predicted")
    # Half of the uses come in the next step, and the rest after about 20 steps, of which each uses a tenth.
    assert miss_rate(subject, "predicted", 0.5) == pytest.approx(0.5, abs=0.05)
    assert plan_for(DEVICE, history).expected.miss_rate != plan_for(DEVICE).expected.miss_rate
    assert plan_for(DEVICE, history) == plan_for(DEVICE, counted(14_000))


def test_few_tokens_make_no_plan_but_are_shown() -> None:
    history = counted(MIN_COUNTED_TOKENS - 1)
    assert counted_manifest(M, history) == M
    assert history_reasons(history, M) == ()
    assert counted_line(history) == "runs have counted 999 tokens in predicted mode; plans use them from 1,000 on"


def test_counts_of_exact_mode_say_nothing_about_another_mode() -> None:
    subject = counted_manifest(M, counted(5000, "exact"))
    assert subject.profile("exact") is not None
    assert not was_measured(subject, "predicted")
    assert plan_for(DEVICE, counted(5000, "exact")).expected.miss_rate == plan_for(DEVICE).expected.miss_rate


def test_counts_have_no_frequencies_so_no_pin_is_chosen_by_them() -> None:
    def unread() -> None:
        raise AssertionError

    assert AccessFrequencies.of(counted_manifest(M, counted(5000)), unread) is None  # type: ignore[arg-type]
    assert plan_for(DEVICE, counted(5000)).memory.pins == plan_for(DEVICE).memory.pins


def test_the_share_that_fires_is_counted_where_the_package_states_none() -> None:
    unstated = dataclasses.replace(M, fired_by_layer=None)
    subject = counted_manifest(unstated, counted(5000, "exact"))
    assert subject.fired_by_layer == (0.1,) * M.model.layers
    assert subject.trigger_fired_by_layer == (0.12,) * M.model.layers
    stated = dataclasses.replace(M, fired_by_layer=(0.3,) * M.model.layers)
    assert counted_manifest(stated, counted(5000, "exact")).fired_by_layer == stated.fired_by_layer


def test_a_history_stays_small_however_many_runs_there_are() -> None:
    history, plan = EMPTY, plan_for(DEVICE)
    for _ in range(3 * MAX_RUNS):
        history = with_run(history, M, run(plan, tokens=MAX_TOKENS // 4, steps=MAX_TOKENS // 4))
    assert len(history.runs) == MAX_RUNS
    assert history.counts[0].tokens == MAX_TOKENS
    assert len(json.dumps(to_json(history))) < 16_384
    assert from_json(History, json.loads(json.dumps(to_json(history))), "history") == history


def test_the_last_runs_are_shown_planned_and_measured() -> None:
    table = runs_table(with_run(EMPTY, M, run(plan_for(DEVICE), kernels=2.0)))
    header, names, row = table.splitlines()
    assert "planned -> measured" in header
    assert names.split() == ["ended", "tokens", "misses", "flash", "waits", "kernels", "token"]
    assert row.split()[2] == "200"
    assert row.count(" -> ") == 5
    assert runs_table(EMPTY) == ""


# ---- the file ----------------------------------------------------------------------------------------------------
def test_a_history_is_read_as_it_was_written_and_forgotten_for_all_devices() -> None:
    histories = [dataclasses.replace(counted(5000), device_id=device) for device in ("one", "two")]
    for history in histories:
        write_history(history)
        assert read_history(history.package_id, history.device_id) == history
    assert forget_history(M.id) == 2
    assert read_history(M.id, "one") == dataclasses.replace(EMPTY, device_id="one")
    assert forget_history(M.id) == 0


def test_a_package_takes_its_history_along_when_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    shutil.copytree(DEMO, packages_folder() / "demo-copy")
    package_id = Package.open(DEMO).manifest.id
    write_history(dataclasses.replace(EMPTY, package_id=package_id))
    write_history(EMPTY)
    assert rm.main(argparse.Namespace(names=["demo-copy"], json=True)) == 0
    assert [file.name for file in history_folder().glob("*")] == [history_file.history_file(M.id, "d").name]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"version": 2}', b'{"version": 1, "package_id": "p", "device_id": "d", "x": 1}', b"\xff" * 99],
)
def test_a_file_that_is_no_history_counts_as_none_and_is_replaced(content: bytes) -> None:
    path = history_file.history_file(M.id, "d")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    assert read_history(M.id, "d") == EMPTY
    write_history(counted(5000))
    assert read_history(M.id, "d") == counted(5000)


def test_a_file_of_another_package_or_too_large_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    write_history(counted(5000))
    assert read_history(M.id[:16] + "0" * 48, "d").counts == ()  # the same name
    monkeypatch.setattr(history_file, "MAX_BYTES", 100)
    assert read_history(M.id, "d") == EMPTY


def test_files_of_packages_that_are_long_gone_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_file, "MAX_FILES", 3)
    paths: list[Path] = []
    for number in range(5):
        write_history(dataclasses.replace(EMPTY, package_id=f"{number}" * 64))
        paths.append(history_file.history_file(f"{number}" * 64, "d"))
        os.utime(paths[-1], (number, number))
    assert [path.exists() for path in paths] == [False, False, True, True, True]
