"""Mixtures in GGUF files whose experts a package can read in place, so that only the rest of the model is converted.

In such a file the rows of an expert's gate, up and down matrix are contiguous, and experts lie at equal distances. An
expert that is needed whole can
therefore be read from there, and the loader converts its rows to the types that the engine computes with. Experts that
compute every token lie in one feed-forward there: the package has its parts in a file of its own, encoded in the same
way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from neuronpipe.native import ROW_TYPES, lib
from neuronpipe.plans.convert.checkpoint import Checkpoint, ffn_name
from neuronpipe.plans.convert.encodings import can_unpack, row_bytes
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.convert.stored_tensors import ColumnPart, StoredMatrix
from neuronpipe.plans.package.layout import GROUP_WEIGHTS, Layout, Quantization, expert_layout, reads_inputs_of
from neuronpipe.plans.package.source_experts import (
    GGUF_TYPES,
    MATRICES,
    MAX_HEADER_BYTES,
    SourceEntry,
    SourceExperts,
    SourceRows,
    expert_bytes,
    read_bytes,
)
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

MAX_EXPERT_BYTES = 24 << 20  # eight experts are read at once, and their buffers count in the memory limit
OTHERWISE = "Q8_0"  # encoding of parts of shared experts that cannot stay as they are stored
SLOT_QUANTIZATIONS: tuple[Quantization, ...] = ("q4", "iq4", "mxfp4", "q4k", "q5k", "q6k", "q8")


@frozen
class ExpertsInPlace:
    """Experts that a package reads in place.

    quantizations: quantizations of gate, up and down in memory
    """

    places: SourceExperts
    layout: Layout
    quantizations: Mapping[str, Quantization]


def experts_in_place(checkpoint: Checkpoint) -> ExpertsInPlace | str:
    """Return the experts of a checkpoint that can be read in place, or the reason why they are converted.

    The reason is a clause; "" for a dense model.
    """
    if checkpoint.model.experts == 1:
        return ""
    if (reason := _refusal(checkpoint)) is not None:
        return reason
    model, quantizations = checkpoint.model, _slot_quantizations(checkpoint)
    if quantizations is None:
        encodings = sorted({_encoding(part) for part in _all_experts(checkpoint)})
        return f"experts in {', '.join(encodings)} are not computed with as they are stored"
    layout = _layout(checkpoint, quantizations)
    headers = _header_bytes(checkpoint)
    files = sorted({part.file.path for part in _all_experts(checkpoint)})
    matrices: dict[str, list[SourceRows]] = {matrix: [] for matrix in MATRICES}
    own_bytes = 0  # of shared.bin so far
    for layer, first, count in model.runs:
        for matrix in MATRICES:
            stored = _expert(checkpoint, layer, first, matrix)
            if is_shared(stored):
                rows = SourceRows(len(files), own_bytes, _encoding(stored))
                own_bytes += count * expert_bytes(rows.encoding, layout, matrix, model.width)
            else:
                size_bytes, stride = stored.rows * stored.stride_bytes, _stride(checkpoint, layer, first, count, matrix)
                stride = 0 if stride == size_bytes else stride
                rows = SourceRows(files.index(stored.file.path), stored.offset, stored.encoding, stride)
            matrices[matrix].append(rows)
    return ExpertsInPlace(
        SourceExperts(
            tuple(SourceEntry.of(path, headers[str(path)]) for path in files),
            {matrix: tuple(rows) for matrix, rows in matrices.items()},
        ),
        layout,
        quantizations,
    )


def is_shared(stored: StoredMatrix) -> bool:
    """Return True if a matrix is a part of a larger one, whose rows the package has in its own file."""
    return stored.order is not None or isinstance(stored, ColumnPart)


def shared_rows(stored: StoredMatrix) -> NDArray[np.uint8]:
    """Return the rows of a matrix for which `is_shared` is true, [rows, row bytes], as shared.bin has them: as stored
    if its columns are whole blocks, else encoded in Q8_0."""
    numbers = np.arange(stored.rows, dtype=np.int64)
    if _encoding(stored) != stored.encoding:
        from gguf import GGMLQuantizationType  # the library is slow to import
        from gguf.quants import quantize

        encoded: NDArray[np.uint8] = quantize(stored.values(numbers), GGMLQuantizationType[OTHERWISE])
        return encoded
    return stored.stored(numbers)


def _encoding(stored: StoredMatrix) -> str:
    """Return the encoding in which the rows of an expert are read."""
    if not is_shared(stored):
        return stored.encoding
    is_whole = not isinstance(stored, ColumnPart) or not stored.is_decoded
    return stored.encoding if is_whole and stored.encoding in GGUF_TYPES else OTHERWISE


def _layout(checkpoint: Checkpoint, quantizations: Mapping[str, Quantization]) -> Layout:
    model = checkpoint.model

    def sizes(matrix: str) -> list[int]:
        rows, columns = (model.width, model.neurons) if matrix == "down" else (model.neurons, model.width)
        of_runs = (_encoding(_expert(checkpoint, layer, first, matrix)) for layer, first, _ in model.runs)
        return [read_bytes(rows * (row_bytes(encoding, columns) or 0)) for encoding in of_runs]

    return expert_layout(
        model.width,
        model.neurons,
        quantizations,
        trigger_read_bytes=max(sizes("gate")),
        value_read_bytes=max(map(sum, zip(sizes("up"), sizes("down"), strict=True))),
    )


def _expert(checkpoint: Checkpoint, layer: int, expert: int, matrix: str) -> StoredMatrix:
    return checkpoint.matrices[ffn_name(checkpoint.model, f"layers.{layer}", expert, matrix)][0]


def _stride(checkpoint: Checkpoint, layer: int, first: int, count: int, matrix: str) -> int:
    """Return the bytes from one expert's rows of a run to those of the next."""
    stored = _expert(checkpoint, layer, first, matrix)
    if count == 1:
        return stored.rows * stored.stride_bytes
    return _expert(checkpoint, layer, first + 1, matrix).offset - stored.offset


def _all_experts(checkpoint: Checkpoint) -> Iterator[StoredMatrix]:
    model = checkpoint.model
    return (_expert(checkpoint, layer, expert, matrix) for matrix in MATRICES for layer, expert in model.places)


def _refusal(checkpoint: Checkpoint) -> str | None:
    """Return why experts cannot be read in place, whatever their encoding; None if they can."""
    model = checkpoint.model
    if checkpoint.source.kind != "gguf":
        return "the experts of a checkpoint are not contiguous"
    if not model.all_neurons_fire or checkpoint.predictors is not None:
        return "its experts are not needed whole, so they are stored by neuron"
    if checkpoint.down_by_neuron:
        return "its experts are stored in a form of their own"
    if model.experts_differ and model.neurons % GROUP_WEIGHTS:
        return f"its shared experts cannot be divided into parts of {model.neurons} neurons as they are stored"
    largest_bytes = 0
    for layer, first_expert, count in model.runs:
        one_bytes = 0
        for matrix in MATRICES:
            first = _expert(checkpoint, layer, first_expert, matrix)
            size_bytes = first.rows * first.stride_bytes
            one_bytes += size_bytes
            if is_shared(first):
                continue
            stride = _stride(checkpoint, layer, first_expert, count, matrix)
            for expert in range(count):
                stored = _expert(checkpoint, layer, first_expert + expert, matrix)
                is_next = (stored.offset, stored.encoding) == (first.offset + expert * stride, first.encoding)
                if type(stored.file) is not SourceFile or stored.order is not None:
                    return "its experts are not on this disk as they are needed"
                if not is_next or stride < size_bytes or stored.file.path != first.file.path:
                    return "its experts do not follow one another in the file"
        largest_bytes = max(largest_bytes, one_bytes)
    if largest_bytes > MAX_EXPERT_BYTES:
        return f"an expert takes {largest_bytes >> 20} MiB, too much to be read as a whole"
    return None


def _slot_quantizations(checkpoint: Checkpoint) -> dict[str, Quantization] | None:
    """Return the quantizations of gate, up and down in memory: the smallest that hold all layers; None if there are
    none."""
    model = checkpoint.model
    chosen: dict[str, Quantization] = {}
    for matrix in MATRICES:
        stored = [_expert(checkpoint, layer, first, matrix) for layer, first, _ in model.runs]
        fitting = [choice for choice in SLOT_QUANTIZATIONS if all(_fits(part, choice) for part in stored)]
        if not fitting:
            return None
        chosen[matrix] = fitting[0]
    if not reads_inputs_of(chosen["up"], chosen["gate"]):
        chosen["gate"] = chosen["up"] = SLOT_QUANTIZATIONS[-1]  # it holds every encoding that another one holds
    return chosen


def _fits(stored: StoredMatrix, quantization: Quantization) -> bool:
    is_whole = lib.np_quant_bytes(ROW_TYPES[quantization], stored.columns) > 0 and stored.stride_bytes > 0
    return is_whole and can_unpack(_encoding(stored), quantization)


def _header_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the length of the header of each file, up to the first tensor of the model; at most MAX_HEADER_BYTES."""
    starts: dict[str, int] = {}
    for parts in (*checkpoint.matrices.values(), *checkpoint.vectors.values()):
        for part in parts:
            path = str(part.file.path)
            starts[path] = min(starts.get(path, MAX_HEADER_BYTES), part.offset)
    return starts
