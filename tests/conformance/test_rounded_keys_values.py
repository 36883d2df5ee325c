"""A KV cache of q8: the same bits however a text is computed, near those of fp16, for every kind of attention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from neuronpipe.native import lib
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import KV_TYPES
from neuronpipe.plans.plan.segment_sizes import RunShape, fixed_layouts, kv_type_fault

from tests.conformance.checkpoints import RECIPES, tokens
from tests.conformance.participants import Participants

Converted = Callable[..., Package]
KINDS = (
    ("awkward", "q4"),
    ("gemma4 moe", "q8"),  # heads of two widths, windows, values from keys, norms of values
    ("gpt-oss", "f16"),  # sinks
    ("deepseek v2 groups", "q8"),  # latents
    ("olmo2", "q8"),  # keys of all heads normed together
    ("qwen3 next", "q8"),  # attention in some layers
)


@pytest.mark.parametrize(("recipe", "quantization"), KINDS)
def test_it_has_the_same_bits_in_steps_of_any_length(recipe: str, quantization: str, converted: Converted) -> None:
    package, text = converted(recipe, quantization), tokens(RECIPES[recipe], 83)
    alone = Participants(package, count=1, max_tokens=1, kv_type=lib.NP_Q8).run(text, 1)
    for count, chunk in ((2, 1), (2, 7), (1, 83)):
        together = Participants(package, count=count, max_tokens=chunk, kv_type=lib.NP_Q8).run(text, chunk)
        assert together.tobytes() == alone.tobytes(), (count, chunk)
    of_f16 = Participants(package, count=1, max_tokens=83).run(text, 83)
    errors = np.sqrt(np.mean(np.square(alone - of_f16), axis=1)) / of_f16.std()
    assert 0 < np.median(errors) < 0.03


@pytest.mark.parametrize("recipe", ["awkward", "gemma4 moe", "deepseek v2 groups", "qwen3 next"])
def test_it_takes_17_of_32_bytes(recipe: str, converted: Converted) -> None:
    shape = RunShape(
        mode="exact", processes=7, workers=2, prefill_threads=2, sequences=3, context_tokens=70, logit_rows=8
    )
    manifest = converted(recipe, "q8").manifest
    of_f16, of_q8 = (
        math.prod(fixed_layouts(manifest, dataclasses.replace(shape, kv_type=kv_type))["kv"]["kv"].shape)
        for kv_type in KV_TYPES
    )
    assert of_f16 == manifest.model.position_elements * 3 * 70
    assert of_q8 * 32 == of_f16 * 17


def test_keys_of_other_widths_are_refused(converted: Converted) -> None:
    model = converted("qwen3", "f16").manifest.model
    assert kv_type_fault(model, "f16") is None
    assert "have groups of 32 elements, and this model's have 48" in (kv_type_fault(model, "q8") or "")
    assert kv_type_fault(converted("awkward", "q4").manifest.model, "q8") is None
