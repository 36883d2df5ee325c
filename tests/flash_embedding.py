"""Plans with the embedding on flash, for packages that the planner leaves in memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import read_plan
from neuronpipe.plans.plan.memory_budget import memory_budget
from neuronpipe.plans.plan.segment_sizes import RunShape


def leave_embedding_on_flash(file: Path, manifest: Manifest) -> None:
    """Change a plan file."""
    plan = read_plan(file)
    compute = dataclasses.replace(plan.compute, embedding_on_flash=True)
    budget = memory_budget(
        manifest,
        RunShape.of(compute),
        prefill_chunk_tokens=compute.prefill_chunk_tokens,
        staging_bytes=plan.flash.staging_bytes,
    )
    memory = dataclasses.replace(plan.memory, **dataclasses.asdict(budget))
    file.write_text(dataclasses.replace(plan, compute=compute, memory=memory).to_json(), encoding="utf-8")
