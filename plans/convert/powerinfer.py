"""PowerInfer's variant of GGUF: magic PWRI, Down stored by neuron, predictors of the feed-forward inside.

Its program decides by the magic what a file means: the same architecture `llama` computes ReLU here and SiLU in an
ordinary GGUF. Facts from its converters and its loader (convert.py, convert-hf-to-powerinfer-gguf.py, llama.cpp).
"""

from __future__ import annotations

import re
from dataclasses import replace

from neuronpipe.plans.models.family import Family, GgufArchitecture, TensorNames
from neuronpipe.plans.models.registry import FAMILIES
from neuronpipe.plans.models.spec import Activation
from neuronpipe.plans.package.fields import Record
from neuronpipe.protocol.errors import quoted

# Of each architecture that its sparse graph knows: how queries and keys lie, and what its feed-forward computes.
ARCHITECTURES: dict[str, tuple[str, GgufArchitecture, Activation]] = {
    "llama": ("llama", GgufArchitecture(interleaved=True), "relu"),
    "bamboo": ("llama", GgufArchitecture(interleaved=True), "drelu"),
}
PREDICTORS = r"blk\.\d+\.fc[12]\.weight"
THRESHOLD = "powerinfer.sparse_threshold"
_SHIFTED = re.compile(r"prosparse|minicpm-s", re.IGNORECASE)


def powerinfer_names(names: TensorNames) -> TensorNames:
    """What such a file calls its tensors: Down has another name, and one row for each neuron."""
    return replace(names, down="ffn_down_t")


def powerinfer_architecture(metadata: Record) -> tuple[Family, GgufArchitecture]:
    """What the file's architecture means with this magic. Raises UserError by the field."""
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        metadata.fail(
            "general.architecture",
            f"{quoted(name)} is not supported in a file for PowerInfer; {', '.join(ARCHITECTURES)} are",
        )
    if metadata.has(THRESHOLD):
        metadata.number(THRESHOLD, -1e9, 1e9)
    family, architecture, _ = ARCHITECTURES[name]
    return FAMILIES[family], architecture


def powerinfer_activation(metadata: Record, file_name: str, wanted: Activation | None) -> Activation:
    """What was asked for, else what PowerInfer computes, where the model is not known to mean something else."""
    if wanted is not None:
        return wanted
    names = [file_name, *(metadata.text(key) for key in ("general.name",) if metadata.has(key))]
    if shifted := next((name for name in names if _SHIFTED.search(name)), None):
        metadata.fail(
            "general.name",
            f"{quoted(shifted)} sounds like a model whose activation has a threshold (FATReLU), which such a file "
            "does not say and PowerInfer leaves out; `--activation relu` computes what PowerInfer does, the original "
            "checkpoint says what was meant",
        )
    return ARCHITECTURES[metadata.text("general.architecture")][2]
