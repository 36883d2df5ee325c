"""What a service process is given when it starts: all that it needs to find its place in the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.plan import Plan, Seat
from neuronpipe.protocol.run_directory import PLAN_FILE, RunDirectory
from neuronpipe.protocol.segments import Segment
from neuronpipe.services.gateway.listener import Listener


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One seat of a run. `incarnation` counts the processes that had it before."""

    run: str
    seat: Seat
    incarnation: int
    package: Package
    plan: Plan
    directory: RunDirectory
    segments: Mapping[str, Segment]
    listener: Listener | None = None  # a gateway's

    @property
    def endpoints(self) -> Mapping[str, str]:
        """The addresses of the run's links."""
        return self.directory.endpoints()

    @property
    def doorbell(self) -> Path:
        """The FIFO whose bytes wake the loader."""
        return self.directory.doorbell

    def facts(self) -> dict[str, str]:
        """The same in words, for a program in another language, which finds the rest in the run directory."""
        return {
            "run": str(self.directory.path),
            "role": self.seat.role,
            "index": str(self.seat.index),
            "incarnation": str(self.incarnation),
            "core": "" if self.seat.core is None else str(self.seat.core),
            "package": str(self.package.path.resolve()),
            "plan": str(self.directory.path / PLAN_FILE),
            "listen": "" if self.listener is None else str(self.listener.descriptor),
        }
