"""What `serve` offers of several packages, and what it refuses before it measures anything."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from neuronpipe.launch.arguments.command_line import parse
from neuronpipe.launch.arguments.plan_arguments import plan_options
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.serving import offers as serving_offers
from neuronpipe.launch.serving.offers import make_offers
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

Converted = Callable[..., Package]


def test_each_package_has_a_plan_of_its_own(converted: Converted) -> None:
    other = converted("relu2", "f16")
    offers = make_offers([other.path, DEMO], PlanOptions(memory_bytes=2 << 30), plain=False)
    assert list(offers) == [other.manifest.name, Package.open(DEMO).manifest.name]
    assert [offer.plan.package_id for offer in offers.values()] == [
        offer.package.manifest.id for offer in offers.values()
    ]


def test_two_models_of_one_name_are_refused_before_anything_is_measured(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(DEMO, copy)
    monkeypatch.setattr(serving_offers, "plan_here", lambda *_, **__: pytest.fail("it was planned"))
    with pytest.raises(UserError, match=f"^{copy} and {DEMO}: both models are called"):
        make_offers([DEMO, converted("relu2", "f16").path, copy], PlanOptions(), plain=False)


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UserError, match=r"^--mode exact and --quality predicted"):
        plan_options(parse(["serve", "--mode", "exact", "--quality", "predicted"]))
