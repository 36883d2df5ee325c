"""Every kind of model that a description allows, against the reference engine: bits among ourselves, close to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from neuronpipe.launch.client import attach
from neuronpipe.launch.scoring import score, stored_logits
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import read_plan
from neuronpipe.plans.reference.engine import LayerRun, ReferenceEngine
from neuronpipe.protocol.messages.client import Finished
from neuronpipe.protocol.messages.request import Generate
from neuronpipe.protocol.run_directory import RunDirectory
from neuronpipe.services.steps.backend import Share, StepWork
from neuronpipe.services.steps.scored_tokens import Ratings
from numpy.typing import NDArray

from tests.conformance.participants import SNAPSHOT, Participants, Ranges
from tests.conformance.specs import SPECS, give_predictor, give_thresholds, strength, write_package
from tests.conformance.test_pipeline_logits import BOUNDS
from tests.pipeline import Shell, eventually

Packages = Callable[[str, str], Package]
CHUNK = 64
TEXT = np.random.default_rng(3).integers(0, 509, CHUNK + 6).tolist()  # chunks with a panel and without
CASES = [(name, "f16") for name in SPECS] + [
    (name, q) for name in ("opt", "ungated relu2", "parallel", "turbosparse", "gpt-oss", "glm") for q in ("q8", "q4")
]
CASES += [(name, q) for name in SPECS if name.startswith("latents") for q in ("q8", "q4", "q4k")]
CASES += [
    (name, q)
    for name in ("norms after", "mixture with norms after", "gemma", "heads of layers", "gemma 4")
    for q in ("q8", "q4")
]
RECURRENT = [name for name, model in SPECS.items() if model.is_recurrent]
CASES += [(name, "q4") for name in RECURRENT]
# In a mixture a token that goes to another expert, since inputs are rounded, changes the states of all later ones.
CASES += [(name, "q8") for name in RECURRENT if SPECS[name].experts == 1]
CASES += [(name, "q3") for name in ("many neurons", "turbosparse")]
CASES += [("parallel", "q4k"), ("turbosparse", "q4k"), ("opt", "q5k"), ("many neurons", "q6k")]
CASES += [("opt", "iq4"), ("turbosparse", "mxfp4"), ("gpt-oss", "mxfp4"), ("parallel", "q4h")]
CASES += [("slices", q) for q in ("q8", "q4", "q4k", "q3")] + [("one slice", "q4")]
CASES += [("starcoder2", "q8"), ("neox", "q4k"), ("cohere", "q4k")]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """packages(name of a description, quantization) -> its package; q3: of its gates."""
    folder = tmp_path_factory.mktemp("specs")

    @cache
    def package(name: str, quantization: str) -> Package:
        target = folder / f"{name.replace(' ', '-')}-{quantization}"
        return write_package(target, SPECS[name], cast(Quantization, quantization))

    return package


def error_of(logits: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Root mean square of the difference, relative to that of what is wanted."""
    return float(np.sqrt(np.square(logits - wanted).mean() / np.square(wanted).mean()))


@pytest.mark.parametrize(("name", "quantization"), CASES)
def test_every_kind_of_model_has_the_logits_of_the_reference_and_the_same_bits_on_every_path(
    name: str, quantization: str, packages: Packages
) -> None:
    package = packages(name, quantization)
    wanted = ReferenceEngine(package).run(TEXT).logits
    logits = Participants(package, count=1, max_tokens=1).run(TEXT, 1)
    error = error_of(logits, wanted)
    print(f"{name} {quantization}: relative rms {error:.5f}, deviation of logits {wanted.std():.2f}")
    assert error < BOUNDS["q4" if quantization == "q3" else quantization]
    plain: dict[str, Any] = {}
    blocks = package.manifest.layout.blocks
    by_turns: dict[str, Any] = {"partial_tokens": 5, "window_blocks": blocks}
    together: dict[str, Any] = {"window_blocks": blocks * package.manifest.model.most_experts}
    in_parts: dict[str, Any] = {"pipeline": False}
    cases = [(2, 1, plain), (3, 5, plain), (1, CHUNK, plain), (2, CHUNK, plain), (2, CHUNK, by_turns)]
    cases += [(2, 1, together), (3, 5, together), (2, CHUNK, {**together, "partial_tokens": 5})]
    for count, tokens, config in [*cases, (2, 1, in_parts), (2, CHUNK, in_parts)]:
        participants = Participants(package, count=count, max_tokens=tokens, **config)
        assert np.array_equal(logits, participants.run(TEXT, tokens)), (count, tokens, config)


@pytest.mark.parametrize(("workers", "rows"), [(1, 1), (1, 4), (2, 3), (3, 5), (3, CHUNK)])
def test_ratings_are_those_of_the_logits_however_few_rows_there_are(
    workers: int, rows: int, packages: Packages
) -> None:
    """Between two turns nobody may still claim pieces of the one before, nor overwrite what another reads."""
    package, text = packages("qwen3", "q8"), TEXT[:CHUNK]
    vocabulary = package.manifest.model.vocabulary
    logits = Participants(package, count=1, max_tokens=1).run(text, 1)
    wanted = Ratings(text[1:], 2)
    for first in range(len(text)):
        wanted.read(memoryview(logits[first : first + 1]).cast("B"), vocabulary, first, 1)
    participants = Participants(package, count=workers, max_tokens=len(text), logit_rows=rows)
    for _ in range(5):
        assert participants.rate(text, 2).ratings() == wanted.ratings()
    target, found = text[1], wanted.ratings()[0]
    row = logits[0].astype(np.float64)
    assert found.logprob == pytest.approx(row[target] - np.log(np.exp(row).sum()), abs=1e-9)
    assert list(found.likely) == np.argsort(-row, kind="stable")[:2].tolist()


@pytest.mark.parametrize("target", [-1, 1 << 20])
def test_a_target_that_is_no_token_is_refused(target: int, packages: Packages) -> None:
    with pytest.raises(ValueError, match="refused"):
        Participants(packages("qwen3", "q8"), count=1, max_tokens=2).rate([1, target], 0)


@pytest.mark.parametrize(
    ("name", "guesses"), [("mixtral", True), ("turbosparse", True), ("glm", True), ("smallthinker", False)]
)
@pytest.mark.parametrize("tokens", [1, 5])
def test_experts_are_guessed_while_flash_is_idle_and_change_no_bit(
    name: str, guesses: bool, tokens: int, packages: Packages
) -> None:
    """A router that reads the layer's input needs no guess: what it names is exact."""
    package = packages(name, "q8")
    wanted = Participants(package, count=1, max_tokens=1).run(TEXT, 1)
    idle, busy = (Participants(package, count=2, max_tokens=tokens, prefetch=True, hints=True) for _ in range(2))
    busy.in_flight[0] = 3
    for participants in (idle, busy):
        assert np.array_equal(participants.run(TEXT, tokens), wanted)
    asked, silent = idle.counters(), busy.counters()
    assert (silent["guessed"], silent["guessed_right"]) == (0, 0)
    assert (asked["guessed"] > 0) is guesses
    assert 0 <= asked["guessed_right"] <= asked["guessed"]


@pytest.mark.parametrize(
    ("name", "window", "in_step"), [("slices", 1, 8), ("slices", 2, 8), ("slices", 3, 6), ("one slice", 1, 1)]
)
def test_slices_are_read_ahead_from_the_next_layer_too(
    name: str, window: int, in_step: int, packages: Packages
) -> None:
    """Each counts once, but for those that a step begins with: the first, or the first layer's if all are open."""
    participants = Participants(packages(name, "q8"), count=2, max_tokens=1, prefetch=True, window_blocks=window)
    participants.run(TEXT[:4], 1)
    assert participants.counters()["foreseen"] == in_step, "of the last step"


@pytest.mark.parametrize(
    "name",
    ["deltanet", "mixture with deltanet", "kda", "mixture with kda and latents", "mixture with mamba", "convolutions"],
)
@pytest.mark.parametrize("first", [1, 2, 7])
def test_a_state_within_a_step_is_that_of_a_step_that_ends_there(name: str, first: int, packages: Packages) -> None:
    """The first tokens are fewer than a convolution spans, or more."""
    package = packages(name, "q8")
    short, whole = (Participants(package, count=2, max_tokens=20) for _ in range(2))
    wanted = Participants(package, count=1, max_tokens=1).run(TEXT[:20], 1)
    short.run(TEXT[:first], first)
    assert np.array_equal(whole.run(TEXT[:20], 20, snapshot_after=first), wanted)
    assert whole.states is not None
    assert short.states is not None
    assert np.array_equal(whole.states[SNAPSHOT], short.states[0])
    assert not np.array_equal(whole.states[SNAPSHOT], whole.states[0])


@pytest.mark.parametrize("tokens", [1, 5, CHUNK])
@pytest.mark.parametrize(
    ("name", "predicts"),
    [
        ("qwen3", False),
        ("gated layer norm", True),
        ("mixtral", False),
        ("smallthinker", True),
        ("glm", False),
        ("latents of a mixture", False),
        ("latents with relu", True),
        ("slices", False),
        ("one slice", False),
    ],
)
def test_who_takes_part_and_whose_blocks_are_which_may_change_with_every_step(
    name: str, tokens: int, predicts: bool, packages: Packages, tmp_path: Path
) -> None:
    """The engines stay; a step has one to three of them, who share all blocks, or some, or have their own, or none."""
    package = packages(name, "q8")
    if predicts:
        package, _ = give_predictor(write_package(tmp_path / "package", SPECS[name], "q8"), TEXT)
    blocks = package.manifest.layout.blocks
    everything = blocks * package.manifest.model.most_experts
    assert blocks >= 2 or package.manifest.layout.down_by_output
    half, rest = (0, blocks // 2), (blocks // 2, blocks)
    stories: list[Ranges] = [
        [(0, blocks)] * 3,
        [half, rest],
        [rest, half, rest],
        [(0, blocks)],
        [(1, blocks), (0, 1), (0, 0)],
        [(0, blocks), (0, blocks)],
    ]
    wanted = Participants(package, count=1, max_tokens=1, predicts=predicts).run(TEXT, 1)
    for config in (
        {},
        {"partial_tokens": 5, "window_blocks": blocks} if tokens > 5 else {"window_blocks": 1},
        {"window_blocks": everything},
    ):
        participants = Participants(package, count=3, max_tokens=tokens, predicts=predicts, **config)
        found = participants.run(TEXT, tokens, lambda number: stories[number % len(stories)])
        assert np.array_equal(wanted, found), config


@pytest.mark.parametrize("name", ["mixtral", "smallthinker"])
def test_no_expert_waits_for_another_where_a_layer_is_open(name: str, packages: Packages) -> None:
    """Nothing of the first layer is there: both experts are asked for. The second arrives first, and is computed."""
    package = packages(name, "q8")
    model, layout = package.manifest.model, package.manifest.layout
    wanted = Participants(package, count=1, max_tokens=1).run(TEXT[:1], 1)
    participants = Participants(package, count=1, max_tokens=1, window_blocks=layout.blocks * model.experts)
    participants.lose(range(model.experts * layout.clusters))
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(participants.run, TEXT[:1], 1)
        assert eventually(lambda: len(participants.asked_for()) == model.experts_per_token * layout.clusters)
        *_, last = sorted({cluster // layout.clusters for cluster in participants.asked_for()})
        sums = participants.partials
        sums[:] = np.nan
        participants.bring(range(last * layout.clusters, (last + 1) * layout.clusters))
        assert eventually(lambda: not np.isnan(sums[-1]).any())
        assert np.isnan(sums[0]).all()
        participants.bring(range(model.experts * layout.clusters))
        assert np.array_equal(found.result(30), wanted)


@pytest.mark.parametrize(
    "wrong",
    [
        {"participant": 1},
        {"participants": 0},
        {"sharer": 1},
        {"sharers": 2},
        {"sharers": 0},
        {"end_block": 1000},
        {"first_block": 3, "end_block": 2},
        {"logits_first": 1},
        {"logits_count": 2},
        {"tokens": [509]},
        {"positions": [-1]},
        {"sequences": [1]},
    ],
)
def test_a_step_that_contradicts_itself_is_refused(wrong: dict[str, Any], packages: Packages) -> None:
    package = packages("qwen3", "q8")
    participants = Participants(package, count=1, max_tokens=1)  # its arrays live as long as it does
    (participant,) = participants.all
    right = StepWork(
        number=0,
        epoch=0,
        sequences=[0],
        positions=[0],
        tokens=[1],
        logits_first=0,
        logits_count=1,
        share=Share(first_block=0, end_block=package.manifest.layout.blocks),
    )
    participant.compute(right)
    if wrong.keys() & Share.__annotations__.keys():
        wrong = {"share": dataclasses.replace(right.share, **wrong)}
    with pytest.raises(ValueError, match="refused"):
        participant.compute(dataclasses.replace(right, **wrong))


@pytest.mark.parametrize(
    ("name", "quantization"), [("opt", "q8"), pytest.param("qwen3", "f16", marks=pytest.mark.nightly), ("neox", "q4k")]
)
def test_the_pipeline_gives_those_bits_whatever_is_resident(
    name: str, quantization: str, packages: Packages, shell: Shell
) -> None:
    package = packages(name, quantization)
    wanted = Participants(package, count=1, max_tokens=1).run(TEXT, 1)
    for options in (("--workers", "1"), ("--workers", "2", "--ffn-resident", "50%")):
        for path in ("decode", "prefill"):
            assert np.array_equal(pipeline_logits(package, shell, path, options), wanted), (options, path)


def pipeline_logits(package: Package, shell: Shell, path: Any, options: tuple[str, ...]) -> NDArray[np.float32]:
    """Logits after each token of the text, from a run with these options."""
    file, out = shell.folder / f"{len(options)}-{path}.json", shell.folder / "logits.npy"
    shell.json("plan", package.path, "-o", file, *options)
    made = read_plan(file)
    with (
        shell.up(package.path, "--plan", file) as run,
        attach(run.path) as client,
        stored_logits(out, RunDirectory(run.path), package, len(TEXT)) as keep,
    ):
        score(client, TEXT, window_tokens=made.compute.context_tokens, path=path, keep=keep)
    return np.asarray(np.load(out))


def test_no_more_rows_of_up_are_read_than_gates_exceed_the_threshold(packages: Packages) -> None:
    package, exceed = packages("threshold", "f16"), {0.29: 0, 0.0: 0}

    def count(run: LayerRun) -> None:
        for threshold in exceed:
            exceed[threshold] += int((run.values["gate"] > threshold).sum())

    ReferenceEngine(package, observe=count).run(TEXT[:12])
    participants = Participants(package, count=1, max_tokens=12)
    participants.run(TEXT[:12], 12)
    counters = participants.counters()
    assert counters["fired"] == counters["up_rows"] == exceed[0.29] < 0.9 * exceed[0.0]


@pytest.mark.parametrize("name", ["opt", "ungated relu2"])
def test_without_a_gate_the_rows_of_down_are_wanted_only_where_a_neuron_fired(name: str, packages: Packages) -> None:
    package = packages(name, "f16")
    layout, layers = package.manifest.layout, package.manifest.model.layers
    fired: list[np.ndarray] = []
    ReferenceEngine(package, observe=lambda run: fired.append(run.inner != 0)).run(TEXT)
    by_token = np.stack(fired, axis=1)  # [tokens, layers, neurons]
    padding = layout.clusters * layout.cluster_neurons - by_token.shape[2]
    clusters = np.pad(by_token, ((0, 0), (0, 0), (0, padding))).reshape(*by_token.shape[:2], layout.clusters, -1)
    participants, shares = Participants(package, count=1, max_tokens=1), []
    for token in range(12):
        participants.run(TEXT[: token + 1], 1)
        counters = participants.counters()
        assert counters["trigger_clusters"] == layers * layout.clusters
        # A value next to zero may fall on either side.
        assert counters["value_clusters"] == pytest.approx(clusters[token].any(axis=-1).sum(), abs=1)
        assert counters["fired"] == pytest.approx(by_token[token].sum(), abs=3)
        assert counters["fired"] == counters["active"] == counters["down_rows"]
        assert counters["gate_rows"] == 0
        assert counters["up_rows"] == counters["neurons"]
        shares.append(counters["value_clusters"] / counters["trigger_clusters"])
    print(f"{name}: value parts of {np.mean(shares):.0%} of all clusters")
    assert name != "opt" or np.mean(shares) < 0.6


@pytest.mark.parametrize(
    "name", ["opt", "ungated relu2", "gated layer norm", "parallel", "turbosparse", "smallthinker"]
)
def test_a_predictor_of_the_trigger_alone_decides_who_takes_part(name: str, tmp_path: Path) -> None:
    package, wanted = give_predictor(write_package(tmp_path / "package", SPECS[name], "f16"), TEXT)
    logits = Participants(package, count=1, max_tokens=1, predicts=True).run(TEXT, 1)
    assert error_of(logits, wanted) < BOUNDS["f16"]
    assert error_of(logits, ReferenceEngine(package).run(TEXT).logits) > 10 * BOUNDS["f16"]  # it takes part
    for count, tokens in ((2, 1), (2, CHUNK)):
        run = Participants(package, count=count, max_tokens=tokens, predicts=True).run(TEXT, tokens)
        assert np.array_equal(run, logits)


@pytest.mark.parametrize(("name", "quantization"), [("qwen3", "f16"), ("mixtral", "f16"), ("qwen3", "q4")])
def test_neurons_below_their_layers_threshold_are_silent_whoever_shares_the_batch(
    name: str, quantization: Quantization, tmp_path: Path
) -> None:
    """In decode and in prefill, by any number of participants; and exact mode stays as it is."""
    plain = write_package(tmp_path / "package", SPECS[name], quantization)
    exact = Participants(plain, count=1, max_tokens=1).run(TEXT, 1)
    package, _ = give_thresholds(plain, TEXT)
    assert np.array_equal(Participants(package, count=1, max_tokens=1).run(TEXT, 1), exact)
    logits = Participants(package, count=1, max_tokens=1, thresholded=True).run(TEXT, 1)
    assert not np.array_equal(logits, exact)
    whole = {"window_blocks": package.manifest.layout.blocks}
    cases: list[tuple[int, int, dict[str, Any]]] = [(2, 1, {}), (3, 5, {}), (1, CHUNK, {}), (2, CHUNK, {})]
    cases += [(2, CHUNK, {"partial_tokens": 5, **whole}), (2, CHUNK, {"pipeline": False}), (2, 1, {"pipeline": False})]
    for count, tokens, config in cases:
        participants = Participants(package, count=count, max_tokens=tokens, thresholded=True, **config)
        assert np.array_equal(logits, participants.run(TEXT, tokens)), (count, tokens, config)


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_silent_neurons_are_those_of_the_reference_and_their_up_and_down_are_not_read(
    name: str, tmp_path: Path
) -> None:
    few = dataclasses.replace(SPECS[name], neurons=48)  # their values leave a gap for the threshold
    package, wanted = give_thresholds(write_package(tmp_path / "package", few, "f16"), TEXT)
    logits = Participants(package, count=1, max_tokens=1, thresholded=True).run(TEXT, 1)
    print(f"{name}: relative rms {error_of(logits, wanted):.5f}")
    assert error_of(logits, wanted) < BOUNDS["f16"]
    assert error_of(logits, ReferenceEngine(package).run(TEXT).logits) > 10 * BOUNDS["f16"]  # they take part
    assert package.manifest.silent is not None
    below, speak, all_of_them = [layer.threshold for layer in package.manifest.silent.by_layer], 0, 0

    def mask(run: LayerRun) -> NDArray[np.bool_]:
        nonlocal speak, all_of_them
        speaks = np.asarray(strength(run) >= below[run.layer])
        speak, all_of_them = speak + int(speaks.sum()), all_of_them + speaks.size
        return speaks

    ReferenceEngine(package, mask=mask).run(TEXT[:12])
    participants = Participants(package, count=1, max_tokens=12, thresholded=True)
    participants.run(TEXT[:12], 12)
    counters = participants.counters()
    assert counters["fired"] == counters["up_rows"] == counters["down_rows"] == speak
    assert 0.2 * all_of_them < speak < 0.8 * all_of_them < all_of_them <= counters["gate_rows"]


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.nightly), "mixtral"])
def test_the_pipeline_leaves_out_the_same_neurons_whatever_is_resident(name: str, tmp_path: Path, shell: Shell) -> None:
    package, _ = give_thresholds(write_package(tmp_path / "package", SPECS[name], "q8"), TEXT)
    wanted = Participants(package, count=1, max_tokens=1, thresholded=True).run(TEXT, 1)
    for options in (("--workers", "1"), ("--workers", "2", "--ffn-resident", "50%")):
        for path in ("decode", "prefill"):
            logits = pipeline_logits(package, shell, path, (*options, "--mode", "thresholded"))
            assert np.array_equal(logits, wanted), (options, path)


def test_a_gate_that_is_no_number_is_not_silent(tmp_path: Path) -> None:
    """A damaged weight must show in the result, not make its neuron disappear."""
    package, _ = give_thresholds(write_package(tmp_path / "package", SPECS["qwen3"], "f16"), TEXT)
    bundles = np.memmap(package.bundles_path, np.uint16, "r+")
    bundles[: package.manifest.model.width] = 0x7E00  # the first neuron's row of Gate
    del bundles
    logits = Participants(package, count=1, max_tokens=1, thresholded=True).run(TEXT[:2], 1)
    assert np.isnan(logits).all()


@pytest.mark.parametrize(
    "name",
    ["gated layer norm", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("smallthinker", "turbosparse"))],
)
def test_hints_of_a_predictor_change_no_bit_of_exact_mode(name: str, tmp_path: Path, shell: Shell) -> None:
    """A random predictor: most of its hints are wrong."""
    package, _ = give_predictor(write_package(tmp_path / "package", SPECS[name], "q8"), TEXT)
    wanted = Participants(package, count=1, max_tokens=1).run(TEXT, 1)
    for count, tokens in ((1, 1), (2, 5), (2, CHUNK)):
        hinted = Participants(package, count=count, max_tokens=tokens, predicts=True, prefetch=True, hints=True)
        assert np.array_equal(hinted.run(TEXT, tokens), wanted)
        assert hinted.counters()["hinted"] == 0  # everything is there
    options = ("--workers", "1", "--ffn-resident", "60%", "--hints")
    for path in ("decode", "prefill"):
        assert np.array_equal(pipeline_logits(package, shell, path, options), wanted)
    ask = Generate(request="test", tokens=tuple(TEXT[:8]), max_tokens=12, temperature=0.0, ignore_end=True)
    with shell.up(package.path, *options) as run, attach(run.path) as client:
        finished = next(message for message in client.request(ask) if isinstance(message, Finished))
    assert 0 < finished.decode["hinted_fired"] <= finished.decode["hinted"]
    refused = shell.refused("plan", package.path, "--hints", "--mode", "predicted")
    assert "--hints: those of a package's predictor, or of its routers, in exact mode" in refused
