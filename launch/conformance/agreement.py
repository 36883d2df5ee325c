"""Agreement of two sets of answers: equal bits within the same numerics, close logits across different numerics.

Across numerics (another instruction set, another kind of processor) sums are rounded in another order. Logits differ a
little then, and a completion may diverge where two tokens were nearly equally likely. So the logits after given tokens
are compared: the root mean squared difference of two rows, over the standard deviation of the expected row (the row's
spread), and the most likely token.

    numerics     logits                                                      completions
    same         every bit                                                   every token
    different    at most MAX_DIFFERENCE; at most MAX_OTHER_TOP of the rows   not compared
                 have another most likely token
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
"""The largest difference of two rows that agree.

Between numpy in float32 and the native engine, whose activations have 8 bits, it is 0.02 (q8, q4;
tests/integration/test_backends.py).
"""

MAX_OTHER_TOP = 0.2
"""The largest share of rows whose most likely tokens may differ."""


@dataclass
class Answers:
    """The answers of a run.

    numerics: numerics of each role, as its processes declared them
    rows: logits by the role that computes them and by name, float32 [vocabulary]
    texts: ids of generated tokens by name, separated by blanks
    """

    numerics: dict[str, str]
    rows: dict[str, dict[str, NDArray[np.float32]]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


@frozen
class Agreement:
    """The distance of two sets of answers with different numerics.

    numerics: for each role where they differ, the expected and the actual numerics
    difference: the largest difference of two rows, as a share of the expected row's spread; 0.01 is 1 %
    same_top: number of rows whose most likely token is the same
    rows: number of compared rows: those of roles that compute in other numerics
    """

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


def compare(expected: Answers, actual: Answers) -> Agreement | None:
    """Return the distance of the answers if their numerics differ, None if all bits are equal.

    Answers that `actual` lacks are ignored; `expected` must have all others. Completions are compared only if all
    numerics are the same. Raises UserError if bits differ within the same numerics, if a logit is not finite, or if the
    distance exceeds MAX_DIFFERENCE or MAX_OTHER_TOP.
    """
    changed = {
        role: (numerics, actual.numerics[role])
        for role, numerics in expected.numerics.items()
        if actual.numerics[role] != numerics
    }
    # An accelerator takes part in the steps of the decode workers.
    inexact = changed.keys() | ({"decode"} if ACCELERATOR in changed else set())
    differences: list[float] = []
    same_top = 0
    for role, rows in actual.rows.items():
        for name, row in rows.items():
            expected_row = expected.rows[role][name]
            if role not in inexact:
                _require_same(name, expected_row.tobytes(), row.tobytes())
                continue
            differences.append(_difference(name, expected_row, row))
            same_top += int(expected_row.argmax() == row.argmax())
    if not changed:
        for name, text in actual.texts.items():
            _require_same(name, expected.texts[name], text)
        return None
    agreement = Agreement(changed, max(differences), same_top, len(differences))
    if agreement.difference > MAX_DIFFERENCE or same_top < (1 - MAX_OTHER_TOP) * len(differences):
        raise UserError(f"computes something else: {agreement}; {MAX_DIFFERENCE:.0%} and {1 - MAX_OTHER_TOP:.0%} agree")
    return agreement


def _require_same(name: str, expected: object, actual: object) -> None:
    if expected != actual:
        raise UserError(f"computes other bits in the same numerics: {name}")


def _difference(name: str, expected: NDArray[np.float32], actual: NDArray[np.float32]) -> float:
    if not np.all(np.isfinite(actual)):
        raise UserError(f"computes no numbers: {name}")
    return float(np.sqrt(np.mean(np.square(actual - expected, dtype=np.float64))) / np.std(expected, dtype=np.float64))
