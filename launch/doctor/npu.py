"""Checks of a machine with one of Qualcomm's chips: whether its Hexagon can compute prompts.

That needs the runtime, its provider, and compiled contexts of the package. A machine without such a chip has one line.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from neuronpipe.launch.doctor.checks import Check
from neuronpipe.plans.package.manifest import MANIFEST
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.offload.npu.chips import Chip, android_property, find_chip
from neuronpipe.services.offload.npu.graph_files import Contexts, compiled_neurons, folder_of
from neuronpipe.services.offload.npu.providers import Provider, require_modules

CHIP, RUNTIME, CONTEXTS = "neural chip", "npu runtime", "npu contexts"
LOAD_TIMEOUT_S = 60
VERSION_SCRIPT = (
    "from neuronpipe.services.offload.npu.chips import chip_of\n"
    "from neuronpipe.services.offload.npu.providers import Provider\n"
    "from neuronpipe.services.offload.npu.sessions import Runtime\n"
    "print(Runtime(Provider('qnn', chip_of('{soc}'))).qnn_version())\n"
)


GUIDE = "launch/guide/gpu-and-npu.md"


def loaded_version(chip: Chip) -> str:
    """Return QNN's version. It is loaded in a process of its own, because a library for another processor may crash it.

    Raises UserError if the library cannot be loaded.
    """
    command = [sys.executable, "-c", VERSION_SCRIPT.format(soc=chip.soc)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"the runtime did not load within {LOAD_TIMEOUT_S} s") from None
    if result.returncode:
        errors = result.stderr.strip().splitlines()
        raise UserError(
            errors[-1].rpartition("UserError: ")[2] if errors else f"its process ended with {result.returncode}"
        )
    return result.stdout.strip().splitlines()[-1]


def npu_checks(
    directory: Path,
    root: Path = Path("/"),
    android: Callable[[str], str] = android_property,
    version: Callable[[Chip], str] = loaded_version,
) -> list[Check]:
    """Check the neural processor, for a package in `directory`.

    root: root of the machine's file system
    android: returns a property of Android
    version: returns the version of the runtime's provider, which it loads
    """
    match = find_chip(root, android)
    if match is None:
        return [Check(name=CHIP, state="ok", found="none of Qualcomm's; prompts are computed by the CPU")]
    if match.chip is None:
        advice = "the chip is not known; a similar one may work: `neuronpipe compile PACKAGE --soc 57`"
        return [Check(name=CHIP, state="warn", found=match.description, advice=advice)]
    chip = match.chip
    runtime, qnn = _runtime(chip, android, version)
    return [Check(name=CHIP, state="ok", found=f"{chip}"), runtime, _contexts(directory, chip, qnn)]


def _runtime(chip: Chip, android: Callable[[str], str], version: Callable[[Chip], str]) -> tuple[Check, str | None]:
    """Check the runtime; return also its version if it can be loaded."""
    provider = Provider("qnn", chip)
    try:
        require_modules(provider)
    except UserError as error:
        if android("ro.soc.model"):
            summary = "there is no wheel of it for Android"
            return Check(name=RUNTIME, state="warn", found=summary, advice=f"use npu-prefill: {GUIDE}"), None
        return Check(name=RUNTIME, state="warn", found=str(error), advice="then run the doctor again"), None
    try:
        qnn = version(chip)
    except UserError as error:
        advice = (
            f"the board's own libcdsprpc.so must be found, and you must be allowed to open /dev/fastrpc-cdsp: {GUIDE}"
        )
        return Check(name=RUNTIME, state="warn", found=str(error), advice=advice), None
    summary = f"QNN {qnn} loads; --backend prefill=onnx:qnn computes prompts there"
    return Check(name=RUNTIME, state="ok", found=summary), qnn


def _contexts(directory: Path, chip: Chip, qnn: str | None) -> Check:
    """Check the package's contexts.

    qnn: version to compare with; None, if the runtime does not load, trusts theirs
    """
    advice = f"`neuronpipe compile {directory} --soc {chip.soc}`, on any x86-64 machine with neuronpipe[npu]"
    if not (directory / MANIFEST).is_file():
        summary = f"not checked: {directory} is not a package"
        return Check(name=CONTEXTS, state="warn", found=summary, advice="name a package: `neuronpipe doctor PACKAGE`")
    neuron_counts = compiled_neurons(directory, chip)
    if not neuron_counts:
        return Check(
            name=CONTEXTS, state="warn", found=f"none for {chip.name}: each start prepares graphs", advice=advice
        )
    manifest, sizes = Package.open(directory).manifest, f"of {' and '.join(map(str, neuron_counts))} neurons"
    for neurons in neuron_counts:
        try:
            Contexts(folder_of(directory, chip, neurons), manifest, chip, neurons, qnn).check_files()
        except UserError as error:
            return Check(name=CONTEXTS, state="warn", found=str(error), advice=advice)
    return Check(name=CONTEXTS, state="ok", found=f"for {chip.name}, {sizes}")
