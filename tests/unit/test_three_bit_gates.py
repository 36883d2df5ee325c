"""Gates in three bits: what their rows mean, where they lie, and who refuses them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.plans.convert import convert
from neuronpipe.plans.convert.quantize import decode, encode, q3_of_q4, q4_of_q3
from neuronpipe.plans.package.layout import compute_layout
from neuronpipe.plans.package.manifest import identity
from neuronpipe.plans.package.parsing.parse import parse_manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.traffic import trigger_row_bytes
from neuronpipe.plans.package.writer import Rows
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.plans.reference.quantized import product
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.steps.backend import create_backend

from tests.conformance.checkpoints import RECIPES, write_checkpoint

RANDOM = np.random.default_rng(3)
GATED = ("gate", "up", "down")


def by_the_format(group: np.ndarray, scale: np.float32) -> list[np.float32]:
    """The weights of 12 bytes, one by one, as FORMAT.md says."""
    weights = []
    for j in range(32):
        low, third = group[j % 8] >> j // 8 * 2 & 3, group[8 + j % 4] >> j // 4 & 1
        weights.append(scale * np.float32(int(low) + 4 * int(third) - 4))
    return weights


def test_twelve_bytes_mean_what_the_format_says() -> None:
    quants = RANDOM.integers(0, 256, (3, 24), dtype=np.uint8)
    scales = RANDOM.standard_normal((3, 2)).astype("<f2")
    found = decode("q3", Rows(quants, scales.view(np.uint8)))
    for row in range(3):
        for group in range(2):
            expected = by_the_format(quants[row, 12 * group : 12 * group + 12], np.float32(scales[row, group]))
            np.testing.assert_array_equal(found[row, 32 * group : 32 * group + 32], expected)


def test_rows_of_four_bits_with_small_weights_are_the_same_in_three() -> None:
    halves = RANDOM.integers(4, 12, (5, 48, 2), dtype=np.uint8)
    quants = halves[..., 0] | halves[..., 1] << 4
    assert q3_of_q4(quants).shape == (5, 36)
    np.testing.assert_array_equal(q4_of_q3(q3_of_q4(quants)), quants)


def test_three_bits_lose_a_sixth_and_less_than_the_largest_magnitude_alone_would() -> None:
    weights = RANDOM.standard_normal((64, 512), dtype=np.float32)
    lost = np.linalg.norm(decode("q3", encode("q3", weights)) - weights) / np.linalg.norm(weights)
    peaks = np.take_along_axis(
        groups := weights.reshape(64, -1, 32), np.abs(groups).argmax(axis=2, keepdims=True), axis=2
    )
    plain = np.clip(np.rint(groups * (-4 / peaks)), -4, 3) * (peaks / -4)
    assert 0.15 < lost < 0.165
    assert lost < 0.97 * np.linalg.norm(plain - groups) / np.linalg.norm(weights)


@pytest.mark.parametrize("weights", [0.0, 1e-6, -3e-8, 5e4])
def test_groups_of_equal_weights_keep_their_value(weights: float) -> None:
    rows = np.full((1, 32), weights, np.float32)
    np.testing.assert_allclose(decode("q3", encode("q3", rows)), np.float32(np.float16(weights)), rtol=2e-2, atol=6e-8)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])
def test_weights_that_fit_no_scale_are_refused(bad: float) -> None:
    rows = np.ones((1, 32), np.float32)
    rows[0, 5] = bad
    with pytest.raises(OverflowError):
        encode("q3", rows)


def test_products_have_the_bits_of_four_bits() -> None:
    rows = encode("q3", RANDOM.standard_normal((70, 352), dtype=np.float32))
    vectors = RANDOM.standard_normal((3, 352), dtype=np.float32)
    wide = Rows(q4_of_q3(rows.quants), rows.scales)
    np.testing.assert_array_equal(product("q3", rows, vectors), product("q4", wide, vectors))


def test_a_7b_gate_takes_512_bytes_less_in_memory() -> None:
    """On flash both fill a page."""
    layouts = [compute_layout("q4", 4096, 14336, GATED, "source", differing={"gate": gates}) for gates in (None, "q3")]
    slots = [layout.slots("q4", 4096, moved=True) for layout in layouts]
    assert [layout.cluster_stride_bytes for layout in layouts] == [8192, 8192]
    assert [place.trigger_bytes for place in slots] == [2304, 1792]
    assert slots[0].value_bytes == slots[1].value_bytes == 4096 + 512


@pytest.mark.parametrize("width", [320, 768, 2048, 2560, 4096])
def test_pieces_neither_overlap_nor_leave_their_part(width: int) -> None:
    layout = compute_layout("q4", width, 1000, GATED, "source", differing={"gate": "q3"})
    assert layout.matrices[0].quantization == "q3"
    ends: dict[str, int] = {"trigger": 0, "value": 0}
    for part, _, offset, size in sorted(layout.pieces("q4", width), key=lambda piece: piece[2]):
        assert offset >= ends[part]
        ends[part] = offset + size
    assert ends["trigger"] <= layout.trigger_part_bytes
    assert ends["value"] <= layout.value_part_bytes
    neuron_bytes = 3 * width // 8 + 2 * (width // 2) + 3 * (width // 16)
    assert sum(size for *_, size in layout.pieces("q4", width)) == layout.cluster_neurons * neuron_bytes


@pytest.fixture(scope="module")
def packages(converted: Callable[..., Package]) -> dict[str, Package]:
    """Of one checkpoint, by how gates are stored."""
    return {"q3": converted("awkward", "q4", gates="q3"), "q4": converted("awkward", "q4")}


def test_a_package_says_how_its_gates_are_stored_and_only_where_it_is_another_way(packages: dict[str, Package]) -> None:
    stored = {name: json.loads((package.path / "manifest.json").read_bytes()) for name, package in packages.items()}
    assert stored["q3"]["layout"]["matrices"]["gate"]["quantization"] == "q3"
    assert "quantization" not in json.dumps(stored["q4"]["layout"])
    assert [packages[name].manifest.precision for name in ("q3", "q4")] == ["q4 (q3 gates)", "q4"]
    errors = packages["q3"].manifest.quantization_error
    assert errors["gate"] > 1.5 * errors["up"]
    assert errors["up"] == packages["q4"].manifest.quantization_error["up"]


def in_gates(field: str, value: Any) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        manifest["layout"]["matrices"][field]["quantization"] = value

    return change


def in_package(value: str) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        manifest["quantization"] = value
        del manifest["quantizations"]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (in_gates("gate", "q2"), "matrices.gate.quantization"),
        (in_gates("gate", "q4"), "matrices.gate.quantization"),
        (in_gates("up", "q3"), "matrices.up.quantization"),
        (in_package("q8"), "q3 does not go with q8"),
        (in_package("q3"), "quantization"),
    ],
)
def test_other_gates_are_refused_by_name(
    change: Callable[[Any], None], message: str, packages: dict[str, Package]
) -> None:
    values = json.loads((packages["q3"].path / "manifest.json").read_bytes())
    change(values)
    values["id"] = identity({name: value for name, value in values.items() if name != "id"})
    with pytest.raises(UserError, match=message):
        parse_manifest(json.dumps(values).encode(), "manifest.json")


def test_an_accelerator_without_kernels_for_them_says_so(packages: dict[str, Package]) -> None:
    opencl = create_backend("opencl")
    assert "gates in q3" in (opencl.supports(packages["q3"].manifest, "accelerator") or "")
    assert opencl.supports(packages["q4"].manifest, "accelerator") is None


def test_fewer_bytes_of_gates_are_counted_as_read(packages: dict[str, Package]) -> None:
    sizes = [trigger_row_bytes(package.manifest) for package in packages.values()]
    assert sizes[1] - sizes[0] == packages["q4"].manifest.model.width // 8


def test_the_reference_engine_computes_with_what_is_stored(packages: dict[str, Package]) -> None:
    logits = {name: ReferenceEngine(package).run([1, 2, 3]).logits for name, package in packages.items()}
    assert not np.array_equal(logits["q3"], logits["q4"])
    assert np.corrcoef(logits["q3"].ravel(), logits["q4"].ravel())[0, 1] > 0.9


@pytest.mark.parametrize(
    ("recipe", "quantization", "message"),
    [("awkward", "q8", "only with the rest in q4"), ("opt", "q4", "has no gates")],
)
def test_what_cannot_have_such_gates_is_refused(recipe: str, quantization: Any, message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", RECIPES[recipe])
    with pytest.raises(UserError, match=message):
        convert(tmp_path / "source", tmp_path / "package", quantization=quantization, gates="q3")
    assert not (tmp_path / "package").exists()
