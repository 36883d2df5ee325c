"""Make the golden logits with PyTorch and transformers: python make.py (from this directory, with both installed). What
logits.npz has already stays as it is, byte for byte; names make those anew: python make.py opt qwen3.

Every recipe of checkpoints.py is written to disk, loaded by transformers' own classes and run in float32. Bamboo's
class is not part of transformers: it is Mistral with the activation on gate and up alike, which is put in here.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from checkpoints import RECIPES, Recipe, tokens, write_checkpoint  # noqa: E402


def golden_logits(recipe: Recipe, directory: Path) -> np.ndarray:
    """float32 [tokens, vocabulary]."""
    write_checkpoint(directory, recipe)
    if recipe.architecture == "BambooForCausalLM":
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["MistralForCausalLM"]}))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    if recipe.architecture == "BambooForCausalLM":
        for layer in model.model.layers:
            mlp = layer.mlp
            mlp.forward = lambda x, m=mlp: m.down_proj(torch.relu(m.gate_proj(x)) * torch.relu(m.up_proj(x)))
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
