"""A plan that stores the scales of Up and Down in value slots or not, whatever flash this machine is said to have."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import read_plan
from neuronpipe.plans.plan.segment_sizes import slots_layout


def move_scales(plan: Path, manifest: Manifest, *, moved: bool = True) -> None:
    """Rewrite this file's plan, with as many slots as it has. moved: whether value slots store the scales"""
    made, places = read_plan(plan), manifest.slots(moved=moved)
    assert bool(places.moved_bytes) == moved, "this package has its scales elsewhere"
    memory = dataclasses.replace(
        made.memory,
        moved_scales_from=places.moved_from,
        moved_scales_bytes=places.moved_bytes,
        slots_bytes=slots_layout(manifest, made.memory.trigger_slots, made.memory.value_slots, moved=moved).total_bytes,
    )
    plan.write_text(dataclasses.replace(made, memory=memory).to_json())
