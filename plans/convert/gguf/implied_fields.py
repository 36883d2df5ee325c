"""The fields that GGUF files of Gemma, OLMo and Cohere imply or call otherwise, as in llama.cpp's llama-model.cpp."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from neuronpipe.plans.convert.rope import MAX_THETA, scaled_frequencies
from neuronpipe.plans.models.family import GgufArchitecture
from neuronpipe.plans.models.spec import MAX_SCALE, MAX_THRESHOLD, MIN_SCALE, ModelSpec, SpecError
from neuronpipe.plans.strict_json import Record
from numpy.typing import NDArray

BASE, LOCAL_BASE = "rope.freq_base", "rope.freq_base_swa"


def with_implied_fields(metadata: Record, name: str, rules: GgufArchitecture, model: ModelSpec) -> ModelSpec:
    """Return the model with norms of outputs, limits, factors and local positions. Raises UserError if they contradict
    the file.

    name: general.architecture
    """
    has_local = rules.local_theta is not None and any(model.windows_tokens)
    _require_windows(metadata, name, rules, model)

    def cap(key: str, default: float) -> float:
        field = f"{name}.{key}"
        return metadata.number(field, 0.0, MAX_THRESHOLD) if metadata.has(field) else default

    logit_scale, field = model.logit_scale, f"{name}.logit_scale"
    if rules.multiplies_logits:
        logit_scale = metadata.number(field, MIN_SCALE, MAX_SCALE)
    scale = 1.0
    if model.layers == rules.layers_scaled_by_width:
        scale = math.sqrt(model.head_width / (model.width // model.query_heads))
    try:
        return replace(
            model,
            norms=rules.norms,
            layer_kinds=tuple(
                replace(kind, local_positions=has_local and kind.window_tokens > 0) for kind in model.layer_kinds
            ),
            embedding_scale=math.sqrt(model.width) if rules.scales_embedding else model.embedding_scale,
            attention_scale=model.attention_scale * scale,
            local_attention_scale=model.local_attention_scale * scale if has_local else 1.0,
            logit_scale=logit_scale,
            score_cap=cap("attn_logit_softcapping", rules.score_cap),
            logit_cap=cap("final_logit_softcapping", rules.logit_cap),
            qkv_limit=cap("attention.clamp_kqv", 0.0),
        )
    except SpecError as error:
        metadata.fail(error.field, error.complaint)


def local_frequencies(
    metadata: Record, name: str, rules: GgufArchitecture, model: ModelSpec
) -> NDArray[np.float32] | None:
    """Return the table of layers with local positions, which no key scales; None if there are none."""
    if rules.local_theta is None or not any(model.local_layers):
        return None
    theta = _theta(metadata, f"{name}.{LOCAL_BASE}", rules.local_theta or _theta(metadata, f"{name}.{BASE}", 10_000.0))
    return scaled_frequencies(Record({"rope_theta": theta}, metadata.where), model.table_width(is_local=True))


def _theta(metadata: Record, field: str, default: float) -> float:
    return metadata.number(field, 1.0, MAX_THETA) if metadata.has(field) else default


def _require_windows(metadata: Record, name: str, rules: GgufArchitecture, model: ModelSpec) -> None:
    """Raise UserError if a file states windows of other layers, or other positions in layers with windows."""
    windows, every = [window > 0 for window in model.windows_tokens], rules.full_layer_every
    field = f"{name}.attention.sliding_window_pattern"
    if metadata.has(field) and metadata.value(field) not in (windows, every or None):
        expected = f"one layer without a window in {every}" if every else "the windows of this architecture"
        metadata.fail(field, f"differs from {expected}: not supported")
    field, theta = f"{name}.{LOCAL_BASE}", _theta(metadata, f"{name}.{BASE}", 10_000.0)
    if rules.local_theta is None and any(windows) and _theta(metadata, field, theta) != theta:
        metadata.fail(field, f"differs from {BASE}, {theta:g}: not supported in this architecture")
