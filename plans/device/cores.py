"""Cores, and which process runs on which. Pure: from capacities to kinds, and from kinds to one core per role.

A phone has three kinds of cores. Sparse decode wants the fast ones; flash commands complete sooner when a fast core
submits them; what only passes messages on is cheapest on a slow one. A machine whose cores are all alike has no cheap
core to give away, so there such roles stay unpinned (None) and the kernel finds them a place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from neuronpipe.protocol.frozen import frozen

Kind = Literal["big", "mid", "little"]
Source = Literal["capacity", "frequency", "equal"]

FULL_CAPACITY = 1024
BIG_FROM_SHARE = 0.95
# Capacity counts instructions per cycle too, and in-order cores come out at 0.2 to 0.45 of the fastest. Clock rates
# alone make them look faster (2.3 of 3.3 GHz is 0.7), so where only clocks are known the line lies higher.
LITTLE_BELOW_SHARE: Mapping[Source, float] = {"capacity": 0.5, "frequency": 0.75, "equal": 0.0}
# With this many fast cores, the loader's is worth more to it alone than to one more decode worker.
SPARE_LOADER_CORE_FROM = 4


@frozen(kw_only=True)
class Core:
    """One logical processor: `capacity` is its speed, 1024 for the fastest here; `allowed`: this process may use it."""

    id: int
    capacity: int
    kind: Kind
    allowed: bool = True


def classify(speeds: Mapping[int, float], source: Source, allowed: Iterable[int]) -> tuple[Core, ...]:
    """Cores by id, from each one's speed in any unit (all positive); `source` says what the speeds are."""
    fastest = max(speeds.values())
    may_use = frozenset(allowed)

    def kind(share: float) -> Kind:
        if share >= BIG_FROM_SHARE:
            return "big"
        return "little" if share < LITTLE_BELOW_SHARE[source] else "mid"

    return tuple(
        Core(id=id, capacity=round(FULL_CAPACITY * speed / fastest), kind=kind(speed / fastest), allowed=id in may_use)
        for id, speed in sorted(speeds.items())
    )


def _by_speed(cores: Iterable[Core]) -> tuple[list[Core], list[Core]]:
    """Allowed cores as (fast, slow), each fastest first; with little ones only, these are the fast ones."""
    ordered = sorted((core for core in cores if core.allowed), key=lambda core: (-core.capacity, core.id))
    fast = [core for core in ordered if core.kind != "little"]
    return (fast, [core for core in ordered if core.kind == "little"]) if fast else (ordered, [])


def default_decode_workers(cores: Sequence[Core], cpu_quota: float | None = None) -> int:
    """One decode worker per fast core, less the loader's when there are plenty; no more than the quota (in cores)."""
    fast, _ = _by_speed(cores)
    workers = len(fast) - 1 if len(fast) >= SPARE_LOADER_CORE_FROM else len(fast)
    return max(1, workers if cpu_quota is None else min(workers, int(cpu_quota)))


def max_decode_workers(cores: Sequence[Core], cpu_quota: float | None = None) -> int:
    """As many as there are fast cores; no more than the quota (in cores). More would share cores."""
    fast, _ = _by_speed(cores)
    return max(1, len(fast) if cpu_quota is None else min(len(fast), int(cpu_quota)))


def restrict_cores(cores: Sequence[Core], ids: Iterable[int]) -> tuple[Core, ...]:
    """The same cores, of which only these may be used."""
    wanted = frozenset(ids)
    return tuple(replace(core, allowed=core.allowed and core.id in wanted) for core in cores)


def assign_cores(cores: Sequence[Core], decode_workers: int) -> dict[str, int | None]:
    """The core of each role: "decode.0" ..., "loader", "prefill", "coordinator", "cache", "gateway"; None: not pinned.

    The loader has the last of the biggest cores, and decode workers take the other fast cores first, so that they share
    with it only when there are as many of them as fast cores. More workers than fast cores go on to the slow ones, then
    round again. Cores that are not allowed are never named. Raises ValueError without an allowed core or a worker.
    """
    fast, slow = _by_speed(cores)
    if not fast or decode_workers < 1:
        raise ValueError(f"{len(fast)} allowed cores for {decode_workers} decode workers: one of each is the least")
    biggest = [core for core in fast if core.kind == fast[0].kind]
    loader = biggest[-1]
    places = [core for core in fast if core is not loader] + [loader] + slow
    roles: dict[str, int | None] = {f"decode.{i}": places[i % len(places)].id for i in range(decode_workers)}
    roles["loader"] = loader.id
    roles["prefill"] = biggest[0].id
    # The coordinator is in every token's way and has the best of the slow cores; what runs now and then has the last.
    roles["coordinator"] = slow[0].id if slow else None
    roles["cache"] = slow[-1].id if slow else None
    roles["gateway"] = slow[-1].id if slow else None
    return roles
