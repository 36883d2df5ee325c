"""Chooses the quantization of every matrix of a package, by a recipe and by how the source stores its weights, and says
why."""

from __future__ import annotations

from collections.abc import Mapping

from neuronpipe.plans.package.layout import BITS, Quantization
from neuronpipe.protocol.frozen import frozen

PLAIN = ("F32", "F16", "BF16")
LOSSLESS: Mapping[str, Quantization] = {"Q4_0": "q4", "Q8_0": "q8", "Q4_K": "q4k", "Q5_K": "q5k"}
"""The smallest quantization that can express all values of an encoding, along the same axis."""
ATTENTION: Mapping[str, Quantization] = {"Q4_K": "q4k", "Q5_K": "q5k", "Q6_K": "q6k"}
"""The quantization of a matrix of attention in a package of q4k, q5k or q6k, by the source's encoding: such files store
some of these matrices with more bits than the rest."""
MAX_SHOWN = 3


@frozen
class Recipe:
    """The quantizations of a package's matrices, named after that of most of them.

    down: quantization of Down, whose rows are stored by neuron, across the source's groups
    ends: quantization of embedding and output, through which every token passes
    """

    down: Quantization
    ends: Quantization


RECIPES: Mapping[Quantization, Recipe] = {
    "q4": Recipe(down="q4", ends="q8"),
    "q4k": Recipe(down="q5k", ends="q6k"),
    "q5k": Recipe(down="q6k", ends="q6k"),
    "q6k": Recipe(down="q6k", ends="q8"),
    "q8": Recipe(down="q8", ends="q8"),
    "f16": Recipe(down="f16", ends="f16"),
}


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

    q4k for plain weights. For others, what keeps the values of most of the quantized weights; q8 if no smaller one
    does: re-encoding in fewer bits loses again what was lost before.
    """
    quantized = {name: count for name, count in weights.items() if name not in PLAIN}
    if 2 * sum(quantized.values()) <= sum(weights.values()):
        return "q4k"
    return LOSSLESS.get(max(quantized, key=lambda name: quantized[name]), "q8")


def with_room_for(quantization: Quantization, encodings: Mapping[str, int]) -> Quantization:
    """Return the quantization of a matrix in a package of `quantization`, if the source stores these numbers of its
    weights in each encoding: one with more bits if an encoding needs them."""
    wanted = [ATTENTION[name] for name in encodings if name in ATTENTION]
    larger = [own for own in wanted if BITS[own] > BITS[quantization]]
    return max(larger, key=lambda own: BITS[own], default=quantization)


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
    sufficient, how = default_quantization(weights), f"the source stores {stored(weights)}"
    name = max(weights, key=lambda name: weights[name])
    if LOSSLESS.get(name) == quantization:
        return f"{how}, and {quantization} keeps the values of {name}"
    if quantization == "q4" or BITS[quantization] < BITS[LOSSLESS.get(name, quantization)]:
        return f"{how}, which {quantization} cannot keep: expect clearly worse text than the source's"
    if BITS[quantization] < BITS[sufficient]:
        return f"{how}, which {quantization} does not keep: expect slightly worse text than the source's"
    return f"{how}, which {quantization} keeps almost exactly"
