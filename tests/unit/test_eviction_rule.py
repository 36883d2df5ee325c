"""Which experts are evicted as a whole: those of which a token uses all clusters."""

from typing import get_args

import pytest
from neuronpipe.plans.activity.eviction_rule import whole_experts_by_part, whole_experts_of_token
from neuronpipe.plans.lab.shapes.models import model_named
from neuronpipe.plans.lab.shapes.shape_manifest import manifest_of_shape
from neuronpipe.plans.package.activity_profile import ProfileMode


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("smallthinker-4b", 4 * 32),
        ("smallthinker-21b", 6 * 52),
        ("turbosparse-mixtral-47b", 2 * 32),
        ("turbosparse-1b", 0),
    ],
)
def test_experts_stored_by_neuron_are_whole_in_exact_mode(name: str, experts: int) -> None:
    manifest = manifest_of_shape(model_named(name))
    assert {mode: whole_experts_of_token(manifest, mode) for mode in get_args(ProfileMode)} == {
        "exact": experts,
        "predicted": 0,
        "thresholded": 0,
    }


def test_values_that_are_read_for_neurons_that_fire_are_no_whole_experts() -> None:
    manifest = manifest_of_shape(model_named("smallthinker-4b"))
    assert whole_experts_by_part(manifest, "exact", reads_whole=True) == (128, 128)
    assert whole_experts_by_part(manifest, "exact", reads_whole=False) == (128, 0)


def test_experts_of_one_cluster_are_always_whole() -> None:
    manifest = manifest_of_shape(model_named("qwen3-30b-a3b"))
    assert manifest.layout.down_by_output
    for mode in get_args(ProfileMode):
        assert whole_experts_by_part(manifest, mode, reads_whole=False) == (8 * 48, 8 * 48)
