"""The fields that GGUF files of Gemma, OLMo and Cohere imply or call otherwise, as in llama.cpp's llama-model.cpp."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from neuronpipe.plans.convert.rope import scaled_frequencies
from neuronpipe.plans.models.family import GgufArchitecture
from neuronpipe.plans.models.spec import MAX_SCALE, MAX_THRESHOLD, MIN_SCALE, ModelSpec, SpecError
from neuronpipe.plans.strict_json import Record
from numpy.typing import NDArray


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
    field = f"{name}.rope.freq_base{'_swa' if rules.gemma4_layers else ''}"
    stated = metadata.number(field, 1.0, 1e12) if metadata.has(field) else 10_000.0
    theta = stated if rules.gemma4_layers else rules.local_theta or stated
    return scaled_frequencies(Record({"rope_theta": theta}, metadata.where), model.table_width(is_local=True))


def _require_windows(metadata: Record, name: str, rules: GgufArchitecture, model: ModelSpec) -> None:
    """Raise UserError if a file lacks the window that its architecture needs, or states windows of other layers."""
    unrotated = rules.full_layer_every > 0 and rules.unrotated_layer_every > 0
    if (rules.norms == "both" or unrotated) and not any(model.windows_tokens):
        metadata.fail(f"{name}.attention.sliding_window", "is missing or 0: not supported in this architecture")
    field = f"{name}.attention.sliding_window_pattern"
    if (rules.norms == "before" and not unrotated) or not metadata.has(field):
        return
    stated, windows = metadata.value(field), [window > 0 for window in model.windows_tokens]
    if stated not in (windows, rules.full_layer_every):
        metadata.fail(field, f"differs from one layer without a window in {rules.full_layer_every}: not supported")
