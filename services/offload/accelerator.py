"""The accelerator: a participant of decode steps that computes the first blocks of every feed-forward on a device that
holds their weights. It takes no other work; the decode workers do not wait for those clusters meanwhile.

Its bits are those of the decode workers, whose instructions its device follows: that they compute its blocks when it is
gone, or that it comes back, changes no text. Or it has numerics of its own, which end with "+" and those of the decode
workers: then steps with it and steps without it differ a little, and each has the numerics of who takes part.
"""

from __future__ import annotations

from neuronpipe.services.offload.offload_backend import HolderBackend
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.steps.backend import Backend, create_backend
from neuronpipe.services.worker.decode import DecodeService


class AcceleratorService(DecodeService):
    """See the module. An experiment overrides `compute`, or `backend`."""

    def backend(self, job: Job) -> Backend:
        """Who computes: what the plan says, with the numerics of the decode workers' backend."""
        backend = create_backend(job.process.backend, "accelerator")
        if isinstance(backend, HolderBackend):
            backend.follow(job.plan.compute.decode_workers()[0].backend)
        return backend
