"""A service by itself, its peers played by the test: the job it is given, over segments that the test maps as well."""

from __future__ import annotations

import os
from pathlib import Path

from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import ProcessSpec
from neuronpipe.plans.planner.device_facts import DeviceFacts
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.protocol.memory.segments import Segment
from neuronpipe.protocol.run_directory import RunDirectory
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.runtime.run_memory import RunMemory, create_segments

ROLES = ("coordinator", "loader", "cache", "prefill", "decode")


def make_job(role: str, package: Package, folder: Path) -> tuple[Job, RunMemory]:
    """The job of `role` in a run with one process each, half of the neurons resident; and the test's own mappings."""
    processes = tuple(ProcessSpec(role=name, index=0, core=None) for name in ROLES)
    device = DeviceFacts(id="d", memory_bytes=1 << 31, flash_engine="threads", processes=processes)
    made = make_plan(package.manifest, device, PlanOptions(ffn_resident_share=0.5))
    segments = create_segments(package.manifest, made)
    job = Job(
        run="r",
        process=processes[ROLES.index(role)],
        incarnation=0,
        package=package,
        plan=made,
        directory=RunDirectory(folder),
        segments={name: Segment.attach(one.layout, os.dup(one.fd)) for name, one in segments.items()},
    )
    os.mkfifo(job.doorbell)
    memory = RunMemory.open("supervisor", segments)
    for segment in segments.values():
        segment.close()
    return job, memory
