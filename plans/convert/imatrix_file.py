"""Reads the importance of columns from an imatrix file, which `llama-imatrix` of llama.cpp writes.

In GGUF, tensor NAME.in_sum2 has sums of squared inputs [matrices, columns], and NAME.counts the numbers of summed
inputs [matrices, 1]; NAME is a tensor of the model's GGUF file. The older format is little-endian: int32 number of
entries; for each int32 length of the name, the name, int32 number of calls, int32 number of values, float32 values.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from neuronpipe.plans.convert.checkpoint import ffn_name
from neuronpipe.plans.convert.gguf.gguf_names import JOINT_GATE_UP
from neuronpipe.plans.convert.importance import ByColumn, Importance
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.models.nemotron_h import NAME as NEMOTRON_H
from neuronpipe.plans.models.nemotron_h import layers_of_blocks
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.tensors import mixer_matrices
from neuronpipe.plans.strict_json import open_file
from neuronpipe.protocol.errors import UserError, safe_name

MAX_FILE_BYTES = 1 << 30
MAX_NAME_BYTES = 256
SUMS, COUNTS = ".in_sum2", ".counts"
LAYER_MATRICES = {
    "attn_q": "qkv",
    "attn_k": "qkv",
    "attn_v": "qkv",
    "attn_qkv": "qkv",
    "ssm_in": "recurrent_input",
    "shortconv.in_proj": "recurrent_input",
    "attn_output": "attention_output",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_gate_exps": "gate",
    "ffn_up_exps": "up",
    "ffn_down_exps": "down",
    "ffn_gate_shexp": "gate",
    "ffn_up_shexp": "up",
    "ffn_down": "down",
    "ffn_down_shexp": "down",
    JOINT_GATE_UP: "gate",
}
"""Name of a matrix in GGUF -> its name in a package."""


def read_imatrix(path: Path, model: ModelSpec) -> Importance:
    """Return the importance in an imatrix file. Entries of matrices that the model does not have, or that have no
    importance, are ignored. Raises UserError, which names file and entry, if the file is damaged or of another
    model."""
    try:
        with open_file(path) as file:
            size_bytes = file.seek(0, 2)
            file.seek(0)
            if size_bytes > MAX_FILE_BYTES:
                raise UserError(f"{path}: is larger than {MAX_FILE_BYTES >> 30} GiB, so it is no imatrix file")
            is_gguf = file.read(4) == b"GGUF"
            file.seek(0)
            entries = _gguf_entries(path) if is_gguf else _older_entries(file.read(), path)
        mean_squares = {
            matrix: _checked(path, name, values, model, matrix, part)
            for name, values in entries
            for matrix, part in _matrices_of(name, model)
        }
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if not mean_squares:
        raise UserError(f"{path}: has no entry for a matrix of this model")
    return Importance.of(mean_squares, path.name)


def _matrices_of(name: str, model: ModelSpec) -> Iterator[tuple[str, int]]:
    """Yield (name in a Checkpoint, number within the entry) of the matrices of an entry."""
    if name == "output.weight" and not model.tied_embeddings:
        yield "output", 0
    found = re.fullmatch(r"blk\.(0|[1-9]\d{0,5})\.([\w.]+)\.weight", name, re.ASCII)
    of_blocks = layers_of_blocks(model) if model.family == NEMOTRON_H else range(model.layers)
    if found is None or (matrix := LAYER_MATRICES.get(found[2])) is None or int(found[1]) >= len(of_blocks):
        return
    number = of_blocks[int(found[1])]
    layer, mixer_has = f"layers.{number}", mixer_matrices(model, number)
    if matrix == "qkv" and "recurrent_input" in mixer_has:  # of DeltaNet, by that name in GGUF
        matrix = "recurrent_input"
    if matrix in ("qkv", "attention_output", "recurrent_input"):
        if matrix in mixer_has:
            yield f"{layer}.{matrix}", 0
    elif matrix in model.ffn_matrices:
        of_entry = ("gate", "up") if found[2] == JOINT_GATE_UP else (matrix,)
        routed = model.routed_experts(number)
        if found[2].endswith("_exps"):
            yield from ((ffn_name(model, layer, e, name), e) for name in of_entry for e in range(routed))
            return
        always = range(routed, model.expert_counts[number])  # parts of one feed-forward
        yield from ((ffn_name(model, layer, e, matrix), e - routed if matrix == "down" else 0) for e in always)


def _checked(path: Path, name: str, values: ByColumn, model: ModelSpec, matrix: str, part: int) -> ByColumn:
    """Return the values [columns] of the entry `name` for a matrix from `_matrices_of`. Raises UserError if they do not
    fit the model."""
    kind, columns, parts = matrix.rpartition(".")[2], model.width, 1
    if kind == "attention_output":
        columns = model.layer_heads[int(matrix.split(".")[1])].query_width
    elif kind == "down":
        columns = model.neurons
    missing = 0
    if name.endswith("_exps.weight"):
        parts = model.experts
    elif kind == "down":
        layer = int(matrix.split(".")[1])
        parts = model.expert_counts[layer] - model.routed_experts(layer)
        missing = -values.size % columns  # the last part may be shorter in the file
    if values.size + missing != parts * columns:
        raise UserError(
            f"{path}: {safe_name(name)}: has {values.size} values where this model needs {parts * columns}: "
            "the file belongs to another model"
        )
    padded = np.pad(values.ravel(), (0, missing)) if missing else values
    selected: ByColumn = padded.reshape(parts, columns)[part]
    if not (np.isfinite(selected).all() and (selected >= 0).all()):
        raise UserError(f"{path}: {safe_name(name)}: has values that are negative or not finite: damaged")
    return selected


def _gguf_entries(path: Path) -> Iterator[tuple[str, ByColumn]]:
    from neuronpipe.plans.convert.gguf.gguf_header import parse_gguf_header  # its library is slow to import

    with open_file(path) as file:
        tensors = parse_gguf_header(file, path).tensors
    source = SourceFile(path)

    def read(name: str) -> ByColumn:
        tensor = tensors[name]
        if tensor.encoding != "F32":
            raise UserError(f"{path}: {safe_name(name)}: is {tensor.encoding}, not F32")
        data = np.empty(tensor.stop - tensor.start, np.uint8)
        source.read_into(tensor.start, data)
        return data.view("<f4").astype(np.float32)

    try:
        for sums_name in tensors:
            name = sums_name.removesuffix(SUMS)
            if name == sums_name:
                continue
            if f"{name}{COUNTS}" not in tensors:
                raise UserError(f"{path}: {safe_name(name)}{COUNTS}: the tensor is missing")
            sums, counts = read(sums_name), read(f"{name}{COUNTS}")
            if sums.size % counts.size:
                raise UserError(f"{path}: {safe_name(name)}: {sums.size} sums of {counts.size} matrices: damaged")
            by_matrix = sums.reshape(counts.size, -1)
            yield name, np.divide(by_matrix, counts[:, None], out=np.zeros_like(by_matrix), where=counts[:, None] > 0)
    finally:
        source.close()


def _older_entries(data: bytes, path: Path) -> Iterator[tuple[str, ByColumn]]:
    at, name = 0, "number of entries"

    def take(count_bytes: int) -> bytes:
        nonlocal at
        if not 0 <= count_bytes <= len(data) - at:
            raise UserError(f"{path}: {safe_name(name)}: truncated, damaged, or no imatrix file")
        at += count_bytes
        return data[at - count_bytes : at]

    def number() -> int:
        return int(struct.unpack("<i", take(4))[0])

    for entry in range(number()):
        name = f"name of entry {entry}"
        length = number()
        name = take(length if length <= MAX_NAME_BYTES else -1).decode("utf-8", "replace")
        number()  # of calls
        yield name, np.frombuffer(take(4 * number()), "<f4").astype(np.float32)
