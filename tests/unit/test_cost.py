"""What work costs on a device, where little or much of it was measured."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from neuronpipe.launch.profile.steps import kernels_alone
from neuronpipe.plans.cost import prompt_time as prompts
from neuronpipe.plans.cost.activation_rates import rates
from neuronpipe.plans.cost.prompt_time import between_products_ms, products_ms
from neuronpipe.plans.cost.work_cost import ASSUMED_STEP_FACTOR, ASSUMED_STEP_FACTOR_OF_ONE, WorkCost
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.measured_points import DecodeKind, ReusedKind, ReusedPoint
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.lab.devices.device_description import planner_device
from neuronpipe.plans.lab.devices.device_file import read_device
from neuronpipe.plans.lab.shapes.models import model_named
from neuronpipe.plans.lab.shapes.shape_manifest import manifest_of_shape
from neuronpipe.plans.models.spec import LayerKind
from neuronpipe.plans.package.layout import Quantization, compute_layout, expert_layout, row_bytes
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import KV_TYPES

from tests.unit.fixed_machine import machine
from tests.unit.test_device_profile import decode_point, profile
from tests.unit.test_planner import manifest


def cost(of: DeviceProfile | None, model: Manifest | None = None, workers: int = 2) -> WorkCost:
    speed = None if of is None else of.memory_speed()
    return WorkCost(model or manifest(), "exact", workers, True, None, speed, of)


def mixed_manifest(*, is_whole: bool = False) -> Manifest:
    """A package in q4k whose Down is in q5k and whose output is in q6k."""
    model, by_matrix = manifest(width=4096), {"gate": "q4k", "up": "q4k", "down": "q5k"}
    whole = expert_layout(4096, 1024, by_matrix, package="q4k")
    by_neuron = compute_layout("q4k", 4096, 1024, model.model.ffn_matrices, "source", differing={"down": "q5k"})
    return dataclasses.replace(
        model, quantization="q4k", layout=whole if is_whole else by_neuron, quantizations={"output": "q6k"}
    )


def speeds(kinds: dict[DecodeKind, dict[Quantization, float]]) -> DeviceProfile:
    """A profile with these speeds of kernels, bytes/s, and no others."""
    points = tuple(
        dataclasses.replace(decode_point(kind, 1.0, 2, speed), quantization=quantization)
        for kind, of in kinds.items()
        for quantization, speed in of.items()
    )
    return profile(decode=points, dram=())


def test_a_step_is_longer_than_its_kernels_also_where_no_run_was_measured() -> None:
    """Without a device profile plans were twice as fast as runs."""
    brief = profile(steps=(), read_delays=(), read_factors=(), flash=None)
    assert cost(brief).step_factor() == ASSUMED_STEP_FACTOR
    assert cost(brief, workers=1).step_factor() == ASSUMED_STEP_FACTOR_OF_ONE
    assert cost(brief).read_delay_ms(together=True) > 0
    assert cost(profile()).step_factor() != ASSUMED_STEP_FACTOR
    assert cost(kernels_alone(brief, [("exact", 2)])).step_factor() == 1.0  # while steps are measured
    device_file = dataclasses.replace(brief, decode=())  # says what cores compute
    assert cost(device_file).step_factor() == 1.0
    assert cost(device_file).read_delay_ms(together=True) == 0.0


def test_gates_of_their_own_quantization_are_planned_by_their_own_kernels() -> None:
    model = manifest(width=4096)
    layout = compute_layout("q4", 4096, 1024, model.model.ffn_matrices, "source", differing={"gate": "q3"})
    q3 = dataclasses.replace(model, quantization="q4", layout=layout)
    without = profile()
    with_q3: Any = dataclasses.replace(decode_point("triggers", 1.0, 2, 2e9), quantization="q3")
    measured = profile(decode=(*without.decode, with_q3))
    q4_ms, q3_ms = (cost(one, q3).triggers_ms(1e9) for one in (without, measured))
    assert q4_ms == pytest.approx(1e3 / 16)  # as many bytes a second as q4, where q3 was not measured
    assert q3_ms == pytest.approx(1e3 / 2)


def test_up_and_down_take_the_time_of_their_own_kernels() -> None:
    of = speeds({"ups": {"q4k": 4e9, "q5k": 1e9}, "downs": {"q4k": 4e9, "q5k": 2e9}})
    up, down = row_bytes("q4k", 4096), row_bytes("q5k", 4096)
    assert cost(of, mixed_manifest()).values_ms(up + down, 1.0, 4096) == pytest.approx(up / 4e6 + down / 2e6)
    matrix = speeds({"matrix": {"q4k": 8e9, "q5k": 2e9, "q6k": 1e9}})
    whole = cost(matrix, mixed_manifest(is_whole=True))
    assert whole.values_ms(up + down, 1.0, 4096) == pytest.approx(up / 8e6 + down / 2e6)


def test_an_output_takes_the_time_of_its_own_kernel() -> None:
    of = cost(speeds({"matrix": {"q4k": 8e9, "q6k": 1e9}}), mixed_manifest())
    assert of.fixed_ms(1e6, "qkv") == pytest.approx(1e6 / 8e6)
    assert of.fixed_ms(1e6, "output") == pytest.approx(1.0)
    model = of.manifest.model
    output = model.vocabulary * model.width * row_bytes("q6k", 256)
    mixers = model.attention_weights * row_bytes("q4k", 256)
    assert of.fixed_ms(output + mixers) == pytest.approx(output / 1e6 + mixers / 8e6)


@pytest.mark.parametrize(("tokens", "before"), [(1, 0), (7, 0), (3, 5), (20, 0), (8, 30)])
def test_a_prompt_looks_at_all_positions_before_it_within_each_layers_window(tokens: int, before: int) -> None:
    model = manifest()
    kinds = (LayerKind(2), LayerKind(3, window_tokens=10))
    windowed = dataclasses.replace(model, model=dataclasses.replace(model.model, layer_kinds=kinds))
    seen = [before + number + 1 for number in range(tokens)]
    expected = sum(2 * count + 3 * min(count, 10) for count in seen)
    assert prompts._attended_elements(windowed, tokens, before) == expected * model.model.head_width


def test_a_prompt_takes_longer_than_its_products_and_the_more_the_narrower_the_model() -> None:
    """Attention, gates and block sums were left out: prompts were planned 1.6 to 2.9 times too fast."""
    shares = []
    for width in (512, 4096):
        model = manifest(width=width, neurons=4 * width)
        of, firing = cost(profile(), model), rates(model, "exact")
        products, besides = products_ms(model, firing, of, 512), between_products_ms(model, firing, of, 512, 0)
        shares.append(besides / products)
    assert 0.1 < shares[1] < shares[0]


def test_a_prompt_whose_experts_meet_few_tokens_is_longer() -> None:
    """A chunk of 64 tokens leaves 8 for each of 64 experts: OLMoE's prompts took 1.6 times as long as with 512."""
    model = manifest_of_shape(model_named("olmoe-7b"))
    of, firing = cost(machine().profile, model), rates(model, "exact")
    assert products_ms(model, firing, of, 64) / 64 > 1.4 * products_ms(model, firing, of, 512) / 512


def test_attention_of_a_prompt_takes_the_time_that_was_measured() -> None:
    """It took the time of products of single tokens, which is twice as long: a prompt of 7,900 tokens was planned 1.8
    times too slow."""

    def point(kind: ReusedKind, speed: float) -> ReusedPoint:
        place: dict[str, Any] = {"quantization": "f16", "row_weights": 128, "workers": 2, "core": None}
        return ReusedPoint(kind=kind, share=1.0, token_weights_per_s=Figure(median=speed, spread=0.0), **place)

    measured = point("ups", 4e10), point("downs", 4e10), point("attended", 8e10)
    profiles = [dataclasses.replace(profile(), reused=reused) for reused in (measured, measured[:2])]
    assert [cost(of).attention_ms(8e7) for of in profiles] == pytest.approx([1.0, 2.0])


def test_a_described_device_attends_to_q8_as_to_f16() -> None:
    """Its rows of weights are twice as fast in q8, but keys and values are multiplied as floats."""
    described = planner_device(read_device("oneplus-12"), manifest()).profile
    assert described is not None
    of_f16, of_q8 = (dataclasses.replace(cost(described), kv_type=kv_type).attention_ms(1e9) for kv_type in KV_TYPES)
    assert of_q8 == of_f16
    attended = [point for point in described.reused if point.kind == "attended"]
    assert {point.quantization for point in attended} == set(KV_TYPES), "neither is assumed"
