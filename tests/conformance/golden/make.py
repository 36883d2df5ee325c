"""Make the golden logits with PyTorch and transformers: python make.py (from this directory, with both installed). What
logits.npz has already stays as it is, byte for byte; names make those anew: python make.py opt qwen3.

Every recipe of checkpoints.py is written to disk, loaded by transformers' own classes and run in float32. Classes that
are not part of transformers are others with an activation that is put in here: Bamboo is Mistral with the activation on
gate and up alike, ProSparse is Llama with a threshold, SparseLM is Llama with ReLU; MiniCPM is Granite, which has its
scales under other names.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

Inner = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from checkpoints import RECIPES, Recipe, tokens, write_checkpoint  # noqa: E402


def drelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """ReLU of both."""
    return torch.relu(gate) * torch.relu(up)


def relu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """ReLU of the gate."""
    return torch.relu(gate) * up


def fatrelu(threshold: float) -> Inner:
    """The gate where it exceeds a threshold, else 0."""
    return lambda gate, up: torch.nn.functional.threshold(gate, threshold, 0.0) * up


def stand_in(recipe: Recipe) -> tuple[dict[str, Any], Inner | None]:
    """What config.json must say for transformers to have a class that computes as the recipe's own, which comes with
    its models' repositories; and what stands between gate, up and down there, where it differs."""
    if recipe.architecture == "BambooForCausalLM":
        return {"architectures": ["MistralForCausalLM"]}, drelu
    if recipe.architecture == "SparseLlamaForCausalLM":
        llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "relu"}
        threshold = recipe.config.get("hidden_act_param")
        return llama, relu if threshold is None else fatrelu(threshold)
    if recipe.architecture == "MiniCPMForCausalLM":
        granite = {
            "architectures": ["GraniteForCausalLM"],
            "model_type": "granite",
            "hidden_act": "relu",
            "embedding_multiplier": recipe.config["scale_emb"],
            "residual_multiplier": recipe.config["scale_depth"] / math.sqrt(recipe.layers),
            "attention_multiplier": 1 / math.sqrt(recipe.head_width),
            "logits_scaling": recipe.width / recipe.config["dim_model_base"],
        }
        return granite, fatrelu(recipe.config["hidden_act_param"])
    return {}, None


def golden_logits(recipe: Recipe, directory: Path) -> np.ndarray:
    """float32 [tokens, vocabulary]."""
    write_checkpoint(directory, recipe)
    changes, inner = stand_in(recipe)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    if inner is not None:
        for layer in model.model.layers:
            mlp = layer.mlp
            mlp.forward = lambda x, m=mlp: m.down_proj(inner(m.gate_proj(x), m.up_proj(x)))
    with torch.no_grad():
        return model(torch.tensor([tokens(recipe)])).logits[0].numpy().astype(np.float32)


def main(again: list[str]) -> None:
    """Write logits.npz beside this file: one array per recipe."""
    path = HERE / "logits.npz"
    kept = {name: values for name, values in np.load(path).items() if name not in again} if path.exists() else {}
    with tempfile.TemporaryDirectory() as directory:
        made = {
            name: golden_logits(recipe, Path(directory) / name) for name, recipe in RECIPES.items() if name not in kept
        }
    for name, values in made.items():
        print(f"{name:10} {values.shape} deviation {values.std():.2f} largest {np.abs(values).max():.1f}")
    logits = kept | made
    np.savez_compressed(path, **{name: logits[name] for name in RECIPES})


if __name__ == "__main__":
    main(sys.argv[1:])
