"""Notices that are shown once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from neuronpipe.launch.generation.notices import first_time
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.inspect import streams_densely
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.planner.device_facts import device_facts
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan

from tests.unit.test_phone_plan import PHONE


def test_a_notice_is_shown_once_for_each_subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [first_time("silu", "a"), first_time("silu", "a"), first_time("silu", "b"), first_time("demo", "a")] == [
        True, False, True, True,
    ]  # fmt: skip


def test_where_nothing_can_be_kept_a_notice_is_shown_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "neuronpipe").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [first_time("silu", "a"), first_time("silu", "a")] == [True, True]
    monkeypatch.setattr("neuronpipe.launch.generation.notices.cache_folder", lambda: None)
    assert first_time("silu", "a")


def test_dense_reading_is_told_where_a_silu_model_streams() -> None:
    manifest = Package.open(DEMO).manifest
    silu = dataclasses.replace(manifest.model, activation="silu")
    whole, half = (
        make_plan(manifest, device_facts(PHONE), PlanOptions(ffn_resident_share=share)) for share in (None, 0.5)
    )
    assert streams_densely(silu, whole) is None
    assert streams_densely(manifest.model, half) is None
    line = streams_densely(silu, half)
    assert line is not None
    assert "50% of the feed-forward weights do not fit" in line
