"""Experts and slices that a package stores with Down by output: of which models, with which values, and what needs
neurons instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.launch.cli import main
from neuronpipe.plans.convert import block_conversion, convert
from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.conversion import open_checkpoint
from neuronpipe.plans.lab.gguf_counterpart import write_gguf_counterpart
from neuronpipe.plans.lab.synth.shapes import SHAPES
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.manifest import Silent, SilentLayer
from neuronpipe.plans.package.model_layout import layout_of_model
from neuronpipe.plans.package.parsing.parse import parse_manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.reference.weights import CheckpointWeights, PackageWeights
from neuronpipe.protocol.errors import UserError

from tests.conformance.specs import SPECS, write_package
from tests.unit.test_gguf_counterpart import MIXTURES

MIXTURE = replace(MIXTURES["qwen3moe"], neurons=256)
DENSE = replace(MIXTURE, neurons=768, experts=1, experts_per_token=1)


@pytest.mark.parametrize(
    ("model", "is_whole"),
    [
        (SHAPES["qwen3-moe-100m"], True),
        (SHAPES["qwen3.6-35b-a3b"], True),
        (SHAPES["gpt-oss-20b"], True),
        (replace(SHAPES["qwen3-moe-100m"], neurons=100), False),  # rows of Down are no whole groups
        (replace(SHAPES["qwen3-moe-100m"], activation="relu"), False),  # most neurons of an expert are not needed
        (replace(SHAPES["qwen3.6-35b-a3b"], width=4096, neurons=14336), False),  # 176 M weights are no unit to read
    ],
)
def test_experts_are_whole_where_every_neuron_of_a_small_expert_fires(model: ModelSpec, is_whole: bool) -> None:
    layout = layout_of_model(model, "q4", "source")
    assert layout.down_by_output is is_whole
    assert (layout.clusters == 1) is is_whole
    assert not layout_of_model(model, "q4", "source", by_neuron=True).down_by_output


@pytest.mark.parametrize(
    ("model", "slices"),
    [
        (SHAPES["qwen3-8b"], 24),
        (SHAPES["smollm2-135m"], 3),
        (replace(SHAPES["qwen3-8b"], neurons=11008), 43),  # of 256 neurons: no other whole blocks fit
        (replace(SHAPES["qwen3-8b"], width=16384, neurons=53248), 208),  # 8 M weights are less than 256 neurons
        (replace(SHAPES["qwen3-8b"], neurons=11000), 0),
        (replace(SHAPES["qwen3-8b"], activation="relu"), 0),
        (replace(SHAPES["qwen3-8b"], gated=False, activation="gelu"), 0),
        (replace(SHAPES["qwen3-8b"], ffn_bias=True), 0),
    ],
)
def test_a_dense_feed_forward_has_slices_where_every_neuron_fires(model: ModelSpec, slices: int) -> None:
    layout = layout_of_model(model, "q4k", "source")
    assert layout.down_by_output is bool(slices)
    assert layout.clusters == layout.blocks == slices or not slices
    assert not layout_of_model(model, "q4k", "source", by_neuron=True).down_by_output
    assert not layout_of_model(model, "q4k", "frequency").down_by_output


@pytest.mark.parametrize("slab_bytes", [1, 1 << 30])
@pytest.mark.parametrize(("preset", "down"), [("Q4_0", "q4"), ("Q8_0", "q8"), ("Q4_K_M", "q5k")])
def test_slices_have_the_weights_of_the_file(
    tmp_path: Path, preset: str, down: str, slab_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down is read in one pass, or for each slice again where memory is small."""
    monkeypatch.setattr(block_conversion, "MIN_SLAB_BYTES", slab_bytes)
    monkeypatch.setattr(block_conversion, "MAX_SLAB_BYTES", slab_bytes)
    path = tmp_path / "m.gguf"
    write_gguf_counterpart(path, DENSE, seed=1, preset=preset)
    package = convert(path, tmp_path / "p")
    assert package.manifest.layout.slices == 3
    assert package.manifest.row_quantization("down") == down
    weights = PackageWeights(package)
    with open_checkpoint(path, Options()) as checkpoint:
        *before, of_down = zip(weights.neurons(1), CheckpointWeights(checkpoint).neurons(1), strict=True)
    for ours, theirs in before:
        np.testing.assert_array_equal(ours, theirs)
    error = np.linalg.norm(of_down[0] - of_down[1]) / np.linalg.norm(of_down[1])
    assert error <= (0.04 if preset == "Q4_K_M" else 0.0)


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        ({"cluster_neurons": 128, "clusters": 6}, {}),  # a block is two slices
        ({"cluster_neurons": 512, "block_neurons": 512, "clusters": 2, "blocks": 2}, {}),  # more neurons than there are
        ({"cluster_neurons": 48, "block_neurons": 48, "clusters": 16, "blocks": 16}, {}),  # no whole groups
        ({}, {"ffn_bias": True}),
        ({}, {"activation": "relu"}),
    ],
)
def test_slices_that_contradict_the_model_are_refused(
    tmp_path: Path, changes: dict[str, Any], model: dict[str, Any]
) -> None:
    manifest = write_package(tmp_path / "p", SPECS["slices"], "q8").manifest
    layout = replace(manifest.layout, **changes)
    wrong = replace(manifest, layout=layout, model=replace(manifest.model, **model), quantizations={})
    with pytest.raises(
        UserError, match=r"m: layout\.(down_by_output: needs a model whose neurons all fire|cluster_neurons: )"
    ):
        parse_manifest(wrong.sealed().to_bytes(), "m")


@pytest.mark.parametrize(("preset", "down"), [("Q4_0", "q4"), ("MXFP4", "mxfp4"), ("Q8_0", "q8"), ("Q4_K_M", "q5k")])
def test_down_keeps_the_values_of_the_file_unless_its_layers_differ(tmp_path: Path, preset: str, down: str) -> None:
    """In Q4_K_M some layers have Down in Q6_K, so all are encoded again. By neuron no encoding could be kept."""
    path = tmp_path / "m.gguf"
    write_gguf_counterpart(path, MIXTURE, seed=1, preset=preset)
    package = convert(path, tmp_path / "p")
    assert package.manifest.row_quantization("down") == down
    weights = PackageWeights(package)
    with open_checkpoint(path, Options()) as checkpoint:
        stored = CheckpointWeights(checkpoint)
        for layer, expert in ((0, 0), (1, 7)):
            *rows, of_down = zip(weights.neurons(layer, expert), stored.neurons(layer, expert), strict=True)
            for ours, theirs in rows:
                np.testing.assert_array_equal(ours, theirs)
            error = np.linalg.norm(of_down[0] - of_down[1]) / np.linalg.norm(of_down[1])
            assert error <= (0.04 if preset == "Q4_K_M" else 0.0)
    shares = np.random.default_rng(1).random((MIXTURE.layers, MIXTURE.experts, MIXTURE.neurons)).astype(np.float32)
    np.save(tmp_path / "shares.npy", shares)
    for package in (
        convert(path, tmp_path / "n", by_neuron=True),
        convert(path, tmp_path / "f", frequencies=tmp_path / "shares.npy"),
    ):
        assert package.manifest.layout.clusters > 1
        assert package.manifest.row_quantization("down") == {"Q4_0": "q5k", "MXFP4": "q6k"}.get(preset, down)


def test_shared_experts_that_share_a_block_of_the_file_are_decoded(tmp_path: Path) -> None:
    """The two shared experts of DeepSeek-V2-Lite have 11 blocks of Q6_K together: 1,408 columns of Down each."""
    path, model = tmp_path / "m.gguf", replace(MIXTURES["glm4moe"], neurons=128)
    write_gguf_counterpart(path, model, seed=1, preset="Q6_K")
    package = convert(path, tmp_path / "p")
    weights = PackageWeights(package)
    with open_checkpoint(path, Options()) as checkpoint:
        stored = CheckpointWeights(checkpoint)
        for expert in (model.experts, model.experts + 1):
            for ours, theirs in zip(weights.neurons(1, expert), stored.neurons(1, expert), strict=True):
                assert np.linalg.norm(ours - theirs) <= 0.04 * np.linalg.norm(theirs)


def test_what_needs_neurons_says_how_to_get_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    package = write_package(tmp_path / "p", SPECS["glm"], "q8")
    (tmp_path / "text.txt").write_text("one two three " * 400)
    for options in (("--silent", "50%", "--text", str(tmp_path / "text.txt")), ("--activity", "--reorder")):
        assert main(["profile", str(package.path), *options]) == 2
        said = capfd.readouterr().err
        assert "its experts are stored as wholes" in said
        assert "`neuronpipe convert SOURCE --by-neuron -o PACKAGE`" in said


def test_thresholds_and_whole_experts_contradict_each_other(tmp_path: Path) -> None:
    manifest = write_package(tmp_path / "p", SPECS["glm"], "q8").manifest
    silent = Silent(0.5, (SilentLayer(0.1, 0.5),) * manifest.model.layers, "t", 9, 9, 9.0, 9.1)
    with pytest.raises(UserError, match="silent: thresholds need neurons in clusters"):
        parse_manifest(replace(manifest, silent=silent).sealed().to_bytes(), "m")


def test_damage_to_a_whole_expert_is_found(tmp_path: Path) -> None:
    package = write_package(tmp_path / "p", SPECS["glm"], "q8")
    with package.bundles_path.open("r+b") as file:
        file.seek(package.manifest.layout.cluster_stride_bytes + package.manifest.layout.trigger_part_bytes)
        file.write(b"\1\2\3")
    weights = PackageWeights(Package.open(package.path))
    weights.neurons(0, 0)
    with pytest.raises(UserError, match="does not match its checksum"):
        weights.neurons(0, 1)
