"""What a device profile says of an accelerator: its figures, its file, its page; and what it is measured on."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.profile.accelerator import accelerator_options
from neuronpipe.launch.profile.picture import draw
from neuronpipe.launch.profile.text_report import render
from neuronpipe.native import ffi, lib
from neuronpipe.plans.cost.accelerator_cost import AcceleratorCost, OffloadedWork
from neuronpipe.plans.device.accelerator import (
    ACCELERATOR_VERSION,
    AcceleratorProfile,
    Copy,
    Launch,
    LayerCall,
    OffloadedPoint,
    RunOverhead,
)
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.profile import parse_profile
from neuronpipe.plans.device.profile_difference import compare_profiles
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

from tests.opencl import require_opencl
from tests.unit.test_device_profile import profile

GB, KIB = 1e9, 1 << 10


def figure(median: float) -> Figure:
    return Figure(median=median, spread=0.01)


def accelerator(**changes: Any) -> AcceleratorProfile:
    """Twice as fast for four texts, and for half of the neurons instead of a tenth."""
    place: dict[str, Any] = {"quantization": "q4", "row_weights": 4096}
    made = AcceleratorProfile(
        version=ACCELERATOR_VERSION,
        backend="opencl",
        name="Fast GPU",
        memory_bytes=8 << 30,
        max_buffer_bytes=2 << 30,
        shares_memory=False,
        is_processor=False,
        launches=(Launch(us=figure(10)),),
        copies=(
            Copy(back=False, copy_bytes=4 * KIB, bytes_per_s=figure(4096 / 10e-6)),
            Copy(back=False, copy_bytes=64 * KIB, bytes_per_s=figure(65536 / 30e-6)),
            Copy(back=True, copy_bytes=4 * KIB, bytes_per_s=figure(0.5 * GB)),
        ),
        visits=(
            LayerCall(texts=1, routed=False, us=figure(50)),
            LayerCall(texts=4, routed=False, us=figure(80)),
            LayerCall(texts=1, routed=True, us=figure(90)),
        ),
        held=tuple(
            OffloadedPoint(
                kind="exact", share=share, texts=texts, bytes_per_s=figure(100 * GB * texts**0.5 * factor), **place
            )
            for share, factor in ((0.1, 1.0), (0.5, 2.0))
            for texts in (1, 4)
        ),
        in_runs=(RunOverhead(mode="exact", us=figure(25)),),
    )
    return dataclasses.replace(made, **changes)


def test_between_its_points_are_lines() -> None:
    one = accelerator()
    q4: dict[str, Any] = {"quantization": "q4", "row_weights": 4096}
    assert one.offloaded_bytes_per_s("exact", 1, 0.1, **q4) == pytest.approx(100 * GB)
    assert one.offloaded_bytes_per_s("exact", 2, 0.1, **q4) == pytest.approx(100 * GB * 2**0.5)
    assert one.offloaded_bytes_per_s("exact", 9, 0.9, **q4) == pytest.approx(400 * GB)
    with pytest.raises(KeyError, match="offloaded blocks of q8"):
        one.offloaded_bytes_per_s("exact", 1, 0.1, quantization="q8", row_weights=4096)
    assert one.layer_call_us(1, routed=False) == pytest.approx(50)
    assert one.layer_call_us(2, routed=False) == pytest.approx((50 * 80) ** 0.5)
    assert one.layer_call_us(4, routed=True) == pytest.approx(90)
    assert one.copy_us(4 * KIB, back=False) == 0, "a visit has the smallest copies already"
    assert one.copy_us(64 * KIB, back=False) == pytest.approx(20)
    assert (one.run_overhead_us("exact"), one.run_overhead_us("predicted")) == (25, 0)
    assert one.copy_us(1 << 20, back=True) == pytest.approx(1e6 * ((1 << 20) - 4096) / (0.5 * GB))


def test_a_profile_keeps_it_and_is_good_without_it() -> None:
    whole = profile(accelerator=accelerator())
    assert parse_profile(whole.to_json().encode(), "p.json") == whole
    values = json.loads(profile().to_json())
    del values["accelerator"]
    assert parse_profile(json.dumps(values).encode(), "p.json") == profile()
    assert whole.spread == profile().spread, "what others keep it from says nothing of the machine"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 1}, "version: 1, but this program reads 2; measure again with `neuronpipe profile device`"),
        ({"memory_bytes": 0}, "memory_bytes 0 is not above zero"),
        ({"visits": []}, "visits: is empty"),
        ({"launches": []}, "launches: 0 points"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_a_bad_one_is_refused_by_its_field(change: dict[str, Any], why: str) -> None:
    values = json.loads(profile(accelerator=accelerator()).to_json())
    values["accelerator"] |= change
    with pytest.raises(UserError, match=r"p\.json: field 'accelerator") as refused:
        parse_profile(json.dumps(values).encode(), "p.json")
    assert why in str(refused.value)


def test_copies_go_both_ways() -> None:
    with pytest.raises(ValueError, match="copies: there are none back"):
        accelerator(copies=accelerator().copies[:2])


def test_figures_of_another_device_are_other_figures() -> None:
    one = profile(accelerator=accelerator())
    slower = accelerator(launches=(Launch(us=figure(20)),))
    (change,) = [
        change for change in compare_profiles(one, profile(accelerator=slower)).changes if change.beyond_spread
    ]
    assert change.what == "accelerator.launches: device Fast GPU (us)"
    assert not change.better
    other = compare_profiles(one, profile(accelerator=accelerator(name="Other GPU")))
    assert len(other.missing) == len(other.added) == 1 + 3 + 3 + 4 + 1
    assert any(name.startswith("accelerator.held: device Other GPU, kind exact") for name in other.added)


def test_the_page_and_the_picture_show_it() -> None:
    page = render(profile(accelerator=accelerator(is_processor=True)))
    assert "accelerator Fast GPU by opencl, 8.00 GiB of its own, which computes on this processor's cores" in page
    assert "exact, 10%, 4 sequences" in page
    assert (
        "a layer's call besides: 50, 80 us with 1, 2, ... sequences, of a mixture 90 us; the smallest kernel: 10 us"
        in page
    )
    assert "a layer in a run besides: 25 us exact" in page
    assert "accelerator, q4 rows of 4096" in draw(profile(accelerator=accelerator()))
    assert "no accelerator measured: a GPU with an OpenCL driver" in render(profile())


def test_what_was_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from neuronpipe.services.offload.gpu import device

    def nothing(options: str) -> None:
        raise UserError("backend opencl: no device")

    monkeypatch.setattr(device, "describe", nothing)
    assert accelerator_options(None) is None
    with pytest.raises(UserError, match="no device"):
        accelerator_options("opencl:nobody")
    with pytest.raises(UserError, match="those of opencl are measured"):
        accelerator_options("cpu")


class Child:
    """A measuring process that says these lines."""

    def __init__(self, lines: list[str], returncode: int = 0, errors: tuple[str, ...] = ()) -> None:
        self.stdout, self.stderr, self.returncode = iter(lines), iter(errors), returncode

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def kill(self) -> None:
        pass


def test_a_driver_that_fails_while_it_is_measured_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from neuronpipe.services.offload.gpu import gpu_measurement as measure

    for child, why in (
        (Child(['{"error": "backend opencl: nothing"}']), "backend opencl: nothing"),
        (Child(["a banner\n"], -11, ("first\n", "it crashed\n")), "measuring the device failed: 'it crashed'"),
        (Child([], -9), "measuring the device failed: 'status -9'"),
    ):
        monkeypatch.setattr(subprocess, "Popen", lambda *_, child=child, **__: child)
        with pytest.raises(UserError, match=why):
            measure.measure_accelerator("")


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["q4", "q5k", "q8"])
def test_a_trial_computes_as_many_rows_as_it_says(quantization: Any) -> None:
    """So that its bytes over its time are a speed."""
    require_opencl()
    from neuronpipe.services.offload.gpu.device import find_device
    from neuronpipe.services.offload.gpu.trial import TrialSteps, fired_of, manifest_of, trial_blocks

    instructions = ffi.string(lib.np_isa_name()).decode()
    manifest = manifest_of(quantization, 256)
    held, steps = trial_blocks(find_device(), manifest, 2, instructions, (0.1, 0.5), 1), TrialSteps(manifest, 2)
    neurons = 2 * manifest.layout.block_neurons
    for layer, share in enumerate((0.1, 0.5)):
        fired = fired_of(neurons, share)
        assert np.abs(fired.mean(axis=0) - share).max() < 0.1
        for texts in (1, 4):
            held.clear_counters()
            held(steps.request(layer, texts))
            counted = int(fired[:, :texts].sum())
            assert held.counters() == {"predicted": texts * neurons, "fired": counted, "active": counted}
            held.clear_counters()
            held(steps.request(layer, texts, fired))
            assert held.counters() == {"predicted": counted, "fired": counted, "active": counted}
    routed = manifest_of(quantization, 256, experts=8, experts_per_token=2)
    held, steps = trial_blocks(find_device(), routed, 1, instructions, (0.1,), 1), TrialSteps(routed, 1)
    held(steps.request(0, 3))
    assert held.counters()["predicted"] == 6 * routed.layout.block_neurons


@pytest.mark.nightly
def test_a_device_is_measured() -> None:
    require_opencl()
    from neuronpipe.services.offload.gpu.gpu_measurement import POINTS, measure_accelerator

    steps = SimpleNamespace(done=0)

    def step() -> None:
        steps.done += 1

    found = measure_accelerator("", step)
    assert steps.done == sum(map(len, found.lists().values())) == POINTS
    assert found.backend == "opencl"


@pytest.mark.parametrize("quantization", ["q4", "q4k", "q6k", "iq4", "q5h"])
def test_quantizations_that_were_not_measured_are_priced_by_one_that_was(quantization: Quantization) -> None:
    """The profile has q4 alone; the output in q8 is priced like the rest."""
    manifest = Package.open(DEMO).manifest
    other = dataclasses.replace(manifest, quantization=quantization, quantizations={"output": "q8"})
    work = OffloadedWork(blocks=1, batch=1, trigger_bytes=1e6, value_bytes=1e6, share=0.5)
    cost = AcceleratorCost(accelerator=accelerator(), manifest=other, mode="exact")
    measured = AcceleratorCost(
        accelerator=accelerator(), manifest=dataclasses.replace(other, quantization="q4"), mode="exact"
    )
    assert cost.step_ms(work) == measured.step_ms(work) > 0
    assert cost.matrices_ms(["output"], 1) == measured.matrices_ms(["output"], 1) > 0
