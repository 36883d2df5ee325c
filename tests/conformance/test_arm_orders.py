"""The device's orders of sums for NEON, against NEON: no OpenCL here runs on Arm, so the library's kernels run as an
aarch64 program under QEMU, the device's on this machine, and both get the same numbers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.layout import Quantization, quant_bytes, scale_bytes
from numpy.typing import NDArray

from tests.opencl import require_opencl

pytest.importorskip("pyopencl", reason="the extra [gpu] is not installed")

from neuronpipe.services.offload.gpu.blocks import OffloadedBlocks
from neuronpipe.services.offload.gpu.device import find_device
from neuronpipe.services.offload.gpu.trial import TYPES, TrialSteps, manifest_of

require_opencl()

NATIVE = Path(__file__).resolve().parents[1] / "native"
TOOLS = ("aarch64-linux-gnu-gcc", "qemu-aarch64-static", "cmake")
RUN = ("qemu-aarch64-static", "-cpu", "max")
TEXTS = 4

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


class Numbers:
    """A block of random weights and some vectors."""

    def __init__(self, quantization: Quantization, width: int) -> None:
        draw = np.random.default_rng(width)
        self.manifest = manifest_of(quantization, width)
        self.quantization, self.width, self.neurons = quantization, width, self.manifest.layout.block_neurons
        rows = quant_bytes(quantization, width)
        self.quants = draw.integers(0, 256, (3, self.neurons, rows), np.uint8)
        if quantization == "q8":
            self.quants[self.quants == 128] = 127  # no quant is -128
        self.scales = draw.uniform(1e-4, 2e-2, (3, self.neurons, scale_bytes(quantization, width) // 2)).astype("<f2")
        self.vectors = draw.normal(0, 2, (TEXTS, width)).astype(np.float32)

    def on_arm(self, program: Path, instructions: str) -> NDArray[np.float32]:
        """[TEXTS][width], as NEON's kernels have it."""
        head = np.array([TYPES[self.quantization], self.width, self.neurons, TEXTS], "<u4")
        said = b"".join(part.tobytes() for part in (head, self.quants, self.scales, self.vectors))
        done = subprocess.run([*RUN, program, instructions], input=said, capture_output=True, check=True)
        return np.frombuffer(done.stdout, "<f4").reshape(TEXTS, self.width)

    def on_the_device(self, instructions: str) -> NDArray[np.float32]:
        """The same by OpenCL, with the order of sums of these instructions."""
        held = OffloadedBlocks(find_device(), self.manifest, blocks=1, tokens=TEXTS, instructions=instructions)
        held.load(self._slots(), None)
        steps = TrialSteps(self.manifest, 1)
        wanted = steps.request(0, TEXTS)
        for text in range(TEXTS):
            vector = ffi.from_buffer("float[]", self.vectors[text])
            lib.np_activation_prepare(
                TYPES[self.quantization], vector, self.width, wanted.vectors + text * wanted.vector_stride
            )
        return held(wanted).reshape(TEXTS, self.width).copy()

    def _slots(self) -> NDArray[np.uint8]:
        """The weights as slots have them."""
        manifest, layout = self.manifest, self.manifest.layout
        clusters, each = layout.block_clusters, layout.cluster_neurons
        starts = {"trigger": 0, "value": manifest.trigger_slot_bytes}
        slots = np.zeros((clusters, manifest.trigger_slot_bytes + manifest.value_slot_bytes), np.uint8)
        for number, place in enumerate(layout.matrices):
            for part, offset, rows in (
                (place.part, place.quants, self.quants[number]),
                (place.scales_part, place.scales, self.scales[number].view(np.uint8)),
            ):
                at, row = starts[part] + offset, rows.shape[1]
                slots[:, at : at + each * row] = rows.reshape(clusters, each * row)
        return slots


@pytest.mark.parametrize("width", [256, 320, 2048])
@pytest.mark.parametrize("quantization", ["q8", "q4"])
@pytest.mark.parametrize("instructions", ["scalar", "neon", "dotprod"])
def test_a_device_gives_the_bits_of_arm(
    arm_sums: Path, instructions: str, quantization: Quantization, width: int
) -> None:
    numbers = Numbers(quantization, width)
    wanted, found = numbers.on_arm(arm_sums, instructions), numbers.on_the_device(instructions)
    assert np.isfinite(wanted).all()
    assert np.count_nonzero(wanted) > 0.99 * wanted.size
    assert np.array_equal(found, wanted), float(np.abs(found - wanted).max())
