"""How many blocks a device that was measured gets, what is expected of it, and when it is used unasked."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from typing import Any

import pytest
from neuronpipe.launch.arguments.plan_arguments import add_plan_arguments, plan_options
from neuronpipe.launch.planning import accelerator as accelerators
from neuronpipe.launch.planning.plan import plan_for
from neuronpipe.launch.planning.search import Subject
from neuronpipe.plans.cost.activation_rates import rates
from neuronpipe.plans.cost.expected_misses import ResidentSlots, part_accesses
from neuronpipe.plans.cost.token_time import step_ms
from neuronpipe.plans.device.accelerator import (
    ACCELERATOR_VERSION,
    AcceleratorProfile,
    Copy,
    Launch,
    LayerCall,
    OffloadedPoint,
    RunOverhead,
)
from neuronpipe.plans.device.cores import Core
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.lab.shapes.models import model_named
from neuronpipe.plans.lab.shapes.shape_manifest import manifest_of_shape
from neuronpipe.plans.plan.document import ACCELERATOR, Plan, ProcessSpec
from neuronpipe.plans.plan.offloaded_blocks import Accelerator, matrix_bytes, offloaded_clusters, show_offloaded_blocks
from neuronpipe.plans.plan.report import explain
from neuronpipe.plans.planner.device_facts import DeviceFacts
from neuronpipe.plans.planner.offload_split import best_blocks_by_batch
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan

from tests.unit.test_accelerator_profile import figure
from tests.unit.test_device_profile import profile

GIB = 1 << 30
MANIFEST = manifest_of_shape(model_named("turbosparse-mistral-7b"))
BLOCKS = MANIFEST.layout.blocks
PROCESSES = tuple(ProcessSpec(role=role, index=0, core=None) for role in ("coordinator", "loader", "cache", "prefill"))
DECODE = tuple(ProcessSpec(role="decode", index=number, core=None) for number in range(2))
HOLDER = ProcessSpec(role=ACCELERATOR, index=0, core=None, backend="opencl")
GPU = Accelerator(name="Fast GPU", memory_bytes=8 * GIB, max_buffer_bytes=2 * GIB, shares_memory=False)


def measured(bytes_per_s: float, layer_call_us: float = 40.0, **changes: Any) -> DeviceProfile:
    """The profile of the tests, with a device of this speed for one text; twice that for four."""
    device = AcceleratorProfile(
        version=ACCELERATOR_VERSION,
        backend="opencl",
        name="Fast GPU",
        memory_bytes=8 * GIB,
        max_buffer_bytes=2 * GIB,
        shares_memory=False,
        is_processor=False,
        launches=(Launch(us=figure(10)),),
        copies=tuple(Copy(back=back, copy_bytes=4096, bytes_per_s=figure(10e9)) for back in (False, True)),
        visits=tuple(LayerCall(texts=texts, routed=False, us=figure(layer_call_us)) for texts in (1, 4)),
        held=tuple(
            OffloadedPoint(
                kind=kind,  # type: ignore[arg-type]
                quantization="q4",
                row_weights=4096,
                share=share,
                texts=texts,
                bytes_per_s=figure(bytes_per_s * texts**0.5),
            )
            for kind, share, texts in itertools.product(("exact", "predicted"), (0.1, 0.5), (1, 4))
        ),
        in_runs=(),
    )
    return profile(accelerator=dataclasses.replace(device, **changes))


def facts(of: DeviceProfile, accelerator: Accelerator | None, memory_bytes: int = 8 * GIB) -> DeviceFacts:
    return DeviceFacts(
        id="d",
        memory_bytes=memory_bytes,
        flash_engine="threads",
        processes=(*PROCESSES, *DECODE, *((HOLDER,) if accelerator else ())),
        flash=of.flash_curve(),
        memory_speed=of.memory_speed(),
        profile=of,
        accelerator=accelerator,
    )


def made(of: DeviceProfile, accelerator: Accelerator | None = GPU, memory_bytes: int = 8 * GIB, **wanted: Any) -> Plan:
    options = {"context_tokens": 1024} | wanted
    return make_plan(MANIFEST, facts(of, accelerator, memory_bytes), PlanOptions(**options))


def time_ms(one: Plan, of: DeviceProfile, blocks: int, texts: int) -> float:
    compute = dataclasses.replace(one.compute, held_blocks=(blocks,))
    device = of.flash_curve(), of.memory_speed(), of
    found = step_ms(MANIFEST, rates(MANIFEST, compute.mode), compute, one.memory, one.flash, device, batch=texts)
    assert found is not None
    return found


@pytest.mark.parametrize("bytes_per_s", [2e9, 20e9, 1e12])
@pytest.mark.parametrize("memory_bytes", [3 * GIB, 8 * GIB])
def test_it_gets_the_blocks_that_make_each_step_shortest(bytes_per_s: float, memory_bytes: int) -> None:
    """Compared with all numbers there are."""
    of = measured(bytes_per_s)
    one = made(of, memory_bytes=memory_bytes, sequences=4)
    for texts in range(1, 5):
        best = min(range(BLOCKS + 1), key=lambda blocks: time_ms(one, of, blocks, texts))
        assert one.compute.offloaded_blocks(texts) == best, texts
    assert one.memory.accelerator_bytes < 8 * GIB


def test_what_is_expected_is_the_longer_of_both_and_says_so() -> None:
    of = measured(100e9)
    one, alone = made(of), made(of, None)
    assert alone.expected.accelerator_ms_per_token is None
    assert one.expected.accelerator_ms_per_token is not None
    assert one.expected.accelerator_wait_ms_per_token is not None
    assert one.expected.tokens_per_s is not None
    assert alone.expected.tokens_per_s is not None
    assert one.expected.tokens_per_s > 1.5 * alone.expected.tokens_per_s
    (blocks,) = one.compute.held_blocks
    far_less = dataclasses.replace(one.compute, held_blocks=(2,))
    device = of.flash_curve(), of.memory_speed(), of
    slower = step_ms(MANIFEST, rates(MANIFEST, "exact"), far_less, one.memory, one.flash, device, batch=1)
    assert slower is not None
    assert slower > 1e3 / one.expected.tokens_per_s
    page = explain(one)
    assert f"opencl: Fast GPU, {blocks} blocks of every feed-forward" in page
    assert "waited for" in page
    assert any("as many as make the shortest step" in reason for reason in one.reasons)


def test_what_a_layer_takes_besides_in_a_run_counts_for_each_layer() -> None:
    times_ms = []
    for us in (1.0, 201.0):
        of = measured(
            2e9, in_runs=(RunOverhead(mode="exact", us=figure(us)), RunOverhead(mode="predicted", us=figure(1e6)))
        )
        times_ms.append(time_ms(made(measured(2e9)), of, BLOCKS, 1))
    assert times_ms[1] - times_ms[0] == pytest.approx(0.2 * MANIFEST.model.layers)


def test_one_that_was_not_measured_gets_all_that_fits_and_no_speed_is_expected_of_it() -> None:
    for of in (profile(), measured(1e12, name="Other GPU")):
        one, alone = made(of), made(of, None)
        assert one.compute.held_blocks == (BLOCKS,)
        assert alone.expected.tokens_per_s
        assert one.expected.tokens_per_s is None
        assert one.expected.accelerator_ms_per_token is None
        assert any("it was not measured" in reason for reason in one.reasons)


def test_its_memory_counts_like_ram_where_flash_bounds() -> None:
    """Neurons that a device holds are read no more. (Of four blocks the driver's memory takes as much.)"""
    of = measured(1e12)
    alone = made(of, None, memory_bytes=3 * GIB)
    for blocks in (12, 18):
        limit = Accelerator(**dataclasses.asdict(GPU) | {"limit_bytes": blocks * 95 << 20})
        one = made(of, limit, memory_bytes=3 * GIB, offloaded_matrices=())
        assert one.compute.max_offloaded_blocks() == blocks
        assert one.expected.flash_bytes_per_token < alone.expected.flash_bytes_per_token
    whole = made(of, memory_bytes=3 * GIB)
    assert whole.expected.tokens_per_s is not None
    assert alone.expected.tokens_per_s is not None
    assert whole.expected.tokens_per_s > 2 * alone.expected.tokens_per_s


@pytest.mark.parametrize(
    ("call_us", "held"), [(20, ("output", "qkv", "attention_output")), (900, ("output",)), (30_000, ())]
)
def test_it_gets_the_matrices_whose_calls_take_less_than_the_workers(call_us: float, held: tuple[str, ...]) -> None:
    of = measured(1e12, layer_call_us=call_us)
    one = made(of)
    assert one.compute.held_matrices == held
    for others in ((), ("output",), ("output", "qkv", "attention_output")):
        other = made(of, offloaded_matrices=others)
        assert other.compute.held_matrices == others
        assert (one.expected.tokens_per_s or 0.0) >= (other.expected.tokens_per_s or 0.0), others
    sums = made(of, offloaded_matrices=())
    left = sums.expected.sequential_bytes_per_token - one.expected.sequential_bytes_per_token
    layers = MANIFEST.model.layers
    assert left == sum(matrix_bytes(MANIFEST, name) * (1 if name == "output" else layers) for name in held)


def test_matrices_take_the_place_of_blocks_that_are_worth_less() -> None:
    of = measured(1e12)
    for blocks, held in ((2, ()), (18, ("output", "qkv", "attention_output"))):
        limit_bytes = blocks * 95 << 20
        one = made(of, dataclasses.replace(GPU, limit_bytes=limit_bytes))
        assert one.compute.held_matrices == held
        assert 0 < one.compute.max_offloaded_blocks() <= blocks
        assert one.memory.accelerator_bytes <= limit_bytes
    small = dataclasses.replace(GPU, max_buffer_bytes=64 << 20)
    assert made(of, small).compute.held_matrices == ("qkv", "attention_output"), "in one piece or not at all"


@pytest.mark.parametrize("mode", ["exact", "predicted"])
@pytest.mark.parametrize("texts", [1, 3])
def test_clusters_on_a_device_are_pinned_clusters_that_nobody_looks_for(mode: Any, texts: int) -> None:
    found = rates(MANIFEST, mode)
    clusters, blocks = MANIFEST.clusters, BLOCKS // 4
    held = MANIFEST.model.ffns * offloaded_clusters(MANIFEST.layout, blocks)
    for share in (0.05, 0.3, 0.6):
        slots = int(share * clusters)
        in_ram = part_accesses(
            MANIFEST, found, mode, 0.12, ResidentSlots(occupied=slots + held, pinned=held), texts, all_accessed=False
        )
        beside = part_accesses(
            MANIFEST,
            found,
            mode,
            0.12,
            ResidentSlots(occupied=slots, pinned=0, offloaded=held),
            texts,
            all_accessed=False,
        )
        assert beside.accesses < in_ram.accesses
        assert beside.misses == pytest.approx(in_ram.misses, rel=0.25)
        nothing = part_accesses(
            MANIFEST, found, mode, 0.12, ResidentSlots(occupied=slots, pinned=0), texts, all_accessed=False
        )
        assert beside.misses < nothing.misses
    all_there = ResidentSlots(occupied=clusters - held, pinned=0, offloaded=held)
    assert part_accesses(MANIFEST, found, mode, 0.12, all_there, texts, all_accessed=False).misses == 0
    left = clusters - held
    half = ResidentSlots(occupied=3 * left // 4, pinned=left // 2, offloaded=held)
    assert part_accesses(MANIFEST, found, mode, 1.0, half, 1, all_accessed=True).misses == pytest.approx(
        left / 2, rel=0.01
    )


def test_memory_that_is_shared_is_given_back_where_the_device_needs_less() -> None:
    slow = measured(3e9, shares_memory=True)
    shared = dataclasses.replace(GPU, shares_memory=True, limit_bytes=2 * GIB)
    one = made(slow, shared, memory_bytes=4 * GIB)
    assert 0 < one.compute.max_offloaded_blocks() < 12
    assert one.memory.device_bytes == one.memory.accelerator_bytes < 2 * GIB
    assert one.memory.total_bytes() <= 4 * GIB
    asked = made(slow, shared, memory_bytes=4 * GIB, offloaded_blocks=(12,))
    assert one.memory.value_slots > asked.memory.value_slots


def test_one_on_the_workers_cores_makes_no_step_shorter() -> None:
    of = measured(2e9, is_processor=True)
    one = made(of, dataclasses.replace(GPU, is_processor=True), sequences=4)
    assert one.compute.held_blocks == (1, 0), "asked for, it has some"
    assert one.expected.accelerator_wait_ms_per_token == one.expected.accelerator_ms_per_token
    assert any("on the decode workers' own cores" in reason for reason in one.reasons)


def test_numbers_that_repeat_are_said_once() -> None:
    assert best_blocks_by_batch(lambda blocks, texts: abs(blocks - 5 * texts), 10, 4) == (5, 10)
    assert best_blocks_by_batch(lambda blocks, texts: 10.0 * blocks if texts > 1 else 5.0 - blocks, 3, 9) == (3, 0)
    assert best_blocks_by_batch(lambda blocks, texts: 1.0 + blocks, 3, 4) == (1, 0)
    assert best_blocks_by_batch(lambda blocks, texts: None, 3, 4) is None


def test_the_numbers_are_shown_by_texts() -> None:
    assert show_offloaded_blocks((7,)) == "7"
    assert show_offloaded_blocks((7, 5)) == "7 (1 text), 5 (2 and more)"
    assert show_offloaded_blocks((7, 5, 3)) == "7 (1 text), 5 (2), 3 (3 and more)"


# ---- unasked ---------------------------------------------------------------------------------------------------------
def planned(of: DeviceProfile, *words: str) -> Plan:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    cores = tuple(Core(id=number, kind="big", capacity=1024, allowed=True) for number in range(3))
    device = Device(
        architecture="x86_64",
        instruction_set="avx2",
        cores=cores,
        cpu_quota=None,
        memory_total_bytes=16 * GIB,
        memory_available_bytes=12 * GIB,
        page_bytes=4096,
        memlock_bytes=None,
        io_uring=False,
        flash=of.flash_curve(),
        memory_speed=of.memory_speed(),
        profile=of,
    )
    subject = Subject(manifest=MANIFEST, read_activity=lambda: None, device=device)  # type: ignore[arg-type, return-value]
    arguments = parser.parse_args(["--memory", "8GiB", "--context", "1024", *words])
    return plan_for(subject, plan_options(arguments), several=False, gateway=False).plan


def has(one: Plan) -> bool:
    return any(spec.role == ACCELERATOR for spec in one.compute.processes)


@pytest.mark.slow
def test_unasked_it_is_used_only_where_a_profile_says_that_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "why_unusable", lambda accelerator, backend: None)
    used = planned(measured(1e12, layer_call_us=5))
    assert has(used)
    (said,) = [reason for reason in used.reasons if "Fast GPU is used" in reason]
    assert "tokens/s expected with it," in said
    left = planned(measured(1e9))
    assert not has(left)
    (said,) = [reason for reason in left.reasons if "Fast GPU is not used" in reason]
    assert "--backend accelerator=opencl uses it all the same" in said
    assert not has(planned(measured(2e9, is_processor=True)))
    plain = planned(profile())
    assert not has(plain)
    assert not any("GPU" in reason for reason in plain.reasons)
    for words in (("--without", "pipeline"), ("--target-speed", "2")):
        assert not has(planned(measured(1e12, layer_call_us=5), *words))
    few = planned(measured(1e12, layer_call_us=5), "--gpu-memory", "1GiB")
    assert few.memory.accelerator_bytes <= GIB


def test_one_that_is_gone_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "why_unusable", lambda accelerator, backend: "backend opencl: no device")
    one = planned(measured(1e12, layer_call_us=5))
    assert not has(one)
    assert any(reason == "Fast GPU is not used: backend opencl: no device" for reason in one.reasons)


def test_memory_that_is_too_small_for_it_is_said() -> None:
    one = planned(measured(1e12, layer_call_us=5), "--gpu-memory", "1MiB")
    assert not has(one)
    assert any("Fast GPU is not used: --gpu-memory: 1 MiB of Fast GPU may be used" in reason for reason in one.reasons)
