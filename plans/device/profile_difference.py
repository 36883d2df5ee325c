"""Comparison of two device profiles: figures that changed by more than their repetitions differ."""

from __future__ import annotations

from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.protocol.frozen import frozen

# Medians count as changed if they differ by more than this many times the sum of both spreads, and by MIN_CHANGE.
SPREADS = 2.0
MIN_CHANGE = 0.05


@frozen(kw_only=True)
class Change:
    """One figure that both profiles have. what: the name of its list and point."""

    what: str
    unit: str
    before: Figure
    after: Figure

    @property
    def ratio(self) -> float:
        """Return the later median relative to the earlier one."""
        return self.after.median / self.before.median

    @property
    def better(self) -> bool:
        """Return True if a speed grew or a time shrank."""
        return (self.ratio > 1) != self.unit.endswith("us")

    @property
    def beyond_spread(self) -> bool:
        """Return True if the change is larger than the repetitions differ by."""
        tolerance = SPREADS * (self.before.spread + self.after.spread)
        return abs(self.ratio - 1) > max(MIN_CHANGE, tolerance)


@frozen(kw_only=True)
class Difference:
    """All differences of two profiles.

    changes: changes of the figures that both have, in the later profile's order
    missing: figures that only the earlier one has
    added: figures that only the later one has
    """

    changes: tuple[Change, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]


def compare_profiles(before: DeviceProfile, after: DeviceProfile) -> Difference:
    """Compare two profiles. Figures correspond if all other values of their points are equal."""
    old, new = dict(before.figures()), dict(after.figures())
    return Difference(
        changes=tuple(
            Change(what=described(key), unit=str(key[-1]), before=old[key], after=figure)
            for key, figure in new.items()
            if key in old
        ),
        missing=tuple(described(key) for key in old if key not in new),
        added=tuple(described(key) for key in new if key not in old),
    )


def described(key: tuple[object, ...]) -> str:
    """Return the readable name of a figure: "decode: kind ups, quantization q4, ... (bytes_per_s)"."""
    name, *pairs, unit = key
    values = [f"{pair[0]} {_plain(pair[1])}" for pair in pairs if isinstance(pair, tuple) and pair[1] is not None]
    return f"{name}: {', '.join(values)} ({unit})"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
