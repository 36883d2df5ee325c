"""Chooses the quantization of every matrix of a package, by a recipe and by how the source stores its weights, and says
why."""

from __future__ import annotations

from collections.abc import Mapping

from neuronpipe.plans.package.layout import BITS, MINIMUM_QUANTIZATIONS, Quantization
from neuronpipe.protocol.frozen import frozen

PLAIN = ("F32", "F16", "BF16")
LOSSLESS: Mapping[str, Quantization] = {
    "Q4_0": "q4",
    "Q8_0": "q8",
    "Q4_K": "q4k",
    "Q5_K": "q5k",
    "IQ4_NL": "iq4",
    "IQ4_XS": "iq4",
    "MXFP4": "mxfp4",
    "Q4_1": "q4h",
    "Q5_0": "q5h",
    "Q5_1": "q5h",
}
"""The smallest quantization that can express all values of an encoding, along the same axis; of IQ4_XS up to the
rounding of its scales to fp16."""
NEARLY_LOSSLESS: Mapping[str, Quantization] = {"Q6_K": "q6k"}
"""The smallest quantization whose error, beside an encoding's own, changes no text: perplexities stay within 0.5 %."""
ATTENTION: Mapping[str, Quantization] = {"Q4_K": "q4k", "Q5_K": "q5k", "Q6_K": "q6k"}
"""The quantization of a matrix of attention in a package of q4k, q5k or q6k, by the source's encoding: such files store
some of these matrices with more bits than the rest."""
BITS_CHOICES: tuple[Quantization, ...] = ("q4", "q4k", "q5k", "q6k", "q8", "f16")
"""Quantizations among which a wanted number of bits a weight chooses."""
MAX_SHOWN = 3

RequestedQuantization = Quantization | float
"""A quantization, or a number of bits a weight, which stands for the one whose package is nearest to it."""


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
    "iq4": Recipe(down="q5k", ends="q6k"),
    "mxfp4": Recipe(down="q5k", ends="q6k"),
    "q4h": Recipe(down="q5k", ends="q6k"),
    "q5h": Recipe(down="q6k", ends="q6k"),
    "q4k": Recipe(down="q5k", ends="q6k"),
    "q5k": Recipe(down="q6k", ends="q6k"),
    "q6k": Recipe(down="q6k", ends="q8"),
    "q8": Recipe(down="q8", ends="q8"),
    "f16": Recipe(down="f16", ends="f16"),
}
SOURCE_RECIPES: Mapping[str, Recipe] = {"Q4_0": Recipe(down="q5k", ends="q8")}
"""The recipe of a package that keeps an encoding's values, where it differs from the quantization's: Down in four bits
raises a real model's perplexity by 1 to 2 %."""


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
    encoding = max(quantized, key=lambda name: quantized[name])
    return LOSSLESS.get(encoding) or NEARLY_LOSSLESS.get(encoding, "q8")


def recipe_for(quantization: Quantization, weights: Mapping[str, int], *, down_by_neuron: bool) -> Recipe:
    """Return the recipe of a package whose source stores these numbers of weights in each encoding.

    down_by_neuron: True if the source stores Down by neuron as well, so that its values are kept like the others.
    """
    encoding = max(weights, key=lambda name: weights[name])
    if LOSSLESS.get(encoding) != quantization:
        return RECIPES[quantization]
    if down_by_neuron:
        return Recipe(down=quantization, ends=RECIPES[quantization].ends)
    return SOURCE_RECIPES.get(encoding, RECIPES[quantization])


def ends_quantization(quantization: Quantization, recipe: Recipe, encodings: Mapping[str, int]) -> Quantization:
    """Return the quantization of embedding or output, which the source stores in these encodings: the recipe's, but no
    more than what keeps the source's values."""
    if {LOSSLESS.get(encoding) for encoding in encodings} == {quantization}:
        return quantization
    sufficient = [LOSSLESS.get(name) or NEARLY_LOSSLESS.get(name, recipe.ends) for name in encodings]
    largest = max(sufficient, key=lambda choice: BITS[choice])
    is_enough = recipe.ends != "f16" and largest in MINIMUM_QUANTIZATIONS and BITS[largest] < BITS[recipe.ends]
    return largest if is_enough else recipe.ends


def with_room_for(quantization: Quantization, encodings: Mapping[str, int]) -> Quantization:
    """Return the quantization of a matrix in a package of `quantization`, if the source stores these numbers of its
    weights in each encoding: one with more bits if an encoding needs them."""
    choices = [ATTENTION[name] for name in encodings if name in ATTENTION]
    larger = [choice for choice in choices if BITS[choice] > BITS[quantization]]
    return max(larger, key=lambda choice: BITS[choice], default=quantization)


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
