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
    _copy_fields(reader, writer)
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


def write_mixture(source: Path, target: Path, kind: GGMLQuantizationType, *, experts: int = 4, active: int = 2) -> None:
    """Write a dense model of llama.cpp's architecture `llama` as a mixture with the same results: every expert is a
    copy of the feed-forward, and the shares of the chosen ones add up to 1.

    kind: encoding of the experts; the other matrices get Q8_0, as llama.cpp's preset for MXFP4 has them
    experts, active: number of experts of a layer, and of those that compute a token; which ones is random
    """
    reader, random = gguf.GGUFReader(source), np.random.default_rng(1)
    writer = gguf.GGUFWriter(target, "llama")
    _copy_fields(reader, writer)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(active)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        is_plain = len(tensor.shape) == 1 or tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
        if match := re.fullmatch(r"(blk\.\d+\.)ffn_(gate|up|down)\.weight", tensor.name):
            encoded = gguf.quants.quantize(values, kind)
            writer.add_tensor(f"{match[1]}ffn_{match[2]}_exps.weight", np.stack([encoded] * experts), raw_dtype=kind)
            if match[2] == "gate":
                router = random.standard_normal((experts, values.shape[1])).astype(np.float32)
                writer.add_tensor(f"{match[1]}ffn_gate_inp.weight", router)
        elif is_plain:
            writer.add_tensor(tensor.name, values)
        else:
            q8 = GGMLQuantizationType.Q8_0
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, q8), raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in OMITTED:
            continue
        item_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], item_type)
