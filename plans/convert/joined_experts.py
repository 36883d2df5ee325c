"""Experts whose gate and up lie in one tensor of all experts.

In gpt-oss the rows of gate and up alternate. Published checkpoints store them in MXFP4, blocks and exponents in
separate tensors; others store them transposed, a row per input, as their class computes with them. In other classes the
rows of gate precede those of up, and Qwen3-VL stores both transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import NamedTuple

import numpy as np
from neuronpipe.plans.convert.encodings import BLOCK_WEIGHTS_BYTES, BYTES, PLAIN_BYTES
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.convert.stored_tensors import Inventory, RowNumbers, StoredMatrix
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

MXFP4_WEIGHTS = BLOCK_WEIGHTS_BYTES["MXFP4"][0]


@frozen
class Mxfp4Rows(StoredMatrix):
    """Rows in MXFP4, whose blocks lie in one tensor and whose exponents in another. `stored` returns them as GGUF has
    them: a block's exponent, then 16 bytes with values 0 to 15 in the low and 16 to 31 in the high halves.

    In the source, a byte has two neighbouring values, the first one in the low half.
    exponents: the file and the offset of the first row's exponents, one byte for 32 weights
    """

    exponents: tuple[SourceFile, int] = field(kw_only=True)

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return self.file, self.exponents[0]

    def stored(self, rows: RowNumbers) -> NDArray[np.uint8]:
        blocks = self.columns // MXFP4_WEIGHTS
        pairs = self._read(self.file, self.offset, 16 * blocks, rows).reshape(len(rows), blocks, 16)
        codes = np.stack((pairs & 15, pairs >> 4), axis=-1).reshape(len(rows), blocks, MXFP4_WEIGHTS)
        halves = codes[..., :16] | codes[..., 16:] << 4
        exponents = self._read(*self.exponents, blocks, rows)[..., None]
        return np.concatenate((exponents, halves), axis=-1).reshape(len(rows), -1)

    def _read(self, file: SourceFile, offset: int, stride_bytes: int, rows: RowNumbers) -> NDArray[np.uint8]:
        as_bytes = StoredMatrix(self.name, file, offset, self.rows, stride_bytes, BYTES, self.order)
        return as_bytes.stored(rows)


@frozen
class TransposedRows(StoredMatrix):
    """Rows that are columns in the source, of which there are `source_columns`. Every call of `stored` reads all."""

    source_columns: int = field(kw_only=True)

    def stored(self, rows: RowNumbers) -> NDArray[np.uint8]:
        element_bytes = PLAIN_BYTES[self.encoding]
        source = np.empty((self.columns, self.source_columns, element_bytes), np.uint8)
        self.file.read_into(self.offset, source)
        places = rows if self.order is None else self.order[rows]
        return np.ascontiguousarray(source[:, places].swapaxes(0, 1)).reshape(len(rows), -1)


class JoinedExperts(NamedTuple):
    """The experts of a layer.

    matrices: gate, up and down of each expert
    biases: the parts of each bias, in the order of the experts
    """

    matrices: dict[str, Sequence[StoredMatrix]]
    biases: dict[str, tuple[StoredMatrix, ...]]


def is_in_mxfp4(inventory: Inventory, layer: str, gate_up: str) -> bool:
    """Return True if the experts of a layer are stored in MXFP4. layer: the prefix of the layer's names"""
    return inventory.has(f"{layer}{gate_up}_blocks")


def take_joined_experts(inventory: Inventory, model: ModelSpec, layer: str, gate_up: str, down: str) -> JoinedExperts:
    """Return the experts of a layer. Raises UserError as `Inventory.take`.

    layer: the prefix of the layer's names
    gate_up, down: names of the tensors
    """
    experts, neurons, width = model.experts, model.neurons, model.width
    turns = {"gate": np.arange(0, 2 * neurons, 2), "up": np.arange(1, 2 * neurons, 2)}
    if is_in_mxfp4(inventory, layer, gate_up):
        joined: Sequence[StoredMatrix] = _mxfp4(inventory, f"{layer}{gate_up}", experts, 2 * neurons, width)
        downs: Sequence[StoredMatrix] = _mxfp4(inventory, f"{layer}{down}", experts, width, neurons)
        matrices: dict[str, Sequence[StoredMatrix]] = {
            matrix: [replace(rows, rows=neurons, order=order) for rows in joined] for matrix, order in turns.items()
        }
    else:
        joined = inventory.take_stack(f"{layer}{gate_up}", experts, width, 2 * neurons)
        matrices = {matrix: [_transposed(part, neurons, order) for part in joined] for matrix, order in turns.items()}
        downs = [_transposed(part, width) for part in inventory.take_stack(f"{layer}{down}", experts, neurons, width)]
    biases = inventory.take(f"{layer}{gate_up}_bias", experts, 2 * neurons)
    every = np.arange(experts)[:, None] * 2 * neurons
    as_column = replace(biases, rows=experts * 2 * neurons, columns=1)
    return JoinedExperts(
        {**matrices, "down": downs},
        {
            **{
                matrix: (replace(as_column, rows=experts * neurons, order=(every + order).reshape(-1)),)
                for matrix, order in turns.items()
            },
            "down": (inventory.take(f"{layer}{down}_bias", experts, width),),
        },
    )


def take_fused_experts(
    inventory: Inventory, model: ModelSpec, gate_up: str, down: str, *, turned: bool
) -> dict[str, Sequence[StoredMatrix]]:
    """Return gate, up and down of each expert of a layer, without biases. Raises UserError as `Inventory.take`.

    gate_up, down: whole names of the tensors
    turned: they have a row for each input
    """
    experts, neurons, width = model.experts, model.neurons, model.width
    first_rows = {"gate": 0, "up": neurons}
    if turned:
        joined = inventory.take_stack(gate_up, experts, width, 2 * neurons)
        downs = inventory.take_stack(down, experts, neurons, width)
        return {
            **{
                matrix: [_transposed(part, neurons, np.arange(first, first + neurons)) for part in joined]
                for matrix, first in first_rows.items()
            },
            "down": [_transposed(part, width) for part in downs],
        }
    joined = inventory.take_stack(gate_up, experts, 2 * neurons, width)
    return {
        **{matrix: [part.rows_from(first, neurons) for part in joined] for matrix, first in first_rows.items()},
        "down": inventory.take_stack(down, experts, width, neurons),
    }


def _transposed(part: StoredMatrix, rows: int, order: RowNumbers | None = None) -> TransposedRows:
    """Return columns of a stored matrix as rows. order: of the columns; None: all"""
    return TransposedRows(
        part.name, part.file, part.offset, rows, part.rows, part.encoding, order, source_columns=part.columns
    )


def _mxfp4(inventory: Inventory, name: str, experts: int, rows: int, columns: int) -> list[StoredMatrix]:
    blocks = columns // MXFP4_WEIGHTS
    file, offset = inventory.take_bytes(f"{name}_blocks", experts, rows, blocks, 16)
    exponents, first = inventory.take_bytes(f"{name}_scales", experts, rows, blocks)
    return [
        Mxfp4Rows(
            f"{name}_blocks", file, offset + number * rows * blocks * 16, rows, columns, "MXFP4",
            exponents=(exponents, first + number * rows * blocks),
        )
        for number in range(experts)
    ]  # fmt: skip
