"""Chunks of more than 512 tokens, for prompts that are longer than the usual one.

The search compares requests with a prompt of 512 tokens, which gain nothing from a larger chunk. Longer prompts do:
each chunk reads all experts that any of its tokens chose, and a kernel that multiplies an expert with more tokens
unpacks its weights less often. A larger chunk is taken if long prompts gain clearly and the usual request loses next to
nothing: its buffers take memory from slots, but slots borrow it between prompts.
"""

from __future__ import annotations

import dataclasses

from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.cost.activation_rates import rates
from neuronpipe.plans.cost.token_time import expected
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Expected
from neuronpipe.plans.plan.runtime_memory import runtime_of
from neuronpipe.plans.plan.segment_sizes import RunShape
from neuronpipe.plans.planner.candidates import USUAL, Candidate
from neuronpipe.plans.planner.planner import CHUNK_TOKENS, LONG_CHUNK_TOKENS, make_plan

PROMPT_TOKENS = 2048  # of the long prompt that is compared
MIN_GAIN = 0.1  # of its time
MAX_LOSS = 0.01  # of the usual request's time
MAX_CHUNK_MS = 60e3  # a cancelled prompt computes its chunk to the end


def with_long_chunks(
    manifest: Manifest, chosen: Candidate, frequencies: AccessFrequencies | None
) -> tuple[Candidate, tuple[str, ...]]:
    """Return the candidate with a larger chunk and the reason, if one gains for long prompts; else `chosen` and none.
    It is also `chosen` for a runtime, an accelerator, and where options disable techniques, as in the search.

    chosen: the candidate of a search
    frequencies: access frequencies of the clusters, if they were measured
    """
    compute, options = chosen.plan.compute, chosen.options
    is_fixed = bool(options.without) or options.baseline is not None or chosen.device.accelerator is not None
    has_runtime = runtime_of(RunShape.of(compute).prefill_backend) is not None
    if compute.prefill_chunk_tokens != CHUNK_TOKENS[0] or has_runtime or is_fixed:
        return chosen, ()
    before_ms = _prompt_ms(manifest, chosen, frequencies)
    best, best_ms = chosen, before_ms
    for chunk in LONG_CHUNK_TOKENS:
        if best_ms is None or 2 * chunk > compute.context_tokens:
            continue
        larger = dataclasses.replace(options, prefill_chunk_tokens=chunk, depth=chosen.plan.flash.depth)
        plan = make_plan(manifest, chosen.device, larger, frequencies=frequencies)
        candidate = dataclasses.replace(chosen, options=larger, plan=plan)
        if plan.compute.prefill_chunk_tokens != chunk or not _is_allowed(manifest, candidate, chosen, frequencies):
            continue
        prompt_ms = _prompt_ms(manifest, candidate, frequencies)
        if prompt_ms is not None and prompt_ms < (1 - MIN_GAIN) * best_ms:
            best, best_ms = candidate, prompt_ms
    if best is chosen or before_ms is None or best_ms is None:
        return chosen, ()
    return best, (
        f"{best.plan.compute.prefill_chunk_tokens} tokens of a prompt at once: {best_ms / 1e3:.2f} s for a prompt of "
        f"{PROMPT_TOKENS} tokens, with {compute.prefill_chunk_tokens} {before_ms / 1e3:.2f} s",
    )


def _is_allowed(
    manifest: Manifest, candidate: Candidate, chosen: Candidate, frequencies: AccessFrequencies | None
) -> bool:
    """Return True if the usual request loses next to nothing, and no chunk takes too long."""
    usual_ms = USUAL.ms(_expected(manifest, candidate, frequencies, USUAL.prompt_tokens))
    chunk_ms = candidate.plan.expected.first_token_ms
    return (
        usual_ms <= (1 + MAX_LOSS) * USUAL.ms(chosen.plan.expected) and chunk_ms is not None and chunk_ms < MAX_CHUNK_MS
    )


def _prompt_ms(manifest: Manifest, candidate: Candidate, frequencies: AccessFrequencies | None) -> float | None:
    return _expected(manifest, candidate, frequencies, PROMPT_TOKENS).first_token_ms


def _expected(
    manifest: Manifest, candidate: Candidate, frequencies: AccessFrequencies | None, prompt_tokens: int
) -> Expected:
    plan, measured = candidate.plan, candidate.device.measured
    plan_rates = rates(manifest, plan.compute.mode, frequencies)
    return expected(manifest, plan_rates, plan.compute, plan.memory, plan.flash, *measured, prompt_tokens=prompt_tokens)
