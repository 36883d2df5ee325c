"""PowerInfer's variant of GGUF: magic PWRI, Down stored by neuron, with predictors.

The magic changes the meaning of a file: the architecture `llama` computes ReLU instead of SiLU. Such files do not state
attention windows, and PowerInfer computes none. The facts are from its converters and its loader (convert.py,
convert-hf-to-powerinfer-gguf.py, llama.cpp).
"""

from __future__ import annotations

import re
from dataclasses import replace

from neuronpipe.plans.convert.stored_tensors import Inventory
from neuronpipe.plans.models import falcon, opt
from neuronpipe.plans.models.family import Family, GgufArchitecture, TensorNames
from neuronpipe.plans.models.registry import FAMILIES
from neuronpipe.plans.models.spec import MAX, Activation, ModelSpec, SpecError
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted

# For each architecture of PowerInfer's sparse graph: family, properties, activation of the feed-forward.
ARCHITECTURES: dict[str, tuple[str, GgufArchitecture, Activation]] = {
    "llama": ("llama", GgufArchitecture(interleaved=True), "relu"),
    "bamboo": ("llama", GgufArchitecture(interleaved=True), "drelu"),
    "falcon": ("falcon", falcon.GGUF, "relu"),
    "opt": ("opt", GgufArchitecture(interleaved=False), "relu"),
}
OPT_SPLIT = "gpt-2"  # OPT files are older than the key tokenizer.ggml.pre
FIRST_POSITION = opt.NAMES.first_position  # the table has the rows before position 0, as in checkpoints
UNPERMUTED = "Llama"  # convert-hf-to-powerinfer-gguf.py, which does not reorder rows, gives every model this name
THRESHOLD = "powerinfer.sparse_threshold"
_SHIFTED = re.compile(r"prosparse|minicpm-s", re.IGNORECASE)


def powerinfer_names(names: TensorNames) -> TensorNames:
    """Return the tensor names of a file for PowerInfer. names: those of llama.cpp."""
    return replace(names, down="ffn_down_t", positions="position_embd", first_position=FIRST_POSITION, predictor="fc{}")


def powerinfer_opt(metadata: Record, inventory: Inventory, context_tokens: int | None) -> ModelSpec:
    """Return the description of an OPT. Raises UserError if sizes contradict each other.

    context_tokens: the requested context; None: all positions
    """

    # Context length and epsilon in the file are constants of the converter, or missing. The table of positions gives
    # the context length, the model's class the epsilon.
    def integer(key: str, maximum: int) -> int:
        return metadata.integer(f"opt.{key}", 1, maximum)

    width, heads = integer("embedding_length", MAX.width), integer("attention.head_count", MAX.query_heads)
    if width % heads:
        metadata.fail("opt.attention.head_count", f"{heads} does not divide embedding_length, {width}")
    positions = inventory.shape("position_embd.weight")[0] - FIRST_POSITION
    if context_tokens is not None and not 1 <= context_tokens <= positions:
        metadata.fail("position_embd.weight", f"has {positions} positions, so {context_tokens} tokens are impossible")
    try:
        return opt.opt_spec(
            width=width,
            neurons=integer("feed_forward_length", MAX.neurons),
            layers=integer("block_count", MAX.layers),
            heads=heads,
            vocabulary=inventory.shape("token_embd.weight")[0],
            context_tokens=context_tokens or positions,
            tied_embeddings=not inventory.has("output.weight"),
        )
    except SpecError as error:
        metadata.fail(error.field, error.complaint)


def powerinfer_architecture(metadata: Record) -> tuple[Family, GgufArchitecture]:
    """Return family and architecture of a file for PowerInfer. Raises UserError if it is not supported or was converted
    wrongly."""
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        metadata.fail(
            "general.architecture",
            f"{quoted(name)} is not supported in a file for PowerInfer; {', '.join(ARCHITECTURES)} are",
        )
    if name == "llama" and metadata.has("general.name") and metadata.text("general.name") == UNPERMUTED:
        metadata.fail(
            "general.name",
            f"is {UNPERMUTED!r}, as files have it that were written without reordering queries and keys, which "
            "PowerInfer computes wrongly; convert the original checkpoint instead",
        )
    family, architecture, _ = ARCHITECTURES[name]
    return FAMILIES[family], architecture


def powerinfer_threshold(metadata: Record) -> float:
    """Return the minimal score of a predicted neuron; 0 if the file does not state it."""
    return metadata.number(THRESHOLD, -1e9, 1e9) if metadata.has(THRESHOLD) else 0.0


def is_opt(metadata: Record) -> bool:
    return metadata.text("general.architecture") == opt.NAME


def powerinfer_activation(metadata: Record, file_name: str, requested: Activation | None) -> Activation:
    """Return the requested activation, or the one that PowerInfer computes. Raises UserError for an OPT without relu,
    or if a name suggests FATReLU and nothing is requested."""
    if requested is not None and not (is_opt(metadata) and requested != "relu"):
        return requested
    if requested is not None:
        metadata.fail("general.architecture", f"'opt' computes relu, and not {requested}")
    names = [file_name, *(metadata.text(key) for key in ("general.name",) if metadata.has(key))]
    if shifted := next((name for name in names if _SHIFTED.search(name)), None):
        metadata.fail(
            "general.name",
            f"{quoted(shifted)} sounds like a model whose activation has a threshold (FATReLU), which such a file "
            "does not say and PowerInfer leaves out; `--activation relu` computes what PowerInfer does, the original "
            "checkpoint says what was meant",
        )
    return ARCHITECTURES[metadata.text("general.architecture")][2]
