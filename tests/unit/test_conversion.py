"""The conversion: order of neurons, errors reported, memory used."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from neuronpipe.plans.convert import block_conversion as work
from neuronpipe.plans.convert import conversion as conversion_module
from neuronpipe.plans.convert import convert
from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.conversion import Conversion, open_checkpoint
from neuronpipe.plans.convert.huggingface import open_huggingface
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.inspect import describe, render
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.plans.reference.weights import PackageWeights
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import RECIPES, TINY, Recipe, tensors, tokens, write_checkpoint, write_safetensors
from tests.conformance.gguf_files import write_gguf


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint."""
    return write_checkpoint(tmp_path_factory.mktemp("source"), TINY)


def shares(recipe: Recipe) -> np.ndarray:
    """Firing shares with ties, [layers, experts, neurons]."""
    values = np.random.default_rng(3).integers(0, 20, (recipe.layers, 1, recipe.neurons)) / 20
    return values.astype(np.float32)


def test_neurons_are_stored_hot_first_and_mean_the_same(source: Path, tmp_path: Path) -> None:
    frequencies = shares(TINY)
    np.save(tmp_path / "shares.npy", frequencies)
    package = convert(source, tmp_path / "hot", quantization="f16", frequencies=tmp_path / "shares.npy")
    assert package.manifest.layout.neuron_order == "frequency"
    assert package.manifest.fired_by_layer == pytest.approx(frequencies.mean(axis=(1, 2)))
    stored = dict(tensors(TINY))
    for layer in range(TINY.layers):
        order = sorted(range(TINY.neurons), key=lambda n, layer=layer: (-frequencies[layer, 0, n], n))
        gate, up, down = PackageWeights(package).neurons(layer)
        for values, name in ((gate, "gate"), (up, "up"), (down.T, "down")):
            matrix = stored[f"model.layers.{layer}.mlp.{name}_proj.weight"]
            np.testing.assert_array_equal(values, matrix[:, order] if name == "down" else matrix[order])
    plain = convert(source, tmp_path / "plain", quantization="f16")
    logits = [ReferenceEngine(each).run(tokens(TINY)).logits for each in (package, plain)]
    np.testing.assert_allclose(*logits, atol=1e-4)


@pytest.mark.parametrize(("tied", "embedding"), [(False, "q4k"), (True, "q6k")])
def test_an_embedding_that_is_only_looked_up_has_no_more_bits_than_the_rest(
    tmp_path: Path, tied: bool, embedding: str
) -> None:
    source = write_checkpoint(tmp_path / "source", replace(TINY, tied=tied))
    manifest = convert(source, tmp_path / "package").manifest
    assert manifest.quantization == "q4k"
    assert manifest.quantization_of("embedding") == embedding
    assert tied or manifest.quantization_of("output") == "q6k"


def test_the_model_with_more_than_ten_layers_keeps_each_layers_own_order(tmp_path: Path) -> None:
    recipe = replace(TINY, layers=12, neurons=40)
    source, frequencies = write_checkpoint(tmp_path / "source", recipe), shares(recipe)
    np.save(tmp_path / "shares.npy", frequencies)
    package = convert(source, tmp_path / "p", quantization="f16", frequencies=tmp_path / "shares.npy")
    stored = dict(tensors(recipe))
    for layer in range(12):
        gate, _, _ = PackageWeights(package).neurons(layer)
        hottest = frequencies[layer, 0].argmax()
        np.testing.assert_array_equal(gate[0], stored[f"model.layers.{layer}.mlp.gate_proj.weight"][hottest])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.zeros((2, 1, 99), np.float32), r"expected floating-point firing shares of shape \[2, 1, 100\]"),
        (np.zeros((2, 1, 100), np.int64), "expected floating-point"),
        (np.full((2, 1, 100), 1.5), "lie between 0 and 1"),
        (np.full((2, 1, 100), np.nan), "lie between 0 and 1"),
        (b"\x93NUMPY\x01\x00\x40\x00{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1, 100)}", "not a .npy"),
        (b"", "not a .npy"),
    ],
)
def test_odd_frequencies_are_refused(content: np.ndarray | bytes, message: str, source: Path, tmp_path: Path) -> None:
    path = tmp_path / "shares.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(UserError, match=rf"shares.npy: .*{message}"):
        convert(source, tmp_path / "p", quantization="q4", frequencies=path)
    assert not (tmp_path / "p").exists()


def test_slabs_and_blocks_of_any_size_give_the_same_package(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = convert(source, tmp_path / "whole", quantization="q4", name="same")
    for name in ("BLOCK_BYTES", "MIN_SLAB_BYTES", "MAX_SLAB_BYTES"):
        monkeypatch.setattr(work, name, 1)
    assert convert(source, tmp_path / "pieces", quantization="q4", name="same").manifest.id == whole.manifest.id


@pytest.mark.parametrize("writes", [1, 300, 900])
def test_an_interrupted_conversion_goes_on_and_makes_the_same_package(
    writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion_module, "MAX_UNSAVED_WEIGHTS", 1)
    source = write_checkpoint(tmp_path / "source", RECIPES["bamboo"])
    whole = convert(source, tmp_path / "whole", quantization="q4", name="same")
    place, target, calls = tmp_path / "place", tmp_path / "package", []

    def interrupted(done: int, total: int) -> None:
        calls.append(done)
        if total * writes < done * 1000:
            raise KeyboardInterrupt

    with open_checkpoint(source, Options()) as checkpoint:
        conversion = Conversion(checkpoint, quantization="q4", name="same")
        with pytest.raises(KeyboardInterrupt):
            conversion.write(target, overwrite=False, progress=interrupted, place=place)
        assert not target.exists()
        with (place / "package" / "bundles.bin").open("ab") as bundles:
            bundles.write(b"half a cluster")
        before = len(calls)
        package = conversion.write(target, overwrite=False, progress=lambda done, _: calls.append(done), place=place)
    assert package.manifest.id == whole.manifest.id
    for file in whole.manifest.files:
        assert (target / file).read_bytes() == (whole.path / file).read_bytes()
    assert writes == 1 or calls[before] > calls[0], "it began again"
    assert not (place / "package").exists()


def test_work_left_by_a_conversion_of_something_else_is_not_used(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"

    def interrupted(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with open_checkpoint(source, Options()) as checkpoint:
        with pytest.raises(KeyboardInterrupt):
            Conversion(checkpoint, quantization="q8", name="same").write(
                tmp_path / "a", overwrite=False, progress=interrupted, place=place
            )
        made = Conversion(checkpoint, quantization="q4", name="same").write(
            tmp_path / "b", overwrite=False, place=place
        )
    assert made.manifest.id == convert(source, tmp_path / "c", quantization="q4", name="same").manifest.id


@pytest.mark.parametrize(
    ("head", "norm", "expected"),
    [
        ("c", "c", "fetch a, fetch a, release a, fetch b, release b, fetch c, fetch c, fetch c, release c"),
        ("a", "c", "fetch a, fetch a, fetch a, release a, fetch b, release b, fetch c, fetch c, release c"),
        ("a", "a", "fetch a, fetch a, fetch a, fetch b, release b, fetch c, release c, fetch a, release a"),
    ],
)
def test_a_file_is_needed_from_its_first_piece_to_its_last(head: str, norm: str, expected: str, tmp_path: Path) -> None:
    """Shards in the order of the layers come one after the other, and go; one that is wanted twice stays. Where the
    output matrix lies beside the embedding, as in files sorted by name, it does not wait for the end."""
    said: list[str] = []

    class Watched(SourceFile):
        def fetch(self) -> None:
            said.append(f"fetch {self.path.stem}")

        def release(self) -> None:
            said.append(f"release {self.path.stem}")

    recipe = replace(TINY, layers=3)
    source = write_checkpoint(tmp_path / "source", recipe)
    stored = {name: ("F16", values.shape, values.astype(np.float16).tobytes()) for name, values in tensors(recipe)}

    def shard(name: str) -> str:
        special = {"lm_head.weight": head, "model.norm.weight": norm}
        return special.get(name) or ("b" if ".layers.1." in name else "c" if ".layers.2." in name else "a")

    for letter in "abc":
        write_safetensors(source / f"{letter}.safetensors", {n: v for n, v in stored.items() if shard(n) == letter})
    (source / "model.safetensors").unlink()
    places = {name: f"{shard(name)}.safetensors" for name in stored}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with open_huggingface(source, Options(), Watched) as checkpoint:
        Conversion(checkpoint, quantization="q4").write(tmp_path / "p", overwrite=False)
    assert ", ".join(said) == expected


def test_errors_are_reported_by_kind_and_progress_to_the_end(source: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    package = convert(
        source, tmp_path / "p", quantization="q4", progress=lambda done, total: calls.append((done, total))
    )
    errors = package.manifest.quantization_error
    assert set(errors) == {"embedding", "output", "attention", "gate", "up", "down"}
    weights = dict(tensors(TINY))["model.layers.0.mlp.gate_proj.weight"]
    gate, _, _ = PackageWeights(package).neurons(0)
    assert errors["gate"] == pytest.approx(np.linalg.norm(gate - weights) / np.linalg.norm(weights), rel=0.05)
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] == 2 * (128 * 64 + 64 * 64 + 3 * 100 * 64) + 2 * 300 * 64


def test_conversion_needs_a_fraction_of_the_model_in_memory(tmp_path: Path) -> None:
    recipe = replace(RECIPES["awkward"], layers=12, neurons=1500, dtype="F32")
    source = write_checkpoint(tmp_path / "source", recipe)
    model_bytes = (source / "model.safetensors").stat().st_size
    assert model_bytes > 70e6
    tracemalloc.start()
    try:
        convert(source, tmp_path / "p", quantization="q4")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < model_bytes / 4


KILLED = """
import os, resource, signal, sys
from pathlib import Path
from neuronpipe.plans.convert import conversion

conversion.MAX_UNSAVED_WEIGHTS = 1
before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def kill(done, total):
    if done > 0.6 * total:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

conversion.convert(Path(sys.argv[1]), Path(sys.argv[2]), quantization="q4", name="same", progress=kill)
"""


def killed_conversion(source: Path, target: Path) -> int:
    """Convert in a process that is killed when more than half is done. Returns the bytes of memory it had taken."""
    done = subprocess.run([sys.executable, "-c", KILLED, source, target], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return 1024 * int(done.stdout)


@pytest.mark.slow
def test_a_killed_conversion_of_shards_goes_on_and_needs_little_memory(tmp_path: Path) -> None:
    recipe = replace(RECIPES["awkward"], layers=12, neurons=1500, dtype="F32", shards=5)
    source = write_checkpoint(tmp_path / "source", recipe)
    model_bytes = sum(shard.stat().st_size for shard in source.glob("*.safetensors"))
    assert model_bytes > 70e6
    assert killed_conversion(source, tmp_path / "package") < model_bytes / 3
    (left,) = tmp_path.glob(".package.partial-*")
    (left / ".journal.json.partial-1").write_text("half")  # as a kill may leave it
    calls: list[float] = []

    def progress(done: int, total: int) -> None:
        calls.append(done / total)

    package = convert(source, tmp_path / "package", quantization="q4", name="same", progress=progress)
    assert calls[0] > 0.5, "it began again"
    whole = convert(source, tmp_path / "whole", quantization="q4", name="same")
    assert package.manifest.id == whole.manifest.id
    for file in ("bundles.bin", "fixed.safetensors", "checksums.bin"):
        assert (package.path / file).read_bytes() == (whole.path / file).read_bytes()
    assert sorted(path.name for path in package.path.iterdir()) == sorted(path.name for path in whole.path.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["package", "source", "whole"]


FAULTS = """
import resource, sys
from pathlib import Path
from neuronpipe.plans.convert import block_conversion as work
from neuronpipe.plans.convert.conversion import convert

work.MIN_SLAB_BYTES = 1 << 20  # as in models whose slabs are too large for the C library to learn by
convert(Path(sys.argv[1]), Path(sys.argv[2]), quantization="q4", name="first")  # what is touched once
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
convert(Path(sys.argv[1]), Path(sys.argv[2]), quantization="q4", name="same", overwrite=True)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's memory")
def test_the_memory_of_a_block_is_used_for_the_next_one(tmp_path: Path) -> None:
    """Fresh pages from the kernel for every block took a third of a conversion."""
    source = write_checkpoint(tmp_path / "source", replace(RECIPES["awkward"], neurons=1500))
    command = [sys.executable, "-c", FAULTS, source, tmp_path / "package"]
    assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) < 300  # 700 otherwise


def test_a_killed_conversion_is_not_gone_on_with_when_the_source_has_changed(tmp_path: Path) -> None:
    changing = write_checkpoint(tmp_path / "source", TINY)
    killed_conversion(changing, tmp_path / "package")
    write_checkpoint(changing, replace(TINY, seed=2))
    package = convert(changing, tmp_path / "package", quantization="q4", name="same")
    whole = convert(changing, tmp_path / "whole", quantization="q4", name="same")
    assert package.bundles_path.read_bytes() == whole.bundles_path.read_bytes()
    assert package.fixed_path.read_bytes() == whole.fixed_path.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["package", "source", "whole"]


@pytest.mark.slow
def test_decoding_k_quants_takes_the_same_memory_for_any_number_of_layers(tmp_path: Path) -> None:
    peaks = []
    for layers in (1, 4):
        recipe = replace(TINY, width=512, neurons=2048, query_heads=8, key_heads=2, head_width=64, layers=layers)
        source = write_gguf(tmp_path / f"{layers}.gguf", recipe, "Q4_K")
        tracemalloc.start()
        try:
            convert(source, tmp_path / str(layers), activation="relu")
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] < 12e6


@pytest.mark.parametrize("quantization", ["q4", "q8"])
def test_rows_that_are_no_groups_of_32_allow_only_f16(quantization: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", replace(TINY, width=72, query_heads=2, head_width=36))
    with pytest.raises(UserError, match="width is 72, no multiple of 32, so only f16 is possible"):
        convert(source, tmp_path / "p", quantization=quantization)
    package = convert(source, tmp_path / "p", quantization="f16")
    assert np.isfinite(ReferenceEngine(package).run([1, 2]).logits).all()


def test_a_person_may_overrule_name_activation_and_context(source: Path, tmp_path: Path) -> None:
    package = convert(
        source, tmp_path / "p", quantization="q4", activation="silu", context_tokens=17, name="mine"
    ).manifest
    assert (package.model.activation, package.model.context_tokens, package.name) == ("silu", 17, "mine")
    with pytest.raises(UserError, match="so a context of 129 tokens is impossible"):
        convert(source, tmp_path / "q", quantization="q4", context_tokens=129)


def test_a_description_accounts_for_every_byte(source: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "shares.npy", shares(TINY))
    package = convert(source, tmp_path / "p", quantization="q4", frequencies=tmp_path / "shares.npy")
    description = describe(package)
    sizes = dict(description["bytes"])
    on_disk = sum(path.stat().st_size for path in package.path.iterdir() if path.name != "manifest.json")
    assert sizes.pop("total") == sum(sizes.values()) == on_disk
    assert description["parameters"] == sum(values.size for _, values in tensors(TINY))
    page = render(description)
    for text in (package.manifest.id, "trigger part [aaaa", "frequency order"):
        assert text in page
