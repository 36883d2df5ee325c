"""What a service process is given when it starts: all that it needs to find its place in the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.plan import Plan, Seat
from neuronpipe.protocol.segments import Segment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One seat of a run. `incarnation` counts the processes that had it before."""

    run: str
    seat: Seat
    incarnation: int
    package: Package
    plan: Plan
    endpoints: Mapping[str, str]
    doorbell: Path
    segments: Mapping[str, Segment]
