"""Plans with an accelerator: how many blocks it gets, whose memory they take, and what a plan file may say of it."""

from __future__ import annotations

import dataclasses
import re

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.device.device import FlashCurve, FlashPoint, MemorySpeed, PiecePoint
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import ACCELERATOR, Compute, Plan, ProcessSpec, parse_plan
from neuronpipe.plans.plan.memory_budget import DRIVER_BYTES, INTERPRETER_PER_PROCESS_BYTES
from neuronpipe.plans.plan.offloaded_blocks import (
    MATRICES,
    Accelerator,
    offload_scratch_bytes,
    offloaded_matrices_bytes,
    offloaded_weights_bytes,
)
from neuronpipe.plans.plan.report import explain
from neuronpipe.plans.plan.runtime_memory import offload_runtime_bytes
from neuronpipe.plans.planner.device_facts import DeviceFacts
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.plans.planner.validation import validate
from neuronpipe.protocol.errors import UserError

MIB = 1 << 20
MANIFEST = Package.open(DEMO).manifest
BLOCKS = MANIFEST.layout.blocks
GPU = Accelerator(name="Fast GPU", memory_bytes=8 << 30, max_buffer_bytes=2 << 30, shares_memory=False)
PROCESSES = tuple(ProcessSpec(role=role, index=0, core=None) for role in ("coordinator", "loader", "cache", "prefill"))
DECODE = ProcessSpec(role="decode", index=0, core=None)
HOLDER = ProcessSpec(role=ACCELERATOR, index=0, core=None, backend="opencl")

CURVE = FlashCurve(engine="io_uring", direct=True, points=(FlashPoint(request_bytes=4096, depth=32, bytes_per_s=1e9),))
SPEED = MemorySpeed(
    threads=2,
    one_thread_bytes_per_s=10e9,
    sequential_bytes_per_s=16e9,
    pieces=(PiecePoint(piece_bytes=4096, bytes_per_s=8e9),),
)


def made(
    accelerator: Accelerator | None,
    memory_bytes: int = 1 << 30,
    backend: str = "opencl",
    measured: bool = False,
    **wanted: object,
) -> Plan:
    others = (DECODE,) if accelerator is None else (DECODE, dataclasses.replace(HOLDER, backend=backend))
    facts = DeviceFacts(
        id="d",
        memory_bytes=memory_bytes,
        flash_engine="threads",
        processes=(*PROCESSES, *others),
        accelerator=accelerator,
        flash=CURVE if measured else None,
        memory_speed=SPEED if measured else None,
    )
    return make_plan(MANIFEST, facts, PlanOptions(**wanted))  # type: ignore[arg-type]


def test_it_gets_as_many_blocks_as_its_memory_holds() -> None:
    assert made(GPU).compute.held_blocks == (BLOCKS,)
    for blocks in (1, 7):
        needed = offloaded_weights_bytes(MANIFEST, blocks) + offload_scratch_bytes(MANIFEST, blocks, 1)
        assert made(dataclasses.replace(GPU, limit_bytes=needed)).compute.held_blocks == (blocks,)
        assert made(dataclasses.replace(GPU, limit_bytes=needed)).memory.accelerator_bytes == needed
    with pytest.raises(UserError, match="one block of every feed-forward takes 1 MiB; give it more"):
        made(dataclasses.replace(GPU, limit_bytes=64 << 10))


def test_one_that_was_not_measured_gets_the_matrices_that_fit_beside_all_blocks() -> None:
    all_blocks = offloaded_weights_bytes(MANIFEST, BLOCKS) + offload_scratch_bytes(MANIFEST, BLOCKS, 1)
    for held in (MATRICES[:1], MATRICES[:2], MATRICES):
        needed = all_blocks + offloaded_matrices_bytes(MANIFEST, held, 1)
        one = made(dataclasses.replace(GPU, limit_bytes=needed))
        assert (one.compute.held_blocks, one.compute.held_matrices) == ((BLOCKS,), held)
        assert one.memory.accelerator_bytes == needed
    assert made(dataclasses.replace(GPU, limit_bytes=all_blocks)).compute.held_matrices == ()
    page = explain(made(GPU))
    assert (
        f"{BLOCKS} blocks of every feed-forward, attention's qkv and output of every layer and the output mat" in page
    )


def test_its_own_memory_is_counted_apart_and_shared_memory_within_the_limit() -> None:
    apart, shared = made(GPU), made(dataclasses.replace(GPU, shares_memory=True))
    alone = made(None)
    assert alone.memory.accelerator_bytes == alone.memory.device_bytes == 0
    assert apart.memory.device_bytes == 0
    assert apart.memory.accelerator_bytes > 8 * MIB
    process = INTERPRETER_PER_PROCESS_BYTES + DRIVER_BYTES
    assert apart.memory.interpreters_bytes - alone.memory.interpreters_bytes == process
    assert apart.compute.prefill_chunk_tokens == alone.compute.prefill_chunk_tokens, "a driver is no prompt's buffer"
    assert shared.memory.device_bytes == shared.memory.accelerator_bytes
    assert shared.memory.total_bytes() <= shared.memory.limit_bytes
    assert "in the accelerator's own memory" in explain(apart)
    assert "accelerator.0   any core, opencl" in explain(apart)
    small = made(dataclasses.replace(GPU, shares_memory=True), memory_bytes=520 * MIB)
    assert small.memory.total_bytes() <= 520 * MIB


@pytest.mark.parametrize("backend", ["opencl", "onnx:cpu"])
def test_no_speed_is_expected_of_one_that_was_not_measured(backend: str) -> None:
    """However fast memory and flash are: it may be a hundred times slower than the workers."""
    assert made(None, measured=True).expected.tokens_per_s
    found = made(GPU, backend=backend, measured=True)
    assert found.expected.tokens_per_s is None
    assert found.expected.prefill_tokens_per_s
    assert "expects  not measured" in explain(found)
    assert re.search(r"accelerator +- ms  not measured", explain(found))
    (reason,) = [reason for reason in found.reasons if "Fast GPU" in reason]
    assert re.search(r"(no speed|none) is expected", reason)


def test_the_plan_says_who_computes_what_and_what_a_loss_costs() -> None:
    (reason,) = [reason for reason in made(GPU).reasons if "Fast GPU" in reason]
    assert f"the first {BLOCKS} of {BLOCKS} blocks of every feed-forward" in reason
    assert "while it is lost the decode workers compute them, from memory and flash" in reason


def test_what_is_not_all_there_has_nothing_pinned_beside_an_accelerator() -> None:
    (pins,) = made(GPU, ffn_resident_share=0.5).memory.pins
    assert (pins.triggers, pins.values) == ("0", "0")


def test_a_plan_with_an_accelerator_is_read_and_checked() -> None:
    good = made(GPU)
    assert parse_plan(good.to_json().encode(), "plan.json") == good
    validate(good, MANIFEST, "plan.json", [])
    without = tuple(one for one in good.compute.processes if one.role != ACCELERATOR)
    by_cpu = tuple(dataclasses.replace(one, backend="cpu") for one in good.compute.processes)
    wrong: dict[str, Compute] = {
        "compute.held_blocks": dataclasses.replace(good.compute, held_blocks=(BLOCKS + 1,)),
        "are an accelerator's": dataclasses.replace(good.compute, processes=without),
        "none at all": dataclasses.replace(good.compute, held_blocks=(0,)),
        "cpu is not an accelerator's": dataclasses.replace(good.compute, processes=by_cpu),
        "is what an accelerator needs": dataclasses.replace(good.compute, pipeline=False),
        "compute.held_blocks': 2 is above 1": dataclasses.replace(good.compute, held_blocks=(3, 2)),
        "compute.held_matrices': some of output, qkv, attention_output in this order": dataclasses.replace(
            good.compute, held_matrices=("qkv", "output")
        ),
        "make": dataclasses.replace(good.compute, held_blocks=(3,)),
    }
    for why, compute in wrong.items():
        with pytest.raises(UserError, match=why):
            validate(dataclasses.replace(good, compute=compute), MANIFEST, "plan.json", [])


@pytest.mark.parametrize("backend", ["onnx:cpu", "onnx:qnn-emulated"])
def test_a_runtime_holds_bytes_in_numerics_of_its_own(backend: str) -> None:
    """Its libraries and graphs count in the place of a driver; blocks are the same for any number of texts."""
    runtime = dataclasses.replace(GPU, name="Runtime", shares_memory=True)
    found, alone = made(runtime, backend=backend, sequences=4), made(None, sequences=4)
    model, neurons = MANIFEST.model, MANIFEST.layout.blocks * MANIFEST.layout.block_neurons
    assert found.memory.device_bytes == found.memory.accelerator_bytes > model.layers * neurons * 3 * model.width
    more_bytes = found.memory.interpreters_bytes - alone.memory.interpreters_bytes - INTERPRETER_PER_PROCESS_BYTES
    assert more_bytes == offload_runtime_bytes(MANIFEST, backend, neurons=neurons) > 60 * MIB
    assert found.compute.prefill_chunk_tokens == alone.compute.prefill_chunk_tokens, "it is no prompt's buffer"
    (reason,) = [reason for reason in found.reasons if "Runtime" in reason]
    assert f"densely, in numerics of its own ({backend})" in reason
    assert "same bits" not in reason
    validate(found, MANIFEST, "plan.json", [])
    other = dataclasses.replace(found.compute, held_blocks=(BLOCKS, 3))
    with pytest.raises(UserError, match="as many for any number of texts"):
        validate(dataclasses.replace(found, compute=other), MANIFEST, "plan.json", [])
    assert found.compute.held_matrices == ()
    other = dataclasses.replace(found.compute, held_matrices=MATRICES)
    with pytest.raises(UserError, match="with the decode workers' bits"):
        validate(dataclasses.replace(found, compute=other), MANIFEST, "plan.json", [])
