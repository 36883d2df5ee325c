"""What monitors may know of a run without asking: for its run.json."""

from __future__ import annotations

from collections.abc import Mapping

from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.traffic import neuron_row_bytes, position_bytes, step_bytes
from neuronpipe.plans.plan.plan import Plan
from neuronpipe.protocol.run_directory import RunFacts
from neuronpipe.protocol.segments import Segment


def run_facts(package: Package, plan: Plan, segments: Mapping[str, Segment]) -> RunFacts:
    """The facts of a run of this plan."""
    manifest, compute, memory = package.manifest, plan.compute, plan.memory
    shape = manifest.shape
    return RunFacts(
        model=manifest.name,
        mode=compute.mode,
        quantization=manifest.quantization,
        seats=" ".join(f"{seat.role}.{seat.index}" for seat in compute.seats),
        layers=shape.layers,
        neurons=shape.experts * shape.neurons,
        clusters=manifest.words // shape.layers,
        members=segments["residency"].layout["windows"].shape[1],
        gate_slots=memory.gate_slots,
        rest_slots=memory.rest_slots,
        gate_slot_bytes=manifest.gate_slot_bytes,
        rest_slot_bytes=manifest.rest_slot_bytes,
        fixed_bytes=segments["fixed"].layout["file"].total_bytes + segments["fixed"].layout["predictor"].total_bytes,
        kv_bytes=segments["kv"].layout["kv"].total_bytes,
        step_bytes=step_bytes(package, predicts=compute.mode == "predicted"),
        row_bytes=neuron_row_bytes(manifest),
        position_bytes=position_bytes(shape),
        context_tokens=compute.context_tokens,
    )
