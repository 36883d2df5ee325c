"""When two sets of answers agree: the same bits within one numerics, close logits across two.

Across numerics (another instruction set, another kind of processor) sums are rounded in another order, so logits differ
a little, and a text may take another turn where two tokens were nearly as likely. What is compared then is logits of
given tokens: how far apart two rows are, as a share of the row's spread, and the likeliest token.

    numerics             logits                                              texts
    the same             every bit                                           every token
    different            MAX_DIFFERENCE of the spread, MAX_OTHER_TOP rows    not compared
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from neuronpipe.plans.plan.document import ACCELERATOR
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

MAX_DIFFERENCE = 0.04
"""Root of the mean squared difference of two rows of logits, over the standard deviation of the first. Between numpy in
float32 and the native engine, whose activations have 8 bits, it is 0.02 (q8, q4; tests/integration/test_backends.py).
"""

MAX_OTHER_TOP = 0.2
"""Share of the rows whose likeliest token may be another."""


@dataclass
class Answers:
    """What a run computed. rows: by the role that computes them, then by name, float32 [vocabulary]; texts: tokens in
    words, by name; numerics: by role, as the processes declared it."""

    numerics: dict[str, str]
    rows: dict[str, dict[str, NDArray[np.float32]]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


@frozen
class Agreement:
    """How near two sets of answers are. numerics: (expected, found) of the roles where they differ, by role."""

    numerics: Mapping[str, tuple[str, str]]
    difference: float
    same_top: int
    rows: int

    def __str__(self) -> str:
        changed = ", ".join(f"{role} computes in {new}, before in {old}" for role, (old, new) in self.numerics.items())
        return (
            f"{changed}: logits differ by {self.difference:.2%} of their spread at most; the likeliest token is the "
            f"same in {self.same_top} of {self.rows} rows"
        )


def compare(expected: Answers, found: Answers) -> Agreement | None:
    """How near the two are, where numerics differ; None where all bits are the same. Raises UserError saying what does
    not agree. What was not asked of both is passed over."""
    changed = {
        role: (numerics, found.numerics[role])
        for role, numerics in expected.numerics.items()
        if found.numerics[role] != numerics
    }
    other_bits = changed.keys() | ({"decode"} if ACCELERATOR in changed else set())  # whose steps it takes part in
    differences: list[float] = []
    same_top = 0
    for role, rows in found.rows.items():
        for name, row in rows.items():
            right = expected.rows[role][name]
            if role not in other_bits:
                _require_same(name, right.tobytes(), row.tobytes())
                continue
            differences.append(_difference(name, right, row))
            same_top += int(right.argmax() == row.argmax())
    if not changed:
        for name, text in found.texts.items():
            _require_same(name, expected.texts[name], text)
        return None
    agreement = Agreement(changed, max(differences), same_top, len(differences))
    if agreement.difference > MAX_DIFFERENCE or same_top < (1 - MAX_OTHER_TOP) * len(differences):
        raise UserError(f"computes something else: {agreement}; {MAX_DIFFERENCE:.0%} and {1 - MAX_OTHER_TOP:.0%} agree")
    return agreement


def _require_same(name: str, expected: object, found: object) -> None:
    if expected != found:
        raise UserError(f"computes other bits in the same numerics: {name}")


def _difference(name: str, expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    if not np.all(np.isfinite(found)):
        raise UserError(f"computes no numbers: {name}")
    return float(np.sqrt(np.mean(np.square(found - expected, dtype=np.float64))) / np.std(expected, dtype=np.float64))
