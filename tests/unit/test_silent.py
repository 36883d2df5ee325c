"""Thresholds of SiLU models: set on one text, measured on another, written whole or not at all, never by accident."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.launch.cli import main
from neuronpipe.plans.convert import convert
from neuronpipe.plans.package.manifest import identity
from neuronpipe.plans.package.parsing.parse import parse_manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.predictor.calibration_texts import MIN_TOKENS, Texts, activity_windows, from_file
from neuronpipe.plans.predictor.profiling import perplexity
from neuronpipe.plans.predictor.thresholds import remove_thresholds, set_thresholds, threshold_mask
from neuronpipe.plans.reference.engine import LayerRun, ReferenceEngine
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray

from tests.conformance.checkpoints import TINY, write_checkpoint
from tests.conformance.specs import SPECS, strength, write_package

LETTERS = np.random.default_rng(5).integers(97, 123, 4000, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("silu")
    return convert(write_checkpoint(folder / "source", TINY), folder / "p", quantization="q8", activation="silu").path


@pytest.fixture
def package(made: Path, tmp_path: Path) -> Package:
    return Package.open(Path(shutil.copytree(made, tmp_path / "p")))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_bytes(LETTERS)
    return tmp_path / "text.txt"


def windows(seed: int, count: int, vocabulary: int = 300) -> list[list[int]]:
    values: list[list[int]] = np.random.default_rng(seed).integers(0, vocabulary, (count, 50)).tolist()
    return values


def values_by_layer(package: Package, texts: list[list[int]]) -> list[NDArray[np.float32]]:
    """|silu(gate)| of each layer's neurons, of all experts, in the exact model."""
    found: list[list[Any]] = [[] for _ in range(package.manifest.model.layers)]

    def collect(run: LayerRun) -> None:
        found[run.layer].append(strength(run).ravel())

    ReferenceEngine(package, observe=collect).hidden(texts)
    return [np.concatenate(layer) for layer in found]


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_a_layers_threshold_is_a_quantile_of_the_calibration_text(kind: str, package: Package, tmp_path: Path) -> None:
    """One threshold for all experts of a layer."""
    if kind == "mixture":
        package = write_package(tmp_path / "mixture", SPECS["mixtral"], "q8")
    calibration = windows(1, 6)
    told: list[tuple[int, int]] = []
    silent = set_thresholds(
        package,
        Texts(calibration, windows(2, 3)),
        share=0.6,
        text="t",
        progress=lambda done, total: told.append((done, total)),
    ).manifest.silent
    assert silent is not None
    assert told == sorted(told)
    assert (told[0][0], told[-1][0]) == (0, told[0][1])
    assert sum(0 < done < 450 for done, _ in told) >= 9  # in the first layer, too
    for layer, values in zip(silent.by_layer, values_by_layer(package, calibration), strict=True):
        assert (values < layer.threshold).mean() == pytest.approx(0.6, abs=0.001)
        assert layer.share == pytest.approx(0.6, abs=0.05)
    assert (silent.share, silent.text, silent.calibration_tokens, silent.held_out_tokens) == (0.6, "t", 300, 150)


def test_what_is_measured_is_measured_on_held_out_text_alone(package: Package) -> None:
    calibration, found = windows(1, 6), []
    for seed in (2, 3):
        held_out = windows(seed, 3)
        with_thresholds = set_thresholds(package, Texts(calibration, held_out), share=0.5, text="t")
        silent = with_thresholds.manifest.silent
        assert silent is not None
        for mask, said in ((None, silent.exact_perplexity), (threshold_mask(with_thresholds.manifest), None)):
            engine = ReferenceEngine(package, mask=mask)
            wanted = said or silent.thresholded_perplexity
            assert perplexity(engine, engine.hidden(held_out)[0], held_out) == pytest.approx(wanted, rel=1e-5)
        found.append(silent)
    one, other = found
    assert [layer.threshold for layer in one.by_layer] == [layer.threshold for layer in other.by_layer]
    assert one.exact_perplexity != other.exact_perplexity
    assert one.exact_perplexity != one.thresholded_perplexity


def test_taking_the_thresholds_away_leaves_the_package_as_it_was(package: Package) -> None:
    before = {path.name: path.read_bytes() for path in package.path.iterdir()}
    with_thresholds = set_thresholds(package, Texts(windows(1, 2), windows(2, 1)), share=0.5, text="t")
    assert with_thresholds.manifest.id != package.manifest.id
    assert Package.open(package.path).manifest == with_thresholds.manifest
    remove_thresholds(with_thresholds)
    assert {path.name: path.read_bytes() for path in package.path.iterdir()} == before


def test_a_full_disk_leaves_the_thresholds_that_were_there(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Texts(windows(1, 2), windows(2, 1))
    set_thresholds(package, texts, share=0.5, text="t")
    before = {path.name: path.read_bytes() for path in package.path.iterdir()}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"manifest\.json: cannot be written: No space left"):
        set_thresholds(Package.open(package.path), texts, share=0.7, text="t")
    assert {path.name: path.read_bytes() for path in package.path.iterdir()} == before


def test_a_damaged_package_gets_no_thresholds(package: Package) -> None:
    data = bytearray(package.fixed_path.read_bytes())
    data[-500] ^= 4
    package.fixed_path.write_bytes(data)
    with pytest.raises(UserError, match=r"fixed\.safetensors: .*damaged"):
        set_thresholds(Package.open(package.path), Texts(windows(1, 2), windows(2, 1)), share=0.5, text="t")


def test_profile_says_what_silence_costs_and_inspect_and_plan_say_it_again(
    package: Package, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", str(package.path), "--silent", "50%", "--text", str(text)]
    assert main([*words, "--json"]) == 0
    silent = json.loads(capsys.readouterr().out)["silent"]
    assert (silent["share"], silent["text"], len(silent["by_layer"])) == (0.5, "text.txt", 2)
    change = silent["thresholded_perplexity"] / silent["exact_perplexity"] - 1
    loss = f"exact ({change:+.2%}), on {silent['held_out_tokens']:,} held-out tokens of text.txt"
    assert main(words) == 0
    assert loss in capsys.readouterr().out
    assert main(["inspect", str(package.path)]) == 0
    page = capsys.readouterr().out
    assert loss in page
    assert f"{silent['by_layer'][1]['share']:.1%}" in page
    assert main(["inspect", str(package.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["silent"] == silent
    assert main(["plan", str(package.path), "--mode", "thresholded"]) == 0
    assert loss in capsys.readouterr().out
    assert main(["plan", str(package.path)]) == 0
    assert "mode exact" in capsys.readouterr().out
    assert main(["profile", str(package.path), "--silent", "off"]) == 0
    assert "has no thresholds now" in capsys.readouterr().out
    assert main(["plan", str(package.path), "--mode", "thresholded"]) == 2
    assert "--silent 50% --text FILE" in capsys.readouterr().err


@pytest.mark.parametrize("share", ["0%", "95.1%", "100%", "-5%", "50", "half", "nan", "", "on"])
def test_shares_that_make_no_sense_are_refused(
    share: str, package: Package, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(["profile", str(package.path), f"--silent={share}", "--text", str(text)], "argument --silent: ", capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 tokens; profiling needs 512 or more"),
        (b"too short", " tokens; profiling needs 512 or more"),
        (b"\x7fELF\xff\xfe\x00" * 200, "odd: is no UTF-8 text: invalid start byte at byte 4"),
        (None, "odd: cannot be read: No such file or directory"),
    ],
)
def test_texts_that_calibrate_nothing_are_refused(
    content: bytes | None, message: str, package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "odd").write_bytes(content)
    refused(["profile", str(package.path), "--silent", "50%", "--text", str(tmp_path / "odd")], message, capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "this package has no workload; name a calibration text with --text FILE"),
        (("--rank", "64", "--text", "TEXT"), "--silent and --rank: thresholds need no predictor"),
        (("--import", "x.safetensors", "--text", "TEXT"), "--silent and --import: thresholds need no predictor"),
        (("--tokens", "3", "--text", "TEXT"), "--tokens 3: expected 32 or more"),
    ],
)
def test_words_that_do_not_go_with_silence_are_refused(
    words: tuple[str, ...], message: str, package: Package, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(text) if word == "TEXT" else word for word in words]
    refused(["profile", str(package.path), "--silent", "50%", *given], message, capsys)


@pytest.mark.parametrize("silent", ["50%", "off"])
def test_neurons_of_other_models_are_silent_by_themselves(
    silent: str, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = convert(write_checkpoint(tmp_path / "source", TINY), tmp_path / "relu", quantization="q8").path
    message = "activation: --silent is for silu, and this model computes relu; take --mode exact or predicted"
    refused(["profile", str(target), "--silent", silent, "--text", str(text)], message, capsys)


def refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, code 2, and the package stays as it is."""
    manifest = Path(words[1]) / "manifest.json"
    before = manifest.read_bytes()
    assert main(words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert manifest.read_bytes() == before


@pytest.mark.parametrize("how", [("--silent", "50%"), ("--rank", "32"), ("--activity",), ("--reorder",)])
def test_a_package_that_cannot_be_written_is_refused_before_anything_is_measured(
    how: tuple[str, ...],
    package: Package,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was refused at the end. Root may write what is not writable, so that a read-only disk is pretended."""
    monkeypatch.setattr(os, "access", lambda path, mode: not (Path(path) == package.path and mode & os.W_OK))
    words = ["profile", str(package.path), *how, *(() if "--reorder" in how else ("--text", str(text)))]
    refused(words, f"{package.path}: cannot be written, and what is measured is kept there; copy it first", capsys)


@pytest.mark.parametrize("tokens", [512, 513, 700, 1030])
def test_a_fifth_of_a_short_text_is_held_out(tokens: int, package: Package, tmp_path: Path) -> None:
    """Not its last token: with 513 of them that was all there was to rate."""
    wide = replace(package.manifest.model, context_tokens=512)
    (tmp_path / "text").write_bytes(LETTERS)
    texts = from_file(
        Package(package.path, replace(package.manifest, model=wide)), tmp_path / "text", -(-4 * tokens // 5)
    )
    held_out = sum(map(len, texts.held_out))
    assert texts.calibration_tokens + held_out == tokens
    assert held_out == pytest.approx(tokens / 5, rel=0.02)
    assert max(map(len, [*texts.calibration, *texts.held_out])) <= 512


@pytest.mark.parametrize("tokens", [32, 64, 300])
def test_few_tokens_of_a_long_text_are_no_short_text(tokens: int, package: Package, text: Path) -> None:
    """--tokens 256 was refused with "320 tokens; profiling needs 512 or more", whatever the text had."""
    texts = from_file(package, text, tokens)
    assert texts.calibration_tokens + sum(map(len, texts.held_out)) == MIN_TOKENS
    windows = activity_windows(package, texts, tokens)
    assert sum(map(len, windows)) == tokens


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a model that is silent by itself": (
        lambda m: m["model"].update(activation="drelu"),
        r"silent\.by_layer: only silu has thresholds",
    ),
    "too few layers": (lambda m: m["silent"]["by_layer"].pop(), r"silent\.by_layer: 1 layers, but the model has 2"),
    "a threshold below zero": (
        lambda m: m["silent"]["by_layer"][1].update(threshold=-0.1),
        r"silent\.by_layer\[1\]\.threshold: -0\.1 is outside",
    ),
    "a share above one": (
        lambda m: m["silent"]["by_layer"][0].update(share=1.1),
        r"silent\.by_layer\[0\]\.share: 1\.1 is outside",
    ),
    "too much silence": (lambda m: m["silent"].update(share=0.99), r"silent\.share: 0\.99 is outside"),
    "a text that a terminal would obey": (lambda m: m["silent"].update(text="\x1b[2J"), r"silent\.text: expected"),
    "an unknown field": (lambda m: m["silent"].update(more=1), r"silent\.more: unknown field"),
    "no perplexity": (lambda m: m["silent"].pop("exact_perplexity"), r"silent\.exact_perplexity: missing"),
    "no list": (lambda m: m["silent"].update(by_layer=[1, 2]), r"silent\.by_layer\[0\]: expected an object, found 1"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_contradiction_is_refused_by_name(what: str, package: Package) -> None:
    set_thresholds(package, Texts(windows(1, 2), windows(2, 1)), share=0.5, text="t")
    values = json.loads((package.path / "manifest.json").read_bytes())
    change, message = CHANGES[what]
    change(values)
    del values["id"]
    with pytest.raises(UserError, match=message):
        parse_manifest(json.dumps({**values, "id": identity(values)}).encode(), "manifest.json")
