"""What a plan expects flash to cost a token: by when the reads are named, and while workers compute or wait."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
from neuronpipe.launch.profile.steps import MIN_US, _Reading
from neuronpipe.plans.cost.activation_rates import rates
from neuronpipe.plans.cost.io_wait import IoWait, IssueTime, Reads, backlog
from neuronpipe.plans.cost.read_sizes import ClusterDemand
from neuronpipe.plans.cost.token_time import decode_reads
from neuronpipe.plans.cost.work_cost import WorkCost
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.measured_points import ReadDelay, ReadFactor
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.lab.devices.device_description import planner_device
from neuronpipe.plans.lab.devices.device_file import read_device
from neuronpipe.plans.lab.shapes.models import model_named
from neuronpipe.plans.lab.shapes.shape_manifest import manifest_of_shape
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Expected, Plan
from neuronpipe.plans.planner.device_facts import DeviceFacts, device_facts
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.plans.planner.search import UNLIMITED_BYTES

from tests.unit.test_device_profile import profile
from tests.unit.test_planner import GIB, SPEED, device, manifest, predicted

LAYERS = 8
M = predicted(manifest(width=4096, neurons=14336, layers=LAYERS, order="frequency"))


def with_read_delay(us: float) -> DeviceProfile:
    """Figures of a run on this device's two workers, and no kernels: those follow memory's speed."""
    delay = ReadDelay(together=False, workers=2, us=Figure(median=us, spread=0.0))
    return dataclasses.replace(profile(), read_delays=(delay,), steps=(), decode=(), dram=())


def planned(measured: DeviceProfile | None, **wishes: object) -> Plan:
    facts: DeviceFacts = dataclasses.replace(device(memory_bytes=8 * GIB), profile=measured, memory_speed=SPEED)
    return make_plan(M, facts, PlanOptions(**wishes))  # type: ignore[arg-type]


def exposed_ms(expected: Expected) -> float:
    assert expected.exposed_flash_ms_per_token is not None
    return expected.exposed_flash_ms_per_token


def test_a_value_row_that_a_late_gate_names_is_waited_for_however_much_is_computed() -> None:
    made = planned(None, mode="exact", ffn_resident_share=0.85)
    assert made.memory.trigger_slots == M.clusters  # so nothing is read ahead
    assert made.expected.flash_ms_per_token is not None
    assert made.expected.sequential_ms_per_token is not None
    assert made.expected.flash_ms_per_token < made.expected.sequential_ms_per_token / 2  # attention could hide it all
    assert exposed_ms(made.expected) > 0


def test_what_a_read_takes_in_a_run_is_waited_for_in_every_layer() -> None:
    short, long = (planned(with_read_delay(us), mode="exact", ffn_resident_share=0.85).expected for us in (1e4, 2e4))
    assert exposed_ms(long) - exposed_ms(short) == pytest.approx(10 * LAYERS, rel=0.01)


def test_triggers_that_do_not_stay_are_read_for_every_token() -> None:
    """They come in turn, so that each is gone before its next one. A 1B, a quarter resident: 85.0 % were missed with
    15.0 % pinned, and 79.0 % with 21.0 %, though slots held 25 and 31 %."""
    for share in (0.25, 0.4, 0.6):
        made = planned(None, mode="exact", ffn_resident_share=share, bundle=True)
        pinned = sum(made.memory.pins_for(1).counts(M.model.ffns)[0])
        assert pinned < 0.8 * made.memory.trigger_slots < M.clusters
        assert made.expected.miss_rate == pytest.approx(1 - pinned / M.clusters, abs=1e-3)


def test_the_delay_of_a_read_is_found_from_what_was_waited_for_it() -> None:
    waiting = IoWait(WorkCost(M, "exact", 2, True, device().flash, SPEED), LAYERS, depth=32)
    for named in (IssueTime.TOGETHER, IssueTime.ONE_BY_ONE):
        for reads in (2 * LAYERS, 60 * LAYERS):
            found = Reads(named, reads, reads * 8192, hidden_ms=4.0)
            for delay_ms in (0.1, 0.4, 3.0):
                waited_ms = waiting.exposed_ms(found, delay_ms)
                assert waited_ms is not None
                assert waiting.delay_ms(found, waited_ms) == pytest.approx(delay_ms, rel=1e-6)


def test_a_whole_expert_that_is_missed_is_waited_for_though_few_layers_miss_one() -> None:
    waiting = IoWait(WorkCost(M, "exact", 2, True, device().flash, SPEED), LAYERS, depth=32)
    spread = Reads(IssueTime.TOGETHER, 40.0, 40.0 * (256 << 10), hidden_ms=1.0 * LAYERS)
    whole = dataclasses.replace(spread, group_reads=20.0, layer_groups=4.0)  # of 32 experts two are missed
    spread_ms, whole_ms, flash_ms = waiting.exposed_ms(spread), waiting.exposed_ms(whole), waiting.flash_ms(whole)
    assert spread_ms is not None
    assert whole_ms is not None
    assert flash_ms is not None
    delay_ms = waiting.cost.read_delay_ms(together=True)
    assert spread_ms < whole_ms
    assert whole_ms == pytest.approx(flash_ms + 2 * (delay_ms - 1.0), rel=0.05)
    every = dataclasses.replace(whole, reads=20.0 * 4 * LAYERS, read_bytes=20.0 * 4 * LAYERS * (256 << 10))
    every_ms, of_all_ms = waiting.exposed_ms(every), waiting.flash_ms(every)
    assert of_all_ms is not None
    assert every_ms == pytest.approx(of_all_ms + LAYERS * (delay_ms - 1.0))
    # Layers of a batch access 3.4 experts on average: all missed ones are waited for.
    mean = dataclasses.replace(every, reads=20.0 * 3.4 * LAYERS, layer_groups=3.4)
    mean_ms, of_mean_ms = waiting.exposed_ms(mean), waiting.flash_ms(mean)
    assert of_mean_ms is not None
    assert mean_ms == pytest.approx(of_mean_ms + LAYERS * (delay_ms - 1.0), rel=0.02)


def test_experts_of_which_all_neurons_fire_are_read_whole_if_most_are_resident() -> None:
    """In parts a Phi-3.5-MoE at 60 % took 4,752 reads of 25 KB a token where 446 of 262 KB bring the same bytes."""
    shape = manifest_of_shape(model_named("phi-3.5-moe"))
    slots_bytes = int(0.6 * shape.clusters * (shape.trigger_slot_bytes + shape.value_slot_bytes))
    (demand, *_) = ClusterDemand.of(shape, rates(shape, "exact"), slots_bytes)
    assert demand.triggers_stay == demand.values_stay == demand.pairs_stay == pytest.approx(0.6, abs=0.01)
    phone = device_facts(planner_device(read_device("oneplus-12"), shape))
    options = PlanOptions(memory_bytes=UNLIMITED_BYTES, ffn_resident_share=0.6, context_tokens=1024)
    assert make_plan(shape, phone, options).flash.bundle


def test_a_loader_on_a_workers_core_serves_reads_while_the_workers_are_slowed_by_it() -> None:
    """As if none were served meanwhile, a 1B at 60 % in exact mode was planned at 20.8 tokens/s, and reached 26.4."""
    alone, shared, one_core = (
        WorkCost(M, "exact", workers, shares_core, device().flash, SPEED)
        for workers, shares_core in ((2, False), (2, True), (1, True))
    )
    assert alone.stolen_ms(5.0, 2.0) == 0.0
    assert shared.stolen_ms(1.0, 2.0) == 0.5
    assert shared.stolen_ms(5.0, 2.0) == 2.0  # one core is the loader's, and the other computes what both would
    assert one_core.stolen_ms(5.0, 2.0) == 5.0
    found = Reads(IssueTime.ONE_BY_ONE, 60 * LAYERS, 60 * LAYERS * 8192, hidden_ms=1.0 * LAYERS)
    own_ms, shared_ms = (IoWait(cost, LAYERS, depth=32).exposed_ms(found) for cost in (alone, shared))
    assert own_ms is not None
    assert shared_ms is not None
    assert 0 < shared_ms < own_ms


def test_a_loader_on_a_core_of_its_own_has_only_what_exceeds_the_time_left_at_the_end() -> None:
    """Reads that gates name one by one were expected to wait for all others of their layer, as if none were served
    while the workers compute: a 7B on a phone was planned at 10.8 tokens/s, and its simulation had 15.3."""
    assert backlog(0, 7.0, 1000.0) == 0.0
    assert backlog(10, 7.0, 1000.0) < 1.0
    assert backlog(400, 7.0, 1000.0) == pytest.approx(400 * 7.0 - 1000.0, rel=0.01)
    assert backlog(100, 10.0, 1000.0) == pytest.approx(10.0 * (2 * 100 / math.pi) ** 0.5, rel=1e-3)
    lefts = [backlog(reads, 10.0, 1000.0) for reads in range(0, 200, 5)]
    assert lefts == sorted(lefts)


@pytest.mark.parametrize("shares_core", [False, True])
def test_reads_take_as_long_as_the_loader_works_on_them(shares_core: bool) -> None:
    cost, many = WorkCost(M, "predicted", 2, shares_core, device().flash, SPEED), 1000
    for size in (4096, 1 << 20):
        flash_ms, loader_ms = cost.flash_ms(many, many * size, many, 32), many * (6.0 + 0.25 * size / 1024) / 1e3
        assert cost.storage_ms(many, many * size, many, 32) == max(flash_ms or 0.0, loader_ms)


def test_a_burst_takes_what_one_read_takes_and_for_each_other_what_it_takes_among_them() -> None:
    curve = device().flash
    assert curve is not None
    cost = WorkCost(M, "predicted", 2, True, curve, SPEED)
    one_ms, each_ms = (1e3 * 8192 / curve.bytes_per_s(8192, depth) for depth in (1, 16))
    assert cost.flash_ms(16, 16 * 8192, 16, depth=32) == pytest.approx(one_ms + 15 * each_ms)
    assert cost.flash_ms(64, 64 * 8192, 16, depth=32) == pytest.approx(4 * (one_ms + 15 * each_ms))


def test_a_read_in_a_run_takes_as_many_times_the_processor_time_as_was_measured() -> None:
    alone = profile()
    factor = ReadFactor(workers=2, factor=Figure(median=3.0, spread=0.0))
    costs = (
        WorkCost(M, "predicted", 2, True, device().flash, SPEED, one)
        for one in (alone, dataclasses.replace(alone, read_factors=(factor,)))
    )
    one_ms, other_ms = (cost.read_overhead_ms(100, 100 * 8192, 10) for cost in costs)
    assert one_ms > 0
    assert other_ms == pytest.approx(3 * one_ms)


def test_reads_named_together_are_hidden_by_the_work_that_follows_them() -> None:
    few, many = (planned(None, mode="predicted", ffn_resident_share=share).expected for share in (0.9, 0.4))
    for expected in (few, many):
        assert expected.flash_ms_per_token is not None
        assert 0 < exposed_ms(expected) < expected.flash_ms_per_token
    hidden = [1 - exposed_ms(e) / (e.flash_ms_per_token or 1.0) for e in (few, many)]
    assert hidden[0] > 2 * hidden[1]


def test_while_workers_wait_reading_takes_nothing_from_them() -> None:
    alike = [planned(with_read_delay(us), mode="exact", ffn_resident_share=0.5).expected for us in (1.0, 100_001.0)]
    assert alike[0].flash_reads_per_token == alike[1].flash_reads_per_token
    assert alike[1].overhead_ms_per_token < alike[0].overhead_ms_per_token / 2


def test_a_read_that_is_not_late_in_a_run_makes_a_profile_all_the_same() -> None:
    """6e-9 us were found of it once, which a profile refuses."""
    delay = ReadDelay(together=False, workers=2, us=Figure.of([MIN_US]))
    measured = dataclasses.replace(profile(), read_delays=(delay,))
    assert measured.read_delay_us(2, together=False) == pytest.approx(MIN_US)


# ---- what a run's rows say of reads (launch/profile/steps.py) --------------------------------------------------------
TOKENS = 48


def reading(reads_per_token: int, exposed_share: float, loading_s: float) -> _Reading:
    """Three repetitions that went alike, of tokens of 20 ms and reads of 8 KiB."""
    row = {
        "flash_reads_per_token": float(reads_per_token),
        "flash_bytes_per_token": reads_per_token * 8192.0,
        "exposed_io_share": exposed_share,
        "tokens_per_s": 50.0,
    }
    package = cast("Package", SimpleNamespace(manifest=M))
    made = planned(profile(), mode="exact", ffn_resident_share=0.85)
    return _Reading(package, made, TOKENS, [row] * 3, [loading_s] * 3)


def test_reads_in_a_run_take_as_many_times_the_processor_time_as_its_loader_took() -> None:
    alone_us = profile().read_cpu_us(8192, 64 / LAYERS)
    assert alone_us > 0
    (found,) = reading(64, 0.1, TOKENS * 64 * 3.5 * alone_us / 1e6).factors(profile())
    assert (found.workers, found.factor.median, found.factor.spread) == (2, pytest.approx(3.5), 0)


def test_what_a_run_waited_for_reads_gives_their_delay_back() -> None:
    here: Any = dataclasses.replace(device(memory_bytes=8 * GIB), profile=profile(), memory_speed=SPEED)
    one = reading(64, 0.0, 1.0)
    known = (
        one.plan_document.compute,
        one.plan_document.memory,
        one.plan_document.flash,
        here.flash,
        here.memory_speed,
        here.profile,
    )
    waiting, named = decode_reads(M, rates(M, "exact"), *known, tokens=TOKENS // 2)
    waited_ms = waiting.exposed_ms(dataclasses.replace(named, reads=64, read_bytes=64 * 8192), 0.25)
    assert waited_ms is not None
    (found,) = reading(64, waited_ms / 20, 1.0).delays(here)
    assert (found.together, found.workers, found.us.median) == (False, 2, pytest.approx(250, rel=1e-3))
    (none,) = one.delays(here)
    assert none.us.median == pytest.approx(MIN_US), "nothing was waited for"


def test_too_few_reads_say_nothing() -> None:
    few = reading(LAYERS - 1, 0.1, 1.0)
    assert (few.factors(profile()), few.delays(cast("Any", None))) == ((), ())
