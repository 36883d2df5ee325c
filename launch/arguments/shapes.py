"""Shapes in place of packages, for verbs that plan or simulate: this machine for a model that is not on it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

from neuronpipe.launch.planning import DEMO, Planned, Subject, memory_warning, planned_for
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.measure.probe import BUNDLES, probe
from neuronpipe.plans.package.activity_profile import Activity
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.pull.package_library import package_names, packages_folder
from neuronpipe.protocol.errors import UserError


def no_model_named() -> str:
    """Return the message for a command line that names no model: what can be named, and which packages exist."""
    from neuronpipe.plans.lab.simulate.models import known_models  # reads models.json, only for this message

    names = _names()
    packages = f"; packages are {', '.join(names)}" if names else ""
    return f"name a model: a shape, or a package; shapes are {', '.join(known_models())}{packages}"


def shape_here(arguments: argparse.Namespace, manifest: Manifest, *, several: bool, gateway: bool) -> Planned:
    """The plan for a shape without a package, on this machine. Flash is that of the largest package there is, by what
    is kept of earlier measurements or a short one; the plan's reasons say so."""
    said: list[str] = []
    measured, device = measured_place(say=said.append)
    subject = Subject(manifest=manifest, read_activity=no_activity, device=device)
    made = planned_for(arguments, subject, several=several, gateway=gateway)
    if (warning := memory_warning(made.plan, device, made.least_bytes)) is not None:
        said.append(warning)
    for line in said:
        print(f"neuronpipe: {line}", file=sys.stderr)
    reasons = (flash_of_a_shape(measured, device), *made.plan.reasons)
    return dataclasses.replace(made, plan=dataclasses.replace(made.plan, reasons=reasons))


def measured_place(say: Callable[[str], None]) -> tuple[Path, Device]:
    """The package on whose file flash is measured where the one that is meant does not exist, and this machine."""
    packages = [DEMO, *(packages_folder() / name for name in _names())]
    place = max(packages, key=lambda path: (path / BUNDLES).stat().st_size if (path / BUNDLES).is_file() else -1)
    return place, probe(place, say=say)


def flash_of_a_shape(measured: Path, device: Device) -> str:
    """Where a plan's speeds of this machine come from, for a shape that has no package here."""
    if device.flash is None:
        return "no package exists whose flash could be measured: what flash takes is not expected"
    name = "the demo model" if measured == DEMO else measured.name
    in_full = device.profile is not None and device.profile.steps  # a start measures no steps
    how = "of the device profile" if in_full else "measured in brief"
    return (
        f"speeds are {how}, with flash as it reads the file of {name}; a package of this shape may lie on faster or "
        "slower flash"
    )


def no_activity() -> Activity:
    """In place of a package's profile. Raises ValueError: a shape's manifest names none."""
    raise ValueError("a shape has no activity profile")


def _names() -> list[str]:
    """The names of all packages; none for a user without a home."""
    with contextlib.suppress(UserError):
        return package_names()
    return []
