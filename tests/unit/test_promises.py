"""What a plan promises: more memory, cores or speed, or fewer bytes, never make an expectation worse."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from neuronpipe.plans.device.cores import default_decode_workers, max_decode_workers
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.lab.devices.device_description import planner_device
from neuronpipe.plans.lab.devices.device_file import (
    BlockSpeed,
    CoreClass,
    Curve,
    DeviceModel,
    Sourced,
    read_device,
)
from neuronpipe.plans.lab.shapes.models import SimulatedModel
from neuronpipe.plans.lab.shapes.shape_manifest import manifest_of_shape
from neuronpipe.plans.models.spec import LayerKind, ModelSpec
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Mode
from neuronpipe.plans.planner.candidates import Space
from neuronpipe.plans.planner.device_facts import DeviceFacts, device_facts
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.search import Search

from tests.unit.fixed_machine import machine

OPTIONS = PlanOptions(context_tokens=512)
FEW = settings(max_examples=4, deadline=None, derandomize=True)
MANY = settings(max_examples=200, deadline=None)
SOURCE = "drawn by a test"
GAINS = st.sampled_from((1.01, 1.1, 1.5, 3.0))


@st.composite
def shapes(draw: st.DrawFn) -> SimulatedModel:
    """Draw a dense model or a mixture, of neurons or of whole experts."""
    activation = draw(st.sampled_from(("drelu", "silu")))
    experts = draw(st.sampled_from((1, 8, 32)))
    width = 256 * draw(st.integers(2, 8))
    spec = ModelSpec(
        family="llama",
        activation=activation,
        norm_epsilon=1e-5,
        width=width,
        neurons=256 * draw(st.integers(2, 12)),
        layer_kinds=(LayerKind(draw(st.integers(2, 16))),),
        experts=experts,
        experts_per_token=1 if experts == 1 else draw(st.integers(1, 4)),
        query_heads=width // 64,
        key_heads=draw(st.sampled_from((1, 2, 4))),
        head_width=64,
        vocabulary=1024 * draw(st.integers(4, 64)),
        context_tokens=2048,
    )
    active = draw(st.sampled_from((0.05, 0.15, 0.4))) if activation == "drelu" else 1.0
    return SimulatedModel(name="drawn", spec=spec, active=active, predicted=min(1.0, 1.3 * active), predictor_rank=128)


@st.composite
def phones(draw: st.DrawFn) -> DeviceModel:
    """Draw a described device: its cores, and the speeds of its memory and flash."""
    base = read_device("oneplus-12")
    reads, computes = draw(st.floats(2, 20)), draw(st.floats(5, 80))
    cpu = draw(st.floats(10, 100))
    small, large = draw(st.floats(0.02, 1.0)), draw(st.floats(1.0, 8.0))
    curve = Curve(
        points=(BlockSpeed(block_kib=4, gb_per_s=small), BlockSpeed(block_kib=512, gb_per_s=large)), source=""
    )
    return dataclasses.replace(
        base,
        cores=(
            CoreClass(
                kind="mid",
                count=draw(st.integers(1, 6)),
                reads_gb_per_s=reads,
                computes_gb_per_s=computes,
                source=SOURCE,
            ),
            CoreClass(kind="little", count=2, reads_gb_per_s=2, computes_gb_per_s=2, source=SOURCE),
        ),
        dram_cpu_gb_per_s=Sourced(value=cpu, source=SOURCE),
        dram_total_gb_per_s=Sourced(value=max(cpu, 60.0), source=SOURCE),
        barrier_us=Sourced(value=draw(st.floats(1, 20)), source=SOURCE),
        message_us=Sourced(value=draw(st.floats(50, 400)), source=SOURCE),
        flash_random=curve,
        flash_sequential=curve,
    )


def search_on(device: Device, manifest: Manifest) -> Search:
    def place(count: int) -> DeviceFacts:
        return device_facts(device, count)

    modes: tuple[Mode, ...] = ("exact",) if manifest.predictor is None else ("predicted", "exact")
    of_rules = default_decode_workers(device.cores, None)
    counts = of_rules, *(count for count in range(1, max_decode_workers(device.cores) + 1) if count != of_rules)
    return Search(manifest, Space(modes=modes, workers=counts, place=place, more=lambda count: None), OPTIONS)


def request_ms(device: Device, manifest: Manifest, limit_bytes: int) -> float:
    one = search_on(device, manifest)
    return one.ms(one.best(limit_bytes))


def fastest_ms(device: Device, manifest: Manifest, limit_bytes: int) -> float:
    one = search_on(device, manifest)
    return min(map(one.ms, one.within(limit_bytes).candidates))


def limit_between(device: Device, manifest: Manifest, share: float) -> int:
    least, *_, most = search_on(device, manifest).limits_bytes()
    return int(least * (most / least) ** share)


def grows(one: Search) -> None:
    least, *_, most = one.limits_bytes()
    limits = [int(least * (most / least) ** (n / 12)) for n in range(13)]
    times = [one.ms(one.best(limit)) for limit in limits]
    for less, more in itertools.pairwise(times):
        assert more <= less


def faster(phone: DeviceModel, what: str, gain: float) -> DeviceModel:
    """Return the phone with one part faster by this factor."""

    def times(value: Sourced) -> Sourced:
        return dataclasses.replace(value, value=value.value * gain)

    def curve(line: Curve) -> Curve:
        points = tuple(dataclasses.replace(point, gb_per_s=point.gb_per_s * gain) for point in line.points)
        return dataclasses.replace(line, points=points)

    if what == "flash":
        return dataclasses.replace(phone, flash_random=curve(phone.flash_random))
    if what == "memory":
        cores = tuple(dataclasses.replace(core, reads_gb_per_s=core.reads_gb_per_s * gain) for core in phone.cores)
        return dataclasses.replace(phone, cores=cores, dram_cpu_gb_per_s=times(phone.dram_cpu_gb_per_s))
    if what == "computing":
        cores = tuple(
            dataclasses.replace(core, computes_gb_per_s=core.computes_gb_per_s * gain) for core in phone.cores
        )
        return dataclasses.replace(phone, cores=cores)
    first, *rest = phone.cores
    return dataclasses.replace(phone, cores=(dataclasses.replace(first, count=first.count + 1), *rest))


def smaller(shape: SimulatedModel, what: str) -> SimulatedModel:
    """Return the shape with fewer bytes."""
    spec = shape.spec
    if what == "layers":
        return dataclasses.replace(shape, spec=dataclasses.replace(spec, layer_kinds=(LayerKind(spec.layers - 1),)))
    if what == "vocabulary":
        return dataclasses.replace(shape, spec=dataclasses.replace(spec, vocabulary=spec.vocabulary // 2))
    return dataclasses.replace(shape, spec=dataclasses.replace(spec, neurons=spec.neurons - 256))


def check_memory(device: Device, shape: SimulatedModel) -> None:
    grows(search_on(device, manifest_of_shape(shape)))


def check_device(phone: DeviceModel, shape: SimulatedModel, what: str, gain: float, share: float) -> None:
    manifest = manifest_of_shape(shape)
    slow, fast = (planner_device(model, manifest) for model in (phone, faster(phone, what, gain)))
    limit = max(limit_between(slow, manifest, share), search_on(fast, manifest).limits_bytes()[0])
    # The search keeps all cores that the rules take unless fewer are clearly faster: then the fastest choice counts.
    expected_ms = fastest_ms if what == "cores" else request_ms
    assert expected_ms(fast, manifest, limit) <= expected_ms(slow, manifest, limit) * (1 + 1e-9)


def check_bytes(phone: DeviceModel, shape: SimulatedModel, what: str, share: float) -> None:
    large, small = manifest_of_shape(shape), manifest_of_shape(smaller(shape, what))
    device = planner_device(phone, large)
    limit = limit_between(device, large, share)
    assert request_ms(device, small, limit) <= request_ms(device, large, limit) * (1 + 1e-9)


PARTS = st.sampled_from(("flash", "memory", "computing", "cores"))
BYTES = st.sampled_from(("layers", "vocabulary", "neurons"))
SHARES = st.floats(0.05, 0.95)


@FEW
@given(phones(), shapes())
def test_more_memory_never_makes_an_expectation_worse(phone: DeviceModel, shape: SimulatedModel) -> None:
    check_memory(planner_device(phone, manifest_of_shape(shape)), shape)


@FEW
@given(phones(), shapes(), PARTS, GAINS, SHARES)
def test_a_faster_device_never_makes_an_expectation_worse(
    phone: DeviceModel, shape: SimulatedModel, what: str, gain: float, share: float
) -> None:
    check_device(phone, shape, what, gain, share)


@FEW
@given(phones(), shapes(), BYTES, SHARES)
def test_fewer_bytes_never_make_an_expectation_worse(
    phone: DeviceModel, shape: SimulatedModel, what: str, share: float
) -> None:
    check_bytes(phone, shape, what, share)


@pytest.mark.parametrize("share", [0.2, 0.6])
@FEW
@given(shapes(), GAINS, GAINS)
def test_a_measured_machine_that_is_faster_never_makes_an_expectation_worse(
    share: float, shape: SimulatedModel, gain: float, flash_gain: float
) -> None:
    manifest = manifest_of_shape(shape)
    limit = limit_between(machine(), manifest, share)
    assert request_ms(machine(gain, flash_gain), manifest, limit) <= request_ms(machine(), manifest, limit)


@pytest.mark.nightly
@MANY
@given(phones(), shapes(), PARTS, BYTES, GAINS, SHARES)
def test_no_promise_is_broken_on_many_devices(
    phone: DeviceModel, shape: SimulatedModel, part: str, fewer: str, gain: float, share: float
) -> None:
    check_memory(planner_device(phone, manifest_of_shape(shape)), shape)
    check_device(phone, shape, part, gain, share)
    check_bytes(phone, shape, fewer, share)
