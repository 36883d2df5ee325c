"""The summary of a run in its run.json, which monitors read: names, counts and sizes."""

from __future__ import annotations

from collections.abc import Mapping

from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.traffic import neuron_row_bytes, position_bytes, step_bytes
from neuronpipe.plans.plan.document import Plan
from neuronpipe.protocol.memory.segments import Segment
from neuronpipe.protocol.run_directory import RunSummary


def run_summary(package: Package, plan: Plan, segments: Mapping[str, Segment]) -> RunSummary:
    """Return what `status` and the page show of a run besides its state; all sizes are in bytes."""
    manifest, compute, memory = package.manifest, plan.compute, plan.memory
    model, slots = manifest.model, manifest.slots(moved=plan.memory.are_scales_moved)
    return RunSummary(
        model=manifest.name,
        mode=compute.mode,
        quantization=manifest.precision,
        processes=" ".join(f"{process.role}.{process.index}" for process in compute.processes),
        layers=model.layers,
        neurons=model.ffns * model.neurons // model.layers,
        clusters=manifest.clusters // model.layers,
        participants=segments["residency"].layout["windows"].shape[0],
        trigger_slots=memory.trigger_slots,
        value_slots=memory.value_slots,
        trigger_slot_bytes=slots.trigger_bytes,
        value_slot_bytes=slots.value_bytes,
        fixed_bytes=memory.fixed_bytes,
        kv_bytes=segments["kv"].layout["kv"].total_bytes,
        step_bytes=step_bytes(package, predicts=compute.mode == "predicted" or compute.hints),
        row_bytes=neuron_row_bytes(manifest),
        position_bytes=position_bytes(model, compute.kv_type),
        context_tokens=compute.context_tokens,
        lends=memory.has_borrowed_slots,
    )
