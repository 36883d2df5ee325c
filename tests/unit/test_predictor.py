"""Predictors are fitted from text alone, keep their recall on other text, and are judged as engines compute them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from neuronpipe.launch.cli import main
from neuronpipe.launch.verbs.packages import profile as verb
from neuronpipe.plans.convert import convert
from neuronpipe.plans.convert.quantize import decode, encode
from neuronpipe.plans.inspect import low_recall
from neuronpipe.plans.models.spec import Activation
from neuronpipe.plans.package.manifest import Predictor, PredictorQuality, Side
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.writer import Rows
from neuronpipe.plans.predictor.calibration_texts import Texts
from neuronpipe.plans.predictor.fit import (
    MIN_CHANCE,
    NEVER,
    Calibration,
    ScoreModel,
    fit_layer,
    leading_directions,
    min_probability,
    transfer_rows,
)
from neuronpipe.plans.predictor.imported_predictor import open_imported
from neuronpipe.plans.predictor.predictions import judge, predicted_neurons
from neuronpipe.plans.predictor.profiling import profile
from neuronpipe.plans.reference.engine import LayerRun, ReferenceEngine
from neuronpipe.plans.reference.quantized import Vectors, product
from neuronpipe.plans.reference.weights import PackageWeights
from neuronpipe.protocol.errors import UserError
from safetensors.numpy import save_file

from tests.conformance.checkpoints import RECIPES, TINY, write_checkpoint

WIDTH, NEURONS, TOKENS = 64, 256, 3000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Activation], Package]:
    """tiny(activation) -> a package of random weights."""
    directory = tmp_path_factory.mktemp("tiny")
    source = write_checkpoint(directory / "source", TINY)
    return lambda activation: convert(
        source, directory / activation, quantization="q8", activation=activation, overwrite=True
    )


def layer(sides: tuple[Side, ...], *, spread: float, seed: int = 0) -> tuple[Calibration, Calibration]:
    """A dReLU layer whose inputs have a spectrum falling by `spread` per coordinate: to fit on, and held out. Gates
    fire rarely, by a steady first coordinate that acts as bias."""
    random = np.random.default_rng(seed)
    scale = np.exp(-spread * np.arange(WIDTH, dtype=np.float32))
    gate, up = random.standard_normal((2, NEURONS, WIDTH), dtype=np.float32)
    inputs = random.standard_normal((2 * TOKENS, WIDTH), dtype=np.float32) * scale
    deviation = np.sqrt(np.square(gate * scale).sum(axis=1))
    inputs[:, 0] = 3.0
    gate[:, 0] = -1.3 / 3 * deviation
    up[:, 0] = 0
    values: dict[Side, np.ndarray] = {"gate": inputs @ gate.T, "up": inputs @ up.T}
    active = (values["gate"] > 0) & (values["up"] > 0)
    weights: dict[Side, np.ndarray] = {"gate": gate, "up": up}

    def part(tokens: slice) -> Calibration:
        read = inputs[tokens]
        return Calibration(
            read, read, {s: weights[s] for s in sides}, {s: values[s][tokens] for s in sides}, active[tokens]
        )

    return part(slice(0, TOKENS)), part(slice(TOKENS, None))


@pytest.mark.parametrize("quantization", ["q4", "q8", "f16"])
@pytest.mark.parametrize("sides", [("gate",), ("gate", "up")])
def test_the_wanted_recall_holds_on_text_that_was_not_seen(quantization: str, sides: tuple[Side, ...]) -> None:
    seen, held_out = layer(sides, spread=0.08)
    factors = fit_layer(seen, 32, quantization, 0.97)  # type: ignore[arg-type]
    quality = judge(predicted_neurons(quantization, factors, "none", held_out.reads), held_out.active)  # type: ignore[arg-type]
    assert quality.recall == pytest.approx(0.97, abs=0.01)
    # One side cannot know the other, which fires half of the time.
    assert quality.recall / quality.precision < (1.6 if len(sides) == 2 else 2.8)


def test_a_higher_rank_predicts_fewer_neurons_for_the_same_recall() -> None:
    seen, held_out = layer(("gate", "up"), spread=0.05)
    shares = [
        judge(
            predicted_neurons("q8", fit_layer(seen, rank, "q8", 0.97), "none", held_out.reads), held_out.active
        ).predicted
        for rank in (32, 64)
    ]
    assert shares[1] < 0.8 * shares[0]


def test_neurons_that_never_fire_are_never_predicted_and_nothing_is_not_a_number() -> None:
    seen, held_out = layer(("gate", "up"), spread=0.08)
    seen.weights["gate"][:8] = 0
    seen.values["gate"][:, :8] = 0
    seen.active[:, :8] = False
    factors = fit_layer(seen, 32, "q8", 0.97)
    assert np.isfinite(decode("q8", factors.input)).all()
    assert all(np.isfinite(factor.bias).all() and (factor.bias >= NEVER).all() for factor in factors.sides.values())
    assert not predicted_neurons("q8", factors, "none", held_out.reads)[:, :8].any()


def test_the_minimum_probability_reaches_the_recall_and_not_much_more() -> None:
    probabilities = 0.05 + 0.9 * np.random.default_rng(4).random(1000) ** 2
    for recall in (0.5, 0.97, 0.999):
        assert recall <= (probabilities > min_probability(probabilities, recall)).mean() < recall + 0.002
    assert min_probability(probabilities[:0], 0.97) == MIN_CHANCE


def test_a_bias_predicts_exactly_what_is_likely_enough() -> None:
    seen, _ = layer(("gate",), spread=0.08)
    value = seen.values["gate"]
    score = value + np.random.default_rng(6).standard_normal(value.shape, dtype=np.float32)
    line = ScoreModel.fitted(score, value, seen.active)
    probabilities = line.probabilities(score, np.ones(value.shape, bool)).reshape(value.shape)
    for least in (0.02, 0.1, 0.3):
        predicted = score + line.bias(least) > 0
        clear = np.abs(probabilities - least) > 1e-3
        assert (predicted == (probabilities > least))[clear].all()
        assert predicted.any()
        assert not predicted.all()


def test_products_are_the_same_whatever_rows_are_asked_for_together() -> None:
    random = np.random.default_rng(7)
    vectors = random.standard_normal((37, 96), dtype=np.float32)
    weights = random.standard_normal((1030, 96), dtype=np.float32)
    for quantization in ("q4", "q8", "f16"):
        rows = encode(quantization, weights)
        whole = product(quantization, rows, vectors)
        np.testing.assert_allclose(whole, vectors @ decode(quantization, rows).T, atol=0.5)
        prepared = Vectors(quantization, vectors)
        for some in (slice(3, 4), slice(100, 700)):
            part = prepared.times(Rows(rows.quants[some], rows.scales[some]))
            np.testing.assert_array_equal(part, whole[:, some])


def test_factors_that_are_no_numbers_are_refused_not_written() -> None:
    seen, _ = layer(("gate",), spread=0.08)
    seen.weights["gate"][3, 5] = np.nan
    with pytest.raises(UserError, match="values that are not numbers"):
        fit_layer(seen, 32, "q8", 0.97)


def test_more_directions_than_tokens_or_neurons_are_filled_up_with_nothing() -> None:
    values = np.random.default_rng(1).standard_normal((5, 40), dtype=np.float32)
    directions = leading_directions(values, 32)
    assert directions.shape == (40, 32)
    np.testing.assert_allclose(values @ directions @ directions.T, values, atol=1e-4)
    assert not directions[:, 5:].any()


def test_rows_carried_over_to_an_earlier_vector_follow_what_attention_adds() -> None:
    random = np.random.default_rng(2)
    earlier = random.standard_normal((4000, 32), dtype=np.float32)
    turn = random.standard_normal((32, 32), dtype=np.float32) / 8
    rows = random.standard_normal((3, 32), dtype=np.float32)
    carried = transfer_rows(rows, earlier, earlier * 0.5 + earlier @ turn)
    np.testing.assert_allclose(earlier @ carried.T, (earlier * 0.5 + earlier @ turn) @ rows.T, atol=0.3)


def test_profiling_writes_what_it_judged(tiny: Callable[[Activation], Package], tmp_path: Path) -> None:
    package = Package.open(Path(shutil.copytree(tiny("drelu").path, tmp_path / "p")))
    random, model = np.random.default_rng(3), package.manifest.model
    length = min(64, model.context_tokens)
    windows = random.integers(0, model.vocabulary, (10, length)).tolist()
    told: list[tuple[int, int]] = []
    profiled = profile(
        package,
        Texts(windows[:8], windows[8:]),
        rank=32,
        quantization="q8",
        sides="both",
        text="a story",
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == sorted(told)
    assert (told[0][0], told[-1][0], {total for _, total in told}) == (0, told[0][1], {told[0][1]})
    in_first_layer = {done for done, _ in told if 0 < done < 10 * length}
    assert len(in_first_layer) >= len(windows) + 3  # each text's attention, and each step of what is fitted
    predictor = profiled.package.manifest.predictor
    assert predictor is not None
    profiled.package.verify_fixed()
    assert predictor.calibration_tokens == 8 * length
    assert predictor.sides == ("gate", "up")
    assert all(layer.recall > 0.7 for layer in predictor.by_layer)
    assert (predictor.text, predictor.held_out_tokens) == ("a story", 2 * length)
    assert predictor.loss_share == pytest.approx(
        profiled.predicted_perplexity / profiled.exact_perplexity - 1, abs=1e-6
    )
    assert Package.open(profiled.package.path).manifest.predictor == predictor
    active: list[float] = []

    def observe(run: LayerRun) -> None:
        active.append(float((run.inner != 0).mean()))

    ReferenceEngine(package, observe=observe).hidden(windows)
    assert profiled.package.manifest.fired_by_layer == pytest.approx(active, abs=1e-4)


def test_without_a_gate_the_sign_of_up_is_predicted(converted: Callable[[str, str], Package], tmp_path: Path) -> None:
    package = Package.open(Path(shutil.copytree(converted("opt", "q8").path, tmp_path / "p")))
    windows = np.random.default_rng(5).integers(0, package.manifest.model.vocabulary, (10, 64)).tolist()
    profiled = profile(package, Texts(windows[:8], windows[8:]), rank=64)
    predictor = profiled.package.manifest.predictor
    assert predictor is not None
    assert predictor.sides == ("up",)
    profiled.package.verify_fixed()
    assert all(layer.recall > 0.9 and layer.predicted < 0.95 for layer in predictor.by_layer)
    assert profiled.predicted_perplexity < 1.1 * profiled.exact_perplexity


def test_what_does_not_exceed_the_threshold_counts_as_silent(
    converted: Callable[[str, str], Package], tmp_path: Path
) -> None:
    package = Package.open(Path(shutil.copytree(converted("prosparse", "q8").path, tmp_path / "p")))
    windows = np.random.default_rng(5).integers(0, package.manifest.model.vocabulary, (10, 64)).tolist()
    manifest = profile(package, Texts(windows[:8], windows[8:]), rank=64).package.manifest
    assert manifest.trigger_fired_by_layer == pytest.approx(manifest.fired_by_layer, abs=1e-5)
    assert manifest.predictor is not None
    assert all(layer.recall > 0.9 and layer.predicted < 0.9 for layer in manifest.predictor.by_layer)


def test_masking_every_neuron_leaves_only_attention(tiny: Callable[[Activation], Package]) -> None:
    package = tiny("drelu")
    masked = ReferenceEngine(package, mask=lambda run: np.zeros(run.inner.shape, bool)).run([1, 2, 3])
    assert not masked.fired.any()
    assert np.isfinite(masked.logits).all()


def test_bad_requests_are_one_line_for_a_person(tiny: Callable[[Activation], Package], tmp_path: Path) -> None:
    relu = tiny("relu")
    texts = Texts([[1, 2, 3]], [[1, 2]])
    with pytest.raises(UserError, match=r"rank 48: takes multiples of 32"):
        profile(relu, texts, rank=48)
    with pytest.raises(UserError, match=r"--sides both: only with drelu"):
        profile(relu, texts, rank=32, sides="both")
    with pytest.raises(UserError, match=r"activation: silu neurons always fire"):
        profile(tiny("silu"), texts, rank=32)


@pytest.mark.parametrize(("name", "message"), [("bundles.bin", "layer 1, neurons"), ("fixed.safetensors", "sha256")])
def test_a_damaged_package_is_not_profiled(
    name: str, message: str, tiny: Callable[[Activation], Package], tmp_path: Path
) -> None:
    """A predictor fitted on damaged weights looks like any other."""
    package = Path(shutil.copytree(tiny("relu").path, tmp_path / "p"))
    data = bytearray((package / name).read_bytes())
    data[-5000] ^= 4
    (package / name).write_bytes(data)
    with pytest.raises(UserError, match=rf"{name}: .*{message}.*damaged"):
        profile(Package.open(package), Texts([[1, 2, 3]], [[1, 2]]), rank=32)


def test_the_table_of_a_profile_names_every_candidate() -> None:
    shares = {"recall": 0.97, "precision": 0.5, "predicted": 0.2}
    result = {
        "predictor": {"sides": ["gate"], "rank": 32, "quantization": "q8", "reads": "attention", "by_layer": [shares]},
        "predictor_bytes": 1000,
        "activity_by_layer": [0.1],
        "trigger_fired_by_layer": [0.2],
        "candidates": [{"sides": ["gate", "up"], "rank": 32, "predicted": 0.2, "by_layer": []}],
        "exact_perplexity": 8.0,
        "predicted_perplexity": 8.04,
        "warnings": ["recall is low: `neuronpipe profile`"],
    }
    page = verb.render(json.loads(json.dumps(result)))
    assert "97.0%" in page
    assert "1.94" in page
    assert "gate and up, rank 32: 20.0% of neurons predicted" in page
    assert "+0.50%" in page
    assert "warning: recall is low: `neuronpipe profile`" in page


def test_a_recall_below_the_wanted_one_is_warned_of(
    tiny: Callable[[Activation], Package], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `profile`, whose wish it was, and by `inspect`, which knows the default."""
    package = Path(shutil.copytree(tiny("drelu").path, tmp_path / "p"))
    letters = np.random.default_rng(5).integers(97, 123, 5000, dtype=np.uint8)
    (tmp_path / "text").write_bytes(letters.tobytes())
    words = ["profile", str(package), "--text", str(tmp_path / "text"), "--tokens", "512", "--json"]

    def warnings(*words: str) -> list[str]:
        assert main(list(words)) == 0
        return list(json.loads(capsys.readouterr().out)["warnings"])

    (said,) = warnings(*words, "--recall", "0.98", "--reads", "attention")
    assert re.search(r"recall on held-out text is 9\d\.\d%( to 9\d\.\d%)? in \d of 2 layers, below 98\.0%", said)
    assert "--rank" in said
    assert warnings(*words, "--recall", "0.6") == []
    (said,) = warnings("inspect", str(package), "--json")
    assert "in 2 of 2 layers, below 98.0%" in said
    assert main(["inspect", str(package)]) == 0
    assert "note: recall on held-out text" in capsys.readouterr().out


def test_a_silu_package_says_that_every_neuron_fires(
    tiny: Callable[[Activation], Package], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint(tmp_path / "source", replace(TINY, activation="silu"))
    assert main(["convert", str(source), "-o", str(tmp_path / "silu")]) == 0
    assert "note: silu: every neuron fires" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "silu")]) == 0
    assert "note: silu: every neuron fires" in capsys.readouterr().out
    assert main(["inspect", str(tiny("relu").path)]) == 0
    assert "note:" not in capsys.readouterr().out


def imported_file(package: Package, path: Path, **changes: np.ndarray) -> Path:
    """A predictor file that knows the gates exactly: relu(Ax) and relu(-Ax) together are Ax. Only for q8."""
    weights, model = PackageWeights(package), package.manifest.model
    unit = np.eye(model.width, dtype=np.float32)
    tensors = {}
    for layer in range(model.layers):
        gate = weights.neurons(layer)[0] * weights.vector(f"layers.{layer}.ffn_norm")
        tensors[f"model.layers.{layer}.mlp.predictor.fc1.weight"] = np.concatenate((unit, -unit)).astype(np.float16)
        tensors[f"model.layers.{layer}.mlp.predictor.fc2.weight"] = np.concatenate((gate, -gate), axis=1)
    save_file(tensors | changes, path)
    return path


def test_an_imported_predictor_is_read_from_the_residual_stream_and_calibrated(
    tiny: Callable[[Activation], Package], tmp_path: Path
) -> None:
    package = Package.open(Path(shutil.copytree(tiny("relu").path, tmp_path / "p")))
    random, model = np.random.default_rng(4), package.manifest.model
    windows = random.integers(0, model.vocabulary, (8, min(64, model.context_tokens))).tolist()
    imported = open_imported(imported_file(package, tmp_path / "fc.safetensors"), package.manifest)
    profiled = profile(package, Texts(windows[:6], windows[6:]), rank=32, recall=0.97, imported=imported)
    predictor = profiled.package.manifest.predictor
    assert predictor is not None
    assert (predictor.hidden, predictor.rank, predictor.sides) == ("relu", 2 * model.width, ("gate",))
    assert (predictor.reads, predictor.ranks) == ("residual", None)
    assert all(layer.recall > 0.95 and layer.precision > 0.95 for layer in predictor.by_layer)


def test_an_imported_predictor_reads_what_enters_layer_norm(tmp_path: Path) -> None:
    """The mean that LayerNorm takes away is no part of what it reads: that vector's ups decide, exactly."""
    recipe = RECIPES["opt"]
    package = convert(write_checkpoint(tmp_path / "source", recipe), tmp_path / "p", quantization="q8")
    weights, unit = PackageWeights(package), np.eye(recipe.width, dtype=np.float32)
    centre = unit - 1 / recipe.width
    stored = {}
    for n in range(recipe.layers):
        up = (weights.neurons(n)[0] * weights.vector(f"layers.{n}.ffn_norm")) @ centre
        stored[f"{n}.fc1.weight"] = np.concatenate((unit, -unit))
        stored[f"{n}.fc2.weight"] = np.concatenate((up, -up), axis=1)
    save_file(stored, tmp_path / "fc.safetensors")
    imported = open_imported(tmp_path / "fc.safetensors", package.manifest)
    random = np.random.default_rng(4)
    windows = random.integers(0, recipe.vocabulary, (8, 64)).tolist()
    texts = Texts(windows[:6], windows[6:])
    predictor = profile(package, texts, rank=32, recall=0.97, imported=imported).package.manifest.predictor
    assert predictor is not None
    assert predictor.reads == "residual"
    assert all(layer.recall > 0.9 and layer.precision > 0.7 for layer in predictor.by_layer)
    normed = profile(package, texts, rank=32, imported=imported, imported_reads_normed=True).package.manifest.predictor
    assert normed is not None
    assert normed.reads == "feed_forward"
    with pytest.raises(UserError, match="--reads attention: a trained predictor reads what it was trained on"):
        profile(package, texts, rank=32, imported=imported, reads="attention")


def test_predictors_of_a_mixtures_experts_are_imported_each_for_its_expert(tmp_path: Path) -> None:
    """--import was refused for mixtures. An expert's factors find its own gates, and no other's."""
    recipe = replace(RECIPES["turbosparse"], layers=1)
    package = convert(write_checkpoint(tmp_path / "source", recipe), tmp_path / "p", quantization="q8")
    weights, unit = PackageWeights(package), np.eye(recipe.width, dtype=np.float32)
    stored = {}
    for expert in range(recipe.experts):
        gate = weights.neurons(0, expert)[0] * weights.vector("layers.0.ffn_norm")
        place = f"model.layers.0.block_sparse_moe.experts.{expert}.predictor"
        stored[f"{place}.fc1.weight"] = np.concatenate((unit, -unit))
        stored[f"{place}.fc2.weight"] = np.concatenate((gate, -gate), axis=1)
    save_file(stored, tmp_path / "fc.safetensors")
    imported = open_imported(tmp_path / "fc.safetensors", package.manifest)
    windows = np.random.default_rng(4).integers(0, recipe.vocabulary, (16, 64)).tolist()
    texts = Texts(windows[:12], windows[12:])
    predictor = profile(package, texts, rank=32, recall=0.97, imported=imported).package.manifest.predictor
    assert predictor is not None
    assert (predictor.reads, predictor.rank) == ("residual", 2 * recipe.width)
    assert all(layer.recall > 0.9 and layer.predicted < 0.7 for layer in predictor.by_layer)
    del stored["model.layers.0.block_sparse_moe.experts.2.predictor.fc2.weight"]
    save_file(stored, tmp_path / "part.safetensors")
    with pytest.raises(UserError, match=r"fc2 of layer 0, expert 2 is missing; names end in N\.experts\.E\.fc2"):
        open_imported(tmp_path / "part.safetensors", package.manifest)


def test_what_cannot_be_imported_is_refused_by_name(tiny: Callable[[Activation], Package], tmp_path: Path) -> None:
    manifest = tiny("relu").manifest
    with pytest.raises(UserError, match=r"model_0\.pt: predictors are read from one safetensors file or .*; pickled"):
        open_imported(tmp_path / "model_0.pt", manifest)
    ordered = replace(manifest, layout=replace(manifest.layout, neuron_order="frequency"))
    with pytest.raises(UserError, match=r"stored by frequency"):
        open_imported(tmp_path / "fc.safetensors", ordered)
    wrong = {"model.layers.1.mlp.predictor.fc2.weight": np.zeros((5, 128), np.float32)}
    with pytest.raises(UserError, match=r"layer 1: fc1 \[128, 64\] and fc2 \[5, 128\] do not fit"):
        open_imported(imported_file(tiny("relu"), tmp_path / "wrong.safetensors", **wrong), manifest)
    save_file({"0.fc1.weight": np.zeros((32, 64), np.float32)}, tmp_path / "half.safetensors")
    with pytest.raises(UserError, match=r"fc2 of layer 0 is missing"):
        open_imported(tmp_path / "half.safetensors", manifest)


def test_one_low_recall_is_said_once() -> None:
    """It was said as "97.4% to 97.4%"."""
    quality = PredictorQuality(recall=0.95, precision=0.3, predicted=0.2)
    low = replace(quality, recall=0.9)

    def said(*layers: PredictorQuality) -> str | None:
        return low_recall(
            Predictor(
                rank=32,
                quantization="q8",
                reads="feed_forward",
                sides=("gate",),
                hidden="none",
                calibration_tokens=1,
                by_layer=layers,
            ),
            0.98,
        )

    assert "text is 95.0% in 2 of 2 layers" in str(said(quality, quality))
    assert "text is 90.0% to 95.0% in 2 of 2 layers" in str(said(quality, low))
