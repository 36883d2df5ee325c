"""Sizes of a run without `--sequences` and `--context`: as many sequences as hardly slow down a single one, and a
context whose KV cache takes a small share of the memory limit.

The KV cache of each sequence takes memory from neurons, even if no such sequence ever runs. If memory is scarce, the KV
cache of a fourth sequence can make a single one several times slower. Contexts of 131,072 or 262,144 tokens, as models
are published with, have KV caches of several gigabytes, all of which the smallest limit counts.
"""

from __future__ import annotations

import dataclasses

from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.number_format import show_number
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.traffic import position_bytes
from neuronpipe.plans.plan.document import Expected, KvType, Plan
from neuronpipe.plans.planner.device_facts import DeviceFacts
from neuronpipe.plans.planner.plan_options import LimitTooSmall, PlanOptions
from neuronpipe.plans.planner.planner import make_plan

MAX_SEQUENCES = 4  # `--sequences` allows more
MAX_LOSS = 0.1  # of the speed of one sequence in a plan with room for no other

MIN_CONTEXT_TOKENS = 4096
KV_SHARE = 1 / 8  # of the memory limit, for the KV cache of all sequences


def plan_for_sequences(
    manifest: Manifest, device: DeviceFacts, options: PlanOptions, frequencies: AccessFrequencies | None = None
) -> Plan:
    """Return the plan with room for as many sequences as cost a single one at most MAX_LOSS of its expected speed.

    There are at most MAX_SEQUENCES, and `options.sequences` is ignored. The first reason of the plan explains the
    number. If speeds are not known, the bytes read from flash are compared.

    Raises what `make_plan` raises for one sequence.
    """
    alone = chosen = make_plan(manifest, device, dataclasses.replace(options, sequences=1), frequencies=frequencies)
    beyond: Plan | None = None  # the first plan, with more sequences than the chosen one, that is too slow
    for sequences in range(2, MAX_SEQUENCES + 1):
        try:
            plan = make_plan(
                manifest, device, dataclasses.replace(options, sequences=sequences), frequencies=frequencies
            )
        except LimitTooSmall:
            break
        if _pays(alone.expected, plan.expected):
            chosen, beyond = plan, None
        elif beyond is None:
            beyond = plan
    return dataclasses.replace(chosen, reasons=(_reason(alone, chosen, beyond), *chosen.reasons))


def _pays(alone: Expected, several: Expected) -> bool:
    if alone.tokens_per_s is not None and several.tokens_per_s is not None:
        return several.tokens_per_s >= (1 - MAX_LOSS) * alone.tokens_per_s
    # Nothing was measured: bytes read from flash stand in for speed.
    return (1 - MAX_LOSS) * several.flash_bytes_per_token <= alone.flash_bytes_per_token


def _reason(alone: Plan, chosen: Plan, beyond: Plan | None) -> str:
    count = chosen.compute.sequences
    room = f"room for {_show_count(count)} at once"
    if beyond is not None:
        return (
            f"{room}: {_show_count(beyond.compute.sequences)} would take "
            f"{(beyond.memory.kv_bytes - chosen.memory.kv_bytes) >> 20} MiB more of KV cache from the neurons, "
            f"and one text would get {_cost(beyond.expected)} instead of {_cost(alone.expected)}; "
            "--sequences sets another number"
        )
    if count < MAX_SEQUENCES:
        return f"{room}: memory does not hold the KV cache of another"
    return f"{room}: one text loses at most {MAX_LOSS:.0%} of its expected speed by that"


def _show_count(count: int) -> str:
    return "1 text" if count == 1 else f"{count} texts"


def _cost(expected: Expected) -> str:
    if expected.tokens_per_s is not None:
        return f"{show_number(expected.tokens_per_s)} tokens/s"
    return f"{expected.flash_bytes_per_token / 1e6:.0f} MB from flash a token"


def default_context(model: ModelSpec, limit_bytes: int, sequences: int, kv_type: KvType = "f16") -> int:
    """Return the model's context length, halved until the KV cache of `sequences` sequences takes at most KV_SHARE of
    the limit, or until it would be below MIN_CONTEXT_TOKENS."""
    context_tokens = model.context_tokens
    token_bytes = sequences * position_bytes(model, kv_type)
    while context_tokens * token_bytes > KV_SHARE * limit_bytes and context_tokens // 2 >= MIN_CONTEXT_TOKENS:
        context_tokens //= 2
    return context_tokens


def context_reason(model: ModelSpec, context_tokens: int, sequences: int, kv_type: KvType = "f16") -> str:
    """Return why the context is shorter than the model's."""
    kv_bytes = sequences * position_bytes(model, kv_type) * model.context_tokens
    return (
        f"a context of {context_tokens:,} tokens: the KV cache of the model's {model.context_tokens:,} would take "
        f"{kv_bytes >> 20:,} MiB, more than {KV_SHARE:.1%} of the limit; --context sets another length"
    )
