"""Points of a device profile: each has the conditions of a measurement, and its figures."""

from __future__ import annotations

from typing import Literal

from neuronpipe.plans.device.cores import Kind
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.protocol.frozen import frozen

SEQUENTIAL_PIECE_BYTES = 1 << 20  # a point with this piece size is a sequential read

DecodeKind = Literal["matrix", "triggers", "ups", "downs", "predicted_triggers", "predicted_ups", "predicted_downs"]
"""Rows that are multiplied by the vector of one token.

matrix: rows of a whole matrix
triggers: all triggers of a block
ups, downs: the Up and Down rows of the neurons that fired
predicted_*: the rows of the neurons that a predictor chose; their value parts are prefetched with the triggers
"""

ReusedKind = Literal["ups", "downs", "attended"]
StepMode = Literal["exact", "predicted"]
# Maximum of a speed in company, as a share of the speed alone. More than 1 means that the measurement alone was
# disturbed.
MAX_SHARE = 10.0


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
    """The allowed cores of one kind.

    measured: id of the core that was measured for all of them
    """

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
    """Speed at which this many workers together read memory without computing.

    They read all of it in order if piece_bytes is SEQUENTIAL_PIECE_BYTES, else every eighth piece of this size.
    """

    workers: int
    piece_bytes: int
    bytes_per_s: Figure

    def __post_init__(self) -> None:
        require_positive(self, "workers", "piece_bytes")


@frozen(kw_only=True)
class DecodePoint:
    """Speed of a decode kernel, of all workers together: bytes of computed rows (quants and scales) per second."""

    kind: DecodeKind
    quantization: Quantization
    row_weights: int
    share: float  # share of a block's neurons whose rows are computed
    workers: int
    core: Kind | None  # class of the core of a single worker; None: the decode cores
    bytes_per_s: Figure

    def __post_init__(self) -> None:
        require_positive(self, "row_weights", "workers")
        _share(self.share)


@frozen(kw_only=True)
class PanelPoint:
    """Speed of prefill's product of trigger rows and `tokens` tokens, of all workers: tokens x weights per second."""

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
    """Speed of prefill's products with value rows, or with keys and values, of all workers together: tokens x weights,
    or heads x elements, per second.

    The rows are still in the processor's cache, since the previous token or head used them. With a share of 1, Downs
    are added for several tokens at once.
    """

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
    """Speed of reads of one size with `depth` in flight, within the first `range_bytes` of the file."""

    request_bytes: int
    depth: int
    range_bytes: int
    sequential: bool  # False: at random positions
    core: Kind | None  # class of the core that issues them; None: unpinned
    bytes_per_s: Figure

    def __post_init__(self) -> None:
        require_positive(self, "request_bytes", "depth", "range_bytes")


@frozen(kw_only=True)
class ReadCost:
    """Processor time of the loader for one read of this size: submit, reap, verify its checksum, copy, publish.

    at_once: number of reads requested together, which share the cost of waking the loader
    """

    request_bytes: int
    at_once: int
    cpu_us: Figure

    def __post_init__(self) -> None:
        require_positive(self, "request_bytes", "at_once")


@frozen(kw_only=True)
class Sharing:
    """Slowdown of a decode worker and the loader that run at the same time.

    same_core: both run on one core; False: each has a core
    worker_share, loader_share: speed with the other process, relative to the speed alone (1: no slowdown)
    """

    same_core: bool
    worker_share: Figure
    loader_share: Figure


@frozen(kw_only=True)
class Wait:
    """Time in which this many workers pass a barrier, or in which all of them receive a message and answer it."""

    workers: int
    us: Figure

    def __post_init__(self) -> None:
        require_positive(self, "workers")


@frozen(kw_only=True)
class ReadFactor:
    """Processor time of a flash read in a run with this many workers, relative to a measurement of the loader alone.

    It is larger, since requests come in smaller groups, each completion wakes a waiting worker, and the cache evicts.
    """

    workers: int
    factor: Figure

    def __post_init__(self) -> None:
        require_positive(self, "workers")


@frozen(kw_only=True)
class StepPoint:
    """Times of a decode step of a small package, in a run with all weights resident.

    kernels_us: computed from the speeds of the kernels
    step_us: measured, including work between kernels, barriers, and what other processes take from the workers' cores
    between_us: from the end of a step to the start of the next
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

    The loader is scheduled twice, and the worker is woken.

    together: the read was requested with others before the layer is computed; False: by itself while it is computed
    """

    together: bool
    workers: int
    us: Figure

    def __post_init__(self) -> None:
        require_positive(self, "workers")
