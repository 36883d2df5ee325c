"""The points of a device profile: what was measured, and its figure."""

from __future__ import annotations

from typing import Literal

from neuronpipe.plans.device.cores import Kind
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.protocol.frozen import frozen

SEQUENTIAL_PIECE_BYTES = 1 << 20  # pieces of this size, all of them: read from end to end

DecodeKind = Literal["matrix", "triggers", "ups", "downs", "predicted_triggers", "predicted_ups", "predicted_downs"]
"""Rows of weights times one token: a matrix from end to end; all triggers of a block; the Up rows of the neurons that
fired, and their Down rows; where a predictor chooses the neurons, their triggers (the value parts are fetched with
them), Ups and Downs."""

ReusedKind = Literal["ups", "downs"]
StepMode = Literal["exact", "predicted"]
MAX_SHARE = 10.0  # of a speed that is kept: more says that the other repetition was disturbed


def require_positive(owner: object, *names: str) -> None:
    """Raises ValueError when one of these fields is not."""
    for name in names:
        if not getattr(owner, name) > 0:
            raise ValueError(f"{name} {getattr(owner, name)!r} is not above zero")


def _share(value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"share {value!r} is not above 0 and up to 1")


@frozen(kw_only=True)
class CoreClass:
    """The allowed cores of one kind; `measured`: the one that stands for them."""

    kind: Kind
    cores: tuple[int, ...]
    capacity: int  # 1024 for the fastest core
    measured: int

    def __post_init__(self) -> None:
        require_positive(self, "capacity")
        if self.measured not in self.cores:
            raise ValueError(f"measured core {self.measured} is none of its cores")


@frozen(kw_only=True)
class DramPoint:
    """Reading memory and doing nothing else; pieces of SEQUENTIAL_PIECE_BYTES end to end, others one of eight."""

    workers: int
    piece_bytes: int
    bytes_per_s: Figure

    def __post_init__(self) -> None:
        require_positive(self, "workers", "piece_bytes")


@frozen(kw_only=True)
class DecodePoint:
    """Bytes of weights a second (quants and scales of the rows that were computed), of all workers together."""

    kind: DecodeKind
    quantization: Quantization
    row_weights: int
    share: float  # of a block's neurons whose rows are computed
    workers: int
    core: Kind | None  # of one worker; None: all decode cores
    bytes_per_s: Figure

    def __post_init__(self) -> None:
        require_positive(self, "row_weights", "workers")
        _share(self.share)


@frozen(kw_only=True)
class PanelPoint:
    """Rows of triggers times the panel of many tokens: tokens x weights a second, of all workers together."""

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
    """In prefill, value rows that the token before has left in the processor's cache: tokens x weights a second."""

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
    """Reads of one size, so many under way at once, within the file's first range_bytes."""

    request_bytes: int
    depth: int
    range_bytes: int
    sequential: bool
    core: Kind | None  # of the class that issued them; None: anywhere
    bytes_per_s: Figure

    def __post_init__(self) -> None:
        require_positive(self, "request_bytes", "depth", "range_bytes")


@frozen(kw_only=True)
class ReadCost:
    """Processor time of the loader for one read of this size: submitting, reaping, checksum, copy, publishing. at_once:
    reads that are asked for together, so that one wake-up serves several."""

    request_bytes: int
    at_once: int
    cpu_us: Figure

    def __post_init__(self) -> None:
        require_positive(self, "request_bytes", "at_once")


@frozen(kw_only=True)
class Sharing:
    """A worker computing and the loader reading at once, on one core or on two: what each keeps of its speed alone."""

    same_core: bool
    worker_share: Figure
    loader_share: Figure


@frozen(kw_only=True)
class Wait:
    """Microseconds that so many workers take: to pass a barrier, or to get a message and answer it."""

    workers: int
    us: Figure

    def __post_init__(self) -> None:
        require_positive(self, "workers")


@frozen(kw_only=True)
class ReadFactor:
    """How many times the processor time of a flash read one takes in a run, beside so many workers: requests come in
    smaller groups, whoever waits is woken, and the cache makes room."""

    workers: int
    factor: Figure

    def __post_init__(self) -> None:
        require_positive(self, "workers")


@frozen(kw_only=True)
class StepPoint:
    """A decode step of a small package in a run, everything resident. kernels_us: what the kernels' own speeds give for
    it; step_us: what it took the workers, with all that lies between kernels, waiting for each other and what other
    processes of the run take from their cores; between_us: from its end to the beginning of the next one."""

    mode: StepMode
    workers: int
    kernels_us: Figure
    step_us: Figure
    between_us: Figure

    def __post_init__(self) -> None:
        require_positive(self, "workers")


@frozen(kw_only=True)
class ReadDelay:
    """What a worker waits for a read beyond what the flash takes for it: until the loader runs, twice, and until the
    worker is woken. So many workers, in a run. together: named with others before a layer is computed, not by itself
    while it is."""

    together: bool
    workers: int
    us: Figure

    def __post_init__(self) -> None:
        require_positive(self, "workers")
