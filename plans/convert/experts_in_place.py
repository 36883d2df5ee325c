"""Mixtures in GGUF files whose experts a package can read in place, so that only the rest of the model is converted.

In such a file the rows of an expert's gate, up and down matrix are contiguous. An expert that is needed whole can
therefore be read from there, and the loader converts its rows to the types that the engine computes with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from neuronpipe.native import ROW_TYPES, lib
from neuronpipe.plans.convert.checkpoint import Checkpoint, ffn_name
from neuronpipe.plans.convert.encodings import can_unpack
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.convert.stored_tensors import StoredMatrix
from neuronpipe.plans.package.layout import Layout, Quantization, expert_layout, reads_inputs_of
from neuronpipe.plans.package.source_experts import (
    MATRICES,
    MAX_HEADER_BYTES,
    SourceEntry,
    SourceExperts,
    SourceRows,
    read_bytes,
)
from neuronpipe.protocol.frozen import frozen

MAX_EXPERT_BYTES = 24 << 20  # eight experts are read at once, and their buffers count in the memory limit
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
        encodings = sorted({part.encoding for part in _all_experts(checkpoint)})
        return f"experts in {', '.join(encodings)} are not computed with as they are stored"
    headers = _header_bytes(checkpoint)
    files = sorted({part.file.path for part in _all_experts(checkpoint)})
    matrices: dict[str, tuple[SourceRows, ...]] = {}
    for matrix in MATRICES:
        firsts = [_expert(checkpoint, layer, 0, matrix) for layer in range(model.layers)]
        matrices[matrix] = tuple(SourceRows(files.index(m.file.path), m.offset, m.encoding) for m in firsts)
    reads = {matrix: _read_bytes(checkpoint, matrix) for matrix in MATRICES}
    return ExpertsInPlace(
        SourceExperts(tuple(SourceEntry.of(path, headers[str(path)]) for path in files), matrices),
        expert_layout(
            model.width,
            model.neurons,
            quantizations,
            trigger_read_bytes=max(reads["gate"]),
            value_read_bytes=max(map(sum, zip(reads["up"], reads["down"], strict=True))),
        ),
        quantizations,
    )


def _expert(checkpoint: Checkpoint, layer: int, expert: int, matrix: str) -> StoredMatrix:
    return checkpoint.matrices[ffn_name(checkpoint.model, f"layers.{layer}", expert, matrix)][0]


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
    if model.experts_differ:
        return "experts that compute every token are stored as one feed-forward"
    largest_bytes = 0
    for layer in range(model.layers):
        expert_bytes = 0
        for matrix in MATRICES:
            first = _expert(checkpoint, layer, 0, matrix)
            size_bytes = first.rows * first.stride_bytes
            expert_bytes += size_bytes
            for expert in range(model.experts):
                stored = _expert(checkpoint, layer, expert, matrix)
                is_next = (stored.offset, stored.encoding) == (first.offset + expert * size_bytes, first.encoding)
                if type(stored.file) is not SourceFile or stored.order is not None:
                    return "its experts are not on this disk as they are needed"
                if not is_next or stored.file.path != first.file.path:
                    return "its experts do not follow one another in the file"
        largest_bytes = max(largest_bytes, expert_bytes)
    if largest_bytes > MAX_EXPERT_BYTES:
        return f"an expert takes {largest_bytes >> 20} MiB, too much to be read as a whole"
    return None


def _slot_quantizations(checkpoint: Checkpoint) -> dict[str, Quantization] | None:
    """Return the quantizations of gate, up and down in memory: the smallest that hold all layers; None if there are
    none."""
    model = checkpoint.model
    chosen: dict[str, Quantization] = {}
    for matrix in MATRICES:
        stored = [_expert(checkpoint, layer, 0, matrix) for layer in range(model.layers)]
        fitting = [choice for choice in SLOT_QUANTIZATIONS if all(_fits(part, choice) for part in stored)]
        if not fitting:
            return None
        chosen[matrix] = fitting[0]
    if not reads_inputs_of(chosen["up"], chosen["gate"]):
        chosen["gate"] = chosen["up"] = SLOT_QUANTIZATIONS[-1]  # it holds every encoding that another one holds
    return chosen


def _fits(stored: StoredMatrix, quantization: Quantization) -> bool:
    is_whole = lib.np_quant_bytes(ROW_TYPES[quantization], stored.columns) > 0 and stored.stride_bytes > 0
    return is_whole and can_unpack(stored.encoding, quantization)


def _read_bytes(checkpoint: Checkpoint, matrix: str) -> list[int]:
    """Return the most bytes of a read of one expert's rows of a matrix, by layer."""
    stored = [_expert(checkpoint, layer, 0, matrix) for layer in range(checkpoint.model.layers)]
    return [read_bytes(part.rows * part.stride_bytes) for part in stored]


def _header_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the length of the header of each file, up to the first tensor of the model; at most MAX_HEADER_BYTES."""
    starts: dict[str, int] = {}
    for parts in (*checkpoint.matrices.values(), *checkpoint.vectors.values()):
        for part in parts:
            path = str(part.file.path)
            starts[path] = min(starts.get(path, MAX_HEADER_BYTES), part.offset)
    return starts
