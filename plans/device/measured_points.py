"""Points of a device profile: what was measured, and its figure."""

from __future__ import annotations

from typing import Literal

from neuronpipe.plans.device.cores import Kind
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.protocol.frozen import frozen

SEQUENTIAL_PIECE_BYTES = 1 << 20  # a point with this piece size is a sequential read

DecodeKind = Literal["matrix", "triggers", "ups", "downs", "predicted_triggers", "predicted_ups", "predicted_downs"]
"""Rows of weights times one token.

matrix: a whole matrix; triggers: all triggers of a block; ups, downs: the Up and Down rows of the neurons that fired;
predicted_*: the rows of the neurons that a predictor chose, whose value parts are prefetched with the triggers.
"""

ReusedKind = Literal["ups", "downs"]
StepMode = Literal["exact", "predicted"]
MAX_SHARE = 10.0  # of the speed alone: a larger share means that the measurement alone was disturbed


def require_positive(owner: object, *names: str) -> None:
    """Raise ValueError if one of these fields is not above zero."""
    for name in names:
        if not getattr(owner, name) > 0:
            raise ValueError(f"{name} {getattr(owner, name)!r} is not above zero")


def _share(value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"share {value!r} is not above 0 and up to 1")


@frozen(kw_only=True)
class CoreClass:
    """The allowed cores of one kind. measured: the core that was measured for the class."""

    kind: Kind
    cores: tuple[int, ...]
    capacity: int  # 1024 for the fastest core
    measured: int

    def __post_init__(self) -> None:
        require_positive(self, "capacity")
        if self.measured not in self.cores:
            raise ValueError(f"measured core {self.measured} is not one of its cores")


@frozen(kw_only=True)
class DramPoint:
    """Speed of reading memory only: sequentially for SEQUENTIAL_PIECE_BYTES, else every eighth piece of this size."""

    workers: int
    piece_bytes: int
    bytes_per_s: Figure

    def __post_init__(self) -> None:
        require_positive(self, "workers", "piece_bytes")


@frozen(kw_only=True)
class DecodePoint:
    """Bytes of weights per second (quants and scales of the computed rows) of all workers together."""

    kind: DecodeKind
    quantization: Quantization
    row_weights: int
    share: float  # of a block's neurons, whose rows are computed
    workers: int
    core: Kind | None  # class of a single worker's core; None: all decode cores
    bytes_per_s: Figure

    def __post_init__(self) -> None:
        require_positive(self, "row_weights", "workers")
        _share(self.share)


@frozen(kw_only=True)
class PanelPoint:
    """Tokens x weights per second of trigger rows times a panel of tokens, of all workers together."""

    quantization: Quantization
    row_weights: int
    tokens: int
    workers: int
    core: Kind | None
    token_weights_per_s: Figure

    def __post_init__(self) -> None:
        require_positive(self, "row_weights", "tokens", "workers")


@frozen(kw_only=True)
class ReusedPoint:
    """Tokens x weights per second of prefill's value rows that are still in the cache from the previous token."""

    kind: ReusedKind
    quantization: Quantization
    row_weights: int
    share: float
    workers: int
    core: Kind | None
    token_weights_per_s: Figure

    def __post_init__(self) -> None:
        require_positive(self, "row_weights", "workers")
        _share(self.share)


@frozen(kw_only=True)
class FlashRead:
    """Reads of one size with `depth` in flight, within the first range_bytes of the file."""

    request_bytes: int
    depth: int
    range_bytes: int
    sequential: bool
    core: Kind | None  # class of the issuing core; None: unpinned
    bytes_per_s: Figure

    def __post_init__(self) -> None:
        require_positive(self, "request_bytes", "depth", "range_bytes")


@frozen(kw_only=True)
class ReadCost:
    """Processor time of the loader for one read of this size: submit, reap, checksum, copy, publish.

    at_once: reads requested together, so that one wake-up serves several.
    """

    request_bytes: int
    at_once: int
    cpu_us: Figure

    def __post_init__(self) -> None:
        require_positive(self, "request_bytes", "at_once")


@frozen(kw_only=True)
class Sharing:
    """A worker and the loader active at the same time, on one core or two: the share of its speed alone that each
    keeps."""

    same_core: bool
    worker_share: Figure
    loader_share: Figure


@frozen(kw_only=True)
class Wait:
    """Time for this many workers to pass a barrier, or to receive a message and answer it."""

    workers: int
    us: Figure

    def __post_init__(self) -> None:
        require_positive(self, "workers")


@frozen(kw_only=True)
class ReadFactor:
    """Processor time of a flash read in a run, relative to the loader alone, with this many workers.

    In a run requests come in smaller groups, each completion wakes a waiting worker, and the cache evicts.
    """

    workers: int
    factor: Figure

    def __post_init__(self) -> None:
        require_positive(self, "workers")


@frozen(kw_only=True)
class StepPoint:
    """A decode step of a small package in a run with all weights resident.

    kernels_us: the time computed from the kernels' speeds; step_us: the workers' time, with everything between kernels,
    barriers and what other processes of the run take from their cores; between_us: from the end of a step to the start
    of the next.
    """

    mode: StepMode
    workers: int
    kernels_us: Figure
    step_us: Figure
    between_us: Figure

    def __post_init__(self) -> None:
        require_positive(self, "workers")


@frozen(kw_only=True)
class ReadDelay:
    """Time that a worker waits for a read beyond the flash's own time, in a run with this many workers.

    It contains scheduling of the loader, twice, and waking the worker. together: the read was named with others before
    a layer is computed, not alone while it is computed.
    """

    together: bool
    workers: int
    us: Figure

    def __post_init__(self) -> None:
        require_positive(self, "workers")
