"""Checkpoints in FP8: every matrix is what its bytes and scales say, and what does not fit is refused by its tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.plans.convert import convert
from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.conversion import open_checkpoint
from neuronpipe.plans.convert.fp8_rows import ScaledRows
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import RECIPES, Array, Stored, tensors, write_checkpoint, write_safetensors
from tests.conformance.test_gguf_conversion import same_weights

Tensors = dict[str, Stored]
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [40, 48]}
WHOLE = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}


def grouped(strategy: str, **weights: Any) -> dict[str, Any]:
    """What the library compressed-tensors says of its checkpoints."""
    of_weights = {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": None, **weights}
    groups = {"group_0": {"weights": of_weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


def value_of(code: int) -> float:
    """One byte's value, by the format's definition."""
    sign, exponent, fraction = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


VALUES = np.array([value_of(code) for code in range(256)], np.float32)


def fp8_tensors(name: str, block: tuple[int, int] | None, ending: str) -> tuple[Tensors, dict[str, Array]]:
    """A recipe's tensors with random bytes and scales in place of the matrices of layers, and what these mean. block:
    the rows and columns of one scale, 0 for all of them; None: a scale without dimensions."""
    random, stored, meant = np.random.default_rng(5), {}, {}
    for tensor, values in tensors(RECIPES[name]):
        is_plain = values.ndim != 2 or "layers" not in tensor or tensor.endswith("gate.weight")
        if is_plain:
            stored[tensor], meant[tensor] = ("F32", values.shape, values.tobytes()), values
            continue
        codes = random.choice(np.setdiff1d(np.arange(256), (127, 255)), values.shape).astype(np.uint8)
        rows, columns = (side or whole for side, whole in zip(block or (0, 0), values.shape, strict=True))
        shape = (-(-values.shape[0] // rows), -(-values.shape[1] // columns))
        scales = (random.uniform(0.5, 2.0, shape) * values.std() / 100).astype(np.float32)
        wide = scales.repeat(rows, 0).repeat(columns, 1)[: values.shape[0], : values.shape[1]]
        stored[tensor] = ("F8_E4M3", values.shape, codes.tobytes())
        stored[f"{tensor}{ending}"] = ("F32", shape if block else (), scales.tobytes())
        meant[tensor] = VALUES[codes] * wide
    return stored, meant


def write(folder: Path, name: str, stored: Tensors, quantization: dict[str, Any] | None) -> Path:
    source = write_checkpoint(folder, RECIPES[name])
    for file in source.glob("model*"):
        file.unlink()
    write_safetensors(source / "model.safetensors", stored)
    config = json.loads((source / "config.json").read_text())
    config |= {} if quantization is None else {"quantization_config": quantization}
    (source / "config.json").write_text(json.dumps(config))
    return source


@pytest.mark.parametrize(
    ("name", "block", "ending", "quantization"),
    [
        ("deepseek v3", (40, 48), "_scale_inv", BLOCKS),
        ("qwen3moe", (128, 128), "_scale_inv", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ("phi3", (40, 48), "_scale_inv", BLOCKS),
        ("qwen3", (0, 0), "_scale", WHOLE),
        ("llama3", None, "_scale", WHOLE),
        ("glm4moe", (1, 0), "_scale", grouped("channel")),
        ("qwen3", (0, 0), "_scale", grouped("tensor")),
        ("qwen3", (40, 48), "_scale", grouped("block", block_structure=[40, 48])),
    ],
)
def test_matrices_are_their_bytes_times_their_scales(
    name: str, block: tuple[int, int] | None, ending: str, quantization: dict[str, Any], tmp_path: Path
) -> None:
    """Latents whose rows are reordered, parts of wide feed-forwards, joined matrices, and sides that are no multiples
    of a block's."""
    stored, meant = fp8_tensors(name, block, ending)
    if quantization is WHOLE:
        stored["model.layers.0.mlp.up_proj.input_scale"] = ("F32", (), bytes(4))
    package = convert(write(tmp_path / "m", name, stored, quantization), tmp_path / "p", quantization="f16")
    plain: Tensors = {tensor: ("F32", values.shape, values.tobytes()) for tensor, values in meant.items()}
    expected = convert(write(tmp_path / "n", name, plain, None), tmp_path / "q", quantization="f16")
    assert same_weights(package, expected)
    assert package.manifest.model == expected.manifest.model


def test_rows_that_are_needed_are_read_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, meant = fp8_tensors("qwen3", (40, 48), "_scale_inv")
    read: list[int] = []
    original = SourceFile.read_into

    def counted(self: SourceFile, offset: int, target: np.ndarray) -> None:
        read.append(target.nbytes)
        original(self, offset, target)

    monkeypatch.setattr(SourceFile, "read_into", counted)
    with open_checkpoint(write(tmp_path / "m", "qwen3", stored, BLOCKS), Options()) as checkpoint:
        (up,) = checkpoint.matrices["layers.1.up"]
        assert isinstance(up, ScaledRows)
        read.clear()
        values = up.values(np.array([3, 4, 5, 100]))
    assert np.array_equal(values, meant["model.layers.1.mlp.up_proj.weight"][[3, 4, 5, 100]])
    assert sum(read) <= 4 * 160 + 3 * 4 * 4


UP = "model.layers.1.mlp.up_proj.weight"
SCALE = f"{UP}_scale_inv"


def without(stored: Tensors, name: str) -> None:
    del stored[name]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda stored: without(stored, SCALE), rf"{UP}: is F8_E4M3, but its scales, `{SCALE}`, are missing"),
        (lambda stored: without(stored, UP), rf"{UP}: the tensor is missing"),
        (
            lambda stored: stored.update({SCALE: ("F32", (7, 5), bytes(140))}),
            rf"model\.safetensors: {SCALE}: has shape \[7, 5\], but \[270, 160\] needs \[7, 4\]",
        ),
        (
            lambda stored: stored.update({SCALE: ("U8", (7, 4), bytes(28))}),
            rf"{SCALE}: scales of U8 are not supported; F32",
        ),
        (
            lambda stored: stored.update({SCALE: ("F32", (7, 4), np.full(28, np.nan, np.float32).tobytes())}),
            rf"{SCALE}: holds values that are not finite",
        ),
        (
            lambda stored: stored.update({UP: ("F8_E4M3", (270, 160), bytes([127]) * 270 * 160)}),
            rf"{UP}: holds values that are not finite",
        ),
        (lambda stored: stored.update({f"{UP}_more": ("F32", (1,), bytes(4))}), rf"{UP}_more: a tensor that this"),
        (
            lambda stored: stored.update({"model.norm.weight": ("F8_E4M3", (160,), bytes(160))}),
            r"model\.norm\.weight: F8_E4M3 is not supported in a tensor of 1 dimensions",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused_by_file_and_tensor(
    change: Callable[[Tensors], object], complaint: str, tmp_path: Path
) -> None:
    stored, _ = fp8_tensors("qwen3", (40, 48), "_scale_inv")
    change(stored)
    source = write(tmp_path / "m", "qwen3", stored, BLOCKS)
    with pytest.raises(UserError, match=complaint) as caught:
        convert(source, tmp_path / "p", quantization="q8")
    assert str(caught.value).isprintable()
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("quantization", "complaint"),
    [
        ({**BLOCKS, "fmt": "e5m2"}, r"quantization_config\.fmt: 'e5m2' is not supported"),
        ({**BLOCKS, "weight_block_size": [128]}, r"weight_block_size: \[128\] is not the rows and columns"),
        ({**BLOCKS, "weight_block_size": [128, 0]}, r"weight_block_size: \[128, 0\] is not"),
        ({"quant_method": "gptq"}, "quantization_config: quantized checkpoints are not supported"),
        ({**grouped("channel"), "format": "pack-quantized"}, "format: 'pack-quantized' is not supported"),
        (grouped("channel", num_bits=4), r"weights\.num_bits: 4 is outside 8\.\.8"),
        (grouped("channel", type="int"), r"weights\.type: "),
        (grouped("group"), r"weights\.strategy: "),
    ],
)
def test_quantizations_that_are_not_read_are_refused_by_their_field(
    quantization: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    stored, _ = fp8_tensors("qwen3", (40, 48), "_scale_inv")
    with pytest.raises(UserError, match=complaint):
        convert(write(tmp_path / "m", "qwen3", stored, quantization), tmp_path / "p", quantization="q8")
