"""What a machine with one of Qualcomm's chips lacks to compute prompts on its Hexagon: the runtime, its provider, the
contexts of a package. Each finding says what to do next; a machine without such a chip has one line."""

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
ASK_VERSION = (
    "from neuronpipe.services.offload.npu.chips import chip_of\n"
    "from neuronpipe.services.offload.npu.providers import Provider\n"
    "from neuronpipe.services.offload.npu.sessions import Runtime\n"
    "print(Runtime(Provider('qnn', chip_of('{soc}'))).qnn_version())\n"
)


GUIDE = "launch/guide/gpu-and-npu.md"


def loaded_version(chip: Chip) -> str:
    """QNN's version, from a process of its own: a library of another processor may end the one that loads it. Raises
    UserError."""
    command = [sys.executable, "-c", ASK_VERSION.format(soc=chip.soc)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"the runtime did not load within {LOAD_TIMEOUT_S} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise UserError(said[-1].rpartition("UserError: ")[2] if said else f"its process ended with {done.returncode}")
    return done.stdout.strip().splitlines()[-1]


def npu_checks(
    directory: Path,
    root: Path = Path("/"),
    android: Callable[[str], str] = android_property,
    version: Callable[[Chip], str] = loaded_version,
) -> list[Check]:
    """For a package in `directory`. root: of the machine's file system. android, version: who is asked for a property,
    and for the version of the runtime's provider, which is loaded for it."""
    found = find_chip(root, android)
    if found is None:
        return [Check(name=CHIP, state="ok", found="none of Qualcomm's; prompts are computed by the cores")]
    if found.chip is None:
        advice = "it is not known here; one that is like it may do: `neuronpipe compile PACKAGE --soc 57`"
        return [Check(name=CHIP, state="warn", found=found.description, advice=advice)]
    chip = found.chip
    runtime, qnn = _runtime(chip, android, version)
    return [Check(name=CHIP, state="ok", found=f"{chip}"), runtime, _contexts(directory, chip, qnn)]


def _runtime(chip: Chip, android: Callable[[str], str], version: Callable[[Chip], str]) -> tuple[Check, str | None]:
    """And its version, where it loads."""
    provider = Provider("qnn", chip)
    try:
        require_modules(provider)
    except UserError as error:
        if android("ro.soc.model"):
            found = "there is no wheel of it for Android"
            return Check(name=RUNTIME, state="warn", found=found, advice=f"take npu-prefill: {GUIDE}"), None
        return Check(name=RUNTIME, state="warn", found=str(error), advice="then run the doctor again"), None
    try:
        qnn = version(chip)
    except UserError as error:
        advice = f"the board's own libcdsprpc.so must be found, and /dev/fastrpc-cdsp be yours to open: {GUIDE}"
        return Check(name=RUNTIME, state="warn", found=str(error), advice=advice), None
    found = f"QNN {qnn} loads; prompts go there with --backend prefill=onnx:qnn"
    return Check(name=RUNTIME, state="ok", found=found), qnn


def _contexts(directory: Path, chip: Chip, qnn: str | None) -> Check:
    """qnn: None where the runtime does not load: then they are compared with what they say themselves."""
    make = f"`neuronpipe compile {directory} --soc {chip.soc}`, on any x86-64 machine with neuronpipe[npu]"
    if not (directory / MANIFEST).is_file():
        found = f"not looked for: {directory} is no package"
        return Check(name=CONTEXTS, state="warn", found=found, advice="name a package: `neuronpipe doctor PACKAGE`")
    there = compiled_neurons(directory, chip)
    if not there:
        return Check(
            name=CONTEXTS, state="warn", found=f"none for {chip.name}: each start prepares graphs", advice=make
        )
    manifest, sizes = Package.open(directory).manifest, f"of {' and '.join(map(str, there))} neurons"
    for neurons in there:
        try:
            Contexts(folder_of(directory, chip, neurons), manifest, chip, neurons, qnn).check_files()
        except UserError as error:
            return Check(name=CONTEXTS, state="warn", found=str(error), advice=make)
    return Check(name=CONTEXTS, state="ok", found=f"for {chip.name}, {sizes}")
