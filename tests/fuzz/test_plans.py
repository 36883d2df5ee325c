"""Damaged plans: whatever stands in one, it is obeyed whole or refused in one line, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import ProcessSpec, parse_plan
from neuronpipe.plans.plan.segment_sizes import run_layouts
from neuronpipe.plans.planner.device_facts import DeviceFacts
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.plans.planner.validation import validate

from tests.fuzz.test_model_files import fuzzed, mutated_json, only_user_errors
from tests.service_job import ROLES

PACKAGE = Package.open(DEMO)


@pytest.fixture(scope="module")
def values() -> Any:
    """A plan that is right."""
    processes = tuple(ProcessSpec(role=name, index=0, core=None) for name in ROLES)
    device = DeviceFacts(id="d", memory_bytes=1 << 31, flash_engine="threads", processes=processes)
    return json.loads(make_plan(PACKAGE.manifest, device, PlanOptions(ffn_resident_share=0.5)).to_json())


def obey(text: str) -> None:
    """What happens to a plan between the file and the first process."""
    made = parse_plan(text.encode(), str(Path("plan.json")))
    validate(made, PACKAGE.manifest, "plan.json")
    for layout in run_layouts(PACKAGE.manifest, made).values():
        assert 0 < layout.total_bytes < 1 << 62


@fuzzed
@given(data=st.data())
def test_plans(data: st.DataObject, values: Any) -> None:
    only_user_errors(lambda: obey(json.dumps(mutated_json(data, values))))
