"""A shape twin in GGUF: random weights in the shape of a model, for engines that read GGUF and compute densely.

Such engines do the same work whatever the weights are, so the twin's speed is the model's. Encodings follow llama.cpp's
Q4_0 preset (src/llama-quant.cpp, 2026-11): Q4_0 for all matrices, Q6_K for the output, F32 for norms. The activation
is SiLU, which the architecture `llama` means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from neuronpipe.plans.convert.encodings import BLOCK_WEIGHTS_BYTES
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.whole import whole_file
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray

NAME = "shape twin"
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # kinds of token, as GGUF numbers them
SPACE = "▁"
SPECIAL_PIECES = ("<unk>", "<s>", "</s>")
Progress = Callable[[int, int], None]
BYTE_PIECES = tuple(f"<0x{value:02X}>" for value in range(256))
LETTERS = (SPACE, *"0123456789")
MIN_VOCABULARY = len(SPECIAL_PIECES) + len(BYTE_PIECES) + len(LETTERS)


class _Tensor(NamedTuple):
    name: str
    rows: int  # 0: a vector
    columns: int
    encoding: str


def write_twin(path: Path, model: ModelSpec, seed: int, progress: Progress | None = None) -> None:
    """Write the twin of a shape, tensor by tensor, in three times the RAM of its largest; same seed, same bytes.
    progress is called with bytes written and all of them.

    The file appears whole or not at all. Raises UserError for a shape that the encodings or the architecture do not
    cover, and for what the disk refuses.
    """
    _require(path, model)
    tensors = tuple(_tensors(model))
    with whole_file(path) as place:
        writer = GGUFWriter(place, "llama")
        _describe(writer, model)
        for tensor in tensors:
            dimensions = (tensor.rows, tensor.columns) if tensor.rows else (tensor.columns,)
            kind = GGMLQuantizationType[tensor.encoding]
            writer.add_tensor_info(tensor.name, dimensions, np.dtype(np.float16), _bytes(tensor), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        written, total = 0, sum(map(_bytes, tensors))
        for number, tensor in enumerate(tensors):
            writer.write_tensor_data(_random(tensor, np.random.Generator(np.random.SFC64((seed, number)))))
            written += _bytes(tensor)
            if progress is not None:
                progress(written, total)
        writer.close()


def _require(path: Path, model: ModelSpec) -> None:
    if any(model.windows_tokens):
        raise UserError(
            f"{path}: layer_kinds: has attention windows ({max(model.windows_tokens)} tokens); a twin has none"
        )
    if model.vocabulary < MIN_VOCABULARY:
        raise UserError(f"{path}: vocabulary is {model.vocabulary}; a twin's tokenizer needs {MIN_VOCABULARY}")
    for field, columns, encoding in (
        ("width", model.width, "Q6_K"),
        ("neurons", model.neurons, "Q4_0"),
        ("query_heads * head_width", model.query_width, "Q4_0"),
    ):
        if columns % (block := BLOCK_WEIGHTS_BYTES[encoding][0]):
            raise UserError(f"{path}: {field} is {columns}, no multiple of {block} as {encoding} needs")


def _tensors(model: ModelSpec) -> Iterator[_Tensor]:
    """All tensors of the architecture, in the order in which a step reads them."""
    width, key_width = model.width, model.key_heads * model.head_width
    yield _Tensor("token_embd.weight", model.vocabulary, width, "Q4_0")
    for layer in range(model.layers):
        block = f"blk.{layer}"
        yield _Tensor(f"{block}.attn_norm.weight", 0, width, "F32")
        yield _Tensor(f"{block}.attn_q.weight", model.query_width, width, "Q4_0")
        yield _Tensor(f"{block}.attn_k.weight", key_width, width, "Q4_0")
        yield _Tensor(f"{block}.attn_v.weight", key_width, width, "Q4_0")
        yield _Tensor(f"{block}.attn_output.weight", width, model.query_width, "Q4_0")
        yield _Tensor(f"{block}.ffn_norm.weight", 0, width, "F32")
        yield _Tensor(f"{block}.ffn_gate.weight", model.neurons, width, "Q4_0")
        yield _Tensor(f"{block}.ffn_up.weight", model.neurons, width, "Q4_0")
        yield _Tensor(f"{block}.ffn_down.weight", width, model.neurons, "Q4_0")
    yield _Tensor("output_norm.weight", 0, width, "F32")
    yield _Tensor("output.weight", model.vocabulary, width, "Q6_K")


def _bytes(tensor: _Tensor) -> int:
    if tensor.encoding == "F32":
        return 4 * tensor.columns
    block_weights, block_bytes = BLOCK_WEIGHTS_BYTES[tensor.encoding]
    return tensor.rows * tensor.columns // block_weights * block_bytes


def _random(tensor: _Tensor, generator: np.random.Generator) -> NDArray[np.uint8] | NDArray[np.float32]:
    """Norms of one; else random blocks whose scales give rows a length near one, so that activations stay finite."""
    if tensor.encoding == "F32":
        return np.ones(tensor.columns, dtype=np.float32)
    blocks = np.frombuffer(generator.bytes(_bytes(tensor)), dtype=np.uint8)
    blocks = blocks.reshape(-1, BLOCK_WEIGHTS_BYTES[tensor.encoding][1]).copy()
    # A random nibble less 8 has a spread of 4.6. A Q6_K weight is a signed byte times six bits less 32: 74 times 18.5.
    spread, scale = (4.6, slice(0, 2)) if tensor.encoding == "Q4_0" else (74 * 18.5, slice(208, 210))
    sizes = generator.uniform(0.5, 1.5, len(blocks)) / (spread * np.sqrt(tensor.columns))
    # Quants average just below zero; scales of both signs keep rows from leaning to one side.
    sizes *= generator.choice((-1.0, 1.0), len(blocks))
    blocks[:, scale] = sizes.astype("<f2").view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def _describe(writer: GGUFWriter, model: ModelSpec) -> None:
    """Metadata as the stock converter writes it, and a sentencepiece vocabulary whose words are numbers."""
    writer.add_name(NAME)
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_0)
    writer.add_vocab_size(model.vocabulary)
    writer.add_context_length(model.context_tokens)
    writer.add_embedding_length(model.width)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(model.neurons)
    writer.add_head_count(model.query_heads)
    writer.add_head_count_kv(model.key_heads)
    writer.add_key_length(model.head_width)
    writer.add_value_length(model.head_width)
    writer.add_rope_dimension_count(model.head_width)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(model.norm_epsilon)
    # Numbers count up, so every one is a shorter one and a digit: sentencepiece's merges reach all of them.
    words = [f"{SPACE}{number}" for number in range(model.vocabulary - MIN_VOCABULARY)]
    pieces = [*SPECIAL_PIECES, *BYTE_PIECES, *LETTERS, *words]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * len(BYTE_PIECES), *[NORMAL] * (len(LETTERS) + len(words))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * (len(pieces) - len(words)) + [-float(n) for n in range(len(words))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
