"""Predictors that lie in a checkpoint, dense or of a mixture, in one file or in shards, each of a rank of its own: they
come along with the conversion, and predicted mode computes by them what their definition says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from neuronpipe.launch.cli import main
from neuronpipe.plans.convert import conversion, convert
from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.conversion import Conversion, open_checkpoint
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.predictor.predictions import StoredPredictor
from neuronpipe.plans.reference.engine import LayerRun, ReferenceEngine
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import RECIPES, TINY, Array, Recipe, rounded, tokens, write_checkpoint
from tests.conformance.gguf_files import write_gguf
from tests.conformance.participants import Participants
from tests.conformance.test_powerinfer_conversion import write_opt
from tests.conformance.test_spec_logits import error_of
from tests.pipeline import Shell

DENSE = RECIPES["bamboo"]  # two shards
MIXTURE = RECIPES["turbosparse"]  # one file
CASES = {
    "dense, shards": DENSE,
    "dense, one file": replace(DENSE, shards=1, config={}),
    "mixture, one file": MIXTURE,
    "mixture, shards": replace(MIXTURE, shards=3),
}
# Keys and values are fp16 in an engine: of so many scores some lie so near 0 that they fall on its other side there.
# Relative error of the logits that comes of a few neurons more or fewer.
FEW_OTHERS = 0.02
PLACES = {
    "BambooForCausalLM": "model.layers.{}.mlp.predictor.fc{}.weight",
    "TurboSparseMixtralForCausalLM": "model.layers.{}.block_sparse_moe.experts.{}.predictor.fc{}.weight",
}


def rank_of(ffn: int) -> int:
    """Another one for each feed-forward, and not every one a multiple of 32."""
    return 40 + 24 * (ffn % 4)


def random_predictors(recipe: Recipe) -> dict[tuple[int, int], Array]:
    """(feed-forward, 1 or 2) -> fc1 or fc2 as the recipe's dtype stores them."""
    random = np.random.default_rng(9)
    made: dict[tuple[int, int], Array] = {}
    for ffn in range(recipe.layers * max(1, recipe.experts)):
        for matrix, shape in ((1, (rank_of(ffn), recipe.width)), (2, (recipe.neurons, rank_of(ffn)))):
            values = random.standard_normal(shape).astype(np.float32) * np.float32(shape[1] ** -0.5)
            made[ffn, matrix] = rounded(values, recipe.dtype)
    return made


def named(recipe: Recipe, factors: dict[tuple[int, int], Array]) -> dict[str, Array]:
    """By the names that they have in a checkpoint."""
    experts, place = max(1, recipe.experts), PLACES[recipe.architecture]
    return {
        place.format(*divmod(ffn, experts)[: 2 if recipe.experts else 1], matrix): values
        for (ffn, matrix), values in factors.items()
    }


def expected(package: Package, factors: dict[tuple[int, int], Array], text: list[int]) -> Array:
    """The reference engine's logits where fc2 . relu(fc1 . x) of the residual stream decides."""

    def mask(run: LayerRun) -> np.ndarray:
        scores = np.maximum(run.residual @ factors[run.ffn, 1].T, 0) @ factors[run.ffn, 2].T
        return np.asarray(scores > 0)

    return ReferenceEngine(package, mask=mask).run(text).logits


@pytest.mark.parametrize("case", CASES)
def test_predicted_mode_computes_what_the_checkpoints_predictors_say(case: str, tmp_path: Path) -> None:
    recipe, factors = CASES[case], random_predictors(CASES[case])
    source = write_checkpoint(tmp_path / "source", recipe, named(recipe, factors))
    package = convert(source, tmp_path / "p", quantization="f16")
    predictor, text = package.manifest.predictor, tokens(recipe)
    assert predictor is not None
    assert (predictor.reads, predictor.hidden, predictor.sides) == ("residual", "relu", ("gate",))
    assert predictor.ranks == tuple(-(-rank_of(ffn) // 32) * 32 for ffn in range(package.manifest.model.ffns))
    assert (predictor.calibration_tokens, predictor.by_layer) == (0, ())
    wanted = expected(package, factors, text)
    exact = ReferenceEngine(package).run(text).logits
    assert error_of(exact, wanted) > 10 * FEW_OTHERS  # they decide something
    for count, chunk in ((1, 1), (2, 5), (1, len(text))):
        logits = Participants(package, count=count, max_tokens=chunk, predicts=True).run(text, chunk)
        assert error_of(logits, wanted) < FEW_OTHERS
        assert (logits.argmax(axis=1) == wanted.argmax(axis=1)).all()


@pytest.mark.parametrize("quantization", ["q8", "q4"])
@pytest.mark.parametrize("recipe", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_the_engine_multiplies_quantized_predictors_as_the_reference_does(
    recipe: Recipe, quantization: str, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source", recipe, named(recipe, random_predictors(recipe)))
    package, text = convert(source, tmp_path / "p", quantization=quantization), tokens(recipe)  # type: ignore[arg-type]
    wanted = ReferenceEngine(package, mask=StoredPredictor(package).mask).run(text).logits
    logits = Participants(package, count=2, max_tokens=5, predicts=True).run(text, 5)
    assert error_of(logits, wanted) < 2 * FEW_OTHERS
    assert error_of(ReferenceEngine(package).run(text).logits, wanted) > 8 * FEW_OTHERS


@pytest.mark.parametrize("recipe", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_a_run_in_predicted_mode_gives_the_tokens_of_the_reference(
    recipe: Recipe, shell: Shell, tmp_path: Path
) -> None:
    factors = random_predictors(recipe)
    source = write_checkpoint(tmp_path / "source", recipe, named(recipe, factors))
    package = convert(source, tmp_path / "p", quantization="f16")
    text, made = tokens(recipe, 8), 6
    for _ in range(made):
        logits = expected(package, factors, text)
        text.append(int(logits[-1].argmax()))
    with shell.up(package.path, "--mode", "predicted", "--ffn-resident", "50%") as run:
        assert run.ask(text[:-made], made, ignore_end=True)["token_ids"] == text[-made:]


def test_predictors_follow_their_neurons_into_the_order_of_their_frequency(tmp_path: Path) -> None:
    recipe, factors = MIXTURE, random_predictors(MIXTURE)
    source = write_checkpoint(tmp_path / "source", recipe, named(recipe, factors))
    shares = np.random.default_rng(1).random((recipe.layers, recipe.experts, recipe.neurons), np.float32)
    np.save(tmp_path / "shares.npy", shares)
    package, ordered = (
        convert(source, tmp_path / name, quantization="f16", frequencies=frequencies)
        for name, frequencies in (("p", None), ("q", tmp_path / "shares.npy"))
    )
    text = tokens(recipe)

    def logits(one: Package) -> Array:
        return Participants(one, count=1, max_tokens=5, predicts=True).run(text, 5)

    assert error_of(logits(ordered), logits(package)) < 1e-4


def test_no_predictor_leaves_them(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", MIXTURE, named(MIXTURE, random_predictors(MIXTURE)))
    plain = convert(write_checkpoint(tmp_path / "plain", MIXTURE), tmp_path / "p")
    assert (
        main(["convert", str(source), "-o", str(tmp_path / "q"), "--no-predictor", "--name", plain.manifest.name]) == 0
    )
    package = Package.open(tmp_path / "q")
    assert package.manifest.predictor is None
    assert not package.predictor_path.exists()
    assert package.fixed_path.read_bytes() == plain.fixed_path.read_bytes()
    assert package.bundles_path.read_bytes() == plain.bundles_path.read_bytes()


def test_a_package_with_them_is_exactly_the_other_one_besides(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", DENSE, named(DENSE, random_predictors(DENSE)))
    package, plain = (convert(source, tmp_path / name, predictor=name == "p") for name in "pq")
    assert package.fixed_path.read_bytes() == plain.fixed_path.read_bytes()
    assert package.bundles_path.read_bytes() == plain.bundles_path.read_bytes()
    package.verify_fixed()


@pytest.mark.parametrize("writes", [1, 2, 3])
def test_an_interrupted_conversion_goes_on_with_the_predictors(
    writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "MAX_UNSAVED_WEIGHTS", 1)  # the work is kept after every piece
    source = write_checkpoint(tmp_path / "source", MIXTURE, named(MIXTURE, random_predictors(MIXTURE)))
    place = tmp_path / "place"
    place.mkdir()
    seen: list[tuple[int, int]] = []

    def interrupted(done: int, total: int) -> None:
        seen.append((done, total))
        if Conversion(checkpoint, quantization="q8").pieces_done(place) == writes:
            raise KeyboardInterrupt

    with open_checkpoint(source, Options()) as checkpoint, pytest.raises(KeyboardInterrupt):
        Conversion(checkpoint, quantization="q8").write(
            tmp_path / "a", overwrite=False, progress=interrupted, place=place
        )
    seen.clear()
    with open_checkpoint(source, Options()) as checkpoint:
        package = Conversion(checkpoint, quantization="q8").write(
            tmp_path / "a", overwrite=False, progress=lambda done, total: seen.append((done, total)), place=place
        )
    assert seen[-1][0] == seen[-1][1]
    whole = convert(source, tmp_path / "b", quantization="q8")
    assert package.predictor_path.read_bytes() == whole.predictor_path.read_bytes()
    assert package.manifest == whole.manifest


FC1, FC2 = PLACES["BambooForCausalLM"].format(1, 1), PLACES["BambooForCausalLM"].format(1, 2)
WRONG: dict[str, tuple[Callable[[dict[str, Array]], object], str]] = {
    "ranks that contradict each other": (
        lambda all: all.update({FC2: np.zeros((DENSE.neurons, 63), np.float32)}),
        r"model-0000\d-of-00002\.safetensors: model\.layers\.1\.mlp\.predictor\.fc2\.weight: has shape \[270, 63\]; .*"
        r"fc1 has rank 64; `--no-predictor`",
    ),
    "another width": (
        lambda all: all.update({FC1: np.zeros((64, 159), np.float32)}),
        r"model-0000\d-of-00002\.safetensors: model\.layers\.1\.mlp\.predictor\.fc1\.weight: has shape \[64, 159\]",
    ),
    "another number of neurons": (
        lambda all: all.update({FC2: np.zeros((269, 64), np.float32)}),
        r"predictor\.fc2\.weight: has shape \[269, 64\]; a predictor's .* fc2 \[270, rank\]",
    ),
    "no rank": (lambda all: all.update({FC1: np.zeros((0, 160), np.float32)}), r"fc1\.weight: has shape \[0, 160\]"),
    "a vector": (lambda all: all.update({FC1: np.zeros(160, np.float32)}), r"fc1\.weight: has shape \[160\]"),
    "no fc2": (lambda all: all.pop(FC2), r"model\.layers\.1\.mlp\.predictor\.fc2\.weight: the tensor is missing"),
    "no fc1": (lambda all: all.pop(FC1), r"model\.layers\.1\.mlp\.predictor\.fc1\.weight: the tensor is missing"),
    "a bias, which nobody computes": (
        lambda all: all.update({FC1.replace("weight", "bias"): np.zeros(64, np.float32)}),
        r"predictor\.fc1\.bias: a tensor that this architecture does not have",
    ),
    "values that are none": (
        lambda all: all.update({FC2: np.full((270, 64), np.nan, np.float32)}),
        r"predictor\.fc2\.weight: holds values that are not finite: damaged",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_predictors_that_do_not_fit_are_refused_by_name_and_nothing_is_left(case: str, tmp_path: Path) -> None:
    change, message = WRONG[case]
    stored = named(DENSE, random_predictors(DENSE))
    change(stored)
    source = write_checkpoint(tmp_path / "source", DENSE, stored)
    with pytest.raises(UserError, match=message) as caught:
        convert(source, tmp_path / "p")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(("threshold", "predicted"), [(None, True), (0.0, True), (-0.5, True), (0.5, False)])
def test_the_threshold_of_powerinfers_file_decides_from_its_value_on(
    threshold: float | None, predicted: bool, tmp_path: Path
) -> None:
    """All scores are 0: PowerInfer computes a neuron whose score is not below the threshold."""
    metadata = {} if threshold is None else {"powerinfer.sparse_threshold": threshold}
    shapes = {"fc1": (32, TINY.width), "fc2": (TINY.neurons, 32)}
    zeros = {f"blk.{n}.{name}.weight": np.zeros(shapes[name], np.float32) for n in (0, 1) for name in shapes}
    source = write_gguf(tmp_path / "m.gguf", TINY, powerinfer=True, extra=zeros, metadata=metadata)
    package, text = convert(source, tmp_path / "p", quantization="f16"), tokens(TINY)
    assert package.manifest.predictor is not None
    logits = Participants(package, count=1, max_tokens=1, predicts=True).run(text, 1)
    exact = Participants(package, count=1, max_tokens=1).run(text, 1)
    assert np.array_equal(logits, exact) == predicted


def test_inspect_convert_and_run_say_where_a_predictor_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shell: Shell
) -> None:
    source = write_checkpoint(tmp_path / "source", MIXTURE, named(MIXTURE, random_predictors(MIXTURE)))
    path = str(tmp_path / "p")
    assert main(["convert", str(source), "-o", path]) == 0
    note = r"note: the predictor is the checkpoint's own \(ranks 64 to 128, mean 88\).* never measured; .*--calibrate"
    assert re.search(note, capsys.readouterr().out)
    assert main(["inspect", path]) == 0
    page = capsys.readouterr().out
    assert "Predictor of gate, ranks 64 to 128, mean 88, q4, reads residual: from the checkpoint, never me" in page
    assert re.search(note, page)
    assert "  predictor " in page
    assert main(["plan", path, "--mode", "predicted"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "the predictor is assumed to name 13.0% of the neurons" in page
    assert "the predictor is the checkpoint's own (ranks 64 to 128, mean 88)" in page
    said = shell.call("run", path, "-p", "a", "-n", "1")
    assert (
        "the checkpoint's own (ranks 64 to 128, mean 88), with the threshold it was trained for; exact" in said.errors
    )


@pytest.mark.slow
def test_calibrating_keeps_the_factors_and_measures_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "source", MIXTURE, named(MIXTURE, random_predictors(MIXTURE)))
    package = convert(source, tmp_path / "p", quantization="q8")
    before = {
        name: package.predictor_path.read_bytes()[entry.start : entry.stop]
        for name, entry in (package.predictor or {}).items()
    }
    letters = np.random.default_rng(5).integers(97, 123, 5000, dtype=np.uint8)
    (tmp_path / "text").write_bytes(letters.tobytes())
    words = ["profile", str(package.path), "--text", str(tmp_path / "text"), "--tokens", "2048"]
    assert main([*words, "--calibrate", "--rank", "64"]) == 2
    assert "--calibrate: keeps the package's factors" in capsys.readouterr().err
    assert main([*words, "--calibrate", "--recall", "0.9"]) == 0
    measured = Package.open(package.path)
    old, new = package.manifest.predictor, measured.manifest.predictor
    assert old is not None
    assert new is not None
    losses = ("text", "held_out_tokens", "exact_perplexity", "predicted_perplexity")
    assert all(getattr(new, name) is not None for name in losses)
    assert replace(new, calibration_tokens=0, by_layer=(), **dict.fromkeys(losses)) == old
    assert len(new.by_layer) == MIXTURE.layers
    for name, entry in (measured.predictor or {}).items():
        same = measured.predictor_path.read_bytes()[entry.start : entry.stop] == before[name]
        assert same == (not name.endswith(".bias")), name
    assert main(["inspect", str(package.path)]) == 0
    assert "never measured" not in capsys.readouterr().out


def test_a_package_without_predictor_has_nothing_to_calibrate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = convert(write_checkpoint(tmp_path / "source", TINY), tmp_path / "p")
    (tmp_path / "text").write_text("some letters " * 200)
    assert main(["profile", str(package.path), "--text", str(tmp_path / "text"), "--calibrate"]) == 2
    assert "has no predictor that could be calibrated" in capsys.readouterr().err


def test_an_opt_of_powerinfer_brings_predictors_that_read_before_layer_norm(tmp_path: Path) -> None:
    """What LayerNorm takes away, its mean, they read."""
    recipe = RECIPES["opt"]
    random = np.random.default_rng(9)
    factors = {
        (ffn, matrix): random.standard_normal(shape).astype(np.float32)
        for ffn in range(recipe.layers)
        for matrix, shape in ((1, (64, recipe.width)), (2, (recipe.neurons, 64)))
    }
    factors = {key: rounded(values * np.float32(0.1), "F16") for key, values in factors.items()}
    more = {f"blk.{ffn}.fc{matrix}.weight": values for (ffn, matrix), values in factors.items()}
    package = convert(write_opt(tmp_path / "m.gguf", more=more), tmp_path / "p", quantization="f16")
    text = tokens(recipe)
    wanted = expected(package, factors, text)
    logits = Participants(package, count=1, max_tokens=5, predicts=True).run(text, 5)
    assert error_of(logits, wanted) < FEW_OTHERS
    assert error_of(ReferenceEngine(package).run(text).logits, wanted) > 10 * FEW_OTHERS
