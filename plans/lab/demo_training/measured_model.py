"""Measure a trained demo model: `python -m neuronpipe.plans.lab.demo_training.measured_model TRAINED FREQUENCIES.npy
> measured.json`.

Writes the share of training tokens for which each neuron's gate is above 0 (float32 [layers, 1, neurons], for `convert
--frequencies`), and prints held-out loss and activity by layer. A neuron is active if its up is above 0, too (dReLU).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from neuronpipe.plans.lab.demo_training.model import DemoModel, Shape
from neuronpipe.plans.lab.demo_training.train import HELD_OUT_TOKENS, tokens_of
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

CALIBRATION_TOKENS = 100_000


def load(trained: Path) -> DemoModel:
    model = DemoModel(Shape())
    tensors = {name.removeprefix("model."): value for name, value in load_file(trained / "model.safetensors").items()}
    model.load_state_dict(tensors)
    return model.eval()


def windows(ids: np.ndarray, context_tokens: int) -> Tensor:
    """Return token ids in whole contexts, [n, context_tokens]."""
    return torch.from_numpy(ids[: len(ids) // context_tokens * context_tokens].astype(np.int64)).view(
        -1, context_tokens
    )


class Activity:
    """Counts of tokens for which each neuron's gate fired, and for which the neuron was active, [layers, neurons]."""

    def __init__(self, model: DemoModel) -> None:
        shape = model.shape
        self.gate_fired = np.zeros((shape.layers, shape.neurons))
        self.active = np.zeros((shape.layers, shape.neurons))
        self.tokens = 0
        for number, layer in enumerate(model.layers):
            layer.mlp.register_forward_pre_hook(lambda mlp, inputs, n=number: self._count(n, mlp, inputs[0]))

    def _count(self, layer: int, mlp: torch.nn.Module, x: Tensor) -> None:
        gate, up = mlp.gate_proj(x) > 0, mlp.up_proj(x) > 0
        self.gate_fired[layer] += gate.sum((0, 1)).numpy()
        self.active[layer] += (gate & up).sum((0, 1)).numpy()
        self.tokens += x.shape[0] * x.shape[1] if layer == 0 else 0


def mean_loss(model: DemoModel, text: Tensor) -> float:
    """Return the mean loss in nats per token. text: as from `windows`."""
    total = 0.0
    for window in text.split(8):
        logits = model(window[:, :-1])
        total += functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten()).item() * len(window)
    return total / len(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trained", type=Path, help="directory that train.py wrote")
    parser.add_argument("frequencies", type=Path, help="where to write the firing frequencies")
    arguments = parser.parse_args()
    model = load(arguments.trained)
    activity = Activity(model)
    with torch.no_grad():
        mean_loss(
            model,
            windows(tokens_of(arguments.trained, held_out=False)[:CALIBRATION_TOKENS], model.shape.context_tokens),
        )
        gates, active = activity.gate_fired / activity.tokens, activity.active / activity.tokens
        np.save(arguments.frequencies, gates[:, None, :].astype(np.float32))
        held_out = windows(tokens_of(arguments.trained, held_out=True)[:HELD_OUT_TOKENS], model.shape.context_tokens)
        loss = mean_loss(model, held_out)
    figures = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "held_out_tokens": held_out.numel(),
        "held_out_loss": round(loss, 4),
        "held_out_perplexity": round(math.exp(loss), 3),
        "trigger_fired_by_layer": [round(float(x), 4) for x in gates.mean(1)],
        "active_by_layer": [round(float(x), 4) for x in active.mean(1)],
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
