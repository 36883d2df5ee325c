"""Which activation a source means: the step at which ReLU models are most often read wrongly without a word."""

from __future__ import annotations

import re

from neuronpipe.plans.package.manifest import Activation

ACTIVATION_NAMES: dict[str, Activation] = {
    "relu": "relu",
    "drelu": "drelu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
_RELU_MODELS = re.compile(r"relu|sparse|bamboo|powerinfer|minicpm-s", re.IGNORECASE)


def sounds_like_relu(*names: str) -> str | None:
    """The first of the names that a ReLU-family model might have, if any."""
    return next((name for name in names if _RELU_MODELS.search(name)), None)
