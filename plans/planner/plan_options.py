"""Options of a plan, and the error of a limit that is too small for them."""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

from neuronpipe.plans.plan.document import KvType, Mode
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

Technique = Literal["bundle", "cache", "drafts", "pipeline", "predictor", "prefetch"]
TECHNIQUES: tuple[Technique, ...] = ("bundle", "cache", "drafts", "pipeline", "predictor", "prefetch")
Baseline = Literal["llm-in-a-flash"]
BASELINES: tuple[Baseline, ...] = ("llm-in-a-flash",)

UNIT_BYTES = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
MAX_DECIMALS = 3


class MemoryLimit(int):
    """A memory limit in bytes that keeps the text and the unit in which a person typed it. A computed one has no text,
    and the unit MiB."""

    typed: str
    unit: str

    def __new__(cls, limit_bytes: int, typed: str = "", unit: str = "MiB") -> MemoryLimit:
        limit = super().__new__(cls, limit_bytes)
        limit.typed, limit.unit = typed, unit
        return limit

    @classmethod
    def of(cls, limit_bytes: int) -> MemoryLimit:
        """Return the limit itself if it was typed, else one without text."""
        return limit_bytes if isinstance(limit_bytes, cls) else cls(limit_bytes)

    @property
    def as_typed(self) -> str:
        """Return the text that was typed; of a computed limit, the size to the next thousandth of its unit."""
        return self.typed or f"{self / UNIT_BYTES[self.unit]:,.{MAX_DECIMALS}f}".rstrip("0").rstrip(".") + self.unit


def size_to_type(size_bytes: int, unit: str) -> str:
    """Return a size as a person types it, e.g. `106MiB`: three digits, rounded up, so that a limit of this size is
    large enough."""
    unit_bytes = UNIT_BYTES[unit]
    places = range(MAX_DECIMALS if unit_bytes > 1 else 0)
    decimals = next((n for n in places if size_bytes * 10**n >= 100 * unit_bytes), len(places))
    count = -(-size_bytes * 10**decimals // unit_bytes)
    number = f"{Decimal(count).scaleb(-decimals).normalize():f}"
    return f"{number} bytes" if unit_bytes == 1 else f"{number}{unit}"


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

    memory_bytes: int | None = None  # limit of the whole run; a `MemoryLimit` is shown as it was typed
    ffn_resident_share: float | None = None  # maximum of resident feed-forward bytes, as a share (0..1) of all
    follows: bool = False  # the run takes what is available, up to memory_bytes
    context_tokens: int | None = None
    sequences: int = 1
    mode: Mode | None = None
    without: frozenset[Technique] = frozenset()
    baseline: Baseline | None = None
    kv_type: KvType = "f16"  # as in `Compute`
    hints: bool = False  # exact mode reads early what the package's predictor or routers will probably choose
    prompt_cache_bytes: int = 0  # as in `Flash`
    bundle: bool | None = None  # both parts of a cluster are read together
    prefill_chunk_tokens: int | None = None  # maximum; the chunk is smaller if the memory limit is small
    depth: int | None = None  # maximum of reads at once; there are fewer if staging is small
    staging_first: bool = False  # staging has its share of memory before the maximum of the chunk has
    embedding_on_flash: bool = False  # also if the rules would keep it in memory
    offloaded_blocks: tuple[int, ...] | None = None  # as `Compute.held_blocks`; None: the fastest split
    offloaded_matrices: tuple[str, ...] | None = None  # as `Compute.held_matrices`; None: the fastest split
