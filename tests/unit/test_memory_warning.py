"""A plan beside the memory there is, read from files as machines and control groups show them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from neuronpipe.launch.arguments.command_line import parse
from neuronpipe.launch.arguments.plan_arguments import plan_options
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.planning.memory_check import memory_warning
from neuronpipe.launch.planning.plan import PlanResult, plan_for
from neuronpipe.launch.planning.search import Subject
from neuronpipe.plans.device.process_limits import Memory, read_memory
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan
from neuronpipe.plans.planner.device_facts import device_facts
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.protocol.errors import UserError

from tests.unit.test_device_limits import write
from tests.unit.test_phone_plan import PHONE

MIB, GIB = 1 << 20, 1 << 30
MACHINE = {"proc/meminfo": f"MemTotal: {8 * GIB // 1024} kB\nMemAvailable: {6 * GIB // 1024} kB"}


def group(limit_bytes: int, used_bytes: int) -> dict[str, str]:
    return {
        "proc/self/cgroup": "0::/app",
        "sys/fs/cgroup/app/memory.max": str(limit_bytes),
        "sys/fs/cgroup/app/memory.current": str(used_bytes),
    }


@pytest.fixture(scope="module")
def whole() -> Plan:
    """Everything of the demo resident, by a limit that no phone has."""
    return make_plan(Package.open(DEMO).manifest, device_facts(PHONE), PlanOptions(memory_bytes=100 * GIB))


def warning(made: Plan, memory: Memory) -> str | None:
    device = dataclasses.replace(
        PHONE, memory_total_bytes=memory.total_bytes, memory_available_bytes=memory.available_bytes
    )
    return memory_warning(made, device, made.memory.least_bytes)


def test_a_limit_beyond_all_memory_is_no_harm_where_the_plan_takes_less(whole: Plan, tmp_path: Path) -> None:
    assert whole.memory.limit_bytes > 8 * GIB > whole.memory.total_bytes()
    assert warning(whole, read_memory(write(tmp_path, MACHINE))) is None


def test_a_plan_that_takes_more_than_the_control_group_may_have_is_refused(whole: Plan, tmp_path: Path) -> None:
    limit = whole.memory.total_bytes() - 2 * MIB
    memory = read_memory(write(tmp_path, {**MACHINE, **group(limit, used_bytes=MIB)}))
    takes, there_is = whole.memory.total_bytes() / MIB, limit / MIB
    with pytest.raises(UserError, match=rf"takes {takes:.1f} MiB, and all memory .* is {there_is:.1f} MiB: .*--memory"):
        warning(whole, memory)


def test_the_limit_that_is_advised_is_accepted(whole: Plan, tmp_path: Path) -> None:
    memory = read_memory(write(tmp_path, {**MACHINE, **group(whole.memory.total_bytes() - 1, used_bytes=MIB)}))
    with pytest.raises(UserError) as refused:
        warning(whole, memory)
    advised = int(str(refused.value).partition("--memory ")[2].partition("MiB")[0])
    less = make_plan(Package.open(DEMO).manifest, device_facts(PHONE), PlanOptions(memory_bytes=advised * MIB))
    assert warning(less, memory) is None


def test_a_plan_that_takes_what_other_programs_have_is_warned_of(whole: Plan, tmp_path: Path) -> None:
    memory = read_memory(write(tmp_path, {**MACHINE, **group(8 * GIB - 1, used_bytes=8 * GIB - 100 * MIB)}))
    said = warning(whole, memory)
    assert said is not None
    assert "100.0 MiB of 8.00 GiB are available now" in said


def test_where_no_limit_that_fits_is_enough_the_least_is_named(whole: Plan, tmp_path: Path) -> None:
    memory = read_memory(write(tmp_path, {**MACHINE, **group(20 * MIB, used_bytes=0)}))
    with pytest.raises(UserError, match=rf"needs {whole.memory.least_bytes / MIB:.1f} MiB at least"):
        warning(whole, memory)


def test_the_least_that_is_named_is_the_least_that_works() -> None:
    demo = Package.open(DEMO)

    def made(*words: str) -> PlanResult:
        subject = Subject(manifest=demo.manifest, read_activity=demo.read_activity, device=PHONE)
        return plan_for(subject, plan_options(parse(["plan", *words])), several=False, gateway=False)

    roomy = made()
    assert len(roomy.plan.compute.decode_workers()) > 1
    least = roomy.min_limit_bytes
    assert least < roomy.plan.memory.least_bytes  # a run with one worker needs less
    assert made("--memory", str(least)).min_limit_bytes == least
    with pytest.raises(UserError, match=f"the least for this package is {least:,} bytes"):
        made("--memory", str(least - 1))
    little = dataclasses.replace(PHONE, memory_total_bytes=90 * MIB, memory_available_bytes=20 * MIB)
    with pytest.raises(UserError, match=rf"needs {least / MIB:.1f} MiB at least"):
        memory_warning(roomy.plan, little, least)


def test_a_machine_that_does_not_say_how_much_there_is_refuses_nothing(whole: Plan, tmp_path: Path) -> None:
    assert warning(whole, read_memory(tmp_path)) is None
