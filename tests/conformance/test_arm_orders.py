"""The device's orders of sums for NEON, against NEON: no OpenCL here runs on Arm, so the library's kernels run as an
aarch64 program under QEMU, the device's on this machine, and both get the same numbers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from neuronpipe.plans.package.layout import Quantization

from tests.opencl import require_opencl

pytest.importorskip("pyopencl", reason="the extra [gpu] is not installed")

from tests.conformance.block_numbers import ALL_CODES, Numbers

require_opencl()

NATIVE = Path(__file__).resolve().parents[1] / "native"
TOOLS = ("aarch64-linux-gnu-gcc", "qemu-aarch64-static", "cmake")
RUN = ("qemu-aarch64-static", "-cpu", "max")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(any(shutil.which(tool) is None for tool in TOOLS), reason=f"{', '.join(TOOLS)} are needed"),
]


@pytest.fixture(scope="module")
def arm_sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/native/block_sums.c for aarch64."""
    build = tmp_path_factory.mktemp("aarch64")
    system = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_EXE_LINKER_FLAGS=-static")
    compiler = "-DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc"
    subprocess.run(["cmake", "-S", NATIVE, "-B", build, *system, compiler], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build, "--target", "block_sums"], check=True, capture_output=True)
    return build / "block_sums"


@pytest.mark.parametrize("width", [256, 320, 2048])
@pytest.mark.parametrize("quantization", ["q8", "q4", *ALL_CODES])
@pytest.mark.parametrize("instructions", ["scalar", "neon", "dotprod"])
def test_a_device_gives_the_bits_of_arm(
    arm_sums: Path, instructions: str, quantization: Quantization, width: int
) -> None:
    numbers = Numbers(quantization, width)
    wanted, (found, _) = numbers.on_arm((*RUN, arm_sums, instructions)), numbers.on_the_device(instructions)
    assert np.isfinite(wanted).all()
    assert np.count_nonzero(wanted) > 0.99 * wanted.size
    assert np.array_equal(found, wanted), float(np.abs(found - wanted).max())
