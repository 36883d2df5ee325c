"""Options of a plan, and the error of a limit that is too small for them."""

from __future__ import annotations

from typing import Literal

from neuronpipe.plans.plan.document import Mode
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

Technique = Literal["bundle", "cache", "drafts", "pipeline", "predictor", "prefetch"]
TECHNIQUES: tuple[Technique, ...] = ("bundle", "cache", "drafts", "pipeline", "predictor", "prefetch")
Baseline = Literal["llm-in-a-flash"]
BASELINES: tuple[Baseline, ...] = ("llm-in-a-flash",)


class LimitTooSmall(UserError):
    """The memory limit is below `min_bytes`, the smallest that package and options allow."""

    def __init__(self, message: str, min_bytes: int) -> None:
        super().__init__(message)
        self.min_bytes = min_bytes


@frozen(kw_only=True)
class PlanOptions:
    """The options of a plan. None leaves the choice to the planner.

    `without` and `baseline` are for experiments: they disable techniques.
    """

    memory_bytes: int | None = None  # limit of the whole run
    ffn_resident_share: float | None = None  # maximum of resident feed-forward bytes, as a share (0..1) of all
    follows: bool = False  # the run takes what is available, up to memory_bytes
    context_tokens: int | None = None
    sequences: int = 1
    mode: Mode | None = None
    without: frozenset[Technique] = frozenset()
    baseline: Baseline | None = None
    hints: bool = False  # exact mode reads early what the package's predictor or routers will probably choose
    prompt_cache_bytes: int = 0  # as in `Flash`
    bundle: bool | None = None  # both parts of a cluster are read together
    prefill_chunk_tokens: int | None = None  # maximum; the chunk is smaller if the memory limit is small
    depth: int | None = None  # maximum of reads at once; there are fewer if staging is small
    offloaded_blocks: tuple[int, ...] | None = None  # as `Compute.held_blocks`; None: the fastest split
    offloaded_matrices: tuple[str, ...] | None = None  # as `Compute.held_matrices`; None: the fastest split
