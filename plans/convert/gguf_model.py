"""A GGUF file of architecture llama or qwen2."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from neuronpipe.plans.convert.activations import ACTIVATION_NAMES, SAY_WHICH, may_mean_drelu, sounds_like_relu
from neuronpipe.plans.convert.chat_template import gguf_template
from neuronpipe.plans.convert.checkpoint import (
    Checkpoint,
    Inventory,
    Options,
    RowNumbers,
    SourceFile,
    Stack,
    StoredMatrix,
)
from neuronpipe.plans.convert.gguf_header import GgufHeader, read_gguf_header
from neuronpipe.plans.convert.gguf_tokenizer import end_tokens, package_tokenizer
from neuronpipe.plans.convert.rope import MOST_THETA, base_frequencies
from neuronpipe.plans.package.fields import Record, one_line
from neuronpipe.plans.package.manifest import Activation, Shape, Source
from neuronpipe.plans.package.parse import check_shape
from neuronpipe.protocol.errors import quoted
from numpy.typing import NDArray

ARCHITECTURES = ("llama", "qwen2")
NOTHING = re.compile("(?!)")


def open_gguf(path: Path, options: Options) -> Checkpoint:
    """Read metadata and tensor table, check each tensor's shape. Raises UserError naming file and field."""
    header = read_gguf_header(path)
    metadata = header.metadata
    architecture = metadata.text("general.architecture")
    if architecture not in ARCHITECTURES:
        metadata.fail(
            "general.architecture", f"{quoted(architecture)} is not supported; {', '.join(ARCHITECTURES)} are"
        )
    if metadata.has("split.count") and metadata.integer("split.count", 0, 1 << 16) > 1:
        metadata.fail("split.count", "the model is split over several files; merge them with llama-gguf-split first")
    activation = _activation(path, metadata, architecture, options.activation)
    with ExitStack() as files:
        inventory = _inventory(path, header, files)
        shape = _shape(metadata, architecture, inventory, options.context_tokens)
        tied = not inventory.has("output.weight")
        bias = architecture == "qwen2" or inventory.has("blk.0.attn_q.bias")
        matrices, vectors = _tensors(inventory, shape, tied, bias, interleaved=architecture == "llama")
        frequencies = _frequencies(metadata, architecture, shape, inventory)
        inventory.refuse_leftovers(NOTHING)
        return Checkpoint(
            source=Source("gguf", one_line(path.name), architecture),
            activation=activation,
            shape=shape,
            tied_embeddings=tied,
            attention_bias=bias,
            end_tokens=end_tokens(metadata, shape.vocabulary),
            tokenizer=package_tokenizer(path, metadata, options.tokenizer, shape.vocabulary),
            chat_template=gguf_template(metadata),
            inverse_frequency=frequencies,
            matrices=matrices,
            vectors=vectors,
            files=files.pop_all(),
        )
    raise AssertionError  # ExitStack.__exit__ may swallow errors as far as a type checker knows; ours never does


def _activation(path: Path, metadata: Record, architecture: str, wanted: Activation | None) -> Activation:
    """What was asked for, else what the file says, else SiLU, which no ReLU model may pass for."""
    if wanted is not None:
        return wanted
    field = f"{architecture}.hidden_activation"
    if metadata.has(field):
        if (name := metadata.text(field)) not in ACTIVATION_NAMES:
            metadata.fail(
                field, f"{quoted(name)} is not supported; {', '.join(ACTIVATION_NAMES)} are (or pass --activation)"
            )
        if may_mean_drelu(architecture, name):
            metadata.fail(field, f"'relu', but SparseQwen2 says so and means drelu; {SAY_WHICH}")
        return ACTIVATION_NAMES[name]
    keys = [key for key in metadata.names() if re.fullmatch(r"general\.(\w+\.)*(\d+\.)?(name|basename|finetune)", key)]
    names = [metadata.text(key) for key in keys]
    if suspect := sounds_like_relu(*names, path.name):
        metadata.fail(
            "general.architecture",
            f"{architecture!r} means SiLU, but {quoted(suspect)} sounds like a ReLU model, which such a file cannot "
            f"tell; {SAY_WHICH}",
        )
    return "silu"


def _inventory(path: Path, header: GgufHeader, files: ExitStack) -> Inventory:
    file, inventory = SourceFile(path), Inventory(path)
    files.callback(file.close)
    for name, tensor in header.tensors.items():
        inventory.add(name, file, tensor.start, tensor.shape, tensor.encoding)
    return inventory


def _shape(metadata: Record, architecture: str, inventory: Inventory, context_tokens: int | None) -> Shape:
    def integer(name: str, least: int, most: int, default: int | None = None) -> int:
        field = f"{architecture}.{name}"
        return default if default is not None and not metadata.has(field) else _uniform(metadata, field, least, most)

    if integer("expert_count", 0, 1 << 16, 0):
        metadata.fail(f"{architecture}.expert_count", "mixtures of experts are not supported")
    width, query_heads = integer("embedding_length", 1, 1 << 20), integer("attention.head_count", 1, 4096)
    head_width = integer("attention.key_length", 2, 4096, width // query_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if integer(name, 1, 4096, head_width) != head_width:
            metadata.fail(f"{architecture}.{name}", f"differs from the width of a head, {head_width}: not supported")
    most_tokens = integer("context_length", 1, 1 << 24)
    if context_tokens is not None and not 1 <= context_tokens <= most_tokens:
        metadata.fail(f"{architecture}.context_length", f"is {most_tokens}, so {context_tokens} tokens are impossible")
    shape = Shape(
        width=width,
        neurons=integer("feed_forward_length", 1, 1 << 22),
        layers=integer("block_count", 1, 4096),
        experts=1,
        query_heads=query_heads,
        key_heads=integer("attention.head_count_kv", 1, 4096, query_heads),
        head_width=head_width,
        vocabulary=inventory.shape("token_embd.weight")[0],
        context_tokens=context_tokens or most_tokens,
        norm_epsilon=metadata.number(f"{architecture}.attention.layer_norm_rms_epsilon", 0.0, 1.0),
        window_tokens=integer("attention.sliding_window", 0, 1 << 24, 0),
    )
    check_shape(shape, metadata)
    return shape


def _uniform(metadata: Record, field: str, least: int, most: int) -> int:
    """A whole number, or the one that a list repeats for every layer."""
    value = metadata.value(field)
    if isinstance(value, list):
        if len(set(map(repr, value))) != 1:
            metadata.fail(field, "differs between layers: not supported")
        return Record({field: value[0]}, metadata.where).integer(field, least, most)
    return metadata.integer(field, least, most)


def _frequencies(metadata: Record, architecture: str, shape: Shape, inventory: Inventory) -> NDArray[np.float32]:
    """The rope table: freq_base, linear scaling, and the factors that Llama 3 files carry as a tensor."""

    def number(name: str, default: float, least: float, most: float) -> float:
        field = f"{architecture}.rope.{name}"
        return metadata.number(field, least, most) if metadata.has(field) else default

    frequencies = base_frequencies(shape.head_width, number("freq_base", 10_000.0, 1.0, MOST_THETA))
    field = f"{architecture}.rope.scaling.type"
    kind = metadata.text(field) if metadata.has(field) else "linear"
    if kind not in ("none", "linear"):
        metadata.fail(field, f"{quoted(kind)} is not supported; none and linear are")
    if kind == "linear":
        frequencies = frequencies / (number("scaling.factor", 0.0, 0.0, 1e6) or number("scale_linear", 1.0, 1e-3, 1e6))
    if inventory.has("rope_freqs.weight"):
        factors = inventory.take("rope_freqs.weight", shape.head_width // 2).vector()
        if (factors <= 0).any():
            metadata.fail("rope_freqs.weight", "holds factors that are not positive: damaged")
        frequencies = frequencies / factors
    return frequencies.astype(np.float32)


def interleaved_order(heads: int, head_width: int) -> RowNumbers:
    """Where the rows of query or key matrices lie when pairs (j, j + head_width/2) are stored next to each other."""
    rows = np.arange(heads * head_width, dtype=np.int64).reshape(heads, head_width // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _tensors(inventory: Inventory, shape: Shape, tied: bool, bias: bool, *, interleaved: bool) -> tuple[Stack, Stack]:
    width, neurons, heads_width = shape.width, shape.neurons, shape.query_width
    heads = {"q": shape.query_heads, "k": shape.key_heads, "v": shape.key_heads}
    # Files of architecture llama pair neighbouring elements for rotary positions: their queries and keys are permuted.
    orders = {name: interleaved_order(heads[name], shape.head_width) for name in ("q", "k") if interleaved}
    matrices: dict[str, tuple[StoredMatrix, ...]] = {
        "embedding": (inventory.take("token_embd.weight", shape.vocabulary, width),)
    }
    if not tied:
        matrices["output"] = (inventory.take("output.weight", shape.vocabulary, width),)
    vectors: dict[str, tuple[StoredMatrix, ...]] = {"output_norm": (inventory.take("output_norm.weight", width),)}

    def projection(block: str, name: str) -> StoredMatrix:
        matrix = inventory.take(f"{block}.attn_{name}.weight", heads[name] * shape.head_width, width)
        return matrix.reordered(orders[name]) if name in orders else matrix

    def projection_bias(block: str, name: str) -> StoredMatrix:
        values = inventory.take(f"{block}.attn_{name}.bias", heads[name] * shape.head_width).as_column()
        return values.reordered(orders[name]) if name in orders else values

    for n in range(shape.layers):
        here, block = f"layers.{n}", f"blk.{n}"
        matrices[f"{here}.qkv"] = tuple(projection(block, name) for name in heads)
        matrices[f"{here}.attention_output"] = (inventory.take(f"{block}.attn_output.weight", width, heads_width),)
        matrices[f"{here}.gate"] = (inventory.take(f"{block}.ffn_gate.weight", neurons, width),)
        matrices[f"{here}.up"] = (inventory.take(f"{block}.ffn_up.weight", neurons, width),)
        matrices[f"{here}.down"] = (inventory.take(f"{block}.ffn_down.weight", width, neurons),)
        vectors[f"{here}.attention_norm"] = (inventory.take(f"{block}.attn_norm.weight", width),)
        vectors[f"{here}.ffn_norm"] = (inventory.take(f"{block}.ffn_norm.weight", width),)
        if bias:
            vectors[f"{here}.qkv.bias"] = tuple(projection_bias(block, name) for name in heads)
    return matrices, vectors
