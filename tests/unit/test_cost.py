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
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.models.spec import LayerKind
from neuronpipe.plans.package.layout import compute_layout
from neuronpipe.plans.package.manifest import Manifest

from tests.unit.test_device_profile import decode_point, profile
from tests.unit.test_planner import manifest


def cost(of: DeviceProfile | None, model: Manifest | None = None, workers: int = 2) -> WorkCost:
    speed = None if of is None else of.memory_speed()
    return WorkCost(model or manifest(), "exact", workers, True, None, speed, of)


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
