"""A plan for a phone that is not here: its device profile, unequal cores, no io_uring, little that may be locked."""

from __future__ import annotations

import dataclasses

from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.device.cores import classify, most_decode_workers, restricted
from neuronpipe.plans.device.device import Device, FlashCurve, FlashPoint
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.plan import Plan
from neuronpipe.plans.plan.planner import Wanted, device_facts, plan

GIB = 1 << 30
CAPACITIES = {0: 325, 1: 325, 2: 830, 3: 830, 4: 830, 5: 830, 6: 830, 7: 1024}
PHONE = Device(
    architecture="aarch64",
    instruction_set="dotprod",
    cores=classify(CAPACITIES, "capacity", CAPACITIES),
    cpu_quota=None,
    memory_total_bytes=12 * GIB,
    memory_available_bytes=2 * GIB,
    page_bytes=4096,
    memlock_bytes=64 << 10,
    io_uring=False,
    flash=FlashCurve(
        engine="threads",
        direct=True,
        points=tuple(
            FlashPoint(request_bytes=size << 10, depth=depth, bytes_per_s=speed * 1e6)
            for size, speeds in ((4, (60, 850)), (8, (110, 1200)), (64, (600, 2500)))
            for depth, speed in zip((1, 32), speeds, strict=True)
        ),
    ),
)


def planned(device: Device) -> Plan:
    return plan(Package.open(DEMO).manifest, device_facts(device), Wanted())


def cores(made: Plan) -> dict[str, int | None]:
    return {f"{process.role}.{process.index}": process.core for process in made.compute.processes}


def test_fast_cores_compute_and_slow_ones_pass_messages_on() -> None:
    processes = cores(planned(PHONE))
    assert [processes[f"decode.{n}"] for n in range(5)] == [2, 3, 4, 5, 6]
    assert "decode.5" not in processes
    assert processes["loader.0"] == 7
    assert {processes["coordinator.0"], processes["cache.0"]} == {0, 1}


def test_flash_is_read_by_threads_and_memory_is_a_share_of_what_is_available() -> None:
    made = planned(PHONE)
    assert made.flash.engine == "threads"
    assert made.memory.limit_bytes == int(0.7 * 2 * GIB)


def test_an_app_out_of_sight_is_planned_on_the_slow_cores_it_is_left_with() -> None:
    left = dataclasses.replace(PHONE, cores=classify(CAPACITIES, "capacity", {0, 1}))
    assert set(cores(planned(left)).values()) <= {0, 1, None}
    assert left.id != PHONE.id


def test_a_quota_of_less_than_the_fast_cores_means_fewer_workers() -> None:
    processes = cores(planned(dataclasses.replace(PHONE, cpu_quota=2.5)))
    assert [name for name in processes if name.startswith("decode")] == ["decode.0", "decode.1"]


def test_cores_that_were_named_are_the_only_ones_that_processes_are_pinned_to() -> None:
    allowed = restricted(PHONE.cores, {0, 3, 4, 7})
    facts = device_facts(PHONE, cores=allowed)
    assert facts.id == PHONE.id  # the same machine: plans and profiles made for it still hold
    pinned = {process.core for process in facts.processes}
    assert pinned == {0, 3, 4, 7}
    assert sum(process.role == "decode" for process in facts.processes) == 3
    assert most_decode_workers(allowed) == 3
    assert most_decode_workers(PHONE.cores, 2.5) == 2


def test_a_core_that_is_not_allowed_stays_so() -> None:
    left = classify(CAPACITIES, "capacity", {0, 1, 2})
    assert [core.id for core in restricted(left, {2, 7}) if core.allowed] == [2]
