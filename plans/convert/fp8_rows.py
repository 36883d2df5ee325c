"""Checkpoints in FP8, as DeepSeek, GLM and Qwen publish them: bytes of F8_E4M3 with a scale for each block of rows and
columns, each row, or the whole tensor, in a tensor beside them. Rows are decoded when they are read."""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple, NoReturn

import numpy as np
from neuronpipe.plans.convert.encodings import BYTES, PLAIN_BYTES
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.convert.stored_tensors import Inventory, RowNumbers, StoredMatrix
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import UserError, quoted, safe_name
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

F8, COMPRESSED = "F8_E4M3", "compressed-tensors"
METHODS = ("fp8", COMPRESSED)  # values of quant_method
SCALES = ("_scale_inv", "_scale")  # endings of the tensors with scales, which are factors under either name
HARMLESS = r".*\.(input_scale|activation_scale)"  # scales of inputs, which a package does not round
MAX_BLOCK = 1 << 20


def _e4m3() -> NDArray[np.float32]:
    """Return the value of each byte: a sign, four bits of the exponent, three of the fraction. Two bytes are NaN."""
    codes = np.arange(128)
    exponents, fractions = codes >> 3, codes & 7
    values = np.where(exponents == 0, fractions * 2.0**-9, (8 + fractions) * 2.0 ** (exponents - 10))
    values[127] = np.nan
    return np.concatenate((values, -values)).astype(np.float32)


E4M3 = _e4m3()


class Block(NamedTuple):
    """The rows and columns that share a scale."""

    rows: int
    columns: int


@frozen
class ScaledRows(StoredMatrix):
    """Rows of F8_E4M3, which `stored` decodes to F32.

    scales: a row for each row of blocks, with a scale for each block
    """

    scales: StoredMatrix = field(kw_only=True)
    block: Block = field(kw_only=True)

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return self.file, self.scales.file

    def stored(self, rows: RowNumbers) -> NDArray[np.uint8]:
        places = rows if self.order is None else self.order[rows]
        codes = StoredMatrix(self.name, self.file, self.offset, self.rows, self.columns, BYTES).stored(places)
        values = E4M3[codes]
        block_rows, numbers = np.unique(places // self.block.rows, return_inverse=True)
        factors = self.scales.values(block_rows)[numbers]
        for number, first in enumerate(range(0, self.columns, self.block.columns)):
            values[:, first : first + self.block.columns] *= factors[:, number, None]
        return values.view(np.uint8)


class Fp8Reader:
    """Takes tensors of F8_E4M3 from an Inventory. Raises UserError if their quantization is not supported.

    quantization: `quantization_config` of config.json
    """

    def __init__(self, quantization: Record) -> None:
        self._block: Block | None = None
        if quantization.text("quant_method") == COMPRESSED:
            self._block = _compressed_block(quantization)
            return
        if quantization.has("fmt") and quantization.text("fmt") != "e4m3":
            quantization.fail("fmt", f"{quoted(quantization.text('fmt'))} is not supported; e4m3 is")
        if quantization.has(name := "weight_block_size"):
            self._block = _block(quantization, name)

    def __call__(self, inventory: Inventory, name: str, *shape: int) -> StoredMatrix:
        """Return a matrix and mark it and its scales as used. Raises UserError if the scales are missing or do not
        fit."""
        file, offset = inventory.take_place(name)
        if len(shape) != 2:
            _fail(inventory, name, f"{F8} is not supported in a tensor of {len(shape)} dimensions")
        rows, columns = shape
        places = [f"{name}{ending}" for ending in SCALES if inventory.has(f"{name}{ending}")]
        if not places:
            _fail(inventory, name, f"is {F8}, but its scales, `{name}{SCALES[0]}`, are missing")
        scales, block = self._scales(inventory, places[0], rows, columns)
        return ScaledRows(name, file, offset, rows, columns, "F32", scales=scales, block=block)

    def _scales(self, inventory: Inventory, name: str, rows: int, columns: int) -> tuple[StoredMatrix, Block]:
        block, shape, encoding = self._block, inventory.shape(name), inventory.encoding(name)
        if block is None:
            block = Block(1 if shape in ((rows, 1), (rows,)) and rows > 1 else rows, columns)
        scale_shape = (-(-rows // block.rows), -(-columns // block.columns))
        vector = scale_shape[:1] if scale_shape[1] == 1 else None
        if shape not in (scale_shape, vector) and not (shape == () and scale_shape == (1, 1)):
            _fail(
                inventory,
                name,
                f"has shape {quoted(list(shape))}, but [{rows}, {columns}] needs {list(scale_shape)}",
            )
        if encoding not in PLAIN_BYTES:
            _fail(inventory, name, f"scales of {encoding} are not supported; {', '.join(PLAIN_BYTES)} are")
        return StoredMatrix(name, *inventory.take_place(name), *scale_shape, encoding), block


def _block(record: Record, name: str) -> Block:
    sides = record.items(name)
    if len(sides) != 2 or not all(type(side) is int and 1 <= side <= MAX_BLOCK for side in sides):
        record.fail(name, f"{quoted(sides)} is not the rows and columns of a block")
    return Block(*sides)


def _compressed_block(quantization: Record) -> Block | None:
    """Return the block of a checkpoint of the library compressed-tensors; None if rows or tensors have scales. Raises
    UserError if its weights are not eight bits of floating point."""
    if quantization.text("format") != "float-quantized":
        quantization.fail("format", f"{quoted(quantization.text('format'))} is not supported; float-quantized is")
    blocks, groups = set[Block | None](), quantization.record("config_groups")
    for group in groups.names():
        weights = groups.record(group).record("weights")
        weights.choice("type", "float")
        weights.integer("num_bits", 8, 8)
        strategy = weights.choice("strategy", "tensor", "channel", "block")
        blocks.add(_block(weights, "block_structure") if strategy == "block" else None)
    if len(blocks) != 1:
        quantization.fail("config_groups", "matrices with scales of different kinds are not supported")
    return blocks.pop()


def _fail(inventory: Inventory, name: str, problem: str) -> NoReturn:
    raise UserError(f"{inventory.file(name)}: {safe_name(name)}: {problem}")
