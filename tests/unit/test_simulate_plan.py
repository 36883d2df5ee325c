"""A package simulated under its plan: the services' cache cluster by cluster, and the planner's costs."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from neuronpipe.launch.cli import main
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.activity.replacement_policies import Clock, Ids
from neuronpipe.plans.cost.activation_rates import rates
from neuronpipe.plans.cost.token_time import expected
from neuronpipe.plans.lab.devices.device_description import planner_device
from neuronpipe.plans.lab.devices.device_file import DeviceModel, read_device, this_machine
from neuronpipe.plans.lab.shapes.models import model_named
from neuronpipe.plans.lab.shapes.shape_manifest import manifest_of_shape
from neuronpipe.plans.lab.simulate.recording import Recording
from neuronpipe.plans.lab.simulate.residency import Region, SequenceDemand, planned_traffic
from neuronpipe.plans.lab.simulate.simulate import PlannedRun, SimulationOptions, sequences_of, simulate_plan
from neuronpipe.plans.lab.simulate.task_times import PlannedCosts
from neuronpipe.plans.lab.simulate.workload import LayerDemand, Workload, in_clusters
from neuronpipe.plans.lab.synth.shapes import SHAPES
from neuronpipe.plans.package.manifest import Manifest, Silent, SilentLayer
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Mode, Plan
from neuronpipe.plans.planner.device_facts import DeviceFacts, device_facts
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.plans.planner.search import UNLIMITED_BYTES
from neuronpipe.protocol.errors import UserError

from tests.unit.fixed_machine import machine


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return Package.open(DEMO).manifest


@pytest.fixture(scope="module")
def phone() -> DeviceModel:
    return read_device("oneplus-12")


def facts_of(phone: DeviceModel, manifest: Manifest) -> DeviceFacts:
    return device_facts(planner_device(phone, manifest))


def planned(phone: DeviceModel, manifest: Manifest, share: float, *, bundle: bool | None = None) -> Plan:
    return make_plan(manifest, facts_of(phone, manifest), PlanOptions(ffn_resident_share=share, bundle=bundle))


def steps(seed: int, tokens: int, layers: int, clusters: int) -> list[list[Ids]]:
    """The first clusters are wanted most."""
    random = np.random.default_rng(seed)
    shares = 0.9 * np.linspace(1, 0, clusters) ** 2
    return [
        [np.flatnonzero(random.random(clusters) < shares) + n * clusters for n in range(layers)] for _ in range(tokens)
    ]


def misses(region: Region, wanted: list[list[Ids]]) -> int:
    return sum(region.step(layer) for token in wanted for layer in token)


def test_a_region_without_a_reserve_misses_about_what_clock_does() -> None:
    wanted = steps(1, 120, 4, 256)
    region = Region(256, slots=512, reserve=0, pinned=[0] * 4)
    order = np.arange(1024).reshape(4, 256).T.reshape(-1)
    clock = Clock(order, 512, max_uses=7)
    assert misses(region, wanted) == pytest.approx(sum(clock.step(x) for token in wanted for x in token), rel=0.05)


def test_free_slots_kept_ready_hold_nothing_and_cost_misses() -> None:
    wanted = steps(2, 120, 4, 256)
    without = misses(Region(256, slots=512, reserve=0, pinned=[0] * 4), wanted)
    kept_free = misses(Region(256, slots=512, reserve=128, pinned=[0] * 4), wanted)
    fewer_slots = misses(Region(256, slots=384, reserve=0, pinned=[0] * 4), wanted)
    assert without < kept_free == pytest.approx(fewer_slots, rel=0.1)


def test_pinned_clusters_are_not_evicted() -> None:
    region = Region(64, slots=64, reserve=0, pinned=[16] * 2)
    for _ in range(10):
        region.step(np.arange(16, 64))
    assert region.step(np.arange(16)) == 0
    assert region.step(np.arange(64, 80)) == 0
    everything = Region(64, slots=128, reserve=32, pinned=[64] * 2)
    assert everything.step(np.arange(128)) == 0


def test_what_a_prompt_brings_is_not_counted_but_there_afterwards(phone: DeviceModel, manifest: Manifest) -> None:
    made = planned(phone, manifest, 0.6, bundle=False)
    layers, clusters = manifest.model.layers, manifest.layout.clusters
    last = [np.arange(clusters - 2, clusters) + n * clusters for n in range(layers)]
    cold = planned_traffic(manifest, made, [SequenceDemand([last])], 0)
    warm = planned_traffic(manifest, made, [SequenceDemand([last], prompt=last)], 0)
    assert cold.value_misses.sum() == 2 * layers
    assert warm.value_misses.sum() == 0
    assert warm.looked.shape == (1, layers)


def test_only_texts_after_the_first_ones_count(phone: DeviceModel, manifest: Manifest) -> None:
    made = planned(phone, manifest, 0.5)
    tokens = steps(3, 4, manifest.model.layers, manifest.layout.clusters)
    seen = planned_traffic(manifest, made, [SequenceDemand(tokens[:3]), SequenceDemand(tokens[3:])], 1)
    assert len(seen.looked) == 1
    assert seen.fire.sum() == sum(len(layer) for layer in tokens[3])


def test_a_sample_of_clusters_stands_for_all(phone: DeviceModel, manifest: Manifest) -> None:
    made, layers = planned(phone, manifest, 0.5), manifest.model.layers
    half = manifest.layout.clusters // 2
    every = [np.arange(half) + n * half for n in range(layers)]
    seen = planned_traffic(manifest, made, [SequenceDemand([every])], 0, sampled=half)
    assert seen.looked.sum() == layers * manifest.layout.clusters


def test_neighbours_in_the_order_of_frequency_make_a_cluster() -> None:
    layers = [LayerDemand(np.array([0, 1, 6]), np.ones(3, bool)), LayerDemand(np.array([8, 15]), np.ones(2, bool))]
    work = Workload([layers], np.arange(16), np.ones(16), 1.0, 8)
    ((first, second),), clusters = in_clusters(work, 3)
    assert clusters == 3
    assert first.tolist() == [0, 2]
    assert second.tolist() == [3, 5]
    ((first, _),), clusters = in_clusters(Workload([layers], np.arange(16), np.ones(16), 1.0, 4), 2)
    assert (clusters, first.tolist()) == (2, [0, 3])


def test_under_a_plan_time_is_what_the_planners_costs_say(phone: DeviceModel, manifest: Manifest) -> None:
    facts, made = facts_of(phone, manifest), planned(phone, manifest, 1.0)
    run = PlannedRun(device=phone, manifest=manifest, plan=made, facts=facts)
    texts, sampled = sequences_of(manifest, made.compute.mode, SimulationOptions(tokens=4), None)
    result, _ = simulate_plan(run, texts, 1, sampled=sampled, context_tokens=64, prompt_tokens=64)
    assert result.miss_rate == 0
    assert result.tokens_per_s == pytest.approx(made.expected.tokens_per_s, rel=0.25)
    slow = dataclasses.replace(facts, memory_speed=None, profile=None)
    with pytest.raises(UserError, match="were not measured"):
        simulate_plan(
            dataclasses.replace(run, facts=slow), texts, 1, sampled=sampled, context_tokens=64, prompt_tokens=64
        )


def test_a_loader_without_a_core_of_its_own_takes_the_workers_time(phone: DeviceModel, manifest: Manifest) -> None:
    def costs(device: DeviceModel | None) -> PlannedCosts:
        facts = device_facts(machine()) if device is None else facts_of(device, manifest)
        made = make_plan(manifest, facts, PlanOptions(ffn_resident_share=0.5))
        return PlannedCosts(manifest, made, facts.measured, batch=1, position_tokens=64, looked=1000.0, fire=100.0)

    assert costs(phone).read_values(8, 8).loader_s == 0
    assert costs(None).read_values(8, 8).loader_s > 0


def test_a_recording_of_other_clusters_is_refused(manifest: Manifest) -> None:
    layers = manifest.model.layers
    other = Recording(np.ones((3, layers, 1), dtype=np.uint8), np.ones((3, layers, 1), dtype=bool), 5, True, "other")
    with pytest.raises(UserError, match="of 5 clusters"):
        sequences_of(manifest, "exact", SimulationOptions(), other)


def test_a_package_is_simulated_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "this-machine", str(DEMO), "--ffn-resident", "50%", "--tokens", "8", "--json"]
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["resident"] == pytest.approx(0.5, abs=0.02)
    assert result["tokens_per_s"] > 0
    assert result["miss_rate"] > 0
    assert main(["simulate", "oneplus-12", str(DEMO), "--mode", "exact", "--policy", "powerinfer2"]) == 2
    assert "--mode exact" in capsys.readouterr().err


DEVICES = ("oneplus-12", "oneplus-ace-2", "pc")
IN_EVERY_RUN = {
    ("oneplus-12", "turbosparse-100m", "predicted", 0.3, 4), ("oneplus-12", "turbosparse-100m", "exact", 0.6, 1),
    ("oneplus-12", "qwen3-moe-100m", "exact", 0.3, 1), ("oneplus-12", "qwen3.5-moe-100m", "exact", 1.0, 4),
    ("oneplus-ace-2", "smallthinker-100m", "exact", 0.3, 4), ("pc", "turbosparse-100m", "exact", 0.6, 4),
    ("pc", "turbosparse-100m", "predicted", 1.0, 1), ("pc", "qwen3-moe-100m", "exact", 0.3, 4),
    ("oneplus-12", "qwen3-moe-100m", "exact", 0.6, 4), ("oneplus-ace-2", "turbosparse-mixtral-2b", "exact", 0.3, 1),
    ("oneplus-12", "nemotron-3-100m", "exact", 0.6, 1), ("pc", "granite-4-h-100m", "exact", 0.3, 1),
    ("oneplus-12", "smallthinker-100m", "exact", 0.6, 4),
}  # fmt: skip


def compared() -> Iterator[Any]:
    """Yield every shape in each mode that it has: thresholds need neurons that are not read as whole experts."""
    for device in DEVICES:
        for name, spec in SHAPES.items():
            modes = ["exact"] + ["predicted"] * (spec.activation == "drelu")
            for mode, share, batch in itertools.product(modes, (0.3, 0.6, 1.0), (1, 4)):
                case = (device, name, mode, share, batch)
                marks = [] if case in IN_EVERY_RUN else [pytest.mark.nightly]
                yield pytest.param(*case, marks=marks, id="-".join(map(str, case)))
    for device, share, batch in itertools.product(DEVICES, (0.3, 0.6, 1.0), (1, 4)):
        case = (device, "mistral-silu-7b", "thresholded", share, batch)
        yield pytest.param(*case, marks=[pytest.mark.nightly], id="-".join(map(str, case)))


def device_of(name: str, made_for: Manifest) -> tuple[DeviceModel, DeviceFacts]:
    if name == "pc":
        return this_machine(machine()), device_facts(machine())
    return read_device(name), facts_of(read_device(name), made_for)


@pytest.mark.parametrize(("device", "name", "mode", "share", "batch"), list(compared()))
def test_plan_and_simulation_expect_the_same_speed(
    device: str, name: str, mode: Mode, share: float, batch: int
) -> None:
    """Within 10 % where nothing is read, and within 20 % where reads queue."""
    made_for = manifest_of_shape(model_named(name))
    if mode == "thresholded":
        made_for = with_thresholds(made_for)
    simulated_device, facts = device_of(device, made_for)
    options = PlanOptions(
        memory_bytes=UNLIMITED_BYTES, ffn_resident_share=share, context_tokens=1024, mode=mode, sequences=batch
    )
    made = make_plan(made_for, facts, options)
    expects = expected(
        made_for, rates(made_for, mode), made.compute, made.memory, made.flash, *facts.measured,
        batch=batch, position_tokens=512,
    )  # fmt: skip
    assert expects.tokens_per_s is not None
    run = PlannedRun(device=simulated_device, manifest=made_for, plan=made, facts=facts)
    # A change of topic in fifty tokens is the rule; in twelve tokens it would decide about the misses.
    texts, sampled = sequences_of(made_for, mode, SimulationOptions(tokens=192, batch=batch), None)
    result, _ = simulate_plan(run, texts, 1, sampled=sampled, batch=batch, context_tokens=512, prompt_tokens=64)
    tolerance = 0.2 if expects.flash_reads_per_token else 0.1
    assert result.tokens_per_s == pytest.approx(expects.tokens_per_s, rel=tolerance)


def with_thresholds(plain: Manifest) -> Manifest:
    """The same package with SiLU, and with thresholds by which half of the neurons are silent."""
    layers = tuple(SilentLayer(threshold=0.1, share=0.5) for _ in range(plain.model.layers))
    return dataclasses.replace(
        plain,
        model=dataclasses.replace(plain.model, activation="silu"),
        silent=Silent(0.5, layers, "text", 1000, 250, 10.0, 10.2),
    )


def test_a_shape_on_a_phone_is_simulated_under_the_plan_that_it_would_have(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["qwen3-moe-100m", "--memory", "180MiB"]
    assert main(["simulate", "oneplus-12", *words, "--tokens", "12", "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert main(["plan", *words, "--device", "oneplus-12", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)["expected"]
    assert simulated["tokens_per_s"] == pytest.approx(expected["tokens_per_s"], rel=0.25)
    assert simulated["quantization"] == "q4k"
    assert 0 < simulated["miss_rate"] < 0.9
    assert simulated["flash_reads_per_token"] < 1000
