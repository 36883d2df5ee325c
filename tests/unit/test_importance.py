"""The importance of columns: measured on a text, read from imatrix files, and used by the encoding."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from neuronpipe.plans.convert import convert
from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.conversion import open_checkpoint
from neuronpipe.plans.convert.imatrix_file import read_imatrix
from neuronpipe.plans.convert.importance import MIN_RELATIVE_IMPORTANCE, Importance
from neuronpipe.plans.convert.quantize import decode, encode
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.plans.reference.input_importance import measure_importance
from neuronpipe.plans.reference.weights import CheckpointWeights, PackageWeights
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import RECIPES, Recipe, tokens, write_checkpoint

DENSE, MIXTURE, RECURRENT = "awkward", "qwen3moe", "qwen3.5 moe"
WHOLE = "glm4moe groups"  # whole experts, shared ones in two parts
TEXT = "The input of a column counts by its mean square. " * 40
Entries = dict[str, np.ndarray]


def recipe_of(name: str) -> Recipe:
    return RECIPES[name]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {name: write_checkpoint(folder / name, recipe_of(name)) for name in (DENSE, MIXTURE, RECURRENT, WHOLE)}


def measured(source: Path) -> Importance:
    with open_checkpoint(source, Options()) as checkpoint:
        return measure_importance(checkpoint, TEXT, "text", lambda done, total: None)


def write_gguf_imatrix(path: Path, entries: Entries, counts: dict[str, np.ndarray] | None = None) -> Path:
    """Write sums of two vectors each, unless counts say otherwise."""
    writer = gguf.GGUFWriter(path, "imatrix", endianess=gguf.GGUFEndian.LITTLE)
    writer.add_type("imatrix")
    for name, values in entries.items():
        matrices = values.reshape(-1, values.shape[-1]).astype(np.float32)
        count = (counts or {}).get(name, np.full(len(matrices), 2, np.float32)).reshape(-1, 1)
        writer.add_tensor(f"{name}.in_sum2", matrices * count)
        writer.add_tensor(f"{name}.counts", count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_older_imatrix(path: Path, entries: Entries) -> Path:
    data = struct.pack("<i", len(entries))
    for name, values in entries.items():
        data += struct.pack("<i", len(name)) + name.encode()
        data += struct.pack("<ii", 3, values.size) + values.astype("<f4").tobytes()
    path.write_bytes(data + struct.pack("<i", 3))
    return path


WRITERS = (write_gguf_imatrix, write_older_imatrix)


@pytest.mark.parametrize("name", [DENSE, MIXTURE, RECURRENT])
def test_a_checkpoint_computes_what_its_f16_package_computes(
    name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    package = convert(sources[name], tmp_path / "package", quantization="f16")
    prompt = tokens(recipe_of(name))
    with open_checkpoint(sources[name], Options()) as checkpoint:
        ours = ReferenceEngine(CheckpointWeights(checkpoint)).run(prompt).logits
    np.testing.assert_allclose(ours, ReferenceEngine(package).run(prompt).logits, atol=2e-3)


def test_all_matrices_whose_columns_differ_have_an_importance(sources: dict[str, Path]) -> None:
    importance = measured(sources[MIXTURE])
    model = convert_model(sources[MIXTURE])
    expected = {f"layers.{layer}.{matrix}" for layer in range(model.layers) for matrix in ("qkv", "attention_output")}
    assert expected | {"output"} <= set(importance.by_matrix)
    experts = [name for name in importance.by_matrix if ".experts." in name]
    assert {name.rpartition(".")[2] for name in experts} == {"gate", "up", "down"}
    columns = {"attention_output": model.query_width, "down": model.neurons}
    for name, values in importance.by_matrix.items():
        assert values.shape == (columns.get(name.rpartition(".")[2], model.width),)
        assert values.dtype == np.float32
        assert values.min() >= np.float32(MIN_RELATIVE_IMPORTANCE)
        assert values.mean() == pytest.approx(1, abs=0.01)


def convert_model(source: Path):
    with open_checkpoint(source, Options()) as checkpoint:
        return checkpoint.model


@pytest.mark.parametrize("quantization", ["q4k", "q5k", "q6k", "q4h", "q5h", "iq4", "mxfp4"])
def test_important_columns_lose_less(quantization: Quantization) -> None:
    generator = np.random.default_rng(5)
    weights = generator.normal(0, 0.02, (64, 256)).astype(np.float32)
    importance = generator.choice([0.02, 8], size=256, p=(0.8, 0.2)).astype(np.float32)

    def loss(columns: np.ndarray | None) -> float:
        difference = decode(quantization, encode(quantization, weights, columns)) - weights
        return float((np.square(difference) * importance).sum())

    assert loss(importance) < 0.9 * loss(None)
    assert loss(np.full(256, 3, np.float32)) == pytest.approx(loss(None), rel=0.01)


def test_a_package_is_nearer_to_its_source_on_the_text_that_it_was_calibrated_on(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    source = sources[DENSE]
    importance = measured(source)
    plain = convert(source, tmp_path / "plain", quantization="q4k")
    calibrated = convert(source, tmp_path / "calibrated", quantization="q4k", importance=lambda checkpoint: importance)
    assert calibrated.manifest.source.importance == "text"
    assert plain.manifest.source.importance == ""
    assert Package.open(calibrated.path).manifest == calibrated.manifest
    with open_checkpoint(source, Options()) as checkpoint:
        exact = CheckpointWeights(checkpoint)
        for name in ("layers.0.qkv", "layers.1.attention_output", "output"):
            columns = importance.by_matrix[name]
            losses = [
                (np.square(PackageWeights(package).matrix(name) - exact.matrix(name)) * columns).sum()
                for package in (plain, calibrated)
            ]
            assert losses[1] < losses[0], name


def test_down_of_whole_experts_is_nearer_to_its_source_after_calibration(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    source = sources[WHOLE]
    importance = measured(source)
    packages = [
        convert(source, tmp_path / name, quantization="q4k", importance=importance_of)
        for name, importance_of in (("plain", None), ("calibrated", lambda checkpoint: importance))
    ]
    assert all(package.manifest.layout.down_by_output for package in packages)
    with open_checkpoint(source, Options()) as checkpoint:
        exact, model = CheckpointWeights(checkpoint), checkpoint.model
        losses = np.array(
            [
                [
                    (np.square(weights.neurons(*place)[-1] - exact.neurons(*place)[-1]).sum(axis=1) * columns).sum()
                    for weights in (PackageWeights(package) for package in packages)
                ]
                for place in model.places
                if (columns := importance.by_matrix.get(f"layers.{place[0]}.experts.{place[1]}.down")) is not None
            ]
        )
    assert len(losses) > model.ffns / 2
    assert (losses[:, 1] < losses[:, 0]).all()


def test_parts_of_a_shared_expert_have_their_columns_of_its_entry(sources: dict[str, Path], tmp_path: Path) -> None:
    """Also those of a dense layer, whose last part is shorter in the file."""
    model, generator = convert_model(sources[WHOLE]), np.random.default_rng(8)
    width, neurons, routed = model.width, model.neurons, model.experts
    shared, dense = generator.random(2 * neurons), generator.random(neurons * model.expert_counts[0] - 5)
    entries = {
        "blk.2.ffn_gate_shexp.weight": generator.random(width),
        "blk.2.ffn_down_shexp.weight": shared,
        "blk.0.ffn_up.weight": generator.random(width),
        "blk.0.ffn_down.weight": dense,
    }
    by_matrix = read_imatrix(write_gguf_imatrix(tmp_path / "imatrix", entries), model).by_matrix
    assert len(by_matrix) == 4 + 2 * model.expert_counts[0]
    for part in range(2):
        columns = by_matrix[f"layers.2.experts.{routed + part}.down"]
        expected = shared[part * neurons : (part + 1) * neurons]
        np.testing.assert_allclose(columns, np.maximum(expected / expected.mean(), MIN_RELATIVE_IMPORTANCE), rtol=1e-5)
        assert by_matrix[f"layers.2.experts.{routed + part}.gate"].shape == (width,)
    last = by_matrix[f"layers.0.experts.{model.expert_counts[0] - 1}.down"]
    assert (last[-5:] == np.float32(MIN_RELATIVE_IMPORTANCE)).all()
    with pytest.raises(UserError, match="belongs to another model"):
        read_imatrix(write_gguf_imatrix(tmp_path / "long", {"blk.2.ffn_down_shexp.weight": np.ones(300)}), model)


@pytest.mark.parametrize("write", WRITERS)
def test_an_imatrix_file_gives_each_matrix_its_own_columns(
    write: Callable[..., Path], sources: dict[str, Path], tmp_path: Path
) -> None:
    model, generator = convert_model(sources[MIXTURE]), np.random.default_rng(7)
    query = generator.random(model.width)
    output = generator.random(model.query_width)
    experts = generator.random((model.experts, model.width))
    experts[2] = 0  # no token chose it
    neurons = generator.random((model.experts, model.neurons))
    entries = {
        "blk.1.attn_q.weight": query,
        "blk.1.attn_k.weight": query,
        "blk.0.attn_output.weight": output,
        "blk.2.ffn_gate_exps.weight": experts,
        "blk.1.ffn_gate_up_exps.weight": experts[::-1],  # in one tensor
        "blk.2.ffn_down_exps.weight": neurons,
        "blk.0.ffn_gate_inp.weight": query,
        f"blk.{model.layers}.attn_q.weight": query,
    }
    importance = read_imatrix(write(tmp_path / "imatrix", entries), model)
    used = [expert for expert in range(model.experts) if expert != 2]
    assert set(importance.by_matrix) == {
        "layers.1.qkv",
        "layers.0.attention_output",
        *(f"layers.2.experts.{expert}.gate" for expert in used),
        *(f"layers.2.experts.{expert}.down" for expert in range(model.experts)),
        *(f"layers.1.experts.{model.experts - 1 - expert}.{part}" for expert in used for part in ("gate", "up")),
    }
    for name, values in (
        ("layers.1.qkv", query),
        ("layers.0.attention_output", output),
        *((f"layers.2.experts.{expert}.gate", experts[expert]) for expert in used),
        *((f"layers.2.experts.{expert}.down", neurons[expert]) for expert in range(model.experts)),
        *((f"layers.1.experts.{model.experts - 1 - expert}.up", experts[expert]) for expert in used),
    ):
        expected = np.maximum(values / values.mean(), MIN_RELATIVE_IMPORTANCE)
        np.testing.assert_allclose(importance.by_matrix[name], expected, rtol=1e-5)


def test_blocks_of_one_part_are_counted_as_their_layers(tmp_path: Path) -> None:
    """Files of Nemotron-H number mixers and feed-forwards, which are parts of one layer here."""
    model = convert_model(write_checkpoint(tmp_path / "model", RECIPES["nemotron-h"]))
    entries = {
        name: np.ones(model.width) for name in ("blk.2.attn_q.weight", "blk.3.ffn_up.weight", "blk.6.ffn_up.weight")
    }
    importance = read_imatrix(write_gguf_imatrix(tmp_path / "imatrix", entries), model)
    assert set(importance.by_matrix) == {"layers.1.qkv", "layers.1.up", "layers.3.up"}  # of the blocks M-*-MM-


def test_a_recurrent_layers_input_has_the_importance_of_its_file(sources: dict[str, Path], tmp_path: Path) -> None:
    """Its queries, keys and values have the name that those of attention have in other layers."""
    model = convert_model(sources[RECURRENT])
    recurrent, attention = model.mixers.index("deltanet"), model.mixers.index("attention")
    entries = {f"blk.{layer}.attn_qkv.weight": np.ones(model.width) for layer in (recurrent, attention)}
    entries["blk.0.attn_output.weight"] = np.ones(model.query_width)  # which that layer does not have
    importance = read_imatrix(write_gguf_imatrix(tmp_path / "imatrix", entries), model)
    assert set(importance.by_matrix) == {f"layers.{recurrent}.recurrent_input", f"layers.{attention}.qkv"}


def test_an_expert_without_tokens_has_no_importance(sources: dict[str, Path], tmp_path: Path) -> None:
    model = convert_model(sources[MIXTURE])
    counts = np.arange(model.experts, dtype=np.float32)  # none for the first
    name = "blk.0.ffn_up_exps.weight"
    entries = {name: np.ones((model.experts, model.width))}
    importance = read_imatrix(write_gguf_imatrix(tmp_path / "imatrix", entries, {name: counts}), model)
    assert "layers.0.experts.0.up" not in importance.by_matrix
    assert len(importance.by_matrix) == model.experts - 1


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (np.ones(31), "belongs to another model"),
        (np.full(160, -1.0), "negative or not finite"),
        (np.full(160, np.nan), "negative or not finite"),
        (np.full(160, np.inf), "negative or not finite"),
    ],
)
def test_values_that_cannot_be_an_importance_are_refused(
    write: Callable[..., Path], values: np.ndarray, problem: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    model = convert_model(sources[DENSE])
    if values.size > 31:
        values = np.full(model.width, values[0])
    file = write(tmp_path / "imatrix", {"blk.0.attn_q.weight": values})
    with pytest.raises(UserError, match=rf"imatrix: blk\.0\.attn_q\.weight: .*{problem}"):
        read_imatrix(file, model)


@pytest.mark.parametrize("write", WRITERS)
def test_a_file_of_another_model_or_a_damaged_one_is_refused(
    write: Callable[..., Path], sources: dict[str, Path], tmp_path: Path
) -> None:
    model = convert_model(sources[DENSE])
    other = write(tmp_path / "other", {"encoder.weight": np.ones(32)})
    with pytest.raises(UserError, match="no entry for a matrix of this model"):
        read_imatrix(other, model)
    whole = write(tmp_path / "whole", {"blk.0.attn_q.weight": np.ones(model.width)}).read_bytes()
    damaged = tmp_path / "damaged"
    for length in range(len(whole) - 32):  # the last bytes may be padding
        damaged.write_bytes(whole[:length])
        with pytest.raises(UserError, match="damaged"):
            read_imatrix(damaged, model)


def test_quantizations_without_weighed_errors_are_refused_before_the_text_is_computed(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    def measure(checkpoint: object) -> Importance:
        raise AssertionError("computed for nothing")

    for quantization in ("q4", "q8", "f16"):
        with pytest.raises(UserError, match=f"quantization {quantization} does not weigh errors"):
            convert(sources[DENSE], tmp_path / "package", quantization=quantization, importance=measure)  # type: ignore[arg-type]
    assert not (tmp_path / "package").exists()


def test_a_text_of_a_few_words_is_refused(sources: dict[str, Path]) -> None:
    with (
        open_checkpoint(sources[DENSE], Options()) as checkpoint,
        pytest.raises(UserError, match=r"short: \d+ tokens; calibration needs 64 or more"),
    ):
        measure_importance(checkpoint, "few words", "short", lambda done, total: None)
