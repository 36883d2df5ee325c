"""The context length of a run without --context: what its KV cache takes of the memory limit."""

from __future__ import annotations

import dataclasses

import pytest
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.search import Subject, search_plan
from neuronpipe.plans.models.spec import LayerKind, ModelSpec
from neuronpipe.plans.planner.default_sizes import default_context

from tests.unit.test_phone_plan import PHONE
from tests.unit.test_planner import MIB, manifest

# 40 KiB for each token, 10 GiB for its whole context.
LONG = ModelSpec(
    family="llama", width=512, neurons=1024, layer_kinds=(LayerKind(20),), query_heads=8, key_heads=8, head_width=64,
    vocabulary=4096, context_tokens=262_144, norm_epsilon=1e-5, activation="relu",
)  # fmt: skip


@pytest.mark.parametrize(
    ("limit_gib", "sequences", "context_tokens"),
    [(128, 1, 262_144), (8, 1, 16_384), (8, 4, 4_096), (1, 1, 4_096), (0.1, 4, 4_096)],
)
def test_its_keys_and_values_take_an_eighth_of_memory(limit_gib: float, sequences: int, context_tokens: int) -> None:
    assert default_context(LONG, int(limit_gib * (1 << 30)), sequences) == context_tokens


def test_a_short_context_stays_whole() -> None:
    assert default_context(dataclasses.replace(LONG, context_tokens=6_000), 64 << 20, 4) == 6_000


def test_the_plan_says_that_the_context_is_shorter_than_the_models() -> None:
    m = manifest()
    m = dataclasses.replace(m, model=dataclasses.replace(m.model, context_tokens=131_072)).sealed()
    subject = Subject(manifest=m, read_activity=lambda: pytest.fail("no activity"), device=PHONE)
    options = PlanOptions(memory_bytes=320 * MIB, workers=1)
    _, _, plan = search_plan(subject, options, several=False, gateway=False)
    assert plan.compute.context_tokens == 16_384  # 2 KiB for each token
    assert any("a context of 16,384 tokens" in reason and "--context" in reason for reason in plan.reasons)
    chosen = dataclasses.replace(options, context_tokens=512)
    _, _, plan = search_plan(subject, chosen, several=False, gateway=False)
    assert plan.compute.context_tokens == 512
    assert not any("a context of" in reason for reason in plan.reasons)
