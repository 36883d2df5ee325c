"""What a neural processor loses: measured, kept in the package, obeyed by runs and by plans, refused where it does not
fit."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.launch.arguments.plan_arguments import add_plan_arguments, plan_options
from neuronpipe.launch.cli import main
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.planning.package_argument import add_package_argument
from neuronpipe.launch.planning.plan import plan_for
from neuronpipe.launch.planning.prompt_backend import ON_CPU, PromptBackend, choose_prompt_backend
from neuronpipe.launch.planning.search import Subject
from neuronpipe.plans.measure.probe import probe
from neuronpipe.plans.package.manifest import MANIFEST, identity
from neuronpipe.plans.package.npu_section import NpuProfile, matrix_sizes
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan, backend_of
from neuronpipe.plans.planner.mode_choice import Quality, allows_npu
from neuronpipe.plans.predictor.calibration_texts import Texts
from neuronpipe.plans.predictor.profiling import perplexity
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.offload.npu.chips import chip_of
from neuronpipe.services.offload.npu.providers import Provider

from tests.conformance.participants import Participants
from tests.conformance.specs import SPECS, write_package

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from neuronpipe.services.offload.npu import graphs
from neuronpipe.services.offload.npu.accuracy_measurement import NOTICEABLE, keep, measure
from neuronpipe.services.offload.npu.graph_files import contexts_for, folder_of, write_graphs
from neuronpipe.services.offload.npu.layer_products import Products
from neuronpipe.services.offload.npu.sessions import Runtime

pytestmark = pytest.mark.slow  # nearly all measure a model first
CPU = Provider("cpu")
MODELS = {name: SPECS[name] for name in ("scaled", "turbosparse", "many neurons")}
MODELS["gated parallel"] = dataclasses.replace(SPECS["parallel"], gated=True)
TOKENS = np.random.default_rng(8).integers(0, 100, (6, 40)).tolist()
TEXTS = Texts(TOKENS[:4], TOKENS[4:])


@pytest.fixture(scope="module", params=MODELS)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Package, NpuProfile]:
    """A package, and its profile; nothing is kept."""
    package = write_package(tmp_path_factory.mktemp("measured") / "package", MODELS[request.param], "q8")
    return package, measure(package, TEXTS, Runtime(CPU).session, text="numbers")


@pytest.fixture
def profiled(tmp_path: Path) -> Package:
    """A package that keeps its profile, with static ranges."""
    package = write_package(tmp_path / "package", SPECS["scaled"], "q8")
    profile = measure(package, TEXTS, Runtime(CPU).session, text="numbers", scaling="static")
    return keep(package, profile)


def test_both_ways_are_near_the_exact_model(measured: tuple[Package, NpuProfile]) -> None:
    package, profile = measured
    engine = ReferenceEngine(package)
    hidden, _ = engine.hidden(TEXTS.held_out)
    # Both are float32 products of numpy's, whose order of sums depends on the batch and the processor.
    assert profile.exact_perplexity == pytest.approx(perplexity(engine, hidden, TEXTS.held_out), rel=1e-5)
    assert [loss.scaling for loss in profile.losses] == ["token", "static"]
    for loss in profile.losses:
        assert np.log(loss.perplexity) == pytest.approx(np.log(profile.exact_perplexity), rel=0.01)
        assert loss.agreement > 0.9
        assert 0 < min(loss.error_by_layer) <= max(loss.error_by_layer) < 0.03
    assert (profile.calibration_tokens, profile.held_out_tokens) == (160, 80)
    by_token, static = profile.losses
    noticeably = static.perplexity < by_token.perplexity * (1 - NOTICEABLE)
    assert profile.scaling == ("static" if noticeably else "token")


def test_ranges_hold_what_calibration_text_has(measured: tuple[Package, NpuProfile]) -> None:
    """Of its own text nothing is beyond them, and of inputs the greatest is at their end."""
    package, profile = measured
    again = measure(package, Texts(TEXTS.held_out, TEXTS.held_out), Runtime(CPU).session, text="numbers")
    assert again.losses[1].recomputed_share == 0
    assert {(one.rows, one.columns) for one in profile.ranges.matrices} == set(matrix_sizes(package.manifest.model))
    inputs: list[float] = []
    engine = ReferenceEngine(package, observe=lambda run: inputs.append(np.abs(run.feed_forward_input).max()))
    engine.hidden(TEXTS.held_out)
    found = again.ranges.neurons.inputs
    attention = again.ranges.of_matrix(package.manifest.model.qkv_rows, package.manifest.model.width).inputs
    assert found == pytest.approx(max(inputs)) or (package.manifest.model.parallel and found == attention)


def test_what_is_kept_is_read_again_and_obeyed(profiled: Package) -> None:
    assert profiled.manifest.npu is not None
    assert Package.open(profiled.path).manifest == profiled.manifest
    text = TOKENS[0] + TOKENS[1]  # more than one thread takes at once
    wanted = Participants(profiled, count=1, max_tokens=len(text)).run(text, len(text))
    neurons = 2 * profiled.manifest.layout.block_neurons

    def computed(package: Package, threads: int = 1) -> tuple[Any, float]:
        participants = Participants(package, count=2, max_tokens=len(text), external_products=True, product_blocks=2)
        products = Products(
            package.manifest, Runtime(CPU).session, neurons=neurons, max_tokens=len(text), threads=threads
        )
        rows = participants.run(text, len(text), multiply=products)
        return rows, products.counters()["recomputed_tokens"]

    static, again = computed(profiled)
    by_token = dataclasses.replace(profiled.manifest, npu=None)
    other, _ = computed(Package(profiled.path, by_token))
    assert again == 0
    assert np.array_equal(computed(profiled, threads=3)[0], static)
    assert not np.array_equal(static, other)
    spread = wanted.std(axis=1)
    for rows in (static, other):
        assert (np.sqrt(np.mean(np.square(rows - wanted), axis=1)) / spread).max() < 0.04
    narrow = dataclasses.replace(profiled.manifest.npu.ranges.neurons, inputs=0.1)
    ranges = dataclasses.replace(profiled.manifest.npu.ranges, neurons=narrow)
    narrowed = dataclasses.replace(profiled.manifest, npu=dataclasses.replace(profiled.manifest.npu, ranges=ranges))
    rows, again = computed(Package(profiled.path, narrowed))
    assert again >= len(text)  # inputs beyond the range are the engine's
    assert (np.sqrt(np.mean(np.square(rows - wanted), axis=1)) / spread).max() < 0.04


def test_contexts_of_other_ranges_are_refused(profiled: Package) -> None:
    chip, before = chip_of("57"), dataclasses.replace(profiled.manifest, npu=None)
    write_graphs(folder_of(profiled.path, chip, 64), before, 64, chip=chip, qnn="1", prepare=lambda graph: b"")
    assert contexts_for(profiled.path, before, chip, 64, "1") is not None
    with pytest.raises(UserError, match=r"scaling: 'token' does not fit; here it is 'static'; compile again: `neuronp"):
        contexts_for(profiled.path, profiled.manifest, chip, 64, "1")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda npu: npu["ranges"]["matrices"][0].update(rows=8), "npu.ranges.matrices: 8 x .* do not fit the model"),
        (lambda npu: npu["ranges"]["neurons"].update(gate=0.0), "npu.ranges.neurons.gate: 0.0 is not above 0"),
        (lambda npu: npu["ranges"]["neurons"].pop("up"), "npu.ranges.neurons.up: missing"),
        (
            lambda npu: npu["ranges"]["matrices"][0].update(inputs=float("1e300")),
            r"npu.ranges.matrices\[0\].inputs: 1e\+300 is not above 0",
        ),
        (
            lambda npu: npu["losses"][0]["error_by_layer"].pop(),
            r"npu.losses\[0\].error_by_layer: expected 3 numbers, one for each layer",
        ),
        (lambda npu: npu["losses"].pop(), "npu.losses: expected those of token and static"),
        (lambda npu: npu.update(scaling="own"), "npu.scaling: 'own' is not one of token, static"),
        (lambda npu: npu.update(other=1), "npu.other: unknown field"),
    ],
)
def test_a_range_table_that_does_not_fit_is_refused(
    profiled: Package, change: Callable[[dict[str, Any]], object], why: str
) -> None:
    file = profiled.path / MANIFEST
    values = json.loads(file.read_text())
    del values["id"]
    change(values["npu"])
    file.write_text(json.dumps(values | {"id": identity(values)}))
    with pytest.raises(UserError, match=rf"manifest\.json: {why}.*measure again: `neuronpipe profile PACKAGE --npu`$"):
        Package.open(profiled.path)


def lossy(package: Package, share: float) -> Package:
    """As if it had lost so much."""
    npu = package.manifest.npu
    assert npu is not None
    losses = tuple(dataclasses.replace(one, perplexity=npu.exact_perplexity * (1 + share)) for one in npu.losses)
    return Package(package.path, dataclasses.replace(package.manifest, npu=dataclasses.replace(npu, losses=losses)))


def test_plans_take_a_neural_processor_where_the_wish_allows_its_loss(profiled: Package) -> None:
    def chip() -> str:
        return "SM8650"

    unmeasured = Package(profiled.path, dataclasses.replace(profiled.manifest, npu=None))
    wishes: tuple[Quality | None, ...] = (None, "exact", "predicted")
    assert all(choose_prompt_backend(lossy(profiled, 0.0), wish, chip) == ON_CPU for wish in wishes)
    assert choose_prompt_backend(lossy(profiled, 0.004), 0.005, lambda: None) == ON_CPU
    assert choose_prompt_backend(lossy(profiled, 0.004), 0.005, chip) == PromptBackend(
        "onnx:qnn",
        "prompts go to SM8650's neural processor: perplexity +0.400% measured, with --quality 0.5%",
    )
    worse = choose_prompt_backend(lossy(profiled, 0.006), 0.005, chip)
    assert worse.backend is None
    assert "would lose more than is allowed: perplexity +0.600%" in worse.reason
    never = choose_prompt_backend(unmeasured, 0.005, chip)
    assert never.backend is None
    assert f"`neuronpipe profile {profiled.path} --npu` measures it" in never.reason
    assert not allows_npu(unmeasured.manifest, 0.5)


def test_a_plan_sends_prompts_where_it_was_found_that_it_may(profiled: Package) -> None:
    """The test double stands for a device's. What is asked for comes first."""
    parser = argparse.ArgumentParser()
    add_package_argument(parser)
    add_plan_arguments(parser)

    def made(*words: str) -> Plan:
        subject = Subject(
            manifest=profiled.manifest,
            read_activity=profiled.read_activity,
            device=probe(profiled.path),
            prompts=PromptBackend("onnx:cpu", "prompts go elsewhere"),
        )
        arguments = parser.parse_args([str(profiled.path), *words])
        return plan_for(subject, plan_options(arguments), several=False, gateway=False).plan

    plan = made("--quality", "1%")
    assert backend_of("prefill", plan.compute.processes) == "onnx:cpu"
    assert "prompts go elsewhere" in plan.reasons
    asked = made("--quality", "1%", "--backend", "prefill=cpu")
    assert backend_of("prefill", asked.compute.processes) == "cpu"


def test_profiling_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "package"
    shutil.copytree(DEMO, package)
    assert main(["profile", str(package), "--npu", "--tokens", "192", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["id"] == Package.open(package).manifest.id
    assert abs(said["npu"]["loss_share"]) < 0.005
    assert [loss["agreement"] > 0.97 for loss in said["npu"]["losses"]] == [True, True]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--scaling", "static"], "--scaling: says something about --npu; give that too"),
        (["--npu", "--rank", "32"], "--npu and --rank: have nothing to do with each other"),
        (["--npu", "--activity"], "--npu and --activity: have nothing to do with each other"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    assert main(["profile", str(DEMO), *words]) == 2
    assert why in capsys.readouterr().err


def test_a_model_that_no_neural_processor_computes_here_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = write_package(tmp_path / "silu", SPECS["qwen3"], "q8")
    assert main(["profile", str(package.path), "--npu"]) == 2
    assert "this model has silu" in capsys.readouterr().err


def test_measured_ranges_have_a_margin() -> None:
    ranges = graphs.NeuronRange(inputs=2.0, gate=3.0, up=4.0, hidden=5.0, outputs=6.0)
    shape = graphs.FeedForward(64, 64, "relu", ranges)
    assert shape.inputs.step * graphs.MAX_INTEGER / 2 == pytest.approx(1.3 * 2.0, rel=1e-4)
    assert shape.gate.step * graphs.MAX_INTEGER == pytest.approx(1.3 * 3.0)
    assert shape.outputs.step * graphs.MAX_INTEGER / 2 == pytest.approx(1.3 * 6.0, rel=1e-4)
