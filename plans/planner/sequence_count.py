"""How many texts a run has room for unless `--sequences` says: as many as cost one text hardly any speed.

Every further text takes its KV cache from the neurons that stay in memory, whether or not it ever comes. Where memory
is scarce, the KV of a fourth text can make the first one several times slower.
"""

from __future__ import annotations

import dataclasses

from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.number_format import show_number
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Expected, Plan
from neuronpipe.plans.planner.planner import DeviceFacts, LimitTooSmall, PlanOptions, plan

MAX_SEQUENCES = 4  # more are to be had by asking for them
MAX_LOSS = 0.1  # of the speed that one text has where there is room for no other


def plan_for_several(
    manifest: Manifest, device: DeviceFacts, wanted: PlanOptions, heat: AccessFrequencies | None = None
) -> Plan:
    """The plan with room for the most texts, up to MAX_SEQUENCES, that loses at most MAX_LOSS of the expected speed of
    one text; `wanted.sequences` does not count. Its first reason says why so many.

    Raises what `plan` raises for one sequence.
    """
    alone = chosen = plan(manifest, device, dataclasses.replace(wanted, sequences=1), heat=heat)
    beyond: Plan | None = None  # the first that costs too much
    for sequences in range(2, MAX_SEQUENCES + 1):
        try:
            made = plan(manifest, device, dataclasses.replace(wanted, sequences=sequences), heat=heat)
        except LimitTooSmall:
            break
        if _pays(alone.expected, made.expected):
            chosen, beyond = made, None
        elif beyond is None:
            beyond = made
    return dataclasses.replace(chosen, reasons=(_reason(alone, chosen, beyond), *chosen.reasons))


def _pays(alone: Expected, several: Expected) -> bool:
    if alone.tokens_per_s is not None and several.tokens_per_s is not None:
        return several.tokens_per_s >= (1 - MAX_LOSS) * alone.tokens_per_s
    # Nothing was measured here: what is read from flash stands in for speed.
    return (1 - MAX_LOSS) * several.flash_bytes_per_token <= alone.flash_bytes_per_token


def _reason(alone: Plan, chosen: Plan, beyond: Plan | None) -> str:
    count = chosen.compute.sequences
    said = f"room for {_texts(count)} at once"
    if beyond is not None:
        return (
            f"{said}: {_texts(beyond.compute.sequences)} would take "
            f"{(beyond.memory.kv_bytes - chosen.memory.kv_bytes) >> 20} MiB more of KV cache from the neurons, "
            f"and one text would get {_cost(beyond.expected)} instead of {_cost(alone.expected)}; "
            "--sequences sets another number"
        )
    if count < MAX_SEQUENCES:
        return f"{said}: memory does not hold the KV cache of another"
    return f"{said}: one text loses at most {MAX_LOSS:.0%} of its expected speed by that"


def _texts(count: int) -> str:
    return "1 text" if count == 1 else f"{count} texts"


def _cost(expected: Expected) -> str:
    if expected.tokens_per_s is not None:
        return f"{show_number(expected.tokens_per_s)} tokens/s"
    return f"{expected.flash_bytes_per_token / 1e6:.0f} MB from flash a token"
