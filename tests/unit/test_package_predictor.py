"""A package's predictor: what is written is read back, and nothing between a package and a package is ever on disk."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.plans.convert import convert
from neuronpipe.plans.convert.quantize import decode, encode
from neuronpipe.plans.package import optional_file
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import Predictor, PredictorQuality, Side, identity
from neuronpipe.plans.package.parsing.parse import parse_manifest
from neuronpipe.plans.package.predictor_writer import FiringShares, LayerFactors, SideFactor, write_predictor
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.writer import Rows
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import TINY, write_checkpoint

RANK = 32


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source"), TINY)


@pytest.fixture
def package(source: Path, tmp_path: Path) -> Package:
    return convert(source, tmp_path / "package", quantization="q8", activation="drelu")


def with_predictor(package: Package, quantization: Quantization, *sides: Side, seed: int = 1) -> Package:
    """The package with random factors, a layer's arrays drawn in the order of the file."""
    model, random = package.manifest.model, np.random.default_rng(seed)

    def rows(count: int, columns: int) -> Rows:
        return encode(quantization, random.standard_normal((count, columns), dtype=np.float32))

    layers = [
        LayerFactors(
            rows(RANK, model.width),
            {side: SideFactor(rows(model.neurons, RANK), np.full(model.neurons, n, np.float32)) for side in sides},
        )
        for n in range(model.layers)
    ]
    quality = (PredictorQuality(recall=0.97, precision=0.5, predicted=0.2),) * model.layers
    predictor = Predictor(RANK, quantization, "feed_forward", sides, "none", 1000, quality)
    shares = (0.1,) * model.layers
    return write_predictor(package, predictor, layers, FiringShares(shares, tuple(2 * share for share in shares)))


def tensor(package: Package, name: str) -> bytes:
    assert package.predictor is not None
    entry = package.predictor[name]
    return package.predictor_path.read_bytes()[entry.start : entry.stop]


@pytest.mark.parametrize("quantization", ["q4", "q8", "f16"])
def test_a_predictor_is_read_back_as_it_was_written(quantization: Quantization, package: Package) -> None:
    assert package.predictor is None
    predicted = with_predictor(package, quantization, "gate", "up")
    predicted.verify_fixed()
    model, random = predicted.manifest.model, np.random.default_rng(1)
    expected = encode(quantization, random.standard_normal((RANK, model.width), dtype=np.float32))
    assert tensor(predicted, "layers.0.predictor.input.quants") == expected.quants.tobytes()
    if quantization != "f16":
        assert tensor(predicted, "layers.0.predictor.input.scales") == expected.scales.tobytes()
    assert np.isfinite(decode(quantization, expected)).all()
    assert np.frombuffer(tensor(predicted, "layers.1.predictor.up.bias"), "<f4").tolist() == [1.0] * model.neurons
    assert predicted.manifest.fired_by_layer == (0.1, 0.1)
    assert predicted.manifest.trigger_fired_by_layer == (0.2, 0.2)
    data = (predicted.path / "manifest.json").read_bytes()
    assert parse_manifest(data, "manifest.json").to_bytes() == data


def test_what_a_predictor_costs_is_read_back_and_packages_without_it_count_as_unmeasured(package: Package) -> None:
    older = with_predictor(package, "q8", "gate").manifest
    assert older.predictor is not None
    assert older.predictor.loss_share is None
    assert b"perplexity" not in older.to_bytes()
    measured = dataclasses.replace(
        older.predictor, text="a text", held_out_tokens=250, exact_perplexity=10.0, predicted_perplexity=10.2
    )
    sealed = dataclasses.replace(older, predictor=measured).sealed()
    again = parse_manifest(sealed.to_bytes(), "manifest.json").predictor
    assert again == measured
    assert again.loss_share == pytest.approx(0.02)


def test_one_changed_bit_of_a_predictor_is_found(package: Package) -> None:
    predicted = with_predictor(package, "q8", "gate")
    data = bytearray(predicted.predictor_path.read_bytes())
    data[-1] ^= 1
    predicted.predictor_path.write_bytes(data)
    with pytest.raises(UserError, match=r"predictor\.safetensors: does not match the manifest's sha256"):
        Package.open(predicted.path).verify_fixed()


def test_a_predictor_of_another_shape_is_refused(package: Package) -> None:
    both = with_predictor(package, "q8", "gate", "up")
    data = both.predictor_path.read_bytes()
    gate = with_predictor(package, "q8", "gate")
    gate.predictor_path.write_bytes(data)
    with pytest.raises(UserError, match=r"layers\.0\.predictor\.up\.bias: found F32 .*, the manifest needs nothing"):
        _ = Package(gate.path, gate.manifest).predictor


def test_a_disk_that_is_full_leaves_the_predictor_that_was_there(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_predictor(package, "q8", "gate")
    before = {path.name: path.read_bytes() for path in package.path.iterdir()}

    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(optional_file, "_write", full)  # the factors found room, the manifest does not
    with pytest.raises(UserError, match=r"predictor\.safetensors: cannot be written: No space left"):
        with_predictor(Package.open(package.path), "q4", "gate", "up")
    assert {path.name: path.read_bytes() for path in package.path.iterdir()} == before


def test_a_killed_replacement_leaves_a_package_without_predictor(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_predictor(package, "q8", "gate")

    rename, renamed = optional_file._rename, []

    def killed(path: Path, name: Path) -> None:
        if len(renamed) == 2:  # the new file is there, its manifest is not
            raise KeyboardInterrupt
        renamed.append(name.name)
        rename(path, name)

    monkeypatch.setattr(optional_file, "_rename", killed)
    with pytest.raises(KeyboardInterrupt):
        with_predictor(Package.open(package.path), "q4", "gate", "up")
    assert renamed == ["manifest.json", "predictor.safetensors"]
    left = Package.open(package.path)
    left.verify_fixed()
    assert left.predictor is None
    monkeypatch.undo()
    assert with_predictor(left, "q4", "gate", "up").manifest.predictor is not None
    assert not [path for path in package.path.iterdir() if "partial" in path.name]


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a rank between groups": (lambda m: m["predictor"].update(rank=48), r"predictor\.rank: 48 is no multiple of 32"),
    "only the up side": (lambda m: m["predictor"].update(sides=["up"]), r"predictor\.sides: expected gate"),
    "another input": (lambda m: m["predictor"].update(reads="output"), r"predictor\.reads: 'output'"),
    "an unknown field": (lambda m: m["predictor"].update(more=1), r"predictor\.more: unknown field"),
    "too few layers": (lambda m: m["predictor"]["by_layer"].pop(), r"predictor\.by_layer: expected 2 objects"),
    "a recall above one": (
        lambda m: m["predictor"]["by_layer"][1].update(recall=1.5),
        r"predictor\.by_layer\[1\]\.recall: 1\.5 is outside",
    ),
    "a loss without its text": (
        lambda m: m["predictor"].update(exact_perplexity=10.0, predicted_perplexity=10.1, held_out_tokens=5),
        r"predictor\.text: missing",
    ),
    "a text without its loss": (
        lambda m: m["predictor"].update(text="t"),
        r"predictor\.held_out_tokens: missing, besides text",
    ),
    "a perplexity below one": (
        lambda m: m["predictor"].update(exact_perplexity=0.5, predicted_perplexity=10.1, held_out_tokens=5, text="t"),
        r"predictor\.exact_perplexity: 0\.5 is outside",
    ),
    "a model whose neurons always fire": (lambda m: m["model"].update(activation="silu"), r"predictor\.sides: silu"),
    "an up side that decides nothing": (
        lambda m: m["model"].update(activation="relu"),
        r"predictor\.sides: the sign of up",
    ),
    "a predictor without its file": (
        lambda m: m["files"].pop("predictor.safetensors"),
        r"files\.predictor\.safetensors: missing",
    ),
    "the file without a predictor": (
        lambda m: m.pop("predictor"),
        r"files\.predictor\.safetensors: unknown field",
    ),
    "a workload outside the vocabulary": (
        lambda m: m.update(workload={"seed": 1, "presets": {"mild": {"first_token": 10, "tokens": 1 << 30}}}),
        r"workload\.presets\.mild\.tokens",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_contradiction_is_refused_by_name(what: str, package: Package) -> None:
    values = json.loads((with_predictor(package, "q8", "gate", "up").path / "manifest.json").read_bytes())
    change, message = CHANGES[what]
    change(values)
    del values["id"]
    with pytest.raises(UserError, match=message):
        parse_manifest(json.dumps({**values, "id": identity(values)}).encode(), "manifest.json")
