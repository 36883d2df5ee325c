"""A model of 16 bits with the values of a quantized GGUF file, but not on its grid: a stand-in for the checkpoint that
the file was made from, which no registry of packages has.

The vectors between two products are scaled, and the matrices before and after them the other way round, so that the
model computes the same: the columns of query, key, value, gate and up by the norms before them, the rows of up by the
columns of down. Every column then has a factor of its own, and no group of 32 columns has few distinct values.
"""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from tests.bench.gguf_copy import copy_gguf

Factors = dict[str, NDArray[np.float32]]
DEVIATION = 0.2  # of the factors' logarithms
AFTER_NORM = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_v"), "attn_norm"),
    **dict.fromkeys(("ffn_gate", "ffn_up"), "ffn_norm"),
}
"""The norm before a matrix, by their names in GGUF."""


def write_plain_counterpart(source: Path, target: Path) -> None:
    """Write the F16 file. The source is a GGUF of Llama's or Qwen's layers, in one part."""
    factors = _factors({tensor.name: int(tensor.shape[0]) for tensor in gguf.GGUFReader(source).tensors})
    copy_gguf(source, target, _type_of, lambda name, values: _scaled(name, values, factors))


def _type_of(tensor: gguf.ReaderTensor) -> GGMLQuantizationType:
    """Return the type in the counterpart: vectors stay float32."""
    is_vector = tensor.tensor_type == GGMLQuantizationType.F32
    return GGMLQuantizationType.F32 if is_vector else GGMLQuantizationType.F16


def _factors(columns: dict[str, int]) -> Factors:
    """Return factors for the output of each norm, and for the rows of each up matrix, by the tensor's name."""
    generator = np.random.default_rng(1)
    lengths = {
        name: count for name, count in columns.items() if re.fullmatch(r"blk\.\d+\.(attn|ffn)_norm\.weight", name)
    }
    lengths |= {name.replace("ffn_down", "ffn_up"): count for name, count in columns.items() if ".ffn_down." in name}
    return {
        name: np.exp(generator.normal(0, DEVIATION, count)).astype(np.float32)
        for name, count in sorted(lengths.items())
    }


def _scaled(name: str, values: NDArray[np.float32], factors: Factors) -> NDArray[np.float32]:
    if (own := factors.get(name)) is not None:
        values = values * own if values.ndim == 1 else values * own[:, None]
    found = re.fullmatch(r"(blk\.\d+\.)(\w+)\.weight", name)
    if found is None:
        return values
    if (norm := AFTER_NORM.get(found[2])) is not None:
        values = values / factors[f"{found[1]}{norm}.weight"]
    if found[2] == "ffn_down":
        values = values / factors[f"{found[1]}ffn_up.weight"]
    return values
