"""Activity profiles: recorded whole, counted right, kept in the package, and followed by every neuron's own data."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.native import lib
from neuronpipe.plans.activity.expert_prediction import guessed_experts
from neuronpipe.plans.activity.recorded_profile import MeasuredProfile, measure
from neuronpipe.plans.activity.recording import NO_EXPERT, RecordingFolder, token_record
from neuronpipe.plans.activity.reorder import reorder
from neuronpipe.plans.activity.stored_profile import add_profile
from neuronpipe.plans.cost.activation_rates import assumed_curve, rates
from neuronpipe.plans.inspect import describe, profile_lines, render
from neuronpipe.plans.package.activity_profile import ALWAYS, BATCHES, POLICIES, interpolated, neuron_bin_ends
from neuronpipe.plans.package.manifest import MANIFEST, identity
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.predictor.calibration_texts import Texts
from neuronpipe.plans.predictor.predictions import StoredPredictor
from neuronpipe.plans.predictor.profiling import profile
from neuronpipe.plans.reference.engine import LayerRun, ReferenceEngine
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray

from tests.conformance.specs import SPECS, give_predictor, write_package

Flags = NDArray[np.uint8]
WINDOWS = [list(range(3, 43)), list(range(100, 130)), list(range(200, 258))]
SEEN = lib.NP_TRIGGERED | lib.NP_FIRED | lib.NP_ACTIVE


def flags_of(package: Package, windows: Sequence[Sequence[int]]) -> list[list[Flags]]:
    """What neurons do by the reference engine, as a run shows it: of each token [layers * experts, neurons]."""
    model, layout = package.manifest.model, package.manifest.layout
    count, starts = sum(map(len, windows)), np.cumsum([0, *map(len, windows)])
    flags = np.zeros((count, model.ffns, layout.blocks * layout.block_neurons), np.uint8)

    def observe(run: LayerRun) -> None:
        fires = run.values[model.trigger] > model.activation_threshold if model.activation != "silu" else run.inner != 0
        own = lib.NP_TRIGGERED | fires * lib.NP_FIRED | (run.inner != 0) * lib.NP_ACTIVE
        flags[run.tokens, run.ffn, : model.neurons] = own

    ReferenceEngine(package, observe=observe).hidden(windows)
    return [list(flags[a:b]) for a, b in itertools.pairwise(starts)]


def measured(package: Package, windows: Sequence[Sequence[int]] = WINDOWS) -> MeasuredProfile:
    with RecordingFolder(package, "exact", windows) as folder:
        for window in flags_of(package, windows)[folder.windows_done :]:
            folder.add([token_record(token, package.manifest.model, "exact") for token in window])
        made = measure(package.manifest, folder.open_recording(), "exact", "a text")
        folder.remove()
    return made


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return write_package(tmp_path / "p", SPECS["gated layer norm"], "q8")


@pytest.fixture
def mixture(tmp_path: Path) -> Package:
    return write_package(tmp_path / "m", SPECS["turbosparse"], "q8")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with a profile, for copies."""
    package = write_package(tmp_path_factory.mktemp("kept") / "p", SPECS["gated layer norm"], "q8")
    return add_profile(package, measured(package)).path


@pytest.fixture
def profiled(kept: Path, tmp_path: Path) -> Package:
    return Package.open(Path(shutil.copytree(kept, tmp_path / "p")))


# ---- what is recorded -----------------------------------------------------------------------------------------------
def test_a_token_wants_what_fired_or_in_predicted_mode_what_was_predicted(mixture: Package) -> None:
    model, layout = mixture.manifest.model, mixture.manifest.layout
    flags = np.zeros((model.ffns, layout.blocks * layout.block_neurons), np.uint8)
    flags[1, :10], flags[1, 3], flags[1, 7] = lib.NP_TRIGGERED, SEEN, lib.NP_TRIGGERED | lib.NP_FIRED
    flags[3, 299], flags[3, 300] = SEEN, SEEN  # 300 is padding
    exact, predicted = (token_record(flags, model, mode) for mode in ("exact", "predicted"))  # type: ignore[arg-type]
    assert exact["expert"].tolist() == [[1, 3], [-1, -1]]
    assert exact["fired"].tolist() == [[2, 1], [0, 0]]
    assert exact["active"].tolist() == [[1, 1], [0, 0]]
    for record, wanted in ((exact, [3, 7]), (predicted, list(range(10)))):
        bits = np.unpackbits(record["wanted"][0], axis=1, count=model.neurons, bitorder="little")
        assert np.flatnonzero(bits[0]).tolist() == wanted
        assert np.flatnonzero(bits[1]).tolist() == [299]


def test_more_experts_than_compute_a_token_are_noticed(mixture: Package) -> None:
    model, layout = mixture.manifest.model, mixture.manifest.layout
    flags = np.full((model.ffns, layout.blocks * layout.block_neurons), SEEN, np.uint8)
    with pytest.raises(ValueError, match="layer 0: 4 experts computed one token"):
        token_record(flags, model, "exact")


def test_an_interrupted_recording_goes_on_after_its_last_whole_text(package: Package) -> None:
    shown = flags_of(package, WINDOWS)
    records = [[token_record(token, package.manifest.model, "exact") for token in window] for window in shown]
    with RecordingFolder(package, "exact", WINDOWS) as folder:
        folder.add(records[0])
        folder._file.write(records[1][0].tobytes() + b"half of a token")  # as a killed process leaves it
    with RecordingFolder(package, "exact", WINDOWS) as folder:
        assert folder.windows_done == 1
        for window in records[1:]:
            folder.add(window)
        tokens = folder.open_recording().tokens
        assert len(tokens) == sum(map(len, WINDOWS))
        assert tokens["wanted"].tobytes() == np.stack([t for w in records for t in w])["wanted"].tobytes()


@pytest.mark.parametrize("windows", [WINDOWS, WINDOWS[:1]])
def test_two_recordings_of_a_package_do_not_write_into_each_other(
    package: Package, windows: Sequence[Sequence[int]]
) -> None:
    """The same text twice, or another one, whose folder would take the place of the first."""
    shown = flags_of(package, WINDOWS)[0]
    with RecordingFolder(package, "exact", WINDOWS) as folder:
        with (
            pytest.raises(UserError, match="is being profiled by another command"),
            RecordingFolder(package, "exact", windows),
        ):
            pass
        folder.add([token_record(token, package.manifest.model, "exact") for token in shown])
        assert (folder.path / "tokens.bin").stat().st_size == folder.bytes * 40 // 128
    with RecordingFolder(package, "exact", windows):  # it has ended
        pass


def test_a_recording_of_another_text_or_package_is_not_gone_on_with(package: Package) -> None:
    first = [token_record(token, package.manifest.model, "exact") for token in flags_of(package, WINDOWS)[0]]
    for windows, other in (([WINDOWS[0], [5, 6]], package), (WINDOWS, _resealed(package))):
        with RecordingFolder(package, "exact", WINDOWS) as folder:
            folder.add(first)
        with RecordingFolder(other, "exact", windows) as folder:
            assert folder.windows_done == 0
            folder.remove()


def _resealed(package: Package) -> Package:
    manifest = replace(package.manifest, quantization_error={"gate": 0.5}, id="").sealed()
    return Package(package.path, manifest)


# ---- what is counted ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["package", "mixture"])
def test_frequencies_are_those_of_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    package: Package = request.getfixturevalue(kind)
    model = package.manifest.model
    flags = np.concatenate([np.stack(window) for window in flags_of(package, WINDOWS)])[:, :, : model.neurons]
    wanted = (flags & lib.NP_FIRED) != 0
    made = add_profile(package, measured(package))
    for batch in BATCHES:
        each = len(wanted) // batch
        union = np.logical_or.reduce([wanted[part * each : (part + 1) * each] for part in range(batch)])
        for ffn in range(model.ffns):
            layer, expert = divmod(ffn, model.experts)
            stored = np.frombuffer(made.activity.neurons("exact", batch, layer, expert), "<u2")
            np.testing.assert_allclose(stored / ALWAYS, union[:, ffn].mean(axis=0), atol=1e-5)
            chosen = np.logical_or.reduce(
                [flags[part * each : (part + 1) * each, ffn].any(axis=1) for part in range(batch)]
            )
            assert made.activity.expert("exact", batch, layer, expert) == pytest.approx(chosen.mean(), abs=1e-5)
            bins = made.activity.bins("exact", batch, layer, expert)
            weights = np.diff(neuron_bin_ends(model.neurons)) / model.neurons
            assert np.dot(bins, weights) == pytest.approx(union[:, ffn].mean(), abs=1e-4)
    for name, bit in (("fired_by_layer", lib.NP_ACTIVE), ("trigger_fired_by_layer", lib.NP_FIRED)):
        share = ((flags & bit) != 0).reshape(len(flags), model.layers, -1).sum(axis=(0, 2))
        share = share / (len(flags) * model.experts_per_token * model.neurons)
        assert getattr(made.manifest, name) == pytest.approx(tuple(share), abs=1e-5)


def test_reuse_is_counted_within_a_text_only(package: Package) -> None:
    flags = [np.stack(window)[:, :, : package.manifest.model.neurons] for window in flags_of(package, WINDOWS)]
    wanted = [(window & lib.NP_FIRED) != 0 for window in flags]
    again = sum((window[1:] & window[:-1]).sum(axis=(0, 2)) for window in wanted)
    share = again / sum(window[1:].sum(axis=(0, 2)) for window in wanted)
    assert measured(package).profile.reuse_by_layer == pytest.approx(tuple(share), abs=1e-5)


def test_the_best_of_all_policies_is_the_one_that_knows_the_text(mixture: Package) -> None:
    misses = measured(mixture).profile.misses
    assert misses is not None
    assert set(misses) == {"value", "expert"}
    for curves in misses.values():
        assert set(curves) == set(POLICIES)
        best = np.array(curves["optimal"])
        assert (np.diff(best[:, 1]) <= 0).all()
        for curve in curves.values():
            assert (curve[0], curve[-1]) == ((0, 1), (1, 0))
            assert (np.array(curve)[:, 1] >= best[:, 1] - 1e-9).all()


def test_miss_rates_lie_between_measured_points(mixture: Package) -> None:
    profile = measured(mixture).profile
    assert profile.misses is not None
    (x0, y0), (x1, y1) = profile.misses["value"]["clock"][5:7]
    assert profile.miss_rate("value", (x0 + x1) / 2) == pytest.approx((y0 + y1) / 2)
    assert (profile.miss_rate("value", 1.2), profile.miss_rate("bundle", 0.5)) == (0.0, None)


def test_a_miss_rate_at_a_measured_share_is_what_was_measured() -> None:
    """90 % resident, nothing missed: was shown as -0.0 %."""
    curve = ((0.0, 1.0), (0.75, 0.424147), (0.9, 0.0), (1.0, 0.0))
    assert [interpolated(curve, x) for x, _ in curve] == [y for _, y in curve]
    assert all(interpolated(curve, n / 1000) >= 0 for n in range(1001))


def choices(tokens: int, experts: int, follow: bool) -> NDArray[np.int32]:
    """Two of so many experts for each token in each of three layers: the next ones by number, or any."""
    random = np.random.default_rng(3)
    layers = [np.stack([random.permutation(experts)[:2] for _ in range(tokens)]) for _ in range(3)]
    if follow:
        layers = [(layers[0] + layer) % experts for layer in range(3)]
    return np.stack(layers, axis=1).astype(np.int32)


def test_experts_that_follow_those_of_the_layer_before_are_guessed() -> None:
    often, before = guessed_experts(choices(2000, 16, follow=True), 16)
    assert before[0] == often[0]
    assert before[1:] == (1.0, 1.0)
    assert max(often) < 0.2  # two of sixteen, all alike


def test_experts_that_follow_nothing_are_guessed_no_better_than_by_frequency() -> None:
    often, before = guessed_experts(choices(2000, 16, follow=False), 16)
    assert before == pytest.approx(often, abs=0.04)


def test_experts_nobody_looked_at_are_not_counted() -> None:
    chosen = choices(400, 16, follow=True)
    chosen[:, :, 1] = NO_EXPERT
    assert guessed_experts(chosen, 16)[1][1:] == (1.0, 1.0)


def test_what_a_mixtures_layers_tell_is_kept_and_shown(mixture: Package, package: Package) -> None:
    made = add_profile(mixture, measured(mixture))
    (profile,) = made.manifest.profiles
    assert len(profile.experts_by_frequency) == len(profile.experts_by_layer_before) == made.manifest.model.layers
    assert "a token's experts that as many guesses find" in "\n".join(profile_lines(describe(made)["profiles"]))
    assert measured(package).profile.experts_by_frequency == ()


# ---- what is kept ---------------------------------------------------------------------------------------------------
def test_the_profile_is_kept_replaced_and_shown(package: Package) -> None:
    made = add_profile(package, measured(package))
    assert made.manifest.id != package.manifest.id
    again = add_profile(made, measured(made, WINDOWS[:2]))
    assert [(one.mode, one.tokens) for one in again.manifest.profiles] == [("exact", 70)]
    again.verify_fixed()
    assert Package.open(again.path).manifest == again.manifest
    page = render(describe(again))
    assert "Wanted neurons, mode exact, 70 tokens of a text" in page
    assert sorted(path.name for path in again.path.parent.iterdir()) == ["p"]


def test_profiles_of_two_modes_stand_side_by_side(package: Package) -> None:
    exact = measured(package)
    half = replace(exact, profile=replace(exact.profile, mode="predicted", tokens=7))
    half.frequencies.neurons[:] /= 2
    whole = measured(package)
    made = add_profile(add_profile(package, half), whole)
    assert [one.mode for one in made.manifest.profiles] == ["exact", "predicted"]
    both = [np.frombuffer(made.activity.neurons(mode, 1, 1, 0), "<u2") for mode in ("exact", "predicted")]  # type: ignore[arg-type]
    np.testing.assert_allclose(both[0] / 2, both[1], atol=1)
    assert made.manifest.fired_by_layer == whole.fired_by_layer


def test_a_new_predictor_makes_the_profile_of_predicted_mode_void(tmp_path: Path) -> None:
    package, _ = give_predictor(write_package(tmp_path / "p", SPECS["gated layer norm"], "q8"), WINDOWS[0])
    exact = measured(package)
    package = add_profile(package, replace(exact, profile=replace(exact.profile, mode="predicted")))
    fitted = profile(package, Texts(WINDOWS * 8, WINDOWS), rank=32).package
    assert (fitted.manifest.profiles, (fitted.path / "activity.bin").exists()) == ((), False)
    both = add_profile(add_profile(fitted, exact), replace(exact, profile=replace(exact.profile, mode="predicted")))
    fitted = profile(both, Texts(WINDOWS * 8, WINDOWS), rank=32).package
    assert fitted.manifest.profiles == (exact.profile,)
    fitted.verify_fixed()


BAD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a mode twice": (lambda m: m["profiles"].append(m["profiles"][0]), r"profiles\[1\].mode.*has a profile already"),
    "no such mode": (lambda m: m["profiles"][0].update(mode="dense"), r"profiles\[0\].mode"),
    "a curve that ends early": (lambda m: m["profiles"][0].update(curve=[[0, 0], [0.5, 1]]), r"\.curve.*\[1, 1\]"),
    "a curve that turns back": (
        lambda m: m["profiles"][0].update(curve=[[0, 0], [0.5, 0.6], [0.5, 0.7], [1, 1]]),
        r"\.curve.*ascending",
    ),
    "a share above 1": (lambda m: m["profiles"][0].update(curve=[[0, 0], [2, 1]]), r"\.curve.*between 0 and 1"),
    "reuse of too few layers": (lambda m: m["profiles"][0].update(reuse_by_layer=[0.5]), r"\.reuse_by_layer"),
    "experts by one guess only": (
        lambda m: m["profiles"][0].update(experts_by_frequency=[0.5] * m["model"]["layer_kinds"][0]["layers"]),
        r"\.experts_by_layer_before.*together with experts_by_frequency",
    ),
    "misses without a policy": (lambda m: m["profiles"][0]["misses"]["value"].pop("lru"), r"misses.value.lru.*missing"),
    "an unknown unit": (lambda m: m["profiles"][0]["misses"].update(page={}), r"misses.page.*unknown field"),
    "a file too short": (lambda m: m["files"]["activity.bin"].update(bytes=5), r"files.activity.bin.bytes.*5, but"),
    "no file": (lambda m: m["files"].pop("activity.bin"), r"files.activity.bin.*missing"),
    "a file without profiles": (lambda m: m.pop("profiles"), r"files.activity.bin.*unknown field"),
}


@pytest.mark.parametrize("name", BAD)
def test_contradictions_are_refused_by_field(name: str, profiled: Package) -> None:
    change, wanted = BAD[name]
    manifest = json.loads((profiled.path / MANIFEST).read_text())
    change(manifest)
    manifest["id"] = identity({key: value for key, value in manifest.items() if key != "id"})
    (profiled.path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"manifest.json: .*{wanted}"):
        Package.open(profiled.path)


def test_a_damaged_file_is_refused_when_it_is_read(profiled: Package) -> None:
    data = bytearray((profiled.path / "activity.bin").read_bytes())
    data[100] ^= 1
    (profiled.path / "activity.bin").write_bytes(data)
    with pytest.raises(UserError, match=r"activity\.bin: does not match the manifest's sha256"):
        _ = Package.open(profiled.path).activity


def test_a_plan_uses_the_packages_own_curve(package: Package) -> None:
    made = add_profile(package, measured(package))
    (profile,) = made.manifest.profiles
    assumed = rates(package.manifest, "exact")
    assert assumed.curve == assumed_curve(assumed.value_read)
    own = rates(replace(made.manifest, layout=replace(made.manifest.layout, neuron_order="frequency")), "exact")
    x, y = profile.curve[8]
    assert own.activations_within(x) == pytest.approx(y)
    assert y != pytest.approx(rates(package.manifest, "exact").activations_within(x))


# ---- hot-first ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("spec", ["opt", "opt odd", "gated layer norm", "many neurons", "turbosparse", "smallthinker"])
def test_a_reordered_package_computes_the_same(spec: str, tmp_path: Path) -> None:
    """By the reference engine, to rounding: the same terms are added in another order. Biases follow their neurons."""
    text = list(range(50, 90))
    package = write_package(tmp_path / "p", SPECS[spec], "q8" if "odd" not in spec else "f16")
    before = ReferenceEngine(package).run(text).logits
    package = add_profile(package, measured(package))
    made = reorder(package, lambda done, all_: None)
    assert made.manifest.layout.neuron_order == "frequency"
    assert made.manifest.id != package.manifest.id
    made.verify_fixed()
    after = ReferenceEngine(made).run(text).logits
    np.testing.assert_allclose(after, before, atol=1e-3 * np.abs(before).max())
    assert (after.argmax(axis=1) == before.argmax(axis=1)).all()
    model = made.manifest.model
    for layer, expert in np.ndindex(model.layers, model.experts):
        stored = np.frombuffer(made.activity.neurons("exact", 1, layer, expert), "<u2")
        assert (np.diff(stored.astype(int)) <= 0).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p"]


def test_a_reordered_packages_frequencies_are_those_it_has_now(package: Package) -> None:
    made = reorder(add_profile(package, measured(package)), lambda done, all_: None)
    now = add_profile(made, measured(made))
    for layer in range(package.manifest.model.layers):
        first, second = (
            np.frombuffer(one.activity.neurons("exact", 4, layer, 0), "<u2").astype(int) for one in (made, now)
        )
        assert np.abs(first - second).max() <= 2 * ALWAYS // 31  # rounding may turn a sign or two
        assert np.mean(first != second) < 0.02


def test_predictor_rows_follow_their_neurons(tmp_path: Path) -> None:
    text = list(range(50, 90))
    package, before = give_predictor(write_package(tmp_path / "p", SPECS["turbosparse"], "q8"), text)
    made = reorder(add_profile(package, measured(package)), lambda done, all_: None)
    after = ReferenceEngine(made, mask=StoredPredictor(made).mask).run(text).logits
    np.testing.assert_allclose(after, before, atol=1e-3 * np.abs(before).max())


def test_what_a_cache_misses_of_clusters_is_forgotten_where_they_have_other_neurons(tmp_path: Path) -> None:
    package = write_package(tmp_path / "p", SPECS["turbosparse"], "q8")
    assert package.manifest.layout.cluster_neurons > 1
    made = reorder(add_profile(package, measured(package)), lambda done, all_: None)
    misses = made.manifest.profiles[0].misses
    assert misses is not None
    assert set(misses) == {"expert"}


def test_damage_does_not_get_new_checksums(profiled: Package) -> None:
    layout = profiled.manifest.layout
    with profiled.bundles_path.open("r+b") as file:
        file.seek(3 * layout.cluster_stride_bytes + 5)
        file.write(b"\xff\xfe")
    with pytest.raises(UserError, match=r"bundles\.bin: cluster 3 does not match its checksum"):
        reorder(profiled, lambda done, all_: None)
    assert Package.open(profiled.path).manifest == profiled.manifest
    assert os.listdir(profiled.path.parent) == ["p"]


def test_a_package_that_nobody_measured_is_not_reordered(package: Package) -> None:
    with pytest.raises(UserError, match="--activity"):
        reorder(package, lambda done, all_: None)
