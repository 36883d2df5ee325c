"""The files by which clients find a run: run.json with its segments, the plan, and the engine's description."""

from __future__ import annotations

from collections.abc import Mapping

from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan
from neuronpipe.plans.plan.segment_sizes import private_layouts
from neuronpipe.protocol.codec import VERSION
from neuronpipe.protocol.memory.segments import Segment
from neuronpipe.protocol.run_directory import RunDirectory, RunFile, SegmentHandle, own_pid, started
from neuronpipe.services.runtime.run_summary import run_summary
from neuronpipe.services.worker.native_model import engine_json


def publish(directory: RunDirectory, run: str, package: Package, plan: Plan, segments: Mapping[str, Segment]) -> None:
    """Write the files of a run, with read-only descriptors for clients. This process is its supervisor.

    run: id of the run
    """
    handles = {
        name: SegmentHandle(
            fd=segment.read_only().fd, total_bytes=segment.layout.total_bytes, layout=segment.layout.text
        )
        for name, segment in segments.items()
    }
    pid, manifest = own_pid(), package.manifest
    engine = engine_json(manifest, plan.compute.context_tokens, moved_scales=plan.memory.are_scales_moved)
    directory.publish(
        RunFile(
            protocol=VERSION,
            run=run,
            supervisor_pid=pid,
            supervisor_started=started(pid),
            endpoints=directory.endpoints(),
            segments=handles,
            plan=plan.id,
            package=str(package.path.resolve()),
            private={name: layout.text for name, layout in private_layouts(manifest, plan).items()},
            summary=run_summary(package, plan, segments),
        ),
        plan.to_json(),
        engine,
    )
