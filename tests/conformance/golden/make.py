"""Make the golden logits with PyTorch and transformers: python make.py (from this directory, with both installed). What
logits.npz has already stays as it is, byte for byte; names make those anew: python make.py opt qwen3.

Every recipe of checkpoints.py is written to disk, loaded by transformers' own classes and run in float32. Classes that
are not part of transformers are others with an activation that is put in here: Bamboo is Mistral with the activation on
gate and up alike, TurboSparse-Mixtral likewise Mixtral, ProSparse is Llama with a threshold, SparseLM is Llama with
ReLU; MiniCPM is Granite, which has its scales under other names. SmallThinker is computed here from its description, a
token after the other.
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
from checkpoints import RECIPES, Recipe, tensors, tokens, write_checkpoint  # noqa: E402


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
    if recipe.architecture == "TurboSparseMixtralForCausalLM":
        return {"architectures": ["MixtralForCausalLM"]}, None
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
    if recipe.architecture == "SmallThinkerForCausalLM":
        return smallthinker(recipe)
    changes, inner = stand_in(recipe)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    ways = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if recipe.experts else {})
    model, loading = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, **ways
    )
    if any(loading.values()):  # what a checkpoint lacks, transformers makes up
        raise ValueError(f"{recipe.name}: {loading}")
    model.eval()
    if inner is not None:
        for layer in model.model.layers:
            mlp = layer.mlp
            mlp.forward = lambda x, m=mlp: m.down_proj(inner(m.gate_proj(x), m.up_proj(x)))
    if recipe.architecture == "TurboSparseMixtralForCausalLM":
        stored = {name: torch.from_numpy(values) for name, values in tensors(recipe)}
        for number, layer in enumerate(model.model.layers):
            name = f"model.layers.{number}.block_sparse_moe"
            layer.mlp.forward = lambda x, name=name: drelu_experts(stored, name, recipe, x)
    with torch.no_grad():
        return model(torch.tensor([tokens(recipe)])).logits[0].numpy().astype(np.float32)


def drelu_experts(stored: dict[str, torch.Tensor], name: str, recipe: Recipe, x: torch.Tensor) -> torch.Tensor:
    """TurboSparse-Mixtral's experts: softmax over all, the best ones, divided by their sum."""
    shares = torch.softmax(x @ stored[f"{name}.gate.weight"].T, dim=-1)
    best, chosen = torch.topk(shares, recipe.config["num_experts_per_tok"], dim=-1)
    best = best / best.sum(dim=-1, keepdim=True)
    result = torch.zeros_like(x)
    for expert in range(recipe.experts):
        gate, up, down = (stored[f"{name}.experts.{expert}.{matrix}.weight"] for matrix in ("w1", "w3", "w2"))
        share = (best * (chosen == expert)).sum(dim=-1, keepdim=True)
        result += share * ((torch.relu(x @ gate.T) * torch.relu(x @ up.T)) @ down.T)
    return result


def smallthinker(recipe: Recipe) -> np.ndarray:
    """SmallThinker in float64, by its report and its class's documentation."""
    stored = {name: values.astype(np.float64) for name, values in tensors(recipe)}
    settings, heads, width = recipe.config, recipe.query_heads, recipe.head_width
    half = width // 2
    frequencies = 10_000.0 ** (-np.arange(half) / half)
    keys: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(recipe.layers)]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + 1e-5) * stored[f"{name}.weight"]

    def turned(head: np.ndarray, position: int) -> np.ndarray:
        cosine, sine = np.cos(position * frequencies), np.sin(position * frequencies)
        low, high = head[:half], head[half:]
        return np.concatenate([low * cosine - high * sine, high * cosine + low * sine])

    def attention(layer: int, x: np.ndarray, position: int) -> np.ndarray:
        name = f"model.layers.{layer}.self_attn"
        q, k, v = ((stored[f"{name}.{part}_proj.weight"] @ x).reshape(-1, width) for part in ("q", "k", "v"))
        if settings["rope_layout"][layer]:
            q = np.stack([turned(head, position) for head in q])
            k = np.stack([turned(head, position) for head in k])
        keys[layer].append((k, v))
        seen = (
            keys[layer][-settings["sliding_window_size"] :] if settings["sliding_window_layout"][layer] else keys[layer]
        )
        mixed = []
        for head in range(heads):
            of = head * recipe.key_heads // heads
            scores = np.array([q[head] @ past[of] / np.sqrt(width) for past, _ in seen])
            shares = np.exp(scores - scores.max())
            mixed.append(sum(share * past[of] for share, (_, past) in zip(shares / shares.sum(), seen, strict=True)))
        return stored[f"{name}.o_proj.weight"] @ np.concatenate(mixed)

    def experts(layer: int, router_input: np.ndarray, x: np.ndarray) -> np.ndarray:
        name = f"model.layers.{layer}.block_sparse_moe"
        values = stored[f"{name}.primary_router.weight"] @ router_input
        chosen = np.argsort(-values)[: settings["moe_num_active_primary_experts"]]
        shares = 1 / (1 + np.exp(-values[chosen]))
        result = np.zeros_like(x)
        for share, expert in zip(shares / shares.sum(), chosen, strict=True):
            gate, up, down = (stored[f"{name}.experts.{expert}.{part}.weight"] for part in ("gate", "up", "down"))
            result += share * (down @ (np.maximum(gate @ x, 0) * (up @ x)))
        return result

    rows = []
    for position, token in enumerate(tokens(recipe)):
        x = stored["model.embed_tokens.weight"][token]
        for layer in range(recipe.layers):
            name, layer_input = f"model.layers.{layer}", x
            x = x + attention(layer, norm(x, f"{name}.input_layernorm"), position)
            x = x + experts(layer, layer_input, norm(x, f"{name}.post_attention_layernorm"))
        rows.append(stored["model.embed_tokens.weight"] @ norm(x, "model.norm"))
    return np.stack(rows).astype(np.float32)


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
