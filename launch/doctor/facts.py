"""The measured facts about this machine that a plan uses: value, date, effort, spread, and how sure each one is.

sure       a device profile measured it, on a quiet machine and with steady repetitions
fair       a start measured it briefly
doubtful   other programs used the machine, or the repetitions lay apart
assumed    nothing measured it: the planner takes figures of other machines
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from neuronpipe.plans.cost.work_cost import (
    ASSUMED_READ_DELAY_US,
    ASSUMED_READ_FACTOR,
    ASSUMED_READ_US,
    ASSUMED_STEP_FACTOR,
)
from neuronpipe.plans.device.device import FlashCurve
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.measure.cached_profile import MAX_AGE_DAYS, CachedMeasurement, best_speed, doubt
from neuronpipe.protocol.frozen import frozen

if TYPE_CHECKING:
    from neuronpipe.plans.measure.probe import CacheState

Sureness = Literal["sure", "fair", "doubtful", "assumed"]
MEASURE = "`neuronpipe profile device PACKAGE` measures it in minutes; a run that stays does so while it is idle"
AGAIN = "run it again when the machine is quiet: `neuronpipe profile device PACKAGE`"


@frozen(kw_only=True)
class Fact:
    """One fact.

    taken_at: seconds since 1970; None if it is assumed
    effort: "full" for a device profile, "brief" for a start, "" if it is assumed
    spread: median distance of repetitions from their median, relative to it; None if it is assumed
    why: the reason for `sureness`, and when it is measured again
    advice: what makes it surer; empty if nothing does
    """

    name: str
    value: str
    taken_at: float | None = None
    effort: Literal["full", "brief", ""] = ""
    spread: float | None = None
    sureness: Sureness = "assumed"
    why: str = ""
    advice: str = ""


@frozen(kw_only=True)
class _Source:
    """A measurement with several facts: its date, its effort and how sure it is."""

    taken_at: float
    effort: Literal["full", "brief"]
    sureness: Sureness
    why: str
    advice: str

    def fact(self, name: str, value: str, spread: float) -> Fact:
        return Fact(
            name=name,
            value=value,
            taken_at=self.taken_at,
            effort=self.effort,
            spread=round(spread, 4),
            sureness=self.sureness,
            why=self.why,
            advice=self.advice,
        )


def known_facts(state: CacheState, now: float) -> list[Fact]:
    """Return the facts that a plan uses, measured or assumed. now: seconds since 1970"""
    profile = state.profile if state.why_not is None else None
    facts: list[Fact] = []
    if profile is not None:
        source = _Source(
            taken_at=profile.taken_at,
            effort="full",
            sureness="sure",
            why=f"measured again after {MAX_AGE_DAYS} days; faster figures of quiet starts replace its own",
            advice="",
        )
        facts += _facts_of_profile(profile, source)
        facts += _flash_fact(profile.flash_curve(), source)
    elif state.memory is not None:
        facts += _facts_of_profile(state.memory.measured, _source(state.memory, now))
    if not any(fact.name == "flash" for fact in facts) and state.flash is not None:
        facts += _flash_fact(state.flash.measured, _source(state.flash, now))
    reason = ""
    if state.profile is not None and state.why_not is not None:
        reason = f"a device profile of {show_date(state.profile.taken_at)} is not used: {state.why_not}"
    facts += _assumed(facts, reason)
    return facts


def _source(record: CachedMeasurement[Any], now: float) -> _Source:
    again = f"measured again {record.again(now)}"
    if (reason := doubt(record.measured)) is not None:
        return _Source(
            taken_at=record.taken_at, effort="brief", sureness="doubtful", why=f"{reason}; {again}", advice=AGAIN
        )
    count = "measured once" if record.agreed == 1 else f"{record.agreed} measurements agree"
    return _Source(taken_at=record.taken_at, effort="brief", sureness="fair", why=f"{count}; {again}", advice=MEASURE)


def _facts_of_profile(profile: DeviceProfile, source: _Source) -> Iterator[Fact]:
    workers = profile.decode_workers
    by = f"by {workers} worker{'' if workers == 1 else 's'}"
    if profile.dram:
        yield source.fact("memory", f"{best_speed(profile)} {by}", _spread(p.bytes_per_s for p in profile.dram))
    if matrices := [point for point in profile.decode if point.workers == workers]:
        slowest, fastest = (end(point.bytes_per_s.median for point in matrices) / 1e9 for end in (min, max))
        value = f"{slowest:.1f} to {fastest:.1f} GB/s {by}, of {len(matrices)} kinds"
        yield source.fact("kernels", value, _spread(point.bytes_per_s for point in profile.decode))
    if profile.steps:
        ratios = ", ".join(
            f"{point.mode} {point.step_us.median / point.kernels_us.median:.2f}"
            for point in profile.steps
            if point.workers == workers
        )
        yield source.fact("steps", f"times their kernels {by}: {ratios}", _spread(p.step_us for p in profile.steps))
    if profile.read_delays:
        delays = sorted(point.us.median for point in profile.read_delays)
        value = f"{delays[0]:.0f} to {delays[-1]:.0f} us late in a run"
        yield source.fact("reads", value, _spread(point.us for point in profile.read_delays))
    if profile.accelerator is not None:
        spread = _spread(figure for key, figure in profile.figures() if str(key[0]).startswith("accelerator."))
        yield source.fact("accelerator", profile.accelerator.name, spread)


def _flash_fact(curve: FlashCurve | None, source: _Source) -> Iterator[Fact]:
    if curve is None:
        return
    cached = "" if curve.direct else ", through the page cache"
    value = f"{best_speed(curve)}, one 4 KiB read {4096e6 / curve.bytes_per_s(4096, 1):.0f} us{cached}"
    yield source.fact("flash", value, curve.spread)


def _assumed(facts: Iterable[Fact], why: str) -> Iterator[Fact]:
    """Yield what the planner assumes in place of facts that are missing."""
    names = {fact.name for fact in facts}
    for name, value in (
        ("memory", "no speed is expected"),
        ("kernels", "computing keeps up with memory"),
        ("flash", "no time of reads is expected"),
        ("steps", f"{ASSUMED_STEP_FACTOR:g} times their kernels"),
        ("reads", f"{ASSUMED_READ_FACTOR * ASSUMED_READ_US:g} us of a processor, {ASSUMED_READ_DELAY_US:g} us late"),
    ):
        if name not in names:
            yield Fact(name=name, value=value, why=why, advice=MEASURE)


def _spread(figures: Iterable[Figure]) -> float:
    return statistics.median(figure.spread for figure in figures)


def show_date(taken_at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(taken_at))


def render_facts(facts: Iterable[Fact]) -> str:
    """Return the facts as text, one per line, with reason and advice below; equal advice is given once."""
    lines, advised = ["what plans know of this machine:"], set[str]()
    for fact in facts:
        details: list[str] = [fact.sureness]
        if fact.taken_at is not None:
            details += [fact.effort, show_date(fact.taken_at), f"spread {fact.spread or 0:.0%}"]
        lines.append(f"      {fact.name:<14} {fact.value} ({', '.join(details)})")
        if fact.why:
            lines.append(f"{'':21}{fact.why}")
        if fact.advice and fact.advice not in advised:
            lines.append(f"{'':21}-> {fact.advice}")
            advised.add(fact.advice)
    return "\n".join(lines) + "\n"
