"""Checkpoints of models that see: a language model of another class under names of its own, beside a vision tower that
nothing here computes. Its weights are left out, as conversion leaves them out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tests.conformance.dense_tensors import llama_tensors
from tests.conformance.random_tensors import Array
from tests.conformance.recipes import Recipe

LANGUAGE_CLASSES = {
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
}
"""The class that has the tensors of the language model."""


def vision_language_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """The experts of a layer are two tensors with a row for each input."""
    experts: dict[str, list[Array]] = {}
    for name, values in llama_tensors(replace(recipe, architecture=LANGUAGE_CLASSES[recipe.architecture])):
        within = name.replace("model.", "model.language_model.", 1)
        parent, is_expert, matrix = within.partition(".experts.")
        if not is_expert:
            yield within, values
            continue
        matrices = experts.setdefault(matrix.partition(".")[2], [])
        matrices.append(values.T)
        if matrix.endswith("down_proj.weight") and len(matrices) == recipe.experts:
            gate, up, down = (np.stack(experts.pop(f"{part}_proj.weight")) for part in ("gate", "up", "down"))
            yield f"{parent}.experts.gate_up_proj", np.ascontiguousarray(np.concatenate((gate, up), axis=2))
            yield f"{parent}.experts.down_proj", np.ascontiguousarray(down)


def vision_language_config(text: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model that sees, with the keys of a model that does not."""
    model_type, tied = text["model_type"], text["tie_word_embeddings"]
    within = {key: value for key, value in text.items() if key not in ("architectures", "tie_word_embeddings")}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "deepstack_visual_indexes": [0],
        "fullatt_block_indexes": [0],
    }
    return {
        "architectures": text["architectures"],
        "model_type": model_type,
        "tie_word_embeddings": tied,
        "text_config": {**within, "model_type": f"{model_type}_text"},
        "vision_config": vision,
    }
