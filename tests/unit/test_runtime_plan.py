"""Plans whose prompts a runtime computes: what it takes is counted, and what the engine's own products need is not."""

from __future__ import annotations

import dataclasses

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.layout import Layout
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan, ProcessSpec
from neuronpipe.plans.plan.report import explain
from neuronpipe.plans.plan.runtime_memory import MAX_PRODUCT_NEURONS, RUNTIMES
from neuronpipe.plans.plan.segment_sizes import PARTIAL_TOKENS, private_layouts, product_blocks
from neuronpipe.plans.planner.device_facts import DeviceFacts
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.plans.planner.validation import validate
from neuronpipe.protocol.errors import UserError

from tests.unit.test_held_plan import CURVE, SPEED

MIB = 1 << 20
PACKAGE = Package.open(DEMO)
MANIFEST = PACKAGE.manifest


def made(backend: str, memory_bytes: int = 1 << 30, *, measured: bool = False) -> Plan:
    roles = ("coordinator", "loader", "cache", "decode", "decode")
    processes = [ProcessSpec(role=role, index=roles[:n].count(role), core=None) for n, role in enumerate(roles)]
    prefill = ProcessSpec(role="prefill", index=0, core=None, backend=backend)
    facts = DeviceFacts(id="d", memory_bytes=memory_bytes, flash_engine="threads", processes=(*processes, prefill))
    if measured:
        facts = dataclasses.replace(facts, flash=CURVE, memory_speed=SPEED)
    return make_plan(MANIFEST, facts, PlanOptions())


def test_no_speed_of_prompts_is_expected_of_a_runtime_that_was_not_measured() -> None:
    ours = made("cpu", measured=True)
    assert ours.expected.prefill_tokens_per_s
    assert "prompts:" not in explain(ours)
    theirs = made("onnx:cpu", measured=True)
    assert theirs.expected.tokens_per_s
    assert theirs.expected.prefill_tokens_per_s is theirs.expected.first_token_ms is None
    assert "prompts: how fast onnx:cpu computes them is not measured" in explain(theirs)
    assert "a prompt of" not in explain(theirs)


def least_with_small_windows(backend: str) -> Plan:
    """The plan with the most memory with which blocks stream through windows smaller than a layer."""
    for memory_bytes in range(1024 * MIB, 96 * MIB, -4 * MIB):
        found = made(backend, memory_bytes)
        if found.compute.prefill_window_blocks < MANIFEST.layout.blocks:
            return found
    raise AssertionError


@pytest.mark.parametrize("backend", RUNTIMES)
def test_small_windows_do_not_make_its_prompts_short(backend: str) -> None:
    """It needs no block sums, which only so many tokens may have while a window is less than a layer."""
    assert least_with_small_windows("cpu").compute.prefill_chunk_tokens == PARTIAL_TOKENS
    found = least_with_small_windows(backend)
    assert found.compute.prefill_chunk_tokens == 512
    assert found.memory.total_bytes() <= found.memory.limit_bytes
    validate(found, MANIFEST, found.device_id)
    others = [
        dataclasses.replace(one, backend="cpu" if one.role == "prefill" else one.backend)
        for one in found.compute.processes
    ]
    refused = dataclasses.replace(found, compute=dataclasses.replace(found.compute, processes=tuple(others)))
    with pytest.raises(UserError, match="512, but where a block window is less than a layer, 64 at most"):
        validate(refused, MANIFEST, found.device_id)


def test_what_lies_inside_a_feed_forward_takes_no_memory_there() -> None:
    ours, theirs = (private_layouts(MANIFEST, made(name))["prefill_stage"] for name in ("cpu", "onnx:cpu"))
    tokens = theirs["residual"].shape[0]
    assert ours["hidden"].total_bytes == 4 * tokens * MANIFEST.layout.blocks * MANIFEST.layout.block_neurons
    assert ours["partials"].shape[0] == PARTIAL_TOKENS
    assert theirs["hidden"].total_bytes == theirs["partials"].total_bytes == 0
    assert theirs["residual"] != ours["residual"] or theirs["residual"].shape == ours["residual"].shape


@pytest.mark.parametrize(
    ("blocks", "of", "window", "wanted"),
    [(7, 1024, 7, 2), (8, 512, 8, 4), (7, 512, 7, 4), (7, 512, 3, 3), (12, 64, 12 * 128, 12), (3, 4096, 3, 1)],
)
def test_products_of_a_layer_are_about_alike_and_of_one_expert(blocks: int, of: int, window: int, wanted: int) -> None:
    layout = dataclasses.replace(MANIFEST.layout, blocks=blocks, block_neurons=of)
    assert isinstance(layout, Layout)
    assert product_blocks(layout, window) == wanted
    assert wanted == 1 or wanted * of <= MAX_PRODUCT_NEURONS
