"""What changed from one device profile to another, beyond what repetitions of one measurement differ by."""

from __future__ import annotations

from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.protocol.frozen import frozen

SPREADS = 2.0  # medians this many times as far apart as both spreads together have changed,
MIN_CHANGE = 0.05  # and by this share at least


@frozen(kw_only=True)
class Change:
    """One figure that both profiles have. what: its list and its point; ratio: after by before."""

    what: str
    unit: str
    before: Figure
    after: Figure

    @property
    def ratio(self) -> float:
        """How many times as large."""
        return self.after.median / self.before.median

    @property
    def better(self) -> bool:
        """Speeds are better when they grow, times when they shrink."""
        return (self.ratio > 1) != self.unit.endswith("us")

    @property
    def beyond_spread(self) -> bool:
        """Whether this is more than the repetitions differ by."""
        far = SPREADS * (self.before.spread + self.after.spread)
        return abs(self.ratio - 1) > max(MIN_CHANGE, far)


@frozen(kw_only=True)
class Difference:
    """changes: of all figures that both have, in the order of the later profile; missing, added: what only the earlier
    and only the later one has."""

    changes: tuple[Change, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]


def compare_profiles(before: DeviceProfile, after: DeviceProfile) -> Difference:
    """From the earlier profile to the later one. Figures belong together where all else of their points is equal."""
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
    """The name of a figure: "decode: kind ups, quantization q4, ... (bytes_per_s)"."""
    name, *pairs, unit = key
    values = [f"{pair[0]} {_plain(pair[1])}" for pair in pairs if isinstance(pair, tuple) and pair[1] is not None]
    return f"{name}: {', '.join(values)} ({unit})"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
