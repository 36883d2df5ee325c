"""Who computes a process's share of steps: the interface, and the backends there are by name.

A plan names a backend for each worker process as NAME or NAME:OPTIONS, the options in the backend's own words. The
process makes it, asks whether it can compute this model, loads it once the weights are there, and calls `compute` for
every step.

`numerics` names a backend's arithmetic. Two backends with the same numerics compute the same bits, whatever the batch,
the memory and who else takes part; with different numerics they agree within stated tolerances
(launch/conformance/agreement.py). What one computed may stand for what another would have computed only where both have
the same numerics: the coordinator keeps them with keys and values.
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
"""What of steps: decode steps with the other decode workers; prompts alone; the first blocks of decode steps."""

BACKENDS = {
    "cpu": "neuronpipe.services.worker.cpu:CpuBackend",
    "onnx": "neuronpipe.services.offload.npu.backend:OnnxBackend",
    "opencl": "neuronpipe.services.offload.gpu.backend:OpenClBackend",
}
"""The class of each backend: called with its options, a text."""

HOLDERS = {"onnx": "neuronpipe.services.offload.npu.block_backend:OnnxHolder"}
"""Those of an accelerator, where they are others; see services/offload/offload_backend.py."""


Activity = bytearray | mmap.mmap
"""A byte for each neuron: see Placement."""


class Abandoned(Exception):
    """The epoch changed: leave the step, its inputs are still there."""


class Damaged(Exception):
    """A cluster that the step needs cannot be read; the text names it."""


@frozen(kw_only=True, slots=True)
class Share:
    """What of a step is one participant's.

    first_block, end_block: whose neurons it computes, in every layer
    participants, participant: how many compute the step, and which of them this is
    sharers, sharer: how many participants have these blocks and take them by turns, and which of them this is
    held_blocks: the first ones belong to who holds their weights; nobody else looks for their clusters
    held_matrices: whole matrices that belong to the same, by their names in a plan; nobody else computes their rows
    """

    first_block: int
    end_block: int
    participants: int = 1
    participant: int = 0
    sharers: int = 1
    sharer: int = 0
    held_blocks: int = 0
    held_matrices: tuple[str, ...] = ()


@dataclasses.dataclass(slots=True, kw_only=True)
class StepWork:
    """One step as one participant gets it: np_step in native/neuronpipe.h.

    sequences, positions, tokens: the KV slot, position and id of each token
    logits_first, logits_count: whose logits are wanted; they go into logit rows 0..
    ratings: what is to be filled instead of logits; None: nothing
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


@frozen(kw_only=True)
class Placement:
    """Where a backend finds what it computes with.

    job: the package, the plan and the process
    memory: the run's segments
    activity: uint8 [layers * experts][blocks * block_neurons], for who wants to know which neurons fire: the bits of
        np_activity (native/neuronpipe.h) are set. One thread sets them, so it is for a process with one participant
    """

    job: Job
    memory: RunMemory
    activity: Activity | None = None


class Backend(Protocol):
    """One process's means to compute. One thread uses it. One that fills `StepWork.ratings` says so by an attribute
    `rates` that is true; of others a prefill worker asks for logits and rates by these."""

    @property
    def numerics(self) -> str:
        """The name of its arithmetic."""

    def supports(self, manifest: Manifest, phase: Phase) -> str | None:
        """Why it cannot compute steps of this phase for this package, in words; None: it can."""

    def load(self, placement: Placement) -> None:
        """Get ready. The fixed tensors are in memory by now."""

    def compute(self, work: StepWork) -> dict[str, float]:
        """This process's share of a step, and its counters. Raises Abandoned, Damaged, and ValueError for arguments
        out of range."""

    def give_back(self) -> None:
        """Give the memory back that only the stages of steps need; the next step takes it again."""

    def close(self) -> None:
        """Let go of everything, before the segments are unmapped."""


def create_backend(text: str, phase: Phase = "decode") -> Backend:
    """The backend that a plan names, NAME or NAME:OPTIONS, for these steps. Raises UserError."""
    name, _, options = text.partition(":")
    classes = BACKENDS | HOLDERS if phase == "accelerator" else BACKENDS
    if name not in classes:
        raise UserError(f"backend {quoted(text)}: the backends are {', '.join(classes)}")
    module, _, cls = classes[name].partition(":")
    backend: Backend = getattr(importlib.import_module(module), cls)(options)
    return backend


def phase_of(role: str) -> Phase:
    """What of steps the processes of a role compute: by default decode."""
    phases: dict[str, Phase] = {"prefill": "prefill", "accelerator": "accelerator"}
    return phases.get(role, "decode")


def require(backend: Backend, manifest: Manifest, phase: Phase, where: str) -> None:
    """Raises UserError when it cannot compute these steps; `where` names it."""
    if (why := backend.supports(manifest, phase)) is not None:
        raise UserError(f"{where}: {why}")
