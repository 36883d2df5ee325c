"""The steps in a device profile: measured on the pipeline itself, beside what the kernels alone would take."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own: what measures forks the supervisor of its run.
MEASURE = """
import dataclasses, json
from pathlib import Path
from neuronpipe.launch.profile import steps
from neuronpipe.plans.measure.kernel_speed import Case
from neuronpipe.plans.measure.device_measurement import Effort, measure_profile
from neuronpipe.plans.measure.probe import this_device

steps.LAYERS = 1
steps.REPETITIONS = 2
called = []
effort = Effort(rounds=1, pace=0.1, kernels=(Case("matrix", "q4", 2048, 1.0),))
profile = measure_profile(Path("/nowhere"), effort=effort)
device = this_device()
short = dataclasses.replace(device, memory_available_bytes=1 << 20)
slow = dataclasses.replace(profile, dram=())
assert steps.with_steps(profile, short, lambda: None) == profile
assert steps.with_steps(slow, device, lambda: None) == slow
found = steps.with_steps(profile, device, lambda: called.append(1))
assert 0 < len(called) <= steps.steps_count(device)
assert found.read_delays == found.read_factors == ()  # flash was not measured
print(json.dumps([dataclasses.asdict(point) for point in found.steps]))
"""


@pytest.mark.nightly
def test_a_step_is_measured_in_both_modes_and_with_one_worker() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout.splitlines()[-1])
    most = max(point["workers"] for point in points)
    assert {(point["mode"], point["workers"]) for point in points} == {
        ("exact", 1),
        ("exact", most),
        ("predicted", most),
    }
    for point in points:  # a layer of a 1B: some milliseconds at most, on any machine that passes the other tests
        assert 10 < point["step_us"]["median"] < 1e6
        assert 1 < point["between_us"]["median"] < 1e6
        assert 10 < point["kernels_us"]["median"] < 1e6
