"""The counters of an engine's step by name, as `StepDone` carries them."""

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
"""Counters that exist for each part: `trigger_clusters` and so on."""

TIMES = ("step_ms", "flash_ms", "barrier_ms")
"""Times of a step: the whole step, waiting for flash, and waiting for the other participants."""


_WORDS = struct.Struct(f"={ffi.sizeof('np_engine_counters') // 8}Q")
"""One unpacking instead of two dozen field reads, which dominate the Python time of a small model's step."""


def _place(field: str, part: int = 0) -> int:
    return int(ffi.offsetof("np_engine_counters", field)) // 8 + part


_PLACES = tuple(
    [(name, _place(name)) for name in COUNTS]
    + [(f"{part}_{name}", _place(name, n)) for part, n in PARTS.items() for name in PART_COUNTS]
)
_TIME_PLACES = tuple((name, _place(f"{name[:-3]}_ns")) for name in TIMES)


def counters_by_name(counters: Any) -> dict[str, float]:
    """Return the fields of an `np_engine_counters *`, times in milliseconds."""
    return summed_counters([counters])


def summed_counters(pointers: Sequence[Any]) -> dict[str, float]:
    """Return the sums over several `np_engine_counters *`, one per participant, times in milliseconds."""
    words = [_WORDS.unpack_from(ffi.buffer(pointer)) for pointer in pointers]
    sums = words[0] if len(words) == 1 else tuple(map(sum, zip(*words, strict=True)))
    figures = {name: sums[place] for name, place in _PLACES}
    return figures | {name: sums[place] / 1e6 for name, place in _TIME_PLACES}
