"""Measured speeds of an accelerator, an optional part of a device profile: kernels on offloaded blocks, and calls."""

from __future__ import annotations

from typing import Any, Literal

from neuronpipe.plans.device.measured_figures import Figure, interpolate, interpolate_all
from neuronpipe.plans.device.measured_points import StepMode, require_positive
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.protocol.frozen import frozen

ACCELERATOR_VERSION = 2
OffloadedKind = Literal["exact", "predicted"]
MAX_SEQUENCES = 4  # maximum of sequences in a measured step
LISTS = ("launches", "copies", "visits", "held", "in_runs")


@frozen(kw_only=True)
class OffloadedPoint:
    """Speed of the kernels on whole offloaded blocks, in bytes of computed weights per second.

    A row counts for each sequence that reads it, up to all rows. Kind "exact" computes all triggers, and the Up and
    Down rows of `share` of the neurons, different ones for each sequence. Kind "predicted" also computes only the
    triggers of these neurons.
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
    """Time of a layer's call with almost nothing to compute: vectors to the device, kernels, sums back.

    routed: the layer is a mixture of experts, so the call also transfers which experts were chosen
    """

    texts: int  # sequences in the step
    routed: bool
    us: Figure

    def __post_init__(self) -> None:
        require_positive(self, "texts")


@frozen(kw_only=True)
class RunOverhead:
    """Time by which a layer in a run takes longer than its kernels, copies and call measured alone.

    It contains the barrier with the decode workers, the participant's other work and the transfer of predicted neurons.
    If the device computes on the workers' cores, it also contains the time in which workers spin while they wait.
    """

    mode: StepMode
    us: Figure


@frozen(kw_only=True)
class Copy:
    """Speed of a synchronous copy of `copy_bytes` bytes.

    back: from the device to the host
    """

    back: bool
    copy_bytes: int
    bytes_per_s: Figure

    def __post_init__(self) -> None:
        require_positive(self, "copy_bytes")


@frozen(kw_only=True)
class Launch:
    """Time to launch the smallest possible kernel and to wait for it."""

    us: Figure


@frozen(kw_only=True)
class AcceleratorProfile:
    """Measured figures of one accelerator.

    backend: selects the accelerator, as NAME or NAME:OPTIONS
    shares_memory: its memory is that of this machine
    is_processor: it computes on the same cores as the decode workers
    in_runs: empty if no run could be measured
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
        """Return the lists of points, by name as `DeviceProfile.figures` gives it."""
        return {f"accelerator.{name}": getattr(self, name) for name in LISTS}

    @property
    def launch_us(self) -> float:
        """Return the time of the smallest kernel."""
        return self.launches[0].us.median

    def layer_call_us(self, sequences: int, *, routed: bool) -> float:
        """Return the time of a layer's call without computing and large copies, for a step of this many sequences.

        Calls of the other kind stand in if none with this value of `routed` was measured.
        """
        calls = [call for call in self.visits if call.routed == routed] or list(self.visits)
        return interpolate({call.texts: call.us.median for call in calls}, sequences)

    def run_overhead_us(self, mode: StepMode) -> float:
        """Return the extra time of a layer in a run; 0 if it was not measured."""
        return next((overhead.us.median for overhead in self.in_runs if overhead.mode == mode), 0.0)

    def copy_us(self, copy_bytes: float, *, back: bool) -> float:
        """Return by how much a copy takes longer than the smallest measured one, which a layer's call contains."""
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
        """Return the speed in bytes of computed weights per second: see OffloadedPoint.

        Raises KeyError if this quantization was not measured.
        """
        measured = {
            (p.row_weights, p.texts, p.share): p.bytes_per_s.median
            for p in self.held
            if (p.kind, p.quantization) == (kind, quantization)
        }
        if not measured:
            raise KeyError(f"offloaded blocks of {quantization}, {kind}: not in this profile")
        return interpolate_all(measured.items(), (row_weights, sequences, share))
