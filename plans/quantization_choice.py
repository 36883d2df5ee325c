"""Chooses the quantization of a package if the user names none, by how the source stores its weights, and says why."""

from __future__ import annotations

from collections.abc import Mapping

from neuronpipe.plans.package.layout import Quantization
from neuronpipe.protocol.frozen import frozen

PLAIN = ("F32", "F16", "BF16")
LOSSLESS_ENCODINGS: Mapping[Quantization, str] = {"q4": "Q4_0", "q8": "Q8_0"}  # a package stores their values unchanged
MAX_SHOWN = 3


@frozen
class Choice:
    """The quantization of a package, the package's size, and the alternative quantization; None if the model fits no
    other."""

    quantization: Quantization
    why: str
    package_bytes: int
    alternative: Quantization | None
    alternative_bytes: int


def default_quantization(weights: Mapping[str, int]) -> Quantization:
    """Return the quantization of a package whose source stores these numbers of weights in each encoding.

    q4 for plain weights, which most people run, and for Q4_0, whose values it keeps. q8 if more than half of the
    weights have another encoding: the steps of q4 differ from theirs, and what q4 loses is added to what was lost
    before.
    """
    quantized = sum(count for name, count in weights.items() if name not in (*PLAIN, LOSSLESS_ENCODINGS["q4"]))
    return "q8" if 2 * quantized > sum(weights.values()) else "q4"


def stored(weights: Mapping[str, int]) -> str:
    """Return how a source stores its weights, for a person: the most frequent encodings first."""
    total = sum(weights.values())
    ordered = sorted(weights.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {count / total:.0%}" for name, count in ordered[:MAX_SHOWN])
    return text if len(ordered) <= MAX_SHOWN else f"{text} and others"


def why(weights: Mapping[str, int], quantization: Quantization) -> str:
    """Return what a quantization does to a source that stores these numbers of weights in each encoding: half a
    sentence."""
    if set(weights) <= set(PLAIN):
        return "the source is not quantized"
    lossless = LOSSLESS_ENCODINGS.get(quantization)
    if lossless is not None and 2 * weights.get(lossless, 0) > sum(weights.values()):
        return f"the source stores {stored(weights)}, and {quantization} keeps the values of {lossless}"
    if quantization == "q4":
        return f"the source stores {stored(weights)}, which q4 cannot keep: expect clearly worse text than the source's"
    return f"the source stores {stored(weights)}, which q4 could not keep"
