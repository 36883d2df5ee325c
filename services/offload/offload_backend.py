"""The base of offload backends: an engine that goes through decode steps with the other participants, while a device
computes the offloaded blocks."""

from __future__ import annotations

from abc import abstractmethod

from neuronpipe.native import ffi
from neuronpipe.plans.plan.offloaded_blocks import Accelerator
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.steps.backend import Placement
from neuronpipe.services.worker.cpu import CpuBackend
from neuronpipe.services.worker.participant import EmbeddingRows, View


class OffloadBackend(CpuBackend):
    """The base class of offload backends; the interface is `Backend` and the methods below."""

    name = ""
    """The backend's name in a plan."""
    drafts = False

    @abstractmethod
    def describe(self) -> Accelerator:
        """Describe the device. Raises UserError if there is none."""

    def follow(self, decode_backend: str) -> None:
        """Use the instruction set of the decode workers' backend, so that the engine computes their bits.

        Raises UserError if that backend is not `cpu`.
        """
        name, _, instructions = decode_backend.partition(":")
        if name != "cpu":
            raise UserError(f"backend {self.name} follows decode workers of the backend cpu, not {decode_backend}")
        self._isa = instructions or self._isa

    def _own_view(self, placement: Placement) -> View:
        """Return a view of fixed tensors and stages; slots, request rings, keys and values are left out."""
        package, memory, stage = placement.job.package, placement.memory, self._stage
        fixed = memory.view("fixed", "file")
        tensors = {name: fixed[entry.start : entry.stop] for name, entry in package.fixed.items()}
        predictor = memory.view("fixed", "predictor")
        if len(predictor) and package.predictor is not None:
            tensors |= {name: predictor[entry.start : entry.stop] for name, entry in package.predictor.items()}
        stages = ("residual", "queries", "attention", "hidden", "partials", "changes", "ranks", "predicted", "claims")
        return View(
            fixed=tensors,
            embedding_rows=EmbeddingRows.of(package, memory.view("fixed", "embedding_checksums")),
            **{name: stage(name) for name in stages},
            barrier=stage("barriers"),
            logits=memory.view("exchange", "logits"),
            kv=None,
            states=None,
            slots=(None, None),
            entries=(None, None),
            window=None,
            arrivals=None,
            in_flight=None,
            epoch=memory.view("exchange", "epoch"),
            requests=ffi.new("np_requests *"),
            trace=self._trace.native,
            activity=None,
        )
