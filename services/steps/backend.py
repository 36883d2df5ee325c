"""The interface of a backend, which computes a process's share of steps, and the backends by name.

A plan names a backend for each worker process as NAME or NAME:OPTIONS; the options are the backend's own. The process
constructs it, asks whether it supports the model, loads it when the weights are in memory, and calls `compute` for
every step.

`numerics` names a backend's arithmetic. Two backends with the same numerics compute the same bits, whatever the batch,
the memory and the other participants; with different numerics they agree within stated tolerances
(launch/conformance/agreement.py). Results of one backend may replace those of another only if both have the same
numerics, so the coordinator records the numerics with keys and values.
"""

from __future__ import annotations

import dataclasses
import importlib
import mmap
from collections.abc import Sequence
from typing import Literal, Protocol

from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.protocol.errors import UserError, quoted
from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.runtime.run_memory import RunMemory
from neuronpipe.services.steps.scored_tokens import Ratings

Phase = Literal["decode", "prefill", "accelerator"]
"""The steps that a process computes. decode: decode steps, with the other decode workers; prefill: prompts, alone;
accelerator: the offloaded blocks of decode steps."""

BACKENDS = {
    "cpu": "neuronpipe.services.worker.cpu:CpuBackend",
    "onnx": "neuronpipe.services.offload.npu.backend:OnnxBackend",
    "opencl": "neuronpipe.services.offload.gpu.backend:OpenClBackend",
}
"""The class of each backend, which is constructed with its options, a string."""

OFFLOAD_BACKENDS = {"onnx": "neuronpipe.services.offload.npu.block_backend:OnnxOffloadBackend"}
"""Classes that replace those of BACKENDS in accelerator processes; see services/offload/offload_backend.py."""


Activity = bytearray | mmap.mmap
"""A byte for each neuron; see `Placement`."""


class Abandoned(Exception):
    """The epoch changed during a step. The participant leaves the step, which may be repeated with the same inputs."""


class Damaged(Exception):
    """A cluster that the step needs cannot be read. The message names it."""


@frozen(kw_only=True, slots=True)
class Share:
    """One participant's share of a step.

    first_block, end_block: the range of blocks whose neurons it computes, in every layer
    participants, participant: the number of participants, and the index of this one
    sharers, sharer: the number of participants that take turns at the same blocks, and the index of this one
    offloaded_blocks: the number of offloaded blocks, which come first; only the accelerator looks up their clusters
    offloaded_matrices: the offloaded matrices by their names in a plan; only the accelerator computes their rows
    """

    first_block: int
    end_block: int
    participants: int = 1
    participant: int = 0
    sharers: int = 1
    sharer: int = 0
    offloaded_blocks: int = 0
    offloaded_matrices: tuple[str, ...] = ()


@dataclasses.dataclass(slots=True, kw_only=True)
class StepWork:
    """One step as one participant gets it; see np_step in native/neuronpipe.h.

    sequences, positions, tokens: the KV slot, the position and the id of each token
    logits_first, logits_count: the tokens whose logits are computed, into logit rows from 0 on
    ratings: scores to fill in place of logits, or None
    states_from, states_to: for each token two slots of its sequence's state, before and after the tokens that have the
        same two; empty unless layers have a state
    """

    number: int
    epoch: int
    sequences: Sequence[int]
    positions: Sequence[int]
    tokens: Sequence[int]
    logits_first: int
    logits_count: int
    share: Share
    ratings: Ratings | None = None
    states_from: Sequence[int] = ()
    states_to: Sequence[int] = ()


@frozen(kw_only=True)
class Placement:
    """The package, the plan and the memory with which a backend computes.

    job: package, plan and process
    memory: the run's segments
    activity: uint8 [layers * experts][blocks * block_neurons] in which the backend sets the bits of np_activity
        (native/neuronpipe.h) of neurons that fire; None if nobody reads them. One thread writes it, so it is for
        processes with one participant
    """

    job: Job
    memory: RunMemory
    activity: Activity | None = None


class Backend(Protocol):
    """The backend of one process, used by one thread.

    A backend that fills `StepWork.ratings` has an attribute `rates` that is True. From other backends the prefill
    worker requests logits and computes the scores itself. One that computes draft layers has an attribute `drafts` that
    is True; others get no token that is drafted.
    """

    @property
    def numerics(self) -> str:
        """The name of the backend's arithmetic."""

    def supports(self, manifest: Manifest, phase: Phase) -> str | None:
        """Return None if it can compute steps of this phase for this package, otherwise the reason as a sentence."""

    def load(self, placement: Placement) -> None:
        """Prepare to compute. The fixed tensors are in memory."""

    def compute(self, work: StepWork) -> dict[str, float]:
        """Compute this process's share of a step and return its counters. Raises Abandoned, Damaged, and ValueError for
        arguments out of range."""

    def give_back(self) -> None:
        """Free the memory that only running steps need. The next step allocates it again."""

    def close(self) -> None:
        """Release everything, before the segments are unmapped."""


def create_backend(text: str, phase: Phase = "decode") -> Backend:
    """Construct the backend that a plan names as NAME or NAME:OPTIONS. Raises UserError for an unknown name."""
    name, _, options = text.partition(":")
    classes = BACKENDS | OFFLOAD_BACKENDS if phase == "accelerator" else BACKENDS
    if name not in classes:
        raise UserError(f"backend {quoted(text)}: the backends are {', '.join(classes)}")
    module, _, cls = classes[name].partition(":")
    backend: Backend = getattr(importlib.import_module(module), cls)(options)
    return backend


def phase_of(role: str) -> Phase:
    phases: dict[str, Phase] = {"prefill": "prefill", "accelerator": "accelerator"}
    return phases.get(role, "decode")


def require(backend: Backend, manifest: Manifest, phase: Phase, where: str) -> None:
    """Raise UserError if the backend cannot compute these steps.

    where: the process or option to name in the error
    """
    if (why := backend.supports(manifest, phase)) is not None:
        raise UserError(f"{where}: {why}")
