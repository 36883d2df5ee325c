"""What `neuronpipe profile device` has measured of an accelerator: the kernels over blocks that it holds, by how many
texts a step has, and what each call of it takes besides. An optional part of a device profile."""

from __future__ import annotations

from typing import Any, Literal

from neuronpipe.plans.device.measured_figures import Figure, interpolate, interpolate_all
from neuronpipe.plans.device.measured_points import StepMode, require_positive
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.protocol.frozen import frozen

ACCELERATOR_VERSION = 2
OffloadedKind = Literal["exact", "predicted"]
MAX_SEQUENCES = 4  # of a step that is measured
LISTS = ("launches", "copies", "visits", "held", "in_runs")


@frozen(kw_only=True)
class OffloadedPoint:
    """The kernels on whole blocks: bytes of weights a second of the rows that they compute. A row counts once for each
    text that reads it, up to all rows. exact: all triggers, and Up and Down rows of this share of the neurons, others
    for each text; predicted: the triggers of this share as well."""

    kind: OffloadedKind
    quantization: Quantization
    row_weights: int
    share: float
    texts: int
    bytes_per_s: Figure

    def __post_init__(self) -> None:
        require_positive(self, "row_weights", "texts")
        if not 0 < self.share <= 1:
            raise ValueError(f"share {self.share!r} is not above 0 and up to 1")


@frozen(kw_only=True)
class LayerCall:
    """One layer's call where there is next to nothing to compute: vectors to the device, kernels, sums back.
    routed: of a mixture, which tells the device each layer's experts."""

    texts: int
    routed: bool
    us: Figure

    def __post_init__(self) -> None:
        require_positive(self, "texts")


@frozen(kw_only=True)
class RunOverhead:
    """What a layer takes longer in a run whose blocks the device computes than its kernels, copies and call do by
    themselves: meeting the decode workers, what else the participant computes, being told who is predicted, and, of a
    device that computes on the workers' cores, their spinning meanwhile."""

    mode: StepMode
    us: Figure


@frozen(kw_only=True)
class Copy:
    """So many bytes at once, waited for; back: from the device."""

    back: bool
    copy_bytes: int
    bytes_per_s: Figure

    def __post_init__(self) -> None:
        require_positive(self, "copy_bytes")


@frozen(kw_only=True)
class Launch:
    """The smallest kernel there is, waited for."""

    us: Figure


@frozen(kw_only=True)
class AcceleratorProfile:
    """One device. backend: what asks for it, as NAME or NAME:OPTIONS; is_processor: it computes on the cores that the
    decode workers have; in_runs: empty where no run could be measured."""

    version: int
    backend: str
    name: str
    memory_bytes: int
    max_buffer_bytes: int
    shares_memory: bool
    is_processor: bool
    launches: tuple[Launch, ...]
    copies: tuple[Copy, ...]
    visits: tuple[LayerCall, ...]
    held: tuple[OffloadedPoint, ...]
    in_runs: tuple[RunOverhead, ...]

    def __post_init__(self) -> None:
        if self.version != ACCELERATOR_VERSION:
            raise ValueError(
                f"version: {self.version!r}, but this program reads {ACCELERATOR_VERSION}; measure again with "
                "`neuronpipe profile device`"
            )
        require_positive(self, "memory_bytes", "max_buffer_bytes")
        if len(self.launches) != 1:
            raise ValueError(f"launches: {len(self.launches)} points, one is expected")
        for name in ("copies", "visits", "held"):
            if not getattr(self, name):
                raise ValueError(f"{name}: is empty")
        for back in (False, True):
            if not any(copy.back == back for copy in self.copies):
                raise ValueError(f"copies: there are none {'back' if back else 'to the device'}")

    def lists(self) -> dict[str, tuple[Any, ...]]:
        """Its points, as a profile has them."""
        return {f"accelerator.{name}": getattr(self, name) for name in LISTS}

    @property
    def launch_us(self) -> float:
        """Of a kernel by itself."""
        return self.launches[0].us.median

    def layer_call_us(self, texts: int, *, routed: bool) -> float:
        """What a layer's call takes besides computing and larger copies."""
        found = [visit for visit in self.visits if visit.routed == routed] or list(self.visits)
        return interpolate({visit.texts: visit.us.median for visit in found}, texts)

    def run_overhead_us(self, mode: StepMode) -> float:
        """What a layer takes besides in a run; 0 where that was not measured."""
        return next((one.us.median for one in self.in_runs if one.mode == mode), 0.0)

    def copy_us(self, copy_bytes: float, *, back: bool) -> float:
        """A copy's time beyond that of the smallest measured, whose time a visit has already."""
        line: dict[float, float] = {
            copy.copy_bytes: copy.bytes_per_s.median for copy in self.copies if copy.back == back
        }
        least = min(line)
        if copy_bytes <= least:
            return 0.0
        return max(0.0, 1e6 * (copy_bytes / interpolate(line, copy_bytes) - least / line[least]))

    def offloaded_bytes_per_s(
        self, kind: OffloadedKind, texts: int, share: float, *, quantization: Quantization, row_weights: int
    ) -> float:
        """Of rows computed. Raises KeyError for a quantization that was not measured."""
        measured = {
            (p.row_weights, p.texts, p.share): p.bytes_per_s.median
            for p in self.held
            if (p.kind, p.quantization) == (kind, quantization)
        }
        if not measured:
            raise KeyError(f"held blocks of {quantization}, {kind}: not in this profile")
        return interpolate_all(measured.items(), (row_weights, texts, share))
