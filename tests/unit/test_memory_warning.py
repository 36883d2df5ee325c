"""A plan beside the memory there is, read from files as machines and control groups show them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from neuronpipe.launch.arguments.command_line import parse
from neuronpipe.launch.arguments.plan_arguments import plan_options
from neuronpipe.launch.arguments.values import parse_bytes
from neuronpipe.launch.formats import show_min_bytes
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.planning.memory_check import memory_warning
from neuronpipe.launch.planning.plan import PlanResult, plan_for
from neuronpipe.launch.planning.search import Subject
from neuronpipe.plans.device.process_limits import Memory, read_memory
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan
from neuronpipe.plans.planner.device_facts import device_facts
from neuronpipe.plans.planner.plan_options import UNIT_BYTES, LimitTooSmall, PlanOptions, size_to_type
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
    with pytest.raises(UserError, match=rf"needs {show_min_bytes(whole.memory.least_bytes)} at least"):
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
    with pytest.raises(UserError, match=f"the least for this package is {least} bytes: "):
        made("--memory", str(least - 1))
    little = dataclasses.replace(PHONE, memory_total_bytes=90 * MIB, memory_available_bytes=20 * MIB)
    with pytest.raises(UserError, match=rf"needs {show_min_bytes(least)} at least"):
        memory_warning(roomy.plan, little, least)


def test_a_machine_that_does_not_say_how_much_there_is_refuses_nothing(whole: Plan, tmp_path: Path) -> None:
    assert warning(whole, read_memory(tmp_path)) is None


@pytest.mark.parametrize(
    "typed",
    ["2097152", "2097152B", "2048K", "2048kib", "2100KB", "2M", "2.5MiB", "2.5mb", "0.01G", "0.01GiB", "0.01GB"],
)
def test_a_refusal_answers_in_the_typed_unit_with_a_limit_that_is_accepted(typed: str) -> None:
    demo = Package.open(DEMO)

    def made(text: str) -> PlanResult:
        subject = Subject(manifest=demo.manifest, read_activity=demo.read_activity, device=PHONE)
        return plan_for(subject, plan_options(parse(["plan", "--memory", text])), several=False, gateway=False)

    with pytest.raises(LimitTooSmall, match=f"^--memory {typed}: the least for this package is ") as refused:
        made(typed)
    suggested = str(refused.value).split(" package is ")[1].split(": ")[0]
    letters = typed.lstrip("0123456789.").upper()
    units = {" BYTES"} if letters in ("", "B") else {letters, f"{letters}IB"}
    assert suggested.lstrip("0123456789.").upper() in units
    assert made(suggested.removesuffix(" bytes")).plan.memory.limit_bytes >= refused.value.min_bytes


@pytest.mark.parametrize("unit", UNIT_BYTES)
def test_a_size_to_type_is_enough_and_at_most_a_hundredth_or_a_step_more(unit: str) -> None:
    sizes = [n * 10**power + more for power in range(6, 12) for n in (1, 1.005, 1.5, 9.99) for more in (-1, 0, 1)]
    for size in (max(MIB, int(size)) for size in sizes):
        text = size_to_type(size, unit)
        assert size <= parse_bytes(text.removesuffix(" bytes")) < size + max(size / 100, UNIT_BYTES[unit] / 1000) + 1


def test_a_shown_minimum_is_never_too_small() -> None:
    assert [show_min_bytes(size) for size in (MIB, MIB + 1, GIB - 1, GIB, GIB + 1)] == [
        "1.0 MiB", "1.1 MiB", "1.00 GiB", "1.00 GiB", "1.01 GiB",
    ]  # fmt: skip
