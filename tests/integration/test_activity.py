"""`profile --activity` through the pipeline: what a run records is what the reference engine computes."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.activity_profile import ALWAYS
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.predictor import calibration_texts as texts
from neuronpipe.plans.reference.engine import LayerRun, ReferenceEngine

from tests.conformance.specs import SPECS, give_predictor, write_package
from tests.pipeline import Shell, eventually

TOKENS = 700
LETTERS = "".join(map(chr, np.random.default_rng(3).integers(97, 123, 4 * TOKENS)))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").write_text(LETTERS)
    return tmp_path / "text"


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "demo"))


def recorded(package: Package) -> np.ndarray:
    """How often a token wanted each neuron, [feed-forwards, neurons]."""
    model = package.manifest.model
    return np.stack(
        [
            np.frombuffer(package.activity.neurons("exact", 1, *divmod(ffn, model.experts)), "<u2") / ALWAYS
            for ffn in range(model.ffns)
        ]
    )


def computed(package: Package, windows: list[texts.ContextWindow]) -> np.ndarray:
    """The same by the reference engine."""
    model, fired = package.manifest.model, np.zeros((package.manifest.model.ffns, package.manifest.model.neurons))

    def observe(run: LayerRun) -> None:
        fired[run.ffn] += (run.values[model.trigger] > 0).sum(axis=0)

    ReferenceEngine(package, observe=observe).hidden(windows)
    return np.asarray(fired / sum(map(len, windows)))


def test_a_mixtures_run_records_what_the_reference_computes(shell: Shell, text: Path, tmp_path: Path) -> None:
    package = write_package(tmp_path / "mixture", SPECS["turbosparse"], "q8")
    words = ("profile", package.path, "--activity", "--text", text, "--tokens", TOKENS)
    said = shell.json(*map(str, words))
    (profile,) = said["profiles"]
    made = Package.open(package.path)
    windows = texts.activity_windows(made, texts.from_file(made, text, TOKENS), TOKENS)
    assert profile["tokens"] == sum(map(len, windows)) > 600
    assert set(profile["misses"]) == {"value", "expert"}
    assert said["id"] == made.manifest.id != package.manifest.id
    found, wanted = recorded(made), computed(made, windows)
    difference = np.abs(found - wanted).mean()
    assert difference < 0.002  # signs that rounding turned
    for axis in (0, 1):  # each neuron's own, and each expert's
        assert np.abs(found - np.roll(wanted, 1, axis)).mean() > 20 * difference
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mixture", "text"]
    page = shell.call("inspect", package.path).out
    assert f"Wanted neurons, mode exact, {profile['tokens']} tokens of text" in page
    assert "whole experts" in page


@pytest.mark.nightly
def test_predicted_mode_has_a_profile_of_its_own(shell: Shell, text: Path, tmp_path: Path) -> None:
    package, _ = give_predictor(write_package(tmp_path / "p", SPECS["gated layer norm"], "q8"), list(range(60)))
    words = ("profile", package.path, "--activity", "--text", text, "--tokens", "512")
    shell.json(*words)
    said = shell.json(*words, "--mode", "predicted")
    exact, predicted = said["profiles"]
    assert (exact["mode"], predicted["mode"]) == ("exact", "predicted")
    assert (set(exact["misses"]), set(predicted["misses"])) == ({"value"}, {"bundle"})
    assert exact["wanted_by_layer"] != predicted["wanted_by_layer"]


@pytest.mark.nightly
def test_an_interrupted_recording_goes_on_and_ends_as_if_nothing_had_been(
    shell: Shell, text: Path, tmp_path: Path
) -> None:
    whole, halted = (write_package(tmp_path / name, SPECS["many neurons"], "q8") for name in ("whole", "halted"))
    words = ("--activity", "--text", str(text), "--tokens", "600", "--json")
    tokens = tmp_path / ".halted.activity-exact" / "tokens.bin"
    process = shell.start("profile", halted.path, *words)
    assert eventually(lambda: tokens.exists() and tokens.stat().st_size > 0, 60)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert eventually(lambda: not shell.leftovers())
    done = shell.call("profile", halted.path, *words)
    assert "neuronpipe: goes on after " in done.errors
    assert done.code == 0
    assert not tokens.parent.exists()
    assert shell.call("profile", whole.path, *words).code == 0
    files = [(package.path / "activity.bin").read_bytes() for package in (whole, halted)]
    assert files[0] == files[1]


@pytest.mark.nightly
def test_the_demo_says_the_same_after_it_was_reordered(shell: Shell, demo: Path) -> None:
    ask = ("run", demo, "-p", "import os", "-n", "24", "--temperature", "0")
    before = shell.json(*ask)["token_ids"]
    said = shell.json("profile", demo, "--activity", "--reorder", "--tokens", "512")
    assert said["neuron_order"] == "frequency"
    assert shell.json(*ask)["token_ids"] == before
    assert shell.json(*ask, "--mode", "predicted")["token_ids"]


def test_texts_that_cannot_be_measured_on_are_refused(shell: Shell, demo: Path, tmp_path: Path) -> None:
    file = tmp_path / "words"
    for content, wanted in (
        (b"", "0 tokens; profiling needs 512 or more"),
        (b"few words", "tokens; profiling needs 512 or more"),
        (b"\x00" * 5000, "has zero bytes, so it is not a text"),
        (b"\xff\xfe" * 5000, "is no UTF-8 text: invalid start byte at byte 0"),
    ):
        file.write_bytes(content)
        said = shell.refused("profile", demo, "--activity", "--text", file)
        assert str(file) in said
        assert wanted in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "words"]
