"""Which activation a source means: the step at which ReLU models are most often read wrongly without a word."""

from __future__ import annotations

import re

from neuronpipe.plans.models.spec import ACTIVATIONS, Activation
from neuronpipe.plans.package.fields import Record
from neuronpipe.protocol.errors import quoted

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


def named_activation(record: Record, field: str, *, relu_may_mean_drelu: bool) -> Activation:
    """The activation that a field names. relu_may_mean_drelu: SparseQwen2 is a Qwen2 that says relu, and nothing else
    in its files tells it from one that means relu."""
    if (name := record.text(field)) not in ACTIVATION_NAMES:
        record.fail(field, f"{quoted(name)} is not supported; {', '.join(ACTIVATION_NAMES)} are (or pass --activation)")
    if name == "relu" and relu_may_mean_drelu:
        record.fail(field, f"is 'relu', but SparseQwen2 says so and means drelu; {SAY_WHICH}")
    return ACTIVATION_NAMES[name]
