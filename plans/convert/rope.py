"""Rotary positions: computes the table of inverse frequencies, into which every supported scaling is folded.

The engine computes angle = position * frequency and has no kinds of scaling. YaRN's factor on queries and keys becomes
a factor on scores, `attention_scale`. If only the first part of a head rotates, the other elements have frequency 0,
and the rows of queries and keys are reordered so that rotated elements are paired with each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from neuronpipe.plans.models.attention_sizes import AttentionSizes
from neuronpipe.plans.models.configuration import FULL, SLIDING
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted
from numpy.typing import NDArray

MAX_THETA = 1e12
LONG = ("longrope", "su")
MULTIMODAL = "mrope"  # positions in time, height and width, which are one number in a text
PROPORTIONAL = (
    "proportional"  # the first pairs of a head rotate, with the frequencies of a head that rotates as a whole
)


def base_frequencies(head_width: int, theta: float) -> NDArray[np.float64]:
    """Return theta^(-2j / head_width) for j < head_width / 2: radians per position of each pair."""
    return theta ** (-np.arange(0, head_width, 2, dtype=np.float64) / head_width)


def scaled_frequencies(
    config: Record, head_width: int, rotated: int | None = None, context_tokens: int = 0
) -> NDArray[np.float32]:
    """Return the table [head_width / 2] of a config.json, from rope_theta and rope_scaling or rope_parameters.

    A scaling "dynamic" changes frequencies beyond `max_position_embeddings` only, where no package goes, but with
    `alpha`, as Hunyuan's, the base. Precedence and missing keys follow
    RotaryEmbeddingConfigMixin in transformers' modeling_rope_utils.py. Raises UserError for scaling that is not
    supported.

    rotated: number of rotated elements of a head, None: all; the frequencies of the others are 0
    context_tokens: the longest sequence, by which "longrope" chooses one of two tables
    """
    scaling = _scaling(config)
    source = scaling if scaling is not None and scaling.has("rope_theta") else config
    theta = source.number("rope_theta", 1.0, MAX_THETA)
    if scaling is not None and _kind(scaling)[1] == "dynamic" and scaling.has("alpha"):
        theta *= scaling.number("alpha", 1e-3, 1e6) ** (head_width / (head_width - 2))
        scaling = None
    if scaling is not None:
        scaling = scaling.over({"original_max_position_embeddings": _original_tokens(config)}, "config.json")
    table = np.zeros(head_width // 2, dtype=np.float32)
    frequencies = apply_scaling(base_frequencies(rotated or head_width, theta), scaling, theta, context_tokens)
    table[: len(frequencies)] = frequencies
    return table


def attention_scale(config: Record, context_tokens: int = 0) -> float:
    """Return the factor of attention scores: with YaRN or longrope the square of its factor on queries and keys,
    otherwise 1. context_tokens: the longest sequence
    """
    scaling = _scaling(config)
    if scaling is not None and _kind(scaling)[1] in LONG:
        return _longrope_factor(config, scaling, context_tokens) ** 2
    if scaling is None or _kind(scaling)[1] != "yarn":
        return 1.0
    if scaling.has("attention_factor"):
        return scaling.number("attention_factor", 1e-3, 1e3) ** 2
    logarithm = math.log(max(1.0, scaling.number("factor", 1e-3, 1e6)))
    above, below = (
        scaling.number(field, 0.0, 1e2) if scaling.has(field) else 0.0 for field in ("mscale", "mscale_all_dim")
    )
    if not (above and below):
        above, below = 1.0, 0.0
    return ((0.1 * above * logarithm + 1) / (0.1 * below * logarithm + 1)) ** 2


def latent_scale(config: Record) -> float:
    """Return the factor of attention scores in classes with latents, which `mscale_all_dim` determines. There the root
    of `attention_scale` concerns rotated elements alone."""
    scaling = _scaling(config)
    if scaling is None or _kind(scaling)[1] == "default":
        return 1.0
    if not scaling.has("mscale_all_dim"):
        return 1.0
    logarithm = math.log(max(1.0, scaling.number("factor", 1e-3, 1e6)))
    return (0.1 * scaling.number("mscale_all_dim", 0.0, 1e2) * logarithm + 1) ** 2


def with_score_factor(model: ModelSpec, frequencies: NDArray[np.float32], factor: float) -> ModelSpec:
    """Return the model with the factor of scores that its positions imply. It concerns rotated elements alone: where a
    part of each head rotates, or only heads of some layers, it is a factor of these."""
    unrotated = any(kind.mixer == "attention" and not kind.rotary for kind in model.layer_kinds)
    if unrotated or (frequencies == 0).any():
        return replace(model, rotary_scale=math.sqrt(factor))
    return replace(model, attention_scale=model.attention_scale * factor)


def layer_positions(config: Record, local_theta: float) -> tuple[Record, Record]:
    """Return two configurations of rotary positions, each as of a model with one table: of layers without a window, and
    of layers with one, which are scaled only by a field of their own. Raises UserError if they are ambiguous.

    local_theta: the default base of layers with windows
    """
    stated, scaling_of = "rope_parameters", dict[str, dict[str, Any]]()
    for kind in (FULL, SLIDING):
        scaling_of[kind] = {}
        if config.has(stated):
            if not config.record(stated).names() or {*config.record(stated).names()} - {FULL, SLIDING}:
                config.fail(stated, f"is to have {FULL} and {SLIDING}, one for each kind of layer")
            of_kinds = config.record(stated)
            scaling_of[kind] = of_kinds.record(kind).without("") if of_kinds.has(kind) else {}
    if config.has("rope_scaling"):
        scaling_of[FULL] |= config.record("rope_scaling").without("")
    theta_of = {FULL: config.number("rope_theta", 1.0, MAX_THETA), SLIDING: local_theta}
    if config.has("rope_local_base_freq"):
        theta_of[SLIDING] = config.number("rope_local_base_freq", 1.0, MAX_THETA)
    elif "rope_theta" in config.names() and "rope_theta" not in scaling_of[SLIDING] and local_theta != theta_of[FULL]:
        config.fail("rope_theta", f"does not say which base layers with {SLIDING} have; {stated} does")
    common = {name: config.value(name) for name in ("max_position_embeddings",)}
    full, sliding = (
        Record({stated: {"rope_theta": theta_of[kind]} | scaling_of[kind], **common}, config.where)
        for kind in (FULL, SLIDING)
    )
    return full, sliding


def rotated_width(config: Record, head_width: int, *, partial: bool) -> int:
    """Return the number of elements of a head that rotate, from the first on. Raises UserError if it is odd or 0.

    partial: the class obeys `partial_rotary_factor`; otherwise any value but 1 raises UserError
    """
    field = "partial_rotary_factor"
    scaling = _scaling(config)
    if scaling is not None and _kind(scaling)[1] == PROPORTIONAL:
        return head_width
    sources = [record for record in (scaling, config) if record is not None and record.has(field)]
    if not partial:
        for record in sources:
            if record.number(field, 0, 1) != 1:
                record.fail(field, "only heads that rotate as a whole are supported in this class")
        return head_width
    if config.has("rotary_dim") and not sources:
        rotated = config.integer("rotary_dim", 2, head_width)
        if rotated % 2 or head_width % 2:
            config.fail("rotary_dim", f"is {rotated} of a head of {head_width}; rotation needs pairs")
        return rotated
    if not sources:
        return head_width
    share = sources[0].number(field, 0, 1)
    rotated = int(head_width * share)
    if rotated == 0 or rotated % 2 or head_width % 2:
        sources[0].fail(field, f"{share} of a head of {head_width} is {rotated} elements; rotation needs pairs")
    return rotated


def paired_order(heads: int, head_width: int, rotated: int) -> NDArray[np.int64]:
    """Return the order of the rows of a query or key matrix that pairs rotated elements with each other: in each head
    the first halves of the rotated and of the other elements, then their second halves."""
    rotating, fixed = np.split(np.arange(head_width, dtype=np.int64), [rotated])
    halves = zip(np.split(rotating, 2), np.split(fixed, 2), strict=True)
    head = np.concatenate([part for half in halves for part in half])
    rows: NDArray[np.int64] = np.arange(heads, dtype=np.int64)[:, None] * head_width + head
    return rows.reshape(-1)


def interleaved_order(heads: int, head_width: int) -> NDArray[np.int64]:
    """Return the order of the rows of a query or key matrix that turns neighbouring elements of a head, which form a
    pair in the file, into elements j and j + head_width / 2."""
    rows = np.arange(heads * head_width, dtype=np.int64).reshape(heads, head_width // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def interleaved_ends(heads: int, head_width: int, rotated: int) -> NDArray[np.int64]:
    """Return `interleaved_order` of heads of which only the last `rotated` elements form pairs."""
    rows = np.arange(heads * head_width, dtype=np.int64).reshape(heads, head_width)
    ends = rows[:, head_width - rotated :].reshape(heads, rotated // 2, 2).swapaxes(1, 2)
    return np.concatenate((rows[:, : head_width - rotated], ends.reshape(heads, rotated)), axis=1).reshape(-1)


def latent_orders(model: AttentionSizes) -> dict[str, NDArray[np.int64]]:
    """Return `interleaved_ends` of the matrices of a model with latents that compute rotated elements."""
    shapes = {"query": (model.query_heads, model.head_width), "latent_down": (1, model.cached_width)}
    return {part: interleaved_ends(*shape, model.rotary_width) for part, shape in shapes.items()}


def joined_order(model: AttentionSizes, orders: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the order of the rows of a joined matrix of queries, keys and values. orders: of queries and of keys"""
    keys, values = model.query_width, model.query_width + model.key_width
    return np.concatenate((orders["query"], orders["key"] + keys, np.arange(values, model.qkv_rows, dtype=np.int64)))


def _scaling(config: Record) -> Record | None:
    """Return `rope_scaling` if it has any field, else `rope_parameters`."""
    old = config.has("rope_scaling") and config.record("rope_scaling").names()
    field = "rope_scaling" if old else "rope_parameters"
    return config.record(field) if config.has(field) else None


def _original_tokens(config: Record) -> int | None:
    """Return the default of the scaling's field `original_max_position_embeddings`; None if there is none."""
    for field in ("original_max_position_embeddings", "max_position_embeddings"):
        if config.has(field):
            return config.integer(field, 1, 1 << 24)
    return None


def apply_scaling(
    frequencies: NDArray[np.float64], scaling: Record | None, theta: float, context_tokens: int = 0
) -> NDArray[np.float64]:
    """Return frequencies after scaling by `rope_type` or `type`: default, dynamic, linear, llama3, yarn, longrope,
    proportional.
    Raises UserError for other kinds. context_tokens: the longest sequence
    """
    if scaling is None:
        return frequencies
    for name in scaling.names():
        if isinstance(scaling.value(name), dict):
            scaling.fail(name, "positions that differ between kinds of layers are not supported")
    field, kind = _kind(scaling)
    if scaling.has("type") and scaling.text("type") != kind and not {kind, scaling.text("type")} <= {*LONG}:
        scaling.fail("type", f"{quoted(scaling.text('type'))} contradicts rope_type, {quoted(kind)}")
    if kind in ("default", "dynamic", MULTIMODAL):
        return frequencies
    if kind == "linear":
        return frequencies / scaling.number("factor", 1e-3, 1e6)
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    if kind == "yarn":
        return _yarn(frequencies, scaling, theta)
    if kind == PROPORTIONAL:
        share = scaling.number("partial_rotary_factor", 0, 1) if scaling.has("partial_rotary_factor") else 1.0
        pairs = int(share * 2 * len(frequencies) // 2)
        factor = scaling.number("factor", 1e-3, 1e6) if scaling.has("factor") else 1.0
        return np.where(np.arange(len(frequencies)) < pairs, frequencies / factor, 0.0)
    if kind in LONG:
        return frequencies / _longrope_divisors(scaling, len(frequencies), context_tokens)
    scaling.fail(
        field, f"{quoted(kind)} is not supported; default, dynamic, linear, llama3, yarn, longrope, {PROPORTIONAL} are"
    )


def _longrope_divisors(scaling: Record, pairs: int, context_tokens: int) -> NDArray[np.float64]:
    """Return the divisors of the frequencies for sequences up to `context_tokens`."""
    original = scaling.integer("original_max_position_embeddings", 1, 1 << 24)
    field = "long_factor" if context_tokens > original else "short_factor"
    divisors = scaling.items(field)
    if len(divisors) != pairs or not all(type(d) in (int, float) and 1e-3 <= d <= 1e6 for d in divisors):
        scaling.fail(field, f"expected {pairs} positive numbers, one for each rotated pair")
    return np.array(divisors, dtype=np.float64)


def _longrope_factor(config: Record, scaling: Record, context_tokens: int) -> float:
    """Return the factor of rotated queries and keys."""
    original = scaling.over({"original_max_position_embeddings": _original_tokens(config)}, "config.json").integer(
        "original_max_position_embeddings", 1, 1 << 24
    )
    for field in ("long_mscale" if context_tokens > original else "short_mscale", "attention_factor"):
        if scaling.has(field):
            return scaling.number(field, 1e-3, 1e3)
    if scaling.has("factor"):
        times = scaling.number("factor", 1e-3, 1e6)
    else:
        times = config.integer("max_position_embeddings", 1, 1 << 24) / original
    return 1.0 if times <= 1 or original == 1 else math.sqrt(1 + math.log(times) / math.log(original))


def _kind(scaling: Record) -> tuple[str, str]:
    field = "rope_type" if scaling.has("rope_type") else "type"
    return field, scaling.text(field) if scaling.has(field) else "default"


def _yarn(frequencies: NDArray[np.float64], scaling: Record, theta: float) -> NDArray[np.float64]:
    """Return frequencies scaled by YaRN (arXiv:2309.00071), with bounds as in transformers' modeling_rope_utils.py.

    Pairs with more than `beta_fast` turns in the original context keep their frequency, those with fewer than
    `beta_slow` are divided by `factor`, and pairs between are interpolated.
    """
    factor = scaling.number("factor", 1e-3, 1e6)
    context_tokens = scaling.integer("original_max_position_embeddings", 1, 1 << 24)
    if theta <= 1:
        scaling.fail("factor", f"is of no use with rope_theta {theta}: all pairs turn alike")
    width = 2 * len(frequencies)

    def pair_of(field: str, default: float) -> float:
        """Return the fractional number of the pair that makes as many turns as `field` says."""
        turns = scaling.number(field, 1e-3, 1e6) if scaling.has(field) else default
        return width * math.log(context_tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of("beta_fast", 32.0), pair_of("beta_slow", 1.0)
    if not scaling.has("truncate") or scaling.boolean("truncate"):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    slowed: NDArray[np.float64] = np.clip((np.arange(len(frequencies)) - first) / (last - first or 0.001), 0, 1)
    return frequencies * (1 - slowed) + frequencies / factor * slowed


def _llama3(frequencies: NDArray[np.float64], scaling: Record) -> NDArray[np.float64]:
    """Return frequencies scaled as in Llama 3: like YaRN, with the bounds `high_freq_factor` and `low_freq_factor`."""
    factor = scaling.number("factor", 1e-3, 1e6)
    low, high = scaling.number("low_freq_factor", 1e-3, 1e6), scaling.number("high_freq_factor", 1e-3, 1e6)
    context_tokens = scaling.integer("original_max_position_embeddings", 1, 1 << 24)
    if high <= low:
        scaling.fail("high_freq_factor", f"{high} is not above low_freq_factor, {low}")
    turns = context_tokens * frequencies / (2 * math.pi)
    unscaled = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (unscaled + (1 - unscaled) / factor)
