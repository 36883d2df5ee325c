"""Which quantization a package gets where nobody says, and why: from how the source stores its weights."""

from __future__ import annotations

from collections.abc import Mapping

from neuronpipe.plans.package.layout import Quantization
from neuronpipe.protocol.frozen import frozen

PLAIN = ("F32", "F16", "BF16")
KEPT_BY: Mapping[Quantization, str] = {"q4": "Q4_0", "q8": "Q8_0"}  # whose values a package stores as they are
MAX_SHOWN = 3


@frozen
class Choice:
    """The quantization of a package, the package's size, and the quantization that one could have instead; None where
    the model fits no other."""

    quantization: Quantization
    why: str
    package_bytes: int
    other: Quantization | None
    other_bytes: int


def default_quantization(weights: Mapping[str, int]) -> Quantization:
    """The quantization of a package whose source stores so many weights in each encoding.

    q4 for plain weights, which is what most people run, and for Q4_0, whose values it keeps. q8 where more than half of
    the weights have another encoding: the steps of q4 are others than theirs, and what q4 loses comes on top of what
    was lost before. Perplexity of a Q4_K_M rose by 44 % in q4, of an IQ4_XS by 69 %.
    """
    quantized = sum(count for name, count in weights.items() if name not in (*PLAIN, KEPT_BY["q4"]))
    return "q8" if 2 * quantized > sum(weights.values()) else "q4"


def stored(weights: Mapping[str, int]) -> str:
    """How a source stores its weights, for a person: the encodings with most of them first."""
    total = sum(weights.values())
    ordered = sorted(weights.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {count / total:.0%}" for name, count in ordered[:MAX_SHOWN])
    return shown if len(ordered) <= MAX_SHOWN else f"{shown} and others"


def why(weights: Mapping[str, int], quantization: Quantization) -> str:
    """What a quantization does to a source that stores so many weights in each encoding: half a sentence."""
    if set(weights) <= set(PLAIN):
        return "the source is not quantized"
    kept = KEPT_BY.get(quantization)
    if kept is not None and 2 * weights.get(kept, 0) > sum(weights.values()):
        return f"the source stores {stored(weights)}, and {quantization} keeps the values of {kept}"
    if quantization == "q4":
        return f"the source stores {stored(weights)}, which q4 cannot keep: expect clearly worse text than the source's"
    return f"the source stores {stored(weights)}, which q4 could not keep"
