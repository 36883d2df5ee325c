"""The accelerator process: a participant of decode steps that computes the offloaded blocks of every feed-forward.

A device has a copy of the weights of these blocks, so the decode workers neither read nor wait for them. If the device
reproduces the bits of the decode workers, they may compute its blocks while it is gone, and no token changes. Otherwise
the accelerator has numerics of its own, which end with "+" and those of the decode workers. Steps with and without it
then differ slightly, and each step records the numerics of its participants.
"""

from __future__ import annotations

from neuronpipe.services.offload.offload_backend import OffloadBackend
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.steps.backend import Backend, create_backend
from neuronpipe.services.worker.decode import DecodeService


class AcceleratorService(DecodeService):
    """The process of role `accelerator`. Subclasses may override `compute` or `backend`."""

    def backend(self, job: Job) -> Backend:
        """Construct the backend that the plan names, with the instruction set of the decode workers."""
        backend = create_backend(job.process.backend, "accelerator")
        if isinstance(backend, OffloadBackend):
            backend.follow(job.plan.compute.decode_workers()[0].backend)
        return backend
