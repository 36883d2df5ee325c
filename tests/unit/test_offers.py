"""What `serve` offers of several packages, and what it refuses before it measures anything."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from neuronpipe.launch.cli import _parsed
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.serving import host
from neuronpipe.launch.serving.host import offered
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

Converted = Callable[..., Package]


def test_each_package_has_a_plan_of_its_own(converted: Converted) -> None:
    other = converted("relu2", "f16")
    offers = offered(_parsed(["serve", "--memory", "2GiB"]), [other.path, DEMO])
    assert list(offers) == [other.manifest.name, Package.open(DEMO).manifest.name]
    assert [offer.plan.package_id for offer in offers.values()] == [
        offer.package.manifest.id for offer in offers.values()
    ]


def test_two_models_of_one_name_are_refused_before_anything_is_measured(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(DEMO, copy)
    monkeypatch.setattr(host, "planned_here", lambda *_, **__: pytest.fail("it was planned"))
    with pytest.raises(UserError, match=f"^{copy} and {DEMO}: both models are called"):
        offered(_parsed(["serve"]), [DEMO, converted("relu2", "f16").path, copy])


def test_options_that_contradict_each_other_are_refused_before_a_package_is_opened(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--mode exact and --quality predicted"):
        offered(_parsed(["serve", "--mode", "exact", "--quality", "predicted"]), [tmp_path / "none", DEMO])
