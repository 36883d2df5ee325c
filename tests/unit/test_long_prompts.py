"""Chunks of more than 512 tokens: taken where long prompts gain and the usual request does not lose."""

from __future__ import annotations

import pytest
from neuronpipe.plans.lab.shapes.models import model_named
from neuronpipe.plans.lab.shapes.shape_manifest import manifest_of_shape
from neuronpipe.plans.planner import long_prompts
from neuronpipe.plans.planner.candidates import USUAL, Candidate
from neuronpipe.plans.planner.device_facts import device_facts
from neuronpipe.plans.planner.long_prompts import with_long_chunks
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.plans.planner.validation import validate

from tests.unit.fixed_machine import machine


def chosen(shape: str, *, context_tokens: int, memory_bytes: int, chunk: int = 512) -> Candidate:
    manifest, device = manifest_of_shape(model_named(shape)), device_facts(machine(), 2)
    options = PlanOptions(context_tokens=context_tokens, memory_bytes=memory_bytes, prefill_chunk_tokens=chunk)
    return Candidate(device=device, options=options, plan=make_plan(manifest, device, options))


def test_a_streamed_mixtures_experts_meet_more_tokens_at_once() -> None:
    before = chosen("qwen3-30b-a3b", context_tokens=8192, memory_bytes=8 * 10**9)
    manifest = manifest_of_shape(model_named("qwen3-30b-a3b"))
    after, (reason,) = with_long_chunks(manifest, before, None)
    compute, memory = after.plan.compute, after.plan.memory
    assert compute.prefill_chunk_tokens > before.plan.compute.prefill_chunk_tokens == 512
    assert f"{compute.prefill_chunk_tokens} tokens of a prompt at once" in reason
    assert memory.total_bytes() <= memory.limit_bytes
    assert answer_ms(after) <= 1.01 * answer_ms(before)
    validate(after.plan, manifest, "plan", range(2))


def answer_ms(candidate: Candidate) -> float:
    speed = candidate.tokens_per_s
    assert speed is not None
    return 1e3 * USUAL.answer_tokens / speed


@pytest.mark.parametrize(
    ("shape", "context_tokens", "memory_bytes"),
    [
        pytest.param("qwen3-30b-a3b", 1024, 8 * 10**9, id="a context that holds no long prompt"),
        pytest.param("turbosparse-1b", 4096, 8 * 10**9, id="a dense model in memory, which gains nothing"),
    ],
)
def test_a_chunk_that_gains_nothing_stays(shape: str, context_tokens: int, memory_bytes: int) -> None:
    before = chosen(shape, context_tokens=context_tokens, memory_bytes=memory_bytes)
    assert with_long_chunks(manifest_of_shape(model_named(shape)), before, None) == (before, ())


def test_a_chunk_that_memory_or_the_search_made_smaller_stays() -> None:
    before = chosen("qwen3-30b-a3b", context_tokens=8192, memory_bytes=8 * 10**9, chunk=256)
    assert with_long_chunks(manifest_of_shape(model_named("qwen3-30b-a3b")), before, None) == (before, ())


def test_a_cancelled_prompt_does_not_compute_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = chosen("qwen3-30b-a3b", context_tokens=8192, memory_bytes=8 * 10**9)
    monkeypatch.setattr(long_prompts, "MAX_CHUNK_MS", 1.0)
    assert with_long_chunks(manifest_of_shape(model_named("qwen3-30b-a3b")), before, None) == (before, ())
