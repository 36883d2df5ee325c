"""The job of a service process: everything that it needs to take part in the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan, ProcessSpec
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.memory.segments import Segment
from neuronpipe.protocol.run_directory import PLAN_FILE, RunDirectory
from neuronpipe.services.runtime.listener import Listener
from neuronpipe.services.runtime.pulse import Pulse, unwatched


@frozen(kw_only=True)
class Job:
    """The job of one process.

    incarnation: how many processes had this place before it
    """

    run: str
    process: ProcessSpec
    incarnation: int
    package: Package
    plan: Plan
    directory: RunDirectory
    segments: Mapping[str, Segment]
    listener: Listener | None = None  # a gateway's
    pulse: Pulse = field(default_factory=unwatched)

    @property
    def endpoints(self) -> Mapping[str, str]:
        """The endpoints of the run's links, by link name."""
        return self.directory.endpoints()

    @property
    def doorbell(self) -> Path:
        """The FIFO whose bytes wake the loader."""
        return self.directory.doorbell

    def variables(self) -> dict[str, str]:
        """Return the job as strings by name, for a program in another language. The run directory has the rest."""
        return {
            "run": str(self.directory.path),
            "role": self.process.role,
            "index": str(self.process.index),
            "incarnation": str(self.incarnation),
            "backend": self.process.backend,
            "core": "" if self.process.core is None else str(self.process.core),
            "package": str(self.package.path.resolve()),
            "plan": str(self.directory.path / PLAN_FILE),
            "listen": "" if self.listener is None else str(self.listener.descriptor),
        }
