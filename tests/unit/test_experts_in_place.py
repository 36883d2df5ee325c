"""Which mixtures are read in place, what their packages say, and manifests that say wrong things of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.plans.convert.checkpoint import Checkpoint, Options
from neuronpipe.plans.convert.conversion import Conversion, open_checkpoint
from neuronpipe.plans.convert.experts_in_place import ExpertsInPlace, experts_in_place
from neuronpipe.plans.lab.gguf_counterpart import PRESETS, write_gguf_counterpart
from neuronpipe.plans.models.spec import LayerKind, ModelSpec
from neuronpipe.plans.package.manifest import identity
from neuronpipe.plans.package.parsing.parse import parse_manifest
from neuronpipe.plans.package.reader import Package, neurons_file
from neuronpipe.plans.package.source_experts import SHARED, shared_bytes
from neuronpipe.plans.reference.weights import CheckpointWeights, PackageWeights
from neuronpipe.protocol.errors import UserError

from tests.unit.test_gguf_counterpart import MIXTURES, TINY

SHAPE = replace(MIXTURES["qwen3moe"], neurons=256)


def write(folder: Path, model: ModelSpec = SHAPE, preset: str = "Q4_K_M") -> Path:
    path = folder / "m.gguf"
    write_gguf_counterpart(path, model, seed=1, preset=preset)
    return path


def package_of(path: Path, target: Path) -> Package:
    with open_checkpoint(path, Options()) as checkpoint:
        experts = experts_in_place(checkpoint)
        assert isinstance(experts, ExpertsInPlace)
        return Conversion(checkpoint, experts=experts).write(target, overwrite=False)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("mixture")
    return package_of(write(folder), folder / "package")


def reason(checkpoint: Checkpoint) -> str:
    """Why a checkpoint's experts are copied."""
    said = experts_in_place(checkpoint)
    assert isinstance(said, str)
    return said


@pytest.mark.parametrize(
    ("preset", "neurons", "in_memory"),
    [
        ("Q4_K_M", 256, ("q4k", "q4k", "q6k")),
        ("Q4_K_M", 320, ("q4k", "q4k", "q8")),
        ("Q6_K", 256, ("q6k", "q6k", "q6k")),
        ("Q8_0", 320, ("q8", "q8", "q8")),
        ("Q4_0", 320, ("q4", "q4", "q4")),
    ],
)
def test_the_smallest_types_that_hold_all_layers_are_computed_with(
    tmp_path: Path, preset: str, neurons: int, in_memory: tuple[str, ...]
) -> None:
    path = write(tmp_path, replace(SHAPE, neurons=neurons), preset)
    manifest = package_of(path, tmp_path / "p").manifest
    assert tuple(map(manifest.row_quantization, ("gate", "up", "down"))) == in_memory


@pytest.mark.parametrize("preset", PRESETS)
def test_values_are_those_of_the_file(tmp_path: Path, preset: str) -> None:
    """Q6_K has a scale for each 16 weights, which q6k expresses by one for 32 with a minimum."""
    path = write(tmp_path, preset=preset)
    weights = PackageWeights(package_of(path, tmp_path / "p"))
    with open_checkpoint(path, Options()) as checkpoint:
        stored = CheckpointWeights(checkpoint)
        for layer, expert in ((0, 0), (1, 7)):
            for ours, theirs in zip(weights.neurons(layer, expert), stored.neurons(layer, expert), strict=True):
                assert np.linalg.norm(ours - theirs) <= 0.03 * np.linalg.norm(theirs)
                if preset in ("Q4_0", "Q8_0"):
                    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("preset", "neurons", "dense_neurons", "in_memory"),
    [
        ("Q4_K_M", 256, 2, "q6k"),  # blocks of 256 columns: parts of Down stay as they are stored
        ("Q4_K_M", 320, 4, "q8"),  # Down of the shared experts is in Q4_K or Q6_K, parts of it in Q8_0
        ("Q8_0", 320, 3, "q8"),
    ],
)
def test_shared_experts_and_layers_without_a_router_keep_their_values_too(
    tmp_path: Path, preset: str, neurons: int, dense_neurons: int, in_memory: str
) -> None:
    kinds = (LayerKind(1, dense_experts=dense_neurons), LayerKind(2))
    path = write(tmp_path, replace(MIXTURES["glm4moe"], neurons=neurons, layer_kinds=kinds), preset)
    package = package_of(path, tmp_path / "p")
    experts, model = package.manifest.source_experts, package.manifest.model
    assert experts is not None
    assert package.manifest.row_quantization("down") == in_memory
    assert [rows.file for rows in experts.matrices["up"]] == [1, 0, 1, 0, 1]
    assert (package.path / SHARED).stat().st_size == shared_bytes(experts, model, package.manifest.layout) > 0
    package.verify_fixed()
    weights = PackageWeights(package)
    with open_checkpoint(path, Options()) as checkpoint:
        stored = CheckpointWeights(checkpoint)
        for layer, expert in model.places:
            for ours, theirs in zip(weights.neurons(layer, expert), stored.neurons(layer, expert), strict=True):
                assert np.linalg.norm(ours - theirs) <= 0.03 * np.linalg.norm(theirs)
                if preset == "Q8_0":
                    np.testing.assert_array_equal(ours, theirs)
    with (package.path / SHARED).open("r+b") as file:
        file.write(b"\1\2\3")
    with pytest.raises(UserError, match=r"shared\.bin"):
        package.verify_fixed()


def test_gate_and_up_of_all_experts_may_lie_in_one_tensor(tmp_path: Path) -> None:
    """The rows of an expert's gate then lie as far apart as gate and up together are long."""
    path = write(tmp_path, replace(MIXTURES["gemma4"], neurons=256), "Q8_0")
    package = package_of(path, tmp_path / "p")
    experts, model = package.manifest.source_experts, package.manifest.model
    assert experts is not None
    size_bytes = 256 * 512 // 32 * 34
    for matrix, stride in (("gate", 2 * size_bytes), ("up", 2 * size_bytes), ("down", 0)):
        assert [(rows.file, rows.stride) for rows in experts.matrices[matrix]] == [(0, stride), (1, 0)] * model.layers
    assert parse_manifest(package.manifest.to_bytes(), "m") == package.manifest
    assert [rows.offset for rows in experts.matrices["up"][::2]] == [
        rows.offset + size_bytes for rows in experts.matrices["gate"][::2]
    ]
    weights = PackageWeights(package)
    with open_checkpoint(path, Options()) as checkpoint:
        stored = CheckpointWeights(checkpoint)
        for layer, expert in ((0, 0), (1, 7), (5, 31), (5, 34)):
            for ours, theirs in zip(weights.neurons(layer, expert), stored.neurons(layer, expert), strict=True):
                np.testing.assert_array_equal(ours, theirs)
    values = json.loads(package.manifest.to_bytes())
    values["source_experts"]["matrices"]["gate"][0]["stride"] = size_bytes - 34
    with pytest.raises(UserError, match=r"matrices\.gate\.0\.stride: is less than"):
        parse_manifest(
            json.dumps({**values, "id": identity({k: v for k, v in values.items() if k != "id"})}).encode(), "m"
        )


def test_a_package_has_all_but_the_experts(package: Package) -> None:
    names = {file.name for file in package.path.iterdir()}
    assert names == {"manifest.json", "tokenizer.json", "fixed.safetensors", "checksums.bin"}
    assert package.checksums_path.read_bytes() == bytes(8 * package.manifest.clusters)
    assert neurons_file(package.path) == package.neurons_path
    assert parse_manifest(package.manifest.to_bytes(), "m") == package.manifest
    with pytest.raises(UserError, match=r"its experts are read in place .* a test needs .*`neuronpipe convert"):
        package.require_bundles("a test")


def test_checksums_that_a_loader_added_leave_the_package_valid(package: Package) -> None:
    package.checksums_path.write_bytes(b"\1" * 8 * package.manifest.clusters)
    Package.open(package.path).verify_fixed()


def test_files_of_an_interrupted_conversion_do_not_stay(tmp_path: Path) -> None:
    path, place = write(tmp_path), tmp_path / "place"
    unfinished = place / "package"
    unfinished.mkdir(parents=True)
    for name in ("bundles.bin", "checksums.bin"):
        (unfinished / name).write_bytes(b"x" * 100_000)
    with open_checkpoint(path, Options()) as checkpoint:
        experts = experts_in_place(checkpoint)
        assert isinstance(experts, ExpertsInPlace)
        package = Conversion(checkpoint, experts=experts).write(tmp_path / "p", overwrite=False, place=place)
    assert not package.bundles_path.exists()
    assert package.checksums_path.read_bytes() == bytes(8 * package.manifest.clusters)


def test_other_models_are_copied_for_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(model: ModelSpec, preset: str = "Q4_0") -> str:
        with open_checkpoint(write(tmp_path, model, preset), Options()) as checkpoint:
            return reason(checkpoint)

    assert said(TINY) == ""
    assert "not needed whole" in said(MIXTURES["smallthinker"])
    with open_checkpoint(write(tmp_path), Options()) as checkpoint:
        first, second = (f"layers.1.experts.{expert}.up" for expert in (0, 1))
        swapped = dict(checkpoint.matrices) | {
            first: checkpoint.matrices[second],
            second: checkpoint.matrices[first],
        }
        assert "do not follow one another" in reason(replace(checkpoint, matrices=swapped))
    module = "neuronpipe.plans.convert.experts_in_place.MAX_EXPERT_BYTES"
    monkeypatch.setattr(module, 3 * 256 * 256 // 2)
    assert "too much to be read as a whole" in said(SHAPE)


def test_a_file_that_changed_or_went_away_is_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    package = package_of(path, tmp_path / "p")
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(UserError, match=r"m\.gguf: has changed since a package was made of it"):
        Package.open(package.path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    Package.open(package.path)
    for begin, complaint in ((b"GGUF\4", r"m\.gguf: has changed"), (b"GGXF", r"m\.gguf: is not GGUF")):
        with path.open("r+b") as file:
            file.write(begin)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(UserError, match=complaint):
            package.verify_fixed()
    path.unlink()
    with pytest.raises(UserError, match=r"m\.gguf: cannot be read: No such file"):
        Package.open(package.path)
    assert neurons_file(package.path) is None


def rows_of(values: Any, matrix: str, layer: int = 1) -> Any:
    return values["source_experts"]["matrices"][matrix][layer]


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "experts without the layout": (
        lambda m: m["layout"].pop("down_by_output"),
        r"source_experts\.matrices: experts in place need a mixture, and a layout with down_by_output",
    ),
    "the layout without experts": (lambda m: m.pop("source_experts"), r"files\.bundles\.bin: missing"),
    "a relative path": (
        lambda m: m["source_experts"]["files"][0].update(path="m.gguf"),
        r"path: expected the absolute",
    ),
    "no file": (lambda m: m["source_experts"].update(files=[]), r"files: 0 files; expected 1 to"),
    "a layer too few": (
        lambda m: m["source_experts"]["matrices"]["up"].pop(),
        r"up: 1 runs of experts, but the model has 2",
    ),
    "another file": (lambda m: rows_of(m, "up").update(file=1), r"file: 1 is outside"),
    "an offset behind the file": (lambda m: rows_of(m, "gate").update(offset=1 << 46), r"offset: \d+ is outside"),
    "experts that leave the file": (
        lambda m: rows_of(m, "gate").update(offset=m["source_experts"]["files"][0]["bytes"] - 4096),
        r"matrices\.gate\.1\.offset: the experts leave the file",
    ),
    "an encoding of another type": (
        lambda m: rows_of(m, "gate").update(encoding="Q8_0"),
        r"gate\.1\.encoding: Q8_0 does not go with q4k",
    ),
    "an unknown encoding": (lambda m: rows_of(m, "gate").update(encoding="Q2_K"), r"encoding: 'Q2_K' is not one of"),
    "a part that is too short": (
        lambda m: m["layout"].update(
            trigger_part_bytes=4096, cluster_stride_bytes=4096 + m["layout"]["value_part_bytes"]
        ),
        r"source_experts\.matrices: reads of \d+ bytes exceed the layout's trigger part",
    ),
    "half an expert as a cluster": (
        lambda m: m["layout"].update(cluster_neurons=128, clusters=2, block_neurons=256, blocks=1),
        r"down_by_output: needs a model whose neurons all fire, .* each expert of a mixture as one cluster",
    ),
    "a bundle file beside them": (
        lambda m: m["files"].update({"bundles.bin": {"bytes": 0}}),
        r"files\.bundles\.bin: unknown field",
    ),
    "scales in the other part": (
        lambda m: m["layout"]["matrices"]["up"].update(scales_part="trigger"),
        r"the scales of the value part's matrices lie in one part",
    ),
    "all scales in the trigger part": (
        lambda m: [m["layout"]["matrices"][name].update(scales_part="trigger") for name in ("up", "down")],
        r"scales lie in their matrix's part",
    ),
    "places that overlap": (
        lambda m: m["layout"]["matrices"]["down"].update(quants=0),
        r"overlap another piece or leave the value part",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_wrong_manifests_are_refused(package: Package, change: str) -> None:
    values = json.loads(package.manifest.to_bytes())
    edit, complaint = CHANGES[change]
    edit(values)
    del values["id"]
    with pytest.raises(UserError, match=complaint):
        parse_manifest(json.dumps({**values, "id": identity(values)}).encode(), "manifest.json")
