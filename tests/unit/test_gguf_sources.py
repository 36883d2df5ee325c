"""GGUF files: traps are refused by name, damage is found before anything large is allocated or written."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from neuronpipe.plans.convert import convert
from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.encodings import ENCODINGS
from neuronpipe.plans.convert.gguf.gguf_model import open_gguf
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import TINY
from tests.conformance.gguf_files import write_gguf


def refuse(path: Path, message: str) -> None:
    """The file is refused by its name and the field's, and nothing was written."""
    with pytest.raises(UserError, match=message) as caught:
        convert(path, path.parent / "package", quantization="q4")
    assert str(caught.value).startswith(str(path))
    assert not (path.parent / "package").exists()


@pytest.mark.parametrize("name", ["ReluLLaMA-7B", "prosparse-llama-2-7b", "TurboSparse-Mistral", "Bamboo base v0.1"])
def test_a_relu_model_is_not_run_with_silu(name: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, name=name)
    refuse(path, r"general\.architecture: 'llama' means SiLU, but '.*' sounds like a ReLU model.*--activation relu\|")
    assert convert(path, tmp_path / "p", quantization="q4", activation="relu").manifest.model.activation == "relu"


def test_the_file_name_counts_as_a_name(tmp_path: Path) -> None:
    refuse(write_gguf(tmp_path / "llama-7b-relu.q8_0.gguf", TINY), "'llama-7b-relu.q8_0.gguf' sounds like")


@pytest.mark.parametrize(("value", "expected"), [("relu", "relu"), ("silu", "silu")])
def test_an_activation_that_the_file_states_is_believed(value: str, expected: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, name="ReluLLaMA", metadata={"llama.hidden_activation": value})
    assert convert(path, tmp_path / "p", quantization="q4").manifest.model.activation == expected


def test_a_qwen2_that_says_relu_may_be_sparseqwen2_and_needs_a_word(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY)
    path.write_bytes(path.read_bytes().replace(b"llama", b"qwen2"))  # keys and all
    data = path.read_bytes()
    path = write_gguf(tmp_path / "m.gguf", TINY, metadata={"llama.hidden_activation": "relu"})
    path.write_bytes(path.read_bytes().replace(b"llama", b"qwen2"))
    assert data != path.read_bytes()
    refuse(path, r"qwen2\.hidden_activation: is 'relu', but SparseQwen2 .* means drelu; .*--activation relu\|")


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"llama.hidden_activation": LONG}},
        {"metadata": {"llama.rope.scaling.type": "\x1b[2J\0" * 1000}},
        {"metadata": {"llama.expert_count": LONG}},
        {"metadata": {"general.finetune": "relu" + LONG}},
        {"extra": {LONG: np.ones(32, np.float32)}},
    ],
    ids=["activation", "controls", "type", "name", "tensor"],
)
def test_what_a_file_says_is_quoted_in_part(change: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, **change)
    with pytest.raises(UserError) as caught:
        convert(path, tmp_path / "package", quantization="q4")
    assert len(str(caught.value)) < len(str(path)) + 500
    assert str(caught.value).isprintable()


METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"llama.expert_count": 8}, r"llama\.expert_used_count: missing"),
    "longrope": ({"llama.rope.scaling.type": "longrope"}, r"llama\.rope\.scaling\.type: 'longrope' needs the tensors"),
    "partial rotation": (
        {"llama.rope.dimension_count": 16},
        r"rope\.dimension_count: differs from the width of a head",
    ),
    "a stated activation": ({"llama.hidden_activation": "gelu"}, r"llama\.hidden_activation: 'gelu'"),
    "one of several files": ({"split.count": 2}, r"split\.count: the file is part 1 of 2 of a model, and its name"),
}


@pytest.mark.parametrize("what", METADATA)
def test_what_the_engine_would_compute_wrongly_is_refused(what: str, tmp_path: Path) -> None:
    metadata, message = METADATA[what]
    refuse(write_gguf(tmp_path / "m.gguf", TINY, metadata=metadata), message)


def test_a_linear_scaling_and_per_layer_lists_are_read(tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "plain.gguf", TINY)
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    with (
        open_gguf(plain, Options()) as before,
        open_gguf(write_gguf(tmp_path / "m.gguf", TINY, metadata=metadata), Options()) as after,
    ):
        np.testing.assert_allclose(after.inverse_frequency, before.inverse_frequency / 4, rtol=1e-6)


def test_an_unknown_tensor_is_not_ignored(tmp_path: Path) -> None:
    extra = {"blk.0.attn_r_norm.weight": np.ones(32, np.float32)}
    refuse(write_gguf(tmp_path / "m.gguf", TINY, extra=extra), r"attn_r_norm\.weight: a tensor that this architecture")


@pytest.mark.parametrize("name", ["gemma", "bamboo", "generic.gpu_index"])
def test_another_architecture_is_refused(name: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, architecture=name)
    refuse(path, rf"general\.architecture: '{name}' is not supported; llama")


@pytest.mark.parametrize(("name", "missing"), [("bitnet", "ternary weights"), ("mamba2", "layers without a feed-")])
def test_a_known_architecture_is_refused_with_what_it_needs(name: str, missing: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, architecture=name)
    refuse(path, rf"general\.architecture: '{name}' is not supported: it needs {missing}")


@pytest.mark.parametrize(
    "name", ["lm_head_profiler.weight", "blk.0.ffn_gate_inp.weight", "blk.1.moe_router_fc1.weight"]
)
def test_tensors_of_other_engines_are_not_ignored(name: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, extra={name: np.ones((32, 64), np.float32)})
    refuse(path, rf"{name}: a tensor that this architecture does not have")


def test_down_with_its_sides_swapped_is_refused(tmp_path: Path) -> None:
    swapped = {"blk.0.ffn_down.weight": np.ones((TINY.neurons, TINY.width), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", TINY, instead=swapped)
    refuse(path, r"ffn_down\.weight: has shape \[100, 64\], but the configuration needs \[64, 100\]")


def test_what_is_neither_file_nor_directory_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path / "nothing.gguf", "no such file")
    (tmp_path / "text.gguf").write_text("hello, world")
    refuse(tmp_path / "text.gguf", "magic: is not GGUF")


@pytest.mark.parametrize(
    ("offset", "code", "value", "message"),
    [
        (4, "I", 1, "version: 1 is not supported; 2 and 3 are"),
        (4, "I", 0x03000000, "version: the file is big-endian"),  # a big-endian file
        (8, "Q", 1 << 62, "number of tensors: .* is more than"),
        (16, "Q", 1 << 62, "number of metadata entries: .* is more than"),
        (24, "Q", 1 << 62, "metadata entry 0: needs .* bytes where the file has"),
        (56, "I", 99, "general.architecture: has value type 99|needs .* bytes|is not UTF-8"),
    ],
)
def test_absurd_counts_cost_an_error_and_no_memory(
    offset: int, code: str, value: int, message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY)
    data = bytearray(path.read_bytes())
    struct.pack_into(f"<{code}", data, offset, value)
    path.write_bytes(data)
    refuse(path, message)


def test_truncation_is_found_wherever_it_happens(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", replace(TINY, layers=1))
    data = path.read_bytes()
    for size in (len(data) - 1, len(data) // 2, 5000, 500, 23, 7, 3):
        path.write_bytes(data[:size])
        refuse(path, "truncated or damaged")


@pytest.mark.parametrize("kind", [kind for kind in GGMLQuantizationType if kind.name not in ENCODINGS])
def test_an_encoding_that_is_not_understood_is_refused(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", replace(TINY, width=256, neurons=256, head_width=128))
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    struct.pack_into("<I", data, data.index(name) + len(name) + 4 + 2 * 8, kind)
    path.write_bytes(data)
    # One whose weights take more bytes than the file has is damaged before it is unknown.
    refuse(path, rf"blk\.0\.ffn_(up|down)\.weight: ({kind.name} is not supported; F32, F16|overlaps|ends at)|overlaps")


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY)
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    struct.pack_into("<Q", data, data.index(name) + len(name) + 4 + 2 * 8 + 4, 32)
    path.write_bytes(data)
    refuse(path, r"overlaps .*: damaged")


def header(tensors: int, entries: list[tuple[str, bytes]], version: int = 3, order: str = "<") -> bytes:
    """The beginning of a file: metadata entries are a key, and a type with what belongs to it."""
    data = b"GGUF" + struct.pack(f"{order}IQQ", version, tensors, len(entries))
    for key, value in entries:
        data += struct.pack(f"{order}Q", len(key)) + key.encode() + value
    return data


@pytest.mark.parametrize("version", [2, 3])
def test_a_big_endian_file_is_named_as_such(version: int, tmp_path: Path) -> None:
    (path := tmp_path / "m.gguf").write_bytes(header(1, [], version, ">"))
    refuse(path, "version: the file is big-endian.*gguf-convert-endian FILE little")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(65_537, []), "number of tensors: 65537 is more than the 65536"),
        (header(0, [("text", struct.pack("<IQ", 8, 1 << 38))]), "text: the header is longer than 134217728 bytes"),
        (header(0, [("list", struct.pack("<IIQ", 9, 8, 1 << 34))]), "list: has more than the 4194304 values"),
        (header(0, [("bytes", struct.pack("<IIQ", 9, 0, 1 << 38))]), "bytes: has more than the 4194304 values"),
        (header(0, [("lists", struct.pack("<IIQ", 9, 9, 1 << 30))]), "lists: has more than the 4194304 values"),
    ],
)
def test_a_header_costs_no_more_than_one_of_a_model_does_however_large_the_file(
    data: bytes, message: str, tmp_path: Path
) -> None:
    with (path := tmp_path / "m.gguf").open("wb") as file:
        file.write(data)
        file.truncate(1 << 39)  # a hole
    refuse(path, message)
