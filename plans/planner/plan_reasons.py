"""Reasons of a plan: what decides which neurons are computed, and why the embedding stays on flash."""

from __future__ import annotations

from neuronpipe.plans.cost.activation_rates import ActivationRates, unmeasured_predictor
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Mode
from neuronpipe.plans.plan.memory_budget import MIB
from neuronpipe.plans.plan.segment_sizes import RunShape, embedding_flash_bytes, embedding_row_bytes
from neuronpipe.plans.planner.plan_options import PlanOptions


def mode_reasons(manifest: Manifest, shape: RunShape, options: PlanOptions, rates: ActivationRates) -> tuple[str, ...]:
    """Return what decides which neurons are computed, and the techniques and limits that the user chose."""
    reasons = [_mode_reason(manifest, shape.mode, rates)]
    if shape.hints:
        reasons.append("hints: what will probably be wanted is asked for before it is certain, by request")
    if shape.kv_type != "f16":
        reasons.append(f"keys and values are rounded to {shape.kv_type}, by request; results differ a little")
    if (note := unmeasured_predictor(manifest, shape.mode)) is not None:
        reasons.append(note)
    if options.baseline is not None:
        reasons.append(f"baseline {options.baseline}, for comparison")
    if options.without:
        reasons.append(f"without {', '.join(sorted(options.without))}, by request")
    if options.ffn_resident_share is not None:
        reasons.append(f"feed-forward residency is limited to {options.ffn_resident_share:.0%} by request")
    return tuple(reasons)


def embedding_reasons(manifest: Manifest, shape: RunShape) -> tuple[str, ...]:
    """Return why the embedding stays on flash; nothing if it is in memory."""
    if not shape.embedding_on_flash:
        return ()
    return (
        f"the embedding stays on flash: {embedding_flash_bytes(manifest) / MIB:,.0f} MiB more for neurons, and each "
        f"token reads {embedding_row_bytes(manifest):,} bytes",
    )


def _mode_reason(manifest: Manifest, mode: Mode, rates: ActivationRates) -> str:
    """Return the reason that states, in a plan, what decides which neurons are computed."""
    if mode == "thresholded" and manifest.silent is not None:
        return (
            f"every gate is computed; up and down rows of the {rates.value_read:.1%} of the neurons that do "
            f"not count as silent are: {manifest.silent.loss()}"
        )
    if mode == "predicted":
        predictor = manifest.predictor
        names = "names" if predictor is not None and predictor.by_layer else "is assumed to name"
        return (
            f"the predictor {names} {rates.trigger_read:.1%} of the neurons; the gates of these decide, "
            f"and {rates.value_read / max(rates.trigger_read, 1e-9):.0%} of them are expected to fire"
        )
    return "exact: every gate is computed, and decides which up and down rows are"
