"""Which activation a source means: the step at which ReLU models are most often read wrongly without a word."""

from __future__ import annotations

import re

from neuronpipe.plans.package.manifest import ACTIVATIONS, Activation

ACTIVATION_NAMES: dict[str, Activation] = {
    "relu": "relu",
    "drelu": "drelu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
SAY_WHICH = (
    f"say which it is with --activation {'|'.join(ACTIVATIONS)} "
    "(drelu: SparseQwen2, TurboSparse, Bamboo; relu: ReluLLaMA and others with relu(gate) * up)"
)
_RELU_MODELS = re.compile(r"relu|sparse|bamboo|powerinfer|minicpm-s", re.IGNORECASE)


def sounds_like_relu(*names: str) -> str | None:
    """The first of the names that a ReLU-family model might have, if any."""
    return next((name for name in names if _RELU_MODELS.search(name)), None)


def may_mean_drelu(architecture: str, name: str) -> bool:
    """Whether a model of this architecture that says `name` is known to compute dReLU: SparseQwen2 is a Qwen2 that says
    relu, and nothing else in its files tells it from one that means relu."""
    return name == "relu" and architecture in ("Qwen2ForCausalLM", "qwen2")
