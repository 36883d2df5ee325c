"""Copies of GGUF files with tensors of other types or values, for the benchmarks of quantizations."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

Values = NDArray[np.float32]
OMITTED = ("general.architecture", "general.file_type")  # the writer writes the first, and the second may change


def copy_gguf(
    source: Path,
    target: Path,
    type_of: Callable[[gguf.ReaderTensor], GGMLQuantizationType],
    changed: Callable[[str, Values], Values] | None = None,
) -> None:
    """Copy a GGUF file in one part. A tensor that keeps its type and values keeps its bytes.

    type_of: a tensor of the source -> its type in the copy
    changed: (name of a tensor, its values) -> the copy's values; None: no value changes
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in OMITTED:
            continue
        item_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], item_type)
    for tensor in reader.tensors:
        shape, kind = tuple(reversed(tensor.shape.tolist())), type_of(tensor)
        stored_shape = gguf.quants.quant_shape_to_byte_shape(shape, kind)
        bytes_ = int(np.prod(stored_shape))
        writer.add_tensor_info(tensor.name, stored_shape, np.dtype(np.uint8), bytes_, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        kind = type_of(tensor)
        if changed is None and kind == tensor.tensor_type:
            writer.write_tensor_data(tensor.data)
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.write_tensor_data(
            gguf.quants.quantize(values if changed is None else changed(tensor.name, values), kind)
        )
    writer.close()


def write_mxfp4(source: Path, target: Path, *, attention: bool = True) -> None:
    """Write a copy whose layers' matrices are MXFP4. llama.cpp writes this type only for experts.

    attention: those of attention too
    """
    kinds = r"attn_[qkv]|attn_output|ffn_(gate|up|down)" if attention else r"ffn_(gate|up|down)"

    def type_of(tensor: gguf.ReaderTensor) -> GGMLQuantizationType:
        is_layers = re.fullmatch(rf"blk\.\d+\.({kinds})\.weight", tensor.name)
        return GGMLQuantizationType.MXFP4 if is_layers else tensor.tensor_type

    copy_gguf(source, target, type_of)
