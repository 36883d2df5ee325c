"""Core classes, and the assignment of processes to cores. All functions are pure.

A phone has up to three kinds of cores. Decode needs the fast ones, flash commands complete sooner when a fast core
submits them, and processes that only forward messages cost least on a slow core. On a machine without slow cores
these processes are not pinned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from neuronpipe.protocol.frozen import frozen

Kind = Literal["big", "mid", "little"]
Source = Literal["capacity", "frequency", "equal"]

FULL_CAPACITY = 1024
BIG_FROM_SHARE = 0.95  # of the fastest core's speed
# Cores below this share of the fastest core's speed are little. The kernel's capacity includes instructions per cycle:
# in-order cores have 0.2 to 0.45. By clock rate alone they look faster (2.3 of 3.3 GHz is 0.7), so the limit is higher.
LITTLE_BELOW_SHARE: Mapping[Source, float] = {"capacity": 0.5, "frequency": 0.75, "equal": 0.0}
# From this many fast cores on, the loader gets a fast core of its own instead of one more decode worker.
SPARE_LOADER_CORE_FROM = 4


@frozen(kw_only=True)
class Core:
    """One logical processor.

    capacity: relative speed, 1024 for the fastest core of the machine
    allowed: this process may run on it
    physical: id of the first logical processor of the same physical core (SMT siblings share it); None if unknown
    """

    id: int
    capacity: int
    kind: Kind
    allowed: bool = True
    physical: int | None = None


def classify(speeds: Mapping[int, float], source: Source, allowed: Iterable[int]) -> tuple[Core, ...]:
    """Return the cores in order of their ids, classified by their speeds.

    speeds: positive speeds by core id, in any unit
    allowed: ids of the cores on which this process may run
    """
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
    """Return the allowed cores as (fast, slow), each fastest first, and of equal ones one of each physical core before
    its siblings. If only little cores are allowed, they count as fast."""
    allowed = [core for core in cores if core.allowed]
    further = _further_siblings(allowed)
    ordered = sorted(allowed, key=lambda core: (-core.capacity, core.id in further, core.id))
    fast = [core for core in ordered if core.kind != "little"]
    return (fast, [core for core in ordered if core.kind == "little"]) if fast else (ordered, [])


def _further_siblings(cores: Iterable[Core]) -> frozenset[int]:
    """Return the ids of the cores that share a physical core with an earlier one of these cores."""
    siblings: dict[int, list[int]] = {}
    for core in cores:
        siblings.setdefault(core.id if core.physical is None else core.physical, []).append(core.id)
    return frozenset(id for ids in siblings.values() for id in sorted(ids)[1:])


def physical_cores(cores: Iterable[Core]) -> int:
    """Return the number of physical cores of the allowed cores; a core whose siblings are unknown counts as one."""
    allowed = [core for core in cores if core.allowed]
    return len(allowed) - len(_further_siblings(allowed))


def default_decode_workers(cores: Sequence[Core], cpu_quota: float | None = None) -> int:
    """Return the default number of decode workers: one per fast core, but at least one and at most the quota.

    From SPARE_LOADER_CORE_FROM fast cores on, one of them is left to the loader.

    cpu_quota: processor time that the process may use, in cores
    """
    fast, _ = _by_speed(cores)
    workers = len(fast) - 1 if len(fast) >= SPARE_LOADER_CORE_FROM else len(fast)
    return max(1, workers if cpu_quota is None else min(workers, int(cpu_quota)))


def max_decode_workers(cores: Sequence[Core], cpu_quota: float | None = None) -> int:
    """Return the number of fast cores, at least one and at most the quota in cores. More workers would share cores."""
    fast, _ = _by_speed(cores)
    return max(1, len(fast) if cpu_quota is None else min(len(fast), int(cpu_quota)))


def restrict_cores(cores: Sequence[Core], ids: Iterable[int]) -> tuple[Core, ...]:
    """Return the same cores, of which only those with these ids remain allowed."""
    allowed_ids = frozenset(ids)
    return tuple(replace(core, allowed=core.allowed and core.id in allowed_ids) for core in cores)


def assign_cores(cores: Sequence[Core], decode_workers: int) -> dict[str, int | None]:
    """Return the core of each process; None if it is not pinned.

    Keys are "decode.0" and so on, "loader", "prefill", "coordinator", "cache" and "gateway". The loader gets the last
    of the biggest cores. Decode workers take the other fast cores, then the loader's, then the slow ones, and then
    begin again. Only allowed cores are used. Raises ValueError if there is no allowed core, or no worker.
    """
    fast, slow = _by_speed(cores)
    if not fast or decode_workers < 1:
        raise ValueError(f"{len(fast)} allowed cores for {decode_workers} decode workers: needs one of each")
    biggest = [core for core in fast if core.kind == fast[0].kind]
    loader = biggest[-1]
    places = [core for core in fast if core is not loader] + [loader] + slow
    roles: dict[str, int | None] = {f"decode.{i}": places[i % len(places)].id for i in range(decode_workers)}
    roles["loader"] = loader.id
    roles["prefill"] = biggest[0].id
    # The coordinator works for every token, so it gets the fastest slow core; processes that rarely run the slowest.
    roles["coordinator"] = slow[0].id if slow else None
    roles["cache"] = slow[-1].id if slow else None
    roles["gateway"] = slow[-1].id if slow else None
    return roles
