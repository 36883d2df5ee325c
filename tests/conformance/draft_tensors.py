"""Draft layers for the recipes of Qwen3-Next and Qwen3.5: their tensors, and the same layer as a model of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tests.conformance.checkpoints import Array, Recipe, tensors
from tests.conformance.random_tensors import Maker

AROUND = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")


def drafting(recipe: Recipe) -> Recipe:
    """The draft layer as a model: its only layer has attention. Embedding and output matrix are those of `recipe`."""
    settings = {name: value for name, value in recipe.config.items() if name != "layer_types"}
    return replace(
        recipe, layers=1, seed=recipe.seed + 77, shards=1, config=settings | {"full_attention_interval": 1}, dense=()
    )


def draft_tensors(recipe: Recipe) -> dict[str, Array]:
    """The tensors of a checkpoint's draft layer, as published."""
    make = Maker(replace(recipe, seed=recipe.seed + 99))
    named = dict(_named(recipe))
    named |= dict(
        [make.made(f"mtp.pre_fc_norm_{half}.weight", (recipe.width,), 0.1) for half in ("embedding", "hidden")]
    )
    return named | dict([make.linear("mtp.fc", recipe.width, 2 * recipe.width, 1.4)])


def _named(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    for name, values in tensors(drafting(recipe)):
        if name.startswith("model.layers.0."):
            yield name.replace("model.", "mtp.", 1), values
        elif name == "model.norm.weight":
            yield "mtp.norm.weight", values


def own_model(recipe: Recipe) -> dict[str, Array]:
    """The tensors that the draft layer as a model shares with the recipe's model."""
    return {name: values for name, values in tensors(recipe) if name in AROUND[:2]}


def foreseeing(recipe: Recipe) -> dict[str, Array]:
    """Tensors in place of the recipe's with which each token depends on the one before it only, and of a draft layer
    that predicts exactly the tokens that the model computes: no layer adds anything."""
    silent = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")
    named = dict(tensors(recipe)) | draft_tensors(recipe)
    changed = {name: np.zeros_like(values) for name, values in named.items() if name.endswith(silent)}
    changed["mtp.norm.weight"] = named["model.norm.weight"]
    changed["mtp.pre_fc_norm_embedding.weight"] = np.zeros_like(named["mtp.pre_fc_norm_embedding.weight"])
    changed["mtp.fc.weight"] = np.eye(recipe.width, 2 * recipe.width, dtype=np.float32)
    return draft_tensors(recipe) | changed
