"""Rotary positions in a GGUF file: keys of scaling, tensors of divisors, and the context within which both hold.

Files of Phi have divisors for contexts up to the original length and others beyond it. `attention.temperature_scale`
makes queries grow with the position, from the original length on unless `attention.temperature_length` says another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from neuronpipe.plans.convert.gguf.gguf_header import uniform_integer
from neuronpipe.plans.convert.gguf.gguf_latents import latent_scaling
from neuronpipe.plans.convert.rope import (
    MAX_THETA,
    attention_scale,
    latent_scale,
    scaled_frequencies,
    with_score_factor,
)
from neuronpipe.plans.convert.stored_tensors import Inventory
from neuronpipe.plans.models.family import GgufArchitecture
from neuronpipe.plans.models.spec import MAX, MAX_THRESHOLD, ModelSpec
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted
from numpy.typing import NDArray

NOT_ROTATED = 1e20  # a divisor of frequencies by which a file says that a pair is not rotated
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
DIVISORS = ("rope_freqs.weight", SHORT, LONG)


def context_tokens(metadata: Record, name: str, inventory: Inventory, requested: int | None) -> int:
    """Return the number of tokens of the longest sequence. Raises UserError if the requested one is impossible.

    name: value of `general.architecture`
    """
    field = f"{name}.context_length"
    max_tokens = uniform_integer(metadata, field, 1, MAX.context_tokens)
    if requested is not None and not 1 <= requested <= max_tokens:
        metadata.fail(field, f"is {max_tokens}, so {requested} tokens are impossible")
    if requested is None and inventory.has(SHORT):
        max_tokens = min(max_tokens, _original_tokens(metadata, name))
    return requested or max_tokens


def query_growth(metadata: Record, name: str) -> dict[str, Any]:
    """Return the fields of ModelSpec about the factor of queries by position; none if the file has no factor."""
    scale, length = (f"{name}.attention.temperature_{key}" for key in ("scale", "length"))
    if not metadata.has(scale) or not (growth := metadata.number(scale, 0.0, MAX_THRESHOLD)):
        return {}
    stated = metadata.has(length)
    tokens = metadata.integer(length, 1, MAX.context_tokens) if stated else _original_tokens(metadata, name)
    return {"query_growth": growth, "query_growth_tokens": tokens}


def with_positions_factor(
    metadata: Record, name: str, rules: GgufArchitecture, model: ModelSpec, table: NDArray[np.float32]
) -> ModelSpec:
    """Return the model with the factor of attention scores that rotary positions imply.

    table: the inverse frequencies
    """
    keys, field = rope_keys(metadata, name, rules), f"{name}.rope.scaling.attn_factor"
    factor = metadata.number(field, 1e-3, 1e3) if metadata.has(field) else 1.0  # of queries and of keys; 1 with YaRN
    if not rules.latents:
        return with_score_factor(model, table, attention_scale(keys) * factor**2)
    if factor != 1:
        metadata.fail(field, "is not 1: not supported")
    return replace(model, attention_scale=model.attention_scale * latent_scale(keys))


def _original_tokens(metadata: Record, name: str) -> int:
    field, kind = (f"{name}.rope.scaling.{key}" for key in ("original_context_length", "type"))
    if not metadata.has(field) and metadata.has(kind) and metadata.text(kind) == "longrope":
        field = f"{name}.context_length"  # as llama.cpp's converter leaves it out for MiniCPM4
    return metadata.integer(field, 1, MAX.context_tokens)


def frequencies(
    metadata: Record, name: str, architecture: GgufArchitecture, model: ModelSpec, inventory: Inventory
) -> NDArray[np.float32]:
    """Return the table of inverse frequencies. Files of Llama 3 and Phi have their scaling as tensors of divisors."""
    kind = f"{name}.rope.scaling.type"
    if metadata.has(kind) and metadata.text(kind) == "longrope" and not (inventory.has(SHORT) and inventory.has(LONG)):
        metadata.fail(kind, f"'longrope' needs the tensors {SHORT} and {LONG}")
    if model.latent_width:
        return scaled_frequencies(rope_keys(metadata, name, architecture), model.rotary_width)
    rotated = rotated_width(metadata, name, model)
    head_width = model.table_width(is_local=False)
    table = scaled_frequencies(rope_keys(metadata, name, architecture), head_width, rotated)
    divisors = {tensor: inventory.take(tensor, rotated // 2).vector() for tensor in DIVISORS if inventory.has(tensor)}
    if divisors.keys() & {SHORT, LONG}:
        is_long = model.context_tokens > _original_tokens(metadata, name)
        unused = SHORT if is_long else LONG
        inventory.shape(LONG if is_long else SHORT)
        divisors.pop(unused, None)
    for tensor, factors in divisors.items():
        if (factors <= 0).any():
            metadata.fail(tensor, "holds factors that are not positive: damaged")
        table[: len(factors)] /= factors
        table[: len(factors)][factors >= NOT_ROTATED] = 0
    return table


def rope_keys(metadata: Record, architecture: str, rules: GgufArchitecture) -> Record:
    """Return the file's keys about rotary positions by the names of config.json."""

    def number(name: str, default: float, minimum: float, maximum: float) -> float:
        field = f"{architecture}.rope.{name}"
        return metadata.number(field, minimum, maximum) if metadata.has(field) else default

    rope: dict[str, Any] = {"rope_theta": number("freq_base", 10_000.0, 1.0, MAX_THETA)}
    field = f"{architecture}.rope.scaling.type"
    kind = metadata.text(field) if metadata.has(field) else "linear"
    if kind not in ("none", "linear", "yarn", "longrope"):
        metadata.fail(field, f"{quoted(kind)} is not supported; none, linear, yarn and longrope are")
    factor = number("scaling.factor", 0.0, 0.0, 1e6) or number("scale_linear", 1.0, 1e-3, 1e6)
    if kind in ("linear", "yarn"):  # the divisors of longrope are tensors
        rope["rope_scaling"] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        rope["rope_scaling"] |= _yarn(metadata, architecture, rules) | {"truncate": rules.rounds_yarn}
    return Record(rope, metadata.where)


def _yarn(metadata: Record, architecture: str, rules: GgufArchitecture) -> dict[str, Any]:
    """Return the numbers of YaRN by the names of config.json. Raises UserError for keys that config.json cannot
    express and that llama.cpp's converter does not write, unless they have no effect."""
    prefix = f"{architecture}.rope.scaling"
    for key, plain in (("attn_factor", 1.0), ("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if (rules.latents or rules.yarn_multiplier) and key == "yarn_log_multiplier":
            continue
        if metadata.has(f"{prefix}.{key}") and metadata.number(f"{prefix}.{key}", -1e6, 1e6) != plain:
            metadata.fail(f"{prefix}.{key}", f"is not {plain:g}: not supported")
    original = f"{prefix}.original_context_length"
    original = original if metadata.has(original) else f"{architecture}.context_length"
    multiplier = f"{prefix}.yarn_log_multiplier"
    factors = (
        {"mscale": 1.0, "mscale_all_dim": metadata.number(multiplier, 0.0, 10.0)} if metadata.has(multiplier) else {}
    )
    numbers = {
        "beta_fast": (f"{prefix}.yarn_beta_fast", 1e-3, 1e6),
        "beta_slow": (f"{prefix}.yarn_beta_slow", 1e-3, 1e6),
        "attention_factor": (f"{prefix}.yarn_attn_factor", 1e-3, 1e3),
    }
    return {
        "original_max_position_embeddings": metadata.integer(original, 1, MAX.context_tokens),
        **(latent_scaling(metadata, architecture) if rules.latents else factors),
        **{name: metadata.number(*of) for name, of in numbers.items() if metadata.has(of[0])},
    }


def rotated_width(metadata: Record, architecture: str, model: ModelSpec) -> int:
    field = f"{architecture}.rope.dimension_count"
    head_width = model.table_width(is_local=False)
    rotated = uniform_integer(metadata, field, 2, head_width) if metadata.has(field) else head_width
    if rotated % 2:
        metadata.fail(field, f"{rotated} is odd; rotation needs pairs")
    return rotated
