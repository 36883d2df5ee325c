"""Make the golden logits with PyTorch and transformers: python make.py (from this directory, with both installed). What
logits.npz has already stays as it is, byte for byte; names make those anew: python make.py opt qwen3.

Every recipe of checkpoints.py is written to disk, loaded by transformers' own classes and run in float32. Classes that
are not part of transformers are others with an activation that is put in here: Bamboo is Mistral with the activation on
gate and up alike, TurboSparse-Mixtral likewise Mixtral, ProSparse is Llama with a threshold, SparseLM is Llama with
ReLU; MiniCPM is Granite, which has its scales under other names. SmallThinker and Ling are computed here from their
descriptions.
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
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

Inner = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))
from tests.conformance.checkpoints import RECIPES, Recipe, tensors, tokens, write_checkpoint  # noqa: E402


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
    if recipe.architecture.startswith("BailingMoe"):
        return bailing(recipe)
    changes, inner = stand_in(recipe)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    ways = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if recipe.experts else {})
    sees = recipe.architecture.endswith("ForConditionalGeneration")
    owner = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model, loading = owner.from_pretrained(directory, dtype=torch.float32, output_loading_info=True, **ways)
    if sees:  # the checkpoint has no vision tower
        loading["missing_keys"] = {name for name in loading["missing_keys"] if ".visual." not in name}
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


def bailing(recipe: Recipe) -> np.ndarray:
    """Ling of either generation in float64, as the code in its repositories computes it: all tokens of a layer."""
    stored = {name: values.astype(np.float64) for name, values in tensors(recipe)}
    settings, heads, keys, width = recipe.config, recipe.query_heads, recipe.key_heads, recipe.head_width
    second, ids = recipe.architecture == "BailingMoeV2ForCausalLM", tokens(recipe)
    rotated = int(width * settings.get("partial_rotary_factor", 1.0))
    frequencies = settings.get("rope_theta", 10_000.0) ** (-np.arange(0, rotated, 2) / rotated)
    turns = np.exp(1j * np.arange(len(ids))[:, None] * frequencies)[:, None]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * stored[f"{name}.weight"]

    def turned(states: np.ndarray) -> np.ndarray:
        half = rotated // 2
        pairs = (states[..., :half] + 1j * states[..., half:rotated]) * turns
        return np.concatenate([pairs.real, pairs.imag, states[..., rotated:]], axis=-1)

    def attention(name: str, x: np.ndarray) -> np.ndarray:
        states = (x @ stored[f"{name}.query_key_value.weight"].T).reshape(len(x), -1, width)
        q, k, v = np.split(states, [heads, heads + keys], axis=1)
        if settings["use_qk_norm"]:
            q, k = norm(q, f"{name}.query_layernorm"), norm(k, f"{name}.key_layernorm")
        k, v = (np.repeat(part, heads // keys, axis=1) for part in (turned(k), v))
        scores = np.einsum("ihd,jhd->hij", turned(q), k) / math.sqrt(width)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = np.einsum("hij,jhd->ihd", shares / shares.sum(axis=-1, keepdims=True), v)
        return mixed.reshape(len(x), -1) @ stored[f"{name}.dense.weight"].T

    def gated(name: str, x: np.ndarray) -> np.ndarray:
        gate, up, down = (stored[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        values = x @ gate.T
        return (values / (1 + np.exp(-values)) * (x @ up.T)) @ down.T

    def chosen(name: str, x: np.ndarray) -> dict[int, float]:
        """Each chosen expert's share of one token."""
        values = stored[f"{name}.gate.weight"] @ x
        scores = 1 / (1 + np.exp(-values)) if second else np.exp(values) / np.exp(values).sum()
        ranks = scores + stored[f"{name}.gate.expert_bias"] if second else scores
        if second:
            groups = ranks.reshape(settings["n_group"], -1)
            best = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(axis=1))[: settings["topk_group"]]
            ranks = np.where(np.isin(np.arange(len(groups)), best)[:, None], groups, -np.inf).reshape(-1)
        experts = np.argsort(-ranks)[: settings["num_experts_per_tok"]]
        factor = settings.get("routed_scaling_factor", 1.0) / scores[experts].sum()
        return {int(expert): scores[expert] * factor for expert in experts}

    def mixture(name: str, x: np.ndarray) -> np.ndarray:
        result = gated(f"{name}.shared_experts", x)
        for token, vector in enumerate(x):
            for expert, share in chosen(name, vector).items():
                result[token] += share * gated(f"{name}.experts.{expert}", vector)
        return result

    x = stored["model.word_embeddings.weight"][ids]
    for layer in range(recipe.layers):
        name = f"model.layers.{layer}"
        x = x + attention(f"{name}.attention", norm(x, f"{name}.input_layernorm"))
        compute = gated if layer in recipe.dense else mixture
        x = x + compute(f"{name}.mlp", norm(x, f"{name}.post_attention_layernorm"))
    return (norm(x, "model.norm") @ stored["lm_head.weight"].T).astype(np.float32)


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
