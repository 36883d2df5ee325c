"""Measuring a device profile: processes that measure together, slots as they lie, and once through all of it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.profile import device_profile
from neuronpipe.native import ffi
from neuronpipe.plans.device.measured_points import CoreClass, DecodePoint
from neuronpipe.plans.device.profile import DeviceProfile, parse_profile
from neuronpipe.plans.measure import benchmark_processes, benchmark_slots, kernel_speed
from neuronpipe.plans.measure import flash_reads as flash
from neuronpipe.plans.measure import machine_load as busy
from neuronpipe.plans.measure.benchmark_processes import BenchmarkProcess, measure_together
from neuronpipe.plans.measure.benchmark_slots import Neurons, allocate_benchmark_memory, largest_cache_bytes
from neuronpipe.plans.measure.device_measurement import Effort, measure_flash, measure_profile
from neuronpipe.plans.measure.flash_reads import read_cases
from neuronpipe.plans.measure.kernel_speed import (
    ATTENTION,
    KINDS,
    all_cases,
    kernel_cases,
    kernel_cases_of_all,
    profile_cases,
)
from neuronpipe.plans.measure.probe import this_device
from neuronpipe.plans.package.layout import Quantization, compute_layout
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

from tests.unit.test_cost import mixed_manifest
from tests.unit.test_device_profile import profile

MIB = 1 << 20


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much memory for kernels as their workers need: more takes time to fill, and is there for exact figures."""
    needed = (os.cpu_count() or 1) * benchmark_slots.WORKER_BYTES
    unit = benchmark_slots.MIN_BYTES
    monkeypatch.setattr(benchmark_slots, "MAX_BYTES", -(-needed // unit) * unit)


def test_benchmark_processes_measure_in_step_and_on_its_cores() -> None:
    def work(member: BenchmarkProcess) -> Iterator[Sequence[float]]:
        for turn in range(3):
            member.meet()
            yield [turn, member.index, float(os.sched_getaffinity(0) == {member.core})]

    core = min(os.sched_getaffinity(0))
    assert list(measure_together([core, core], work)) == [[[n, 0, 1.0], [n, 1, 1.0]] for n in range(3)]


def test_whoever_waits_for_benchmark_processes_hears_of_each_measurement_and_that_time_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(benchmark_processes, "HEARTBEAT_S", 0.01)
    told: list[int] = []

    def work(member: BenchmarkProcess) -> Iterator[Sequence[float]]:
        yield [1.0]
        time.sleep(0.2)
        yield [2.0]

    assert list(measure_together([None], work, told.append)) == [[[1.0]], [[2.0]]]
    assert sum(told) == 2
    assert told[-2:] == [0, 1]


def test_a_member_that_fails_ends_the_measurement_with_what_it_said() -> None:
    def work(member: BenchmarkProcess) -> Iterator[Sequence[float]]:
        yield [1.0]
        if member.index == 1:
            raise UserError("bundles.bin: reading failed")
        member.meet()  # waits for who will not come
        yield [2.0]

    with pytest.raises(UserError, match=r"bundles.bin: reading failed; close other programs"):
        list(measure_together([None, None], work))


def test_a_member_that_is_killed_does_not_hang_the_others() -> None:
    def work(member: BenchmarkProcess) -> Iterator[Sequence[float]]:
        if member.index == 1:
            os.kill(os.getpid(), 9)
        member.meet()
        yield [1.0]

    started = time.monotonic()
    with pytest.raises(UserError, match="was killed"):
        list(measure_together([None, None], work))
    assert time.monotonic() - started < 10


def test_processes_that_measured_for_us_do_not_count_as_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc").mkdir()
    ticks = os.sysconf("SC_CLK_TCK")
    times = [os.times_result((0.0, 0.0, 0.0, 0.0, 0.0)), os.times_result((1.0, 0.0, 5.0, 1.0, 10.0))]
    monkeypatch.setattr(busy.os, "times", lambda: times[0])
    stat = tmp_path / "proc/stat"
    stat.write_text("cpu 0 0 0 0 0 0 0 0\n")
    looked = busy.MachineLoad(tmp_path)
    stat.write_text(f"cpu {8 * ticks} 0 0 {2 * ticks} 0 0 0 0\n")
    times.pop(0)
    assert looked.processor_share() == pytest.approx(0.1)  # of 10 s, 8 were used, 7 of them by us


def test_rows_lie_where_a_package_has_them() -> None:
    start = 1 << 40
    neurons = Neurons("q4", 4096, start, 16 * MIB)
    layout = compute_layout("q4", 4096, 14336, ("gate", "up", "down"), "frequency")
    trigger, value = (layout.slot_bytes(part, "q4", 4096) for part in ("trigger", "value"))
    assert layout.cluster_neurons == 1
    clusters = 16 * MIB // (trigger + value)
    assert neurons.blocks == clusters // layout.block_clusters
    address = lambda pointer: int(ffi.cast("uintptr_t", pointer))  # noqa: E731
    for matrix, place in enumerate(layout.matrices):
        rows = neurons.rows(matrix, [5, 7])
        base = {"trigger": start, "value": start + clusters * trigger}
        size = {"trigger": trigger, "value": value}
        for n, cluster in enumerate((5, 7)):
            assert address(rows.quants[n]) == base[place.part] + cluster * size[place.part] + place.quants
            assert address(rows.scales[n]) == base[place.scales_part] + cluster * size[place.scales_part] + place.scales


def test_the_turns_of_a_share_have_every_neuron_once() -> None:
    neurons = Neurons("q8", 2048, 1 << 40, 16 * MIB)
    turns = [neurons.sample_block(0, 0.1, turn) for turn in range(10)]
    assert all(turn == sorted(turn) for turn in turns)
    chosen = [neuron for turn in turns for neuron in turn]
    assert len(chosen) == len(set(chosen))
    assert len(chosen) >= 0.97 * neurons.block_neurons


def test_benchmark_memory_is_larger_than_the_caches_where_memory_allows(tmp_path: Path) -> None:
    for index, text in enumerate(("32K", "1024K", "128M", "nonsense")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(text + "\n")
    assert largest_cache_bytes(tmp_path) == 128 * MIB
    assert largest_cache_bytes(tmp_path / "none") == 0
    memory = allocate_benchmark_memory(16 * 100 * MIB, 128 * MIB, 2)
    assert memory is not None
    assert len(memory.content) == 64 * MIB  # no more than a sixteenth of what is available
    assert memory.content[:1] == memory.content[-1:] == b"\x11"
    assert allocate_benchmark_memory(16 * 63 * MIB, 0, 1) is None
    assert allocate_benchmark_memory(16 * 64 * MIB, 0, 8) is None


def test_kernels_are_not_measured_while_their_memory_is_touched_for_the_first_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repetition = kernel_speed._Bench.repetition

    def page_faults(bench: kernel_speed._Bench, *arguments: Any) -> tuple[list[float], int]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        _, block = repetition(bench, *arguments)
        return [1 + resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before], block

    monkeypatch.setattr(kernel_speed._Bench, "repetition", page_faults)
    monkeypatch.setattr(benchmark_slots, "collapse", lambda content: None)  # huge pages fault less than Python does
    memory = allocate_benchmark_memory(1 << 40, 0, 1, usual_bytes=64 << 20)
    assert memory is not None
    matrix = kernel_speed.Case("matrix", "q4", 1024, 1.0)
    (point,) = kernel_speed.measure_kernels(memory, [None], "big", [matrix], rounds=1, budget_s=0.05)
    assert isinstance(point, DecodePoint)
    assert point.bytes_per_s.median < 500, "page faults of a repetition; 1,060 at the first touch, 16 pages each"


def test_flash_is_measured_by_range_order_and_class_as_far_as_the_file_goes() -> None:
    classes = [CoreClass(kind=kind, cores=(n,), capacity=1, measured=n) for n, kind in enumerate(("big", "little"))]
    cases = read_cases(4 << 30, classes)  # type: ignore[arg-type]
    assert {case.range_bytes for case in cases} == {128 * MIB, 512 * MIB, 4 << 30}
    assert {case.kind for case in cases} == {None, "big", "little"}
    assert any(case.sequential for case in cases)
    small = read_cases(2 * MIB, classes[:1])  # type: ignore[arg-type]
    assert {case.range_bytes for case in small} == {2 * MIB}
    assert max(case.request_bytes for case in small) == 2 * MIB // flash.MIN_PLACES
    assert {case.kind for case in small} == {None}  # of one class there is nothing to compare


def test_reads_stay_within_their_range_and_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bundles.bin"
    path.write_bytes(os.urandom(2 * MIB))
    seen: list[int] = []
    submit = flash.lib.np_reader_submit

    class Watched:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def np_reader_submit(self, reader: object, offsets: list[int], *rest: object) -> int:
            seen.extend(offsets)
            return int(submit(reader, offsets, *rest))

    real = flash.lib
    monkeypatch.setattr(flash, "lib", Watched())
    cases = [flash.ReadCase(8192, 1, MIB), flash.ReadCase(8192, 1, 2 * MIB, sequential=True)]
    for case in cases:
        seen.clear()
        flash.measure_reads(path, [case], rounds=1, budget_s=0.1)
        assert max(seen) + 8192 <= case.range_bytes
        steps = {after - before for before, after in itertools.pairwise(seen)}
        assert (8192 in steps and all(step == 8192 or step < 0 for step in steps)) == case.sequential


@pytest.mark.slow
@pytest.mark.usefixtures("little_memory")
def test_once_through_everything_with_little_of_each(tmp_path: Path) -> None:
    (tmp_path / "bundles.bin").write_bytes(os.urandom(4 * MIB))
    shapes = all_cases((("q4", 2048),))
    effort = Effort(rounds=1, flash_rounds=1, pace=0.01, kernels=shapes)
    told: list[tuple[int, int]] = []
    profile = measure_profile(tmp_path, effort=effort, progress=lambda done, total: told.append((done, total)))
    assert parse_profile(profile.to_json().encode(), "p") == profile
    assert told[-1][0] == told[-1][1]
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert profile.dram_bytes_per_s(1) > 1e8
    assert {point.kind for point in profile.decode} == {
        k for kind in ("matrix", "exact", "predicted") for k in KINDS[kind]
    }
    assert {point.tokens for point in profile.panels} == {8, 16, 64, 512}
    assert {point.kind for point in profile.reused} == {"ups", "downs", "attended"}
    assert profile.reused_token_weights_per_s("attended", 1, 1.0, quantization="f16", row_weights=64) > 1e9
    assert profile.flash is not None
    assert {cost.request_bytes for cost in profile.flash.costs} == {4096, 16384}  # of 64 KiB the file has too few
    assert {one.same_core for one in profile.sharing} >= {True}
    assert [wait.workers for wait in profile.messages] == list(range(1, profile.decode_workers + 1))
    assert profile.decode_bytes_per_s("downs", 1, 0.1, row_weights=2048) > 0


@pytest.mark.parametrize("quantization", ["q4", "q4k", "q6k", "iq4", "q5h"])
def test_a_profile_for_a_package_has_the_kernels_of_its_quantization(quantization: Quantization) -> None:
    manifest = dataclasses.replace(Package.open(DEMO).manifest, quantization=quantization)
    cases = profile_cases(manifest)
    assert set(all_cases()) <= set(cases)
    of_package = {case.kind for case in cases if case.quantization == quantization}
    assert of_package == {"matrix", "exact", "predicted", "reused", "panel"}
    assert len(cases) == len(all_cases()) + (0 if quantization in ("q4", "q4k") else 13)


def test_rows_of_a_model_whose_neurons_all_fire_are_measured_all() -> None:
    """Half of them took up to 1.4 times as long for each byte, so SiLU models seemed a third slower than they are.
    Downs of a prompt are added for several tokens at once."""
    relu = Package.open(DEMO).manifest
    silu = dataclasses.replace(relu, model=dataclasses.replace(relu.model, activation="silu"))
    assert {case.amount for case in kernel_cases(silu) if case.kind == "exact"} == {0.5, 1.0}
    assert {case.amount for case in kernel_cases_of_all([silu]) if case.kind in ("exact", "reused")} == {1.0}
    assert [case for case in kernel_cases_of_all([silu]) if case.kind == "attended"] == list(ATTENTION)
    assert {case.amount for case in kernel_cases_of_all([relu, silu]) if case.kind == "exact"} == {0.5, 1.0}
    assert {case.amount for case in all_cases() if case.kind == "exact"} == {0.1, 0.5, 1.0}


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_profile_has_the_kernels_of_each_matrix_of_its_package(is_whole: bool) -> None:
    """Down in q5k took the time of q4k, and the output in q6k as well."""
    manifest = mixed_manifest(is_whole=is_whole)
    assert {"q4k", "q5k", "q6k"} <= {case.quantization for case in profile_cases(manifest)}
    brief = [(case.kind, case.quantization) for case in kernel_cases(manifest)]
    assert {("matrix", "q4k"), ("matrix", "q6k"), ("panel", "q4k")} <= set(brief)
    of_down = {kind for kind, quantization in brief if quantization == "q5k"}
    assert of_down == ({"matrix", "panel"} if is_whole else {"exact", "reused"})
    assert len(kernel_cases(manifest)) == len(set(kernel_cases(manifest)))


@pytest.mark.nightly
@pytest.mark.usefixtures("little_memory")
def test_flash_alone_is_measured_again_and_the_rest_stays(tmp_path: Path) -> None:
    effort = Effort(rounds=1, flash_rounds=1, pace=0.01, kernels=all_cases((("q4", 2048),))[:1])
    before = measure_profile(tmp_path, effort=effort)
    with pytest.raises(UserError, match="too small to measure flash with"):
        measure_flash(before, tmp_path, effort=effort)
    (tmp_path / "bundles.bin").write_bytes(os.urandom(4 * MIB))
    told: list[tuple[int, int]] = []
    after = measure_flash(before, tmp_path, effort=effort, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]
    assert after.flash is not None
    assert after.flash.costs
    assert dataclasses.replace(after, flash=None, busy=before.busy) == before


@pytest.mark.usefixtures("little_memory")
def test_without_a_package_there_is_all_but_flash(tmp_path: Path) -> None:
    effort = Effort(rounds=1, flash_rounds=1, pace=0.01, kernels=all_cases((("q4", 2048),))[:1])
    profile = measure_profile(tmp_path, effort=effort)
    assert profile.flash is None
    assert profile.sharing == ()
    assert profile.decode


@pytest.mark.parametrize(("before", "during_steps", "busy"), [(0.05, 0.4, 0.4), (0.3, 0.01, 0.3)])
def test_a_load_that_begins_while_steps_are_measured_counts(
    before: float, during_steps: float, busy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile with steps of 2.7 times their kernels, measured beside another program, was kept for 30 days."""
    order = []

    class Load:
        def __init__(self) -> None:
            order.append("load")

        def processor_share(self) -> float:
            return during_steps

    def measured(*_: Any, **__: Any) -> Any:
        order.append("profile")
        return dataclasses.replace(profile(), busy=before)

    def with_steps(measured: DeviceProfile, *_: Any) -> DeviceProfile:
        order.append("steps")
        return measured

    monkeypatch.setattr(device_profile, "measure_profile", measured)
    monkeypatch.setattr(device_profile, "MachineLoad", Load)
    monkeypatch.setattr(device_profile, "with_steps", with_steps)
    result = device_profile.measure_device_profile(Path("/nowhere"), this_device(), None)
    assert result.busy == busy
    assert order == ["profile", "load", "steps"]
