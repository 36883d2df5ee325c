"""Plans for shapes: models that have no package here, for the verbs `plan` and `simulate`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.planning.memory_check import memory_warning
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.plan import PlanResult, plan_for
from neuronpipe.launch.planning.search import Subject
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.measure.kernel_speed import Case, kernel_cases
from neuronpipe.plans.measure.probe import probe
from neuronpipe.plans.package.activity_profile import Activity
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.reader import neurons_file
from neuronpipe.plans.pull.package_library import package_names, packages_folder
from neuronpipe.protocol.errors import UserError


def model_required() -> str:
    """Return the error text for verbs where the demo would be of no use: which shapes and packages can be named."""
    from neuronpipe.plans.lab.shapes.models import known_models  # only a mistake pays for it

    names = pulled_names()
    packages = f"; packages are {', '.join(names)}" if names else ""
    return f"name a model: a shape, or a package; shapes are {', '.join(known_models())}{packages}"


def plan_shape_here(manifest: Manifest, options: PlanOptions, *, several: bool, gateway: bool) -> PlanResult:
    """Make the plan for a shape on this machine; parameters as in `plan_here`.

    The speed of flash is that of the largest package, cached or measured briefly, as the plan's reasons state.
    """
    lines: list[str] = []
    measured, device = probe_without_package(kernel_cases(manifest), report=lines.append)
    subject = Subject(manifest=manifest, read_activity=no_activity, device=device)
    result = plan_for(subject, options, several=several, gateway=gateway)
    if (warning := memory_warning(result.plan, device, result.min_limit_bytes)) is not None:
        lines.append(warning)
    for line in lines:
        print(f"neuronpipe: {line}", file=sys.stderr)
    return result.with_reasons(flash_caveat(measured, device))


def probe_without_package(cases: Sequence[Case], report: Callable[[str], None]) -> tuple[Path, Device]:
    """Probe this machine; return the package whose file flash was measured on, which is the largest, and the device.

    cases: kernels to measure unless there is a device profile
    """
    packages = [DEMO, *(packages_folder() / name for name in pulled_names())]
    files = {path: neurons_file(path) for path in packages}
    largest = max(packages, key=lambda path: -1 if (file := files[path]) is None else file.stat().st_size)
    return largest, probe(largest, cases=cases, say=report)


def flash_caveat(measured: Path, device: Device) -> str:
    """Return where the speeds of a plan for a shape on this machine come from.

    measured: the package whose file was read to measure flash
    """
    if device.flash is None:
        return "no package exists whose flash could be measured: the time of flash is not expected"
    name = "the demo model" if measured == DEMO else measured.name
    has_profile = device.profile is not None and device.profile.steps  # a short probe measures no steps
    source = "of the device profile" if has_profile else "measured in brief"
    return (
        f"speeds are {source}, with flash as it reads the file of {name}; a package of this shape may lie on faster or "
        "slower flash"
    )


def no_activity() -> Activity:
    """Stand in for a package's activity profile. Raises ValueError: the manifest of a shape names none."""
    raise ValueError("a shape has no activity profile")


def pulled_names() -> list[str]:
    """Return the names of this user's packages; none for a user without a home."""
    with contextlib.suppress(UserError):  # a user without a home has no packages
        return package_names()
    return []
