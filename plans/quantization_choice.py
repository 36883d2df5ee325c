"""Choice of the quantization of every matrix of a package, by a recipe and by how the source stores its weights.

Encodings are named as the types of GGUF, like Q4_K.
"""

from __future__ import annotations

from collections.abc import Mapping

from neuronpipe.plans.package.layout import BITS, BLOCK_QUANTIZATIONS, MINIMUM_QUANTIZATIONS, Quantization
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
"""The smallest quantization that can express all values of an encoding, if groups follow the same axis in both. For
IQ4_XS, scales are rounded to fp16."""
NEARLY_LOSSLESS: Mapping[str, Quantization] = {"Q6_K": "q6k"}
"""The smallest quantization that adds almost no error to an encoding's own: perplexities stay within 0.5 %."""
ATTENTION: Mapping[str, Quantization] = {"Q4_K": "q4k", "Q5_K": "q5k", "Q6_K": "q6k"}
"""The quantization that an attention matrix needs, by the source's encoding. Files with these encodings store some
attention matrices with more bits than the rest."""
BITS_CHOICES: tuple[Quantization, ...] = ("q4", "q4k", "q5k", "q6k", "q8", "f16")
"""The quantizations that a requested number of bits a weight may select."""
MAX_SHOWN = 3

RequestedQuantization = Quantization | float
"""A quantization, or a number of bits a weight. The number selects the quantization of BITS_CHOICES whose package has
the nearest average."""


@frozen
class Recipe:
    """The quantizations of the matrices that often need more bits than the rest of the package.

    down: quantization of Down, unless a package stores it by output in the encoding of its source
    ends: quantization of the output matrix, through which every token passes, and of an embedding that is the same
    """

    down: Quantization
    ends: Quantization


# By the package's quantization, which is that of the other matrices.
RECIPES: Mapping[Quantization, Recipe] = {
    "q4": Recipe(down="q4", ends="q8"),
    "iq4": Recipe(down="q6k", ends="q6k"),  # in q5k a model of 135M lost 1 %
    "mxfp4": Recipe(down="q6k", ends="q6k"),
    "q4h": Recipe(down="q5k", ends="q6k"),
    "q5h": Recipe(down="q6k", ends="q6k"),
    "q4k": Recipe(down="q5k", ends="q6k"),
    "q5k": Recipe(down="q6k", ends="q6k"),
    "q6k": Recipe(down="q6k", ends="q8"),
    "q8": Recipe(down="q8", ends="q8"),
    "f16": Recipe(down="f16", ends="f16"),
}
SOURCE_RECIPES: Mapping[str, Recipe] = {"Q4_0": Recipe(down="q5k", ends="q8")}
"""The recipe of a package that keeps the values of an encoding, where that differs from RECIPES. Down in four bits
raises a real model's perplexity by 1 to 2 %."""


@frozen
class Choice:
    """The quantization of a package, the reason, and the package's size; the same for an alternative.

    why: a clause, as `why` returns it
    alternative: None if the model fits no other quantization; alternative_bytes is 0 then
    """

    quantization: Quantization
    why: str
    package_bytes: int
    alternative: Quantization | None
    alternative_bytes: int


def default_quantization(weights: Mapping[str, int]) -> Quantization:
    """Return the quantization of a package whose source stores these numbers of weights in each encoding.

    This is q4k if at least half of the weights are plain. Otherwise it is the quantization that keeps the values of the
    most frequent encoding, exactly or nearly. If there is none it is q8, since fewer bits would lose quality again.
    """
    quantized = {name: count for name, count in weights.items() if name not in PLAIN}
    if 2 * sum(quantized.values()) <= sum(weights.values()):
        return "q4k"
    encoding = max(quantized, key=lambda name: quantized[name])
    return LOSSLESS.get(encoding) or NEARLY_LOSSLESS.get(encoding, "q8")


def recipe_for(quantization: Quantization, weights: Mapping[str, int], *, down_by_neuron: bool) -> Recipe:
    """Return the recipe of a package whose source stores these numbers of weights in each encoding.

    down_by_neuron: the source stores Down by neuron, too, so the package can keep its values like those of others
    """
    encoding = max(weights, key=lambda name: weights[name])
    if LOSSLESS.get(encoding) != quantization:
        return RECIPES[quantization]
    if down_by_neuron:
        return Recipe(down=quantization, ends=RECIPES[quantization].ends)
    return SOURCE_RECIPES.get(encoding, RECIPES[quantization])


def kept_quantization(encodings: Mapping[str, int]) -> Quantization | None:
    """Return the quantization that keeps the values of matrices with these numbers of weights in each encoding, exactly
    or nearly; None if they are plain, or have encodings of several quantizations."""
    chosen = {LOSSLESS.get(name) or NEARLY_LOSSLESS.get(name) for name in encodings}
    return chosen.pop() if len(chosen) == 1 else None


def ends_quantization(
    quantization: Quantization, recipe: Recipe, encodings: Mapping[str, int], *, is_looked_up: bool, is_default: bool
) -> Quantization:
    """Return the quantization of embedding or output: the recipe's, or a smaller one that suffices.

    That is one that keeps the source's values. For an embedding that is only looked up it is the package's: a token
    reads one row of it, and a real model's perplexity was the same.

    encodings: numbers of the matrix's weights in each encoding
    is_looked_up: an embedding of a model with an output matrix
    is_default: the package's quantization is the default for its source, so that a matrix in Q8_0 keeps its values
    """
    if is_default and set(encodings) == {"Q8_0"} and quantization != "f16":
        return "q8"
    if is_looked_up and quantization in BLOCK_QUANTIZATIONS and set(encodings) <= set(PLAIN):
        return quantization
    if {LOSSLESS.get(encoding) for encoding in encodings} == {quantization}:
        return quantization
    sufficient = [LOSSLESS.get(name) or NEARLY_LOSSLESS.get(name, recipe.ends) for name in encodings]
    largest = max(sufficient, key=lambda choice: BITS[choice])
    is_enough = recipe.ends != "f16" and largest in MINIMUM_QUANTIZATIONS and BITS[largest] < BITS[recipe.ends]
    return largest if is_enough else recipe.ends


def attention_quantization(
    quantization: Quantization, weights: Mapping[str, int], encodings: Mapping[str, int], *, may_differ: bool
) -> Quantization:
    """Return the quantization of an attention matrix: the package's, or one with more bits if an encoding needs them.

    weights, encodings: numbers of the model's and of the matrix's weights in each encoding
    may_differ: the matrix may have any quantization. It then keeps the values of a source whose values the package
        keeps elsewhere, and q8 stands for 16 bits. False: it reads the same inputs as the package's other matrices
    """
    if may_differ and quantization == default_quantization(weights) and not set(weights) <= set(PLAIN):
        choices = [LOSSLESS.get(name) or NEARLY_LOSSLESS.get(name, "q8") for name in encodings]
    elif quantization in MINIMUM_QUANTIZATIONS:
        choices = [ATTENTION[name] for name in encodings if name in ATTENTION]
    else:
        return quantization
    return max([quantization, *choices], key=lambda choice: (BITS[choice], choice in choices))


def stored(weights: Mapping[str, int]) -> str:
    """Return the MAX_SHOWN most frequent encodings of a source with their shares, like "Q4_K 88%, Q6_K 12%"."""
    total = sum(weights.values())
    ordered = sorted(weights.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {count / total:.0%}" for name, count in ordered[:MAX_SHOWN])
    return text if len(ordered) <= MAX_SHOWN else f"{text} and others"


def why(weights: Mapping[str, int], quantization: Quantization) -> str:
    """Return a clause on what a quantization loses of a source that stores these numbers of weights in each
    encoding."""
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
