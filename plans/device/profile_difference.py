"""Comparison of two device profiles, figure by figure."""

from __future__ import annotations

from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.protocol.frozen import frozen

# A median counts as changed if its relative change exceeds MIN_CHANGE and this many times the sum of both spreads.
SPREADS = 2.0
MIN_CHANGE = 0.05


@frozen(kw_only=True)
class Change:
    """A figure that both profiles have.

    what: readable name of the figure
    unit: name of its field, which ends with the unit
    """

    what: str
    unit: str
    before: Figure
    after: Figure

    @property
    def ratio(self) -> float:
        """Return the later median divided by the earlier one."""
        return self.after.median / self.before.median

    @property
    def better(self) -> bool:
        """Return True if a speed grew or a time shrank."""
        return (self.ratio > 1) != self.unit.endswith("us")

    @property
    def beyond_spread(self) -> bool:
        """Return True if the change is larger than the spread of repetitions explains."""
        tolerance = SPREADS * (self.before.spread + self.after.spread)
        return abs(self.ratio - 1) > max(MIN_CHANGE, tolerance)


@frozen(kw_only=True)
class Difference:
    """The comparison of two profiles.

    changes: all figures that both profiles have, changed or not, in the later profile's order
    missing: names of figures that only the earlier profile has
    added: names of figures that only the later profile has
    """

    changes: tuple[Change, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]


def compare_profiles(before: DeviceProfile, after: DeviceProfile) -> Difference:
    """Compare two profiles. Figures correspond if their keys are equal (`DeviceProfile.figures`)."""
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
    """Return a figure's key as text: "decode: kind ups, quantization q4, ... (bytes_per_s)"."""
    name, *pairs, unit = key
    values = [f"{pair[0]} {_plain(pair[1])}" for pair in pairs if isinstance(pair, tuple) and pair[1] is not None]
    return f"{name}: {', '.join(values)} ({unit})"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
