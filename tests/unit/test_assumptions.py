"""What a plan assumes is said in it, with the command that measures it, and no longer once it was measured."""

from __future__ import annotations

import dataclasses

import pytest
from neuronpipe.plans.package.activity_profile import ActivityProfile
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan

from tests.unit.test_device_profile import profile
from tests.unit.test_planner import CURVE, device, manifest, predicted

TIGHT = PlanOptions(ffn_resident_share=0.5)
OF_PROFILE: Quantization = "q4"  # its kernels
MISSES = {"value": {"clock": ((0.0, 1.0), (1.0, 0.0))}}
COUNTED = ActivityProfile(
    mode="exact", source="measured", text="t", tokens=9, curve=((0.0, 0.0), (1.0, 1.0)), wanted_by_layer=(0.1,) * 8
)


def assumed(made_for: Manifest, wanted: PlanOptions = TIGHT, **facts: object) -> str:
    """The reasons that say so."""
    made = make_plan(made_for, dataclasses.replace(device(), **facts), wanted)  # type: ignore[arg-type]
    return "\n".join(reason for reason in made.reasons if "assumed, " in reason or "was measured through" in reason)


def test_nothing_is_assumed_of_what_was_measured() -> None:
    measured = dataclasses.replace(
        manifest(),
        quantization=OF_PROFILE,
        fired_by_layer=(0.1,) * 8,
        profiles=(dataclasses.replace(COUNTED, misses=MISSES),),
    )
    assert assumed(measured, profile=profile()) == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "without an activity profile: it misses as other models did; `neuronpipe profile PACKAGE --activity`"),
        ({"profiles": (COUNTED,)}, "since the activity profile has no misses"),
        ({"fired_by_layer": None}, "since the package states none: 10% of the neurons fire"),
    ],
)
def test_what_the_package_does_not_say_is_said_to_be_assumed(changes: dict[str, object], said: str) -> None:
    made_for = dataclasses.replace(manifest(), **({"fired_by_layer": (0.1,) * 8} | changes))  # type: ignore[arg-type]
    assert said in assumed(made_for, profile=profile())


def test_another_modes_misses_are_said_to_be_taken() -> None:
    made_for = dataclasses.replace(predicted(manifest()), profiles=(dataclasses.replace(COUNTED, misses=MISSES),))
    said = assumed(made_for, dataclasses.replace(TIGHT, mode="predicted"))
    assert "without an activity profile of predicted mode" in said
    assert "`neuronpipe profile PACKAGE --activity --mode predicted` measures it" in said


def test_where_all_is_resident_nothing_is_assumed_of_misses() -> None:
    assert "misses" not in assumed(manifest(), PlanOptions())


def test_without_a_device_profile_what_is_assumed_of_the_processor_is_said() -> None:
    assert "without a device profile: computing keeps up with memory, a read takes 6 us" in assumed(manifest())


def test_a_curve_of_the_page_cache_is_said_to_be_one() -> None:
    cached = dataclasses.replace(CURVE, direct=False)
    assert "flash was measured through the page cache" in assumed(manifest(), flash=cached)
    assert "page cache" not in assumed(manifest())


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (("panels",), "a core multiplies 50 G weights of a prompt a second;"),
        (("panels", "decode"), "computing keeps up with memory, a core multiplies 50 G weights of a prompt a second;"),
    ],
)
def test_a_device_profile_without_the_packages_kernels_is_said_to_lack_them(others: tuple[str, ...], said: str) -> None:
    of_profile, whole = dataclasses.replace(manifest(), quantization=OF_PROFILE), profile()
    of_others = {
        name: tuple(dataclasses.replace(point, quantization="f16") for point in getattr(whole, name)) for name in others
    }
    assert "no kernels" not in assumed(of_profile, profile=whole)
    found = assumed(of_profile, profile=dataclasses.replace(whole, **of_others))  # type: ignore[arg-type]
    assert f"no kernels of {OF_PROFILE} for it: {said}" in found
