"""What an engine counted in a step, by name: the figures of `StepDone`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from neuronpipe.native import ffi, lib

PARTS = {"trigger": lib.NP_TRIGGER, "value": lib.NP_VALUE}
COUNTS = (
    "neurons",
    "predicted",
    "fired",
    "active",
    "gate_rows",
    "up_rows",
    "down_rows",
    "matrix_rows",
    "foreseen",
    "foreseen_missed",
    "guessed",
    "guessed_right",
    "hinted",
    "hinted_fired",
)
"""Counters of a step, by the names of native/neuronpipe.h."""

PART_COUNTS = ("clusters", "missed")
"""Those that there are of each part: `trigger_clusters` and so on."""

TIMES = ("step_ms", "flash_ms", "barrier_ms")
"""Times of a step: all of it, and what of it went into waiting for flash and for the other participants."""


_WORDS = struct.Struct(f"={ffi.sizeof('np_engine_counters') // 8}Q")
"""One unpacking in place of two dozen reads of fields: steps of a small model wait for little else."""


def _place(field: str, part: int = 0) -> int:
    return int(ffi.offsetof("np_engine_counters", field)) // 8 + part


_PLACES = tuple(
    [(name, _place(name)) for name in COUNTS]
    + [(f"{part}_{name}", _place(name, n)) for part, n in PARTS.items() for name in PART_COUNTS]
)
_TIME_PLACES = tuple((name, _place(f"{name[:-3]}_ns")) for name in TIMES)


def figures_of(counters: Any) -> dict[str, float]:
    """The fields of an `np_engine_counters *`, times in ms."""
    return sum_of([counters])


def sum_of(all_of_them: Sequence[Any]) -> dict[str, float]:
    """Those of several participants, in sum. Each a pointer."""
    words = [_WORDS.unpack_from(ffi.buffer(one)) for one in all_of_them]
    sums = words[0] if len(words) == 1 else tuple(map(sum, zip(*words, strict=True)))
    figures = {name: sums[place] for name, place in _PLACES}
    return figures | {name: sums[place] / 1e6 for name, place in _TIME_PLACES}
