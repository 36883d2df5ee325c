"""Measured speeds of an accelerator, an optional part of a device profile.

They cover the kernels on offloaded blocks by the number of sequences in a step, and the cost of each call.
"""

from __future__ import annotations

from typing import Any, Literal

from neuronpipe.plans.device.measured_figures import Figure, interpolate, interpolate_all
from neuronpipe.plans.device.measured_points import StepMode, require_positive
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.protocol.frozen import frozen

ACCELERATOR_VERSION = 2
OffloadedKind = Literal["exact", "predicted"]
MAX_SEQUENCES = 4  # in a step
LISTS = ("launches", "copies", "visits", "held", "in_runs")


@frozen(kw_only=True)
class OffloadedPoint:
    """Speed of the kernels on whole offloaded blocks, in bytes of weights per second of the computed rows.

    A row counts once per sequence that reads it, up to all rows. Kind "exact" computes all triggers and the Up and Down
    rows of this share of the neurons, different neurons per sequence; kind "predicted" also restricts the triggers to
    this share.
    """

    kind: OffloadedKind
    quantization: Quantization
    row_weights: int
    share: float
    texts: int  # sequences in the step
    bytes_per_s: Figure

    def __post_init__(self) -> None:
        require_positive(self, "row_weights", "texts")
        if not 0 < self.share <= 1:
            raise ValueError(f"share {self.share!r} is not above 0 and up to 1")


@frozen(kw_only=True)
class LayerCall:
    """One layer's call with almost nothing to compute: vectors to the device, kernels, sums back.

    routed: the layer is a mixture, so the call also transfers each layer's experts.
    """

    texts: int  # sequences in the step
    routed: bool
    us: Figure

    def __post_init__(self) -> None:
        require_positive(self, "texts")


@frozen(kw_only=True)
class RunOverhead:
    """Extra time of a layer in a run compared with its kernels, copies and call measured alone.

    It contains the barrier with the decode workers, the participant's other work and the transfer of predicted neurons.
    If the device computes on the workers' cores, it also contains their spinning.
    """

    mode: StepMode
    us: Figure


@frozen(kw_only=True)
class Copy:
    """A synchronous copy of this many bytes. back: from the device to the host."""

    back: bool
    copy_bytes: int
    bytes_per_s: Figure

    def __post_init__(self) -> None:
        require_positive(self, "copy_bytes")


@frozen(kw_only=True)
class Launch:
    """The smallest possible kernel, launched and waited for."""

    us: Figure


@frozen(kw_only=True)
class AcceleratorProfile:
    """Measured figures of one device.

    backend: the name that selects it, as NAME or NAME:OPTIONS; is_processor: it computes on the same cores as the
    decode workers; in_runs: empty if no run could be measured.
    """

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
            raise ValueError(f"launches: {len(self.launches)} points, expected 1")
        for name in ("copies", "visits", "held"):
            if not getattr(self, name):
                raise ValueError(f"{name}: is empty")
        for back in (False, True):
            if not any(copy.back == back for copy in self.copies):
                raise ValueError(f"copies: there are none {'back' if back else 'to the device'}")

    def lists(self) -> dict[str, tuple[Any, ...]]:
        """Return the lists of points by their names in a device profile."""
        return {f"accelerator.{name}": getattr(self, name) for name in LISTS}

    @property
    def launch_us(self) -> float:
        """Return the time of the smallest kernel."""
        return self.launches[0].us.median

    def layer_call_us(self, sequences: int, *, routed: bool) -> float:
        """Return a layer's call time without computing and large copies, for a step of this many sequences."""
        calls = [call for call in self.visits if call.routed == routed] or list(self.visits)
        return interpolate({call.texts: call.us.median for call in calls}, sequences)

    def run_overhead_us(self, mode: StepMode) -> float:
        """Return the extra time of a layer in a run; 0 if it was not measured."""
        return next((overhead.us.median for overhead in self.in_runs if overhead.mode == mode), 0.0)

    def copy_us(self, copy_bytes: float, *, back: bool) -> float:
        """Return a copy's time beyond that of the smallest measured copy, which a layer's call already contains."""
        speeds: dict[float, float] = {
            copy.copy_bytes: copy.bytes_per_s.median for copy in self.copies if copy.back == back
        }
        smallest_bytes = min(speeds)
        if copy_bytes <= smallest_bytes:
            return 0.0
        return max(0.0, 1e6 * (copy_bytes / interpolate(speeds, copy_bytes) - smallest_bytes / speeds[smallest_bytes]))

    def offloaded_bytes_per_s(
        self, kind: OffloadedKind, sequences: int, share: float, *, quantization: Quantization, row_weights: int
    ) -> float:
        """Return the speed for computed rows. Raises KeyError if this quantization was not measured."""
        measured = {
            (p.row_weights, p.texts, p.share): p.bytes_per_s.median
            for p in self.held
            if (p.kind, p.quantization) == (kind, quantization)
        }
        if not measured:
            raise KeyError(f"offloaded blocks of {quantization}, {kind}: not in this profile")
        return interpolate_all(measured.items(), (row_weights, sequences, share))
