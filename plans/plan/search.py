"""The search: of all choices that are allowed, the one whose plan is expected to be fastest.

    maximize    tokens/s that one text is expected to have (speed.py)
    over        mode x decode workers x whether clusters are read whole
    subject to  the plan takes no more than the limit

`plan` makes a whole plan of each choice and decides the rest by rules. Or the other way round: the smallest limit with
which a speed is expected. Pure, as the planner is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from neuronpipe.plans.figures import show_number
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.budget import MIB, usable_bytes
from neuronpipe.plans.plan.plan import Mode, Plan
from neuronpipe.plans.plan.planner import DeviceFacts, LimitTooSmall, Wanted, plan
from neuronpipe.protocol.errors import UserError

# What is expected is off by up to a third in memory (tests/bench/README.md): with less to gain, plans would leave
# proven rules for an error of the model, and change from start to start.
MIN_GAIN = 0.3
ALIKE = 0.01  # speeds that are this near are the same: then fewer workers and less memory count
PRECISION = 0.01  # of the smallest limit
POINTS = 12  # limits from the least to that with which everything is resident
UNLIMITED_BYTES = 1 << 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """What may be chosen. The first mode and the first number of workers are those of the rules.

    place: the device with so many decode workers on its cores
    more: the same with cores that were left out by request; None where there is no core for so many
    """

    modes: tuple[Mode, ...]
    workers: tuple[int, ...]
    place: Callable[[int], DeviceFacts]
    more: Callable[[int], DeviceFacts | None] = lambda workers: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A choice: the device and the wish that name it, and the plan that it makes."""

    device: DeviceFacts
    wanted: Wanted
    plan: Plan

    @property
    def tokens_per_s(self) -> float | None:
        """What is expected; None where something was not measured."""
        return self.plan.expected.tokens_per_s

    @property
    def workers(self) -> int:
        """Decode workers."""
        return len(self.plan.compute.decode_workers())

    @property
    def reads(self) -> str:
        """What is read together."""
        return "clusters whole" if self.plan.flash.bundle else "parts apart"

    def named(self) -> str:
        """For a person."""
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return f"mode {self.plan.compute.mode}, {workers}, {self.reads}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What was tried within a limit, and what is best. rules: what the rules alone choose; None where that does not
    fit."""

    candidates: tuple[Candidate, ...]
    rules: Candidate | None
    chosen: Candidate

    def reason(self) -> str | None:
        """Why it is not the choice of the rules; None where it is."""
        chosen, rules = self.chosen, self.rules
        if rules is chosen:
            return None
        if rules is None:
            return f"{chosen.named()}: the limit is too small for what is chosen otherwise"
        return (
            f"{chosen.named()}: {_speed(chosen.tokens_per_s)} expected, by the rules alone ({rules.named()}) "
            f"{_speed(rules.tokens_per_s)}"
        )


class Search:
    """Of one package, one space and one wish, in which `memory_bytes` does not count."""

    def __init__(self, manifest: Manifest, space: Space, wanted: Wanted) -> None:
        self.manifest, self.space, self.wanted = manifest, space, wanted
        self._found: dict[int | None, Found] = {}
        self._bounds: tuple[int, int] | None = None

    def within(self, limit_bytes: int | None) -> Found:
        """The best choice within this limit (None: the device's share of what is available). Raises LimitTooSmall,
        and what `plan` raises for what the rules choose."""
        if limit_bytes not in self._found:
            self._found[limit_bytes] = self._search(limit_bytes)
        return self._found[limit_bytes]

    def bounds_bytes(self) -> tuple[int, int]:
        """The least limit of any choice, and one that holds everything with every choice."""
        if self._bounds is None:
            plans = [candidate.plan for candidate in self.within(UNLIMITED_BYTES).candidates]
            most = max(one.memory.total_bytes() for one in plans)
            while usable_bytes(most) < max(one.memory.total_bytes() for one in plans) + MIB:
                most += max(MIB, most // 100)
            self._bounds = min(one.memory.least_bytes for one in plans), most
        return self._bounds

    def limits_bytes(self, most_bytes: int | None = None) -> tuple[int, ...]:
        """Limits at equal ratios from the least to that with which everything is resident, or to `most_bytes`. Raises
        LimitTooSmall where that is below the least."""
        least, most = self.bounds_bytes()
        most = most if most_bytes is None else min(most, most_bytes)
        if most < least:
            self.within(most)
        steps = [math.ceil(least * (most / least) ** (n / (POINTS - 1))) for n in range(POINTS - 1)]
        return (*(min(step, most) for step in steps), most)

    def reaching(self, tokens_per_s: float, most_bytes: int | None = None) -> Found:
        """The best choice within the smallest limit, up to most_bytes, that is expected to reach this speed; to within
        PRECISION of the limit.

        More memory may for once be expected to be slower, where a larger chunk of prompts takes it. So the first of
        several limits that reaches the speed is taken, and what lies between it and the one before is halved.

        Raises UserError, with the most that can be had.
        """
        limits = self.limits_bytes(most_bytes)
        first = next((n for n, limit in enumerate(limits) if self._reaches(limit, tokens_per_s)), None)
        if first is None:
            raise self._out_of_reach(tokens_per_s, limits)
        low, high = limits[max(0, first - 1)], limits[first]
        while high > low * (1 + PRECISION) and first > 0:
            middle = math.isqrt(low * high)
            if self._reaches(middle, tokens_per_s):
                high = middle
            else:
                low = middle
        return self.within(high)

    def one_more_worker(self, than: Candidate) -> Candidate | None:
        """The same choice with another worker on a core that no worker has; None where there is no such core, or no
        memory for it."""
        device = self.space.more(than.workers + 1)
        if device is None:
            return None
        try:
            return self._candidate(device, than.wanted)
        except UserError:
            return None

    def _reaches(self, limit_bytes: int, tokens_per_s: float) -> bool:
        expected = self.within(limit_bytes).chosen.tokens_per_s
        return expected is not None and expected >= tokens_per_s

    def _out_of_reach(self, tokens_per_s: float, limits: tuple[int, ...]) -> UserError:
        found = [self.within(limit).chosen for limit in limits]
        best = max(found, key=lambda one: (one.tokens_per_s or 0.0, -one.plan.memory.limit_bytes))
        wish = f"--target-speed {tokens_per_s:g}"
        if best.tokens_per_s is None:
            return UserError(f"{wish}: no speed can be expected, memory or flash was not measured; take --memory")
        more = "" if limits[-1] >= self.bounds_bytes()[1] else "; a larger --memory may reach more"
        return UserError(
            f"{wish}: the most that is expected up to {limits[-1] / MIB:,.0f} MiB is {_speed(best.tokens_per_s)}, "
            f"with {best.plan.memory.limit_bytes / MIB:,.0f} MiB, {best.named()}{more}"
        )

    @property
    def _own(self) -> tuple[Mode, int]:
        """Of the rules."""
        return self.space.modes[0], self.space.workers[0]

    def _search(self, limit_bytes: int | None) -> Found:
        refused: list[LimitTooSmall] = []
        candidates = tuple(self._candidates(limit_bytes, refused))
        if not candidates:
            raise min(refused, key=lambda error: error.least_bytes)
        first = candidates[0]
        rules = first if (first.wanted.mode, first.workers) == self._own else None
        return Found(candidates=candidates, rules=rules, chosen=_best(candidates, rules))

    def _candidates(self, limit_bytes: int | None, refused: list[LimitTooSmall]) -> Iterator[Candidate]:
        """Every choice that fits. What does not goes to `refused`."""
        for mode in self.space.modes:
            for workers in self.space.workers:
                device = self.space.place(workers)
                wanted = dataclasses.replace(self.wanted, mode=mode, memory_bytes=limit_bytes)
                try:
                    one = self._candidate(device, wanted)
                except LimitTooSmall as error:
                    refused.append(error)
                    continue
                except UserError:
                    if (mode, workers) == self._own:
                        raise
                    continue  # with more workers than the feed-forward bytes that were asked for hold
                yield one
                if self._may_read_otherwise(one.plan):
                    other = dataclasses.replace(wanted, bundle=not one.plan.flash.bundle)
                    yield self._candidate(device, other)

    def _candidate(self, device: DeviceFacts, wanted: Wanted) -> Candidate:
        return Candidate(device=device, wanted=wanted, plan=plan(self.manifest, device, wanted))

    def _may_read_otherwise(self, made: Plan) -> bool:
        """Whether reading is measured, wanted at all, and nobody has said how."""
        wanted = self.wanted
        fixed = wanted.baseline is not None or "bundle" in wanted.without or wanted.bundle is not None
        return not fixed and made.expected.tokens_per_s is not None and made.expected.flash_reads_per_token > 0


def _best(candidates: tuple[Candidate, ...], rules: Candidate | None) -> Candidate:
    if rules is not None and rules.tokens_per_s is None:
        return rules
    from_speed = 0.0 if rules is None else (1 + MIN_GAIN) * (rules.tokens_per_s or 0.0)
    speeds = [(one.tokens_per_s or 0.0, one) for one in candidates]
    better = [(speed, one) for speed, one in speeds if speed > from_speed]
    if not better:
        return candidates[0] if rules is None else rules
    fastest = max(speed for speed, _ in better)
    alike = [one for speed, one in better if speed * (1 + ALIKE) >= fastest]
    return min(alike, key=lambda one: (one.workers, one.plan.memory.total_bytes()))


def _speed(tokens_per_s: float | None) -> str:
    return "no speed" if tokens_per_s is None else f"{show_number(tokens_per_s)} tokens/s"
