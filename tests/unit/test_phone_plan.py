"""A plan for a phone that is not here: its device profile, unequal cores, no io_uring, little that may be locked."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from neuronpipe.launch.cli import main
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.planning.shapes import flash_caveat, probe_without_package
from neuronpipe.plans.device.cores import classify, max_decode_workers, restrict_cores
from neuronpipe.plans.device.device import Device, FlashCurve, FlashPoint
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.measured_points import StepPoint
from neuronpipe.plans.lab.devices.device_description import planner_device
from neuronpipe.plans.lab.devices.device_file import FOLDER, read_device
from neuronpipe.plans.measure.probe import probe
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan
from neuronpipe.plans.planner.device_facts import device_facts
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan

GIB = 1 << 30
PHONES = ("oneplus-12", "oneplus-ace-2")
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
    return make_plan(Package.open(DEMO).manifest, device_facts(device), PlanOptions())


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
    assert left.id == PHONE.id  # the same device, of which less may be used


def test_a_quota_of_less_than_the_fast_cores_means_fewer_workers() -> None:
    processes = cores(planned(dataclasses.replace(PHONE, cpu_quota=2.5)))
    assert [name for name in processes if name.startswith("decode")] == ["decode.0", "decode.1"]


def test_cores_that_were_named_are_the_only_ones_that_processes_are_pinned_to() -> None:
    allowed = restrict_cores(PHONE.cores, {0, 3, 4, 7})
    facts = device_facts(PHONE, cores=allowed)
    assert facts.id == PHONE.id  # the same machine: plans and profiles made for it still hold
    pinned = {process.core for process in facts.processes}
    assert pinned == {0, 3, 4, 7}
    assert sum(process.role == "decode" for process in facts.processes) == 3
    assert max_decode_workers(allowed) == 3
    assert max_decode_workers(PHONE.cores, 2.5) == 2


def test_a_core_that_is_not_allowed_stays_so() -> None:
    left = classify(CAPACITIES, "capacity", {0, 1, 2})
    assert [core.id for core in restrict_cores(left, {2, 7}) if core.allowed] == [2]


def test_a_plan_for_a_known_phone_is_for_that_phone_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(DEMO), "--device", "oneplus-12"]) == 0
    page = capsys.readouterr().out
    assert "for OnePlus 12, Snapdragon 8 Gen 3, UFS 4.0" in page
    assert "are assumed" in page
    assert "no backend here drives its NPU" in page
    assert "neuronpipe simulate oneplus-12" in page
    assert main(["plan", str(DEMO), "--device", "oneplus-12", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    workers = [process["core"] for process in made["compute"]["processes"] if process["role"] == "decode"]
    assert workers == [2, 3, 4, 5, 6, 7]  # all fast cores, the loader's too, since nothing is read
    assert made["expected"]["flash_reads_per_token"] == 0
    assert made["flash"]["engine"] == "threads"


def test_a_plan_for_a_phone_is_refused_on_this_machine_and_read_for_that_phone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "phone.json"
    assert main(["plan", str(DEMO), "--device", "oneplus-12", "-o", str(file)]) == 0
    capsys.readouterr()
    assert main(["plan", str(DEMO), "--plan", str(file)]) == 2
    assert "field 'device_id': the plan was made for another device" in capsys.readouterr().err
    assert main(["plan", str(DEMO), "--plan", str(file), "--device", "oneplus-12"]) == 0
    assert main(["plan", str(DEMO), "--plan", str(file), "--device", "oneplus-ace-2"]) == 2
    assert "another device" in capsys.readouterr().err


@pytest.mark.slow
def test_a_shape_without_a_package_is_planned_for_a_phone_and_its_plan_is_of_no_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "turbosparse-mixtral-47b", "--device", "oneplus-12", "--memory", "7GB", "--quality", "predicted"]
    file = tmp_path / "phone.json"
    assert main([*asked, "-o", str(file)]) == 0
    page = capsys.readouterr().out
    assert "for the q4k package that `pull` makes of 16-bit weights of turbosparse-mixtral-47b: " in page
    assert "neuronpipe simulate oneplus-12 turbosparse-mixtral-47b" in page
    made = json.loads(file.read_text())
    assert made["compute"]["mode"] == "predicted"
    assert 25 * GIB < made["memory"]["ffn_bytes"] < 26 * GIB  # 45 billion weights of 4.5 bits, a third of 5.5
    assert made["memory"]["limit_bytes"] == 7e9
    assert main(["plan", str(DEMO), "--plan", str(file), "--device", "oneplus-12"]) == 2
    assert "another package" in capsys.readouterr().err


def test_a_shape_is_planned_for_this_machine_without_a_package(capsys: pytest.CaptureFixture[str]) -> None:
    """It was refused, so that nobody knew the speed of a model before its download."""
    words = ["--memory", "8GiB", "--context", "2048", "--json"]
    assert main(["plan", "SmallThinker-4B", *words]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["expected"]["tokens_per_s"] > 0
    assert made["device_id"] == probe(DEMO).id
    assert "for the q4k package that `pull` makes of Tiiny/SmallThinker-4BA0.6B-Instruct-GGUF:" in made["reasons"][0]
    assert "with flash as it reads the file of the demo model" in made["reasons"][1]
    assert main(["plan", "org/SmallThinker-4B", "--device", "this-machine", *words]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == made["id"]


def test_flash_caveat_is_that_of_the_largest_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONPIPE_DATA", str(tmp_path))
    assert probe_without_package((), print)[0] == DEMO
    larger = tmp_path / "packages" / "larger"
    shutil.copytree(DEMO, larger)
    with (larger / "bundles.bin").open("ab") as file:
        file.write(bytes(1 << 20))
    place, device = probe_without_package((), print)
    assert place == larger
    assert device.flash is not None
    assert "speeds are measured in brief, with flash as it reads the file of larger" in flash_caveat(place, device)
    profile = planner_device(read_device("oneplus-12"), Package.open(DEMO).manifest).profile
    assert profile is not None
    start = dataclasses.replace(device, profile=profile)
    assert "speeds are measured in brief" in flash_caveat(place, start), "a start measures no steps"
    time_us = Figure(median=1.0, spread=0.0)
    step = StepPoint(mode="exact", workers=1, kernels_us=time_us, step_us=time_us, between_us=time_us)
    full = dataclasses.replace(device, profile=dataclasses.replace(profile, steps=(step,)))
    assert "speeds are of the device profile" in flash_caveat(place, full)
    assert "not expected" in flash_caveat(place, dataclasses.replace(device, flash=None))


def test_a_verb_that_needs_a_package_says_what_a_shape_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("run", "chat", "bench"):
        assert main([verb, "turbosparse-1b"]) == 2
        assert "it is a shape, which `neuronpipe plan turbosparse-1b` and" in capsys.readouterr().err


def test_what_is_no_shape_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "turbosparse-mixtral-47"]) == 2
    assert "did you mean turbosparse-mixtral-47b?" in capsys.readouterr().err
    assert main(["plan", "turbosparse-48b", "--device", "oneplus-12"]) == 2
    assert "neither a package nor a known shape; did you mean turbosparse-1b? Shapes are bamboo-7b" in (
        capsys.readouterr().err
    )


def test_a_phone_is_told_of_no_model_that_nobody_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo came out at 1,708 tokens/s."""
    for words in (["simulate", "oneplus-12"], ["plan", "--device", "oneplus-12"]):
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "oneplus-12: name a model: a shape, or a package; shapes are bamboo-7b, " in line


def test_a_slower_phone_is_expected_to_be_slower() -> None:
    manifest = Package.open(DEMO).manifest
    made = [
        make_plan(manifest, device_facts(planner_device(read_device(name), manifest)), PlanOptions()) for name in PHONES
    ]
    speeds = [one.expected.tokens_per_s or 0.0 for one in made]
    prompts = [one.expected.prefill_tokens_per_s or 0.0 for one in made]
    assert speeds[0] > 1.1 * speeds[1] > 0
    assert prompts[0] > 1.2 * prompts[1] > 0


def test_prompts_on_a_phones_cores_are_bound_by_what_these_multiply() -> None:
    phone, manifest = read_device("oneplus-12"), Package.open(DEMO).manifest
    profile = planner_device(phone, manifest).profile
    assert profile is not None
    assert profile.panel_token_weights_per_s(512, 5) == pytest.approx(5 * 27e9 * 8 / 4.5)
    assert profile.dram_bytes_per_s(5) == pytest.approx(43.9e9)
    assert profile.dram_bytes_per_s(1) == pytest.approx(9e9)


def test_a_device_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(DEMO), "--device", "moon-phone"]) == 2
    assert "known are oneplus-12" in capsys.readouterr().err


def test_a_profile_is_no_device_file_and_a_phone_has_not_this_machines_accelerator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.json"
    file.write_text('{"version": 4, "device_id": "0", "dram": []}')
    assert main(["plan", str(DEMO), "--device", str(file)]) == 2
    assert "profile.json: is a profile, which `neuronpipe profile device` measured" in capsys.readouterr().err
    assert main(["plan", str(DEMO), "--device", "oneplus-12", "--backend", "accelerator=opencl"]) == 2
    assert "a device file describes no accelerator" in capsys.readouterr().err


def test_a_plan_that_is_larger_than_the_phone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads((FOLDER / "oneplus-12.json").read_text())
    values["memory_usable_gb"]["value"] = 0.05
    file = tmp_path / "small.json"
    file.write_text(json.dumps(values))
    assert main(["plan", str(DEMO), "--device", str(file), "--memory", "1GiB"]) == 2
    assert "one program may use 47.7 MiB" in capsys.readouterr().err


def test_the_most_that_a_device_file_may_say_can_be_planned_for(tmp_path: Path) -> None:
    values = json.loads((FOLDER / "oneplus-12.json").read_text())
    for core in values["cores"]:
        core["computes_gb_per_s"] = core["reads_gb_per_s"] = 1e6
    for name in ("dram_cpu_gb_per_s", "dram_total_gb_per_s", "memory_usable_gb"):
        values[name]["value"] = 1e6
    values["barrier_us"]["value"] = 1e-6
    file = tmp_path / "fast.json"
    file.write_text(json.dumps(values))
    manifest = Package.open(DEMO).manifest
    made = make_plan(manifest, device_facts(planner_device(read_device(str(file)), manifest)), PlanOptions())
    assert made.memory.slots_bytes == made.memory.ffn_bytes
