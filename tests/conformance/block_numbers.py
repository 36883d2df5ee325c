"""Random rows and vectors for which an OpenCL device and the library's kernels must give the same bits."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from neuronpipe.native import ROW_TYPES, ffi, lib
from neuronpipe.plans.package.layout import (
    CODEBOOK_QUANTIZATIONS,
    HALF_QUANTIZATIONS,
    Quantization,
    quant_bytes,
    scale_bytes,
)
from neuronpipe.services.offload.gpu.blocks import OffloadedBlocks
from neuronpipe.services.offload.gpu.device import find_device
from neuronpipe.services.offload.gpu.matrices import OffloadedMatrices
from neuronpipe.services.offload.gpu.trial import TrialSteps, manifest_of
from numpy.typing import NDArray

TEXTS = 4
CODE_BITS: dict[Quantization, int] = {"q4k": 4, "q5k": 5, "q6k": 6}
"""The bits of the codes of types with minimums in six bits."""
ALL_CODES: tuple[Quantization, ...] = (*CODE_BITS, *HALF_QUANTIZATIONS, *CODEBOOK_QUANTIZATIONS)


def random_scales(
    draw: np.random.Generator, quantization: Quantization, rows: tuple[int, ...], width: int
) -> NDArray[np.uint8]:
    """Return the bytes of rows' scales, of the sizes that weights of a model have."""
    if quantization in HALF_QUANTIZATIONS:
        groups, blocks = width // 32, scale_bytes(quantization, width) // 32
        halves = np.zeros((*rows, 2, 8 * blocks), "<f2")
        halves[..., 0, :groups] = draw.uniform(1e-4, 2e-2, (*rows, groups))
        halves[..., 1, :groups] = halves[..., 0, :groups] * draw.uniform(6, 10, (*rows, groups))
        by_block = np.moveaxis(halves.reshape(*rows, 2, blocks, 8), -3, -2)
        return np.ascontiguousarray(by_block).reshape(*rows, -1).view(np.uint8)
    if quantization not in CODE_BITS:
        return draw.uniform(1e-4, 2e-2, (*rows, scale_bytes(quantization, width) // 2)).astype("<f2").view(np.uint8)
    groups, blocks = width // 32, scale_bytes(quantization, width) // 16
    steps, minimums = draw.integers(0, 64, (2, *rows, 8 * blocks), np.uint8)
    steps[..., groups:] = minimums[..., groups:] = 0
    steps, minimums = steps.reshape(*rows, blocks, 8), minimums.reshape(*rows, blocks, 8)
    step = draw.uniform(3e-6, 6e-4, (*rows, blocks))
    scales = np.zeros((*rows, blocks, 16), np.uint8)
    halves = np.stack((step, step * 2 ** CODE_BITS[quantization] / 2), axis=-1).astype("<f2")
    scales[..., :4] = halves.view(np.uint8)
    scales[..., 4:12] = steps & 15 | minimums << 4
    upper = steps >> 4 | minimums >> 4 << 2
    scales[..., 12:] = upper[..., :4] | upper[..., 4:] << 4
    return scales.reshape(*rows, -1)


class Numbers:
    """A block of random weights and some vectors."""

    def __init__(self, quantization: Quantization, width: int) -> None:
        draw = np.random.default_rng(width)
        self.manifest = manifest_of(quantization, width)
        self.type, self.width, self.neurons = ROW_TYPES[quantization], width, self.manifest.layout.block_neurons
        self.quants = draw.integers(0, 256, (3, self.neurons, quant_bytes(quantization, width)), np.uint8)
        if quantization == "q8":
            self.quants[self.quants == 128] = 127  # no quant is -128
        self.scales = random_scales(draw, quantization, (3, self.neurons), width)
        self.vectors = draw.normal(0, 2, (TEXTS, width)).astype(np.float32)

    def on_arm(self, command: tuple[str | Path, ...]) -> NDArray[np.float32]:
        """Return the sums [TEXTS][width] of the kernels of another machine. command: of tests/native/block_sums.c."""
        head = np.array([self.type, self.width, self.neurons, TEXTS], "<u4")
        numbers = b"".join(part.tobytes() for part in (head, self.quants, self.scales, self.vectors))
        done = subprocess.run(command, input=numbers, capture_output=True, check=True)
        return np.frombuffer(done.stdout, "<f4").reshape(TEXTS, self.width)

    def on_this_processor(self, instructions: str) -> NDArray[np.float32]:
        """Return the same sums by the kernels of this machine, whose instruction set is left selected."""
        lib.np_isa_select(instructions.encode())
        sums = np.zeros((TEXTS, self.width), np.float32)
        gates, ups = self.products(0), self.products(1)
        values = np.where((gates > 0) & (ups > 0), gates * ups, np.float32(0))
        for text in range(TEXTS):
            active = np.flatnonzero(values[text])
            quants, scales = ([ffi.from_buffer(row) for row in part[2, active]] for part in (self.quants, self.scales))
            factors = ffi.from_buffer("float[]", np.ascontiguousarray(values[text, active]))
            lib.np_add_rows(
                self.type, ffi.new("void *[]", quants), ffi.new("void *[]", scales), factors, len(active), self.width,
                ffi.from_buffer("float[]", sums[text]),
            )  # fmt: skip
        return sums

    def products(self, matrix: int) -> NDArray[np.float32]:
        """Return the products [TEXTS][neurons] of one matrix's rows by the selected kernels of this machine."""
        out, request = np.zeros((TEXTS, self.neurons), np.float32), self._request(TrialSteps(self.manifest, 1))
        lib.np_dot_rows(
            self.type, ffi.from_buffer(self.quants[matrix]), ffi.from_buffer(self.scales[matrix]), self.neurons,
            self.width, request.vectors, request.vector_stride, TEXTS, ffi.NULL, ffi.from_buffer("float[]", out),
            self.neurons,
        )  # fmt: skip
        return out

    def on_the_device(self, instructions: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the sums by OpenCL in the order of these instructions, and the products of the first matrix as an
        offloaded one."""
        device = find_device()
        blocks = OffloadedBlocks(device, self.manifest, blocks=1, tokens=TEXTS, instructions=instructions)
        blocks.load(self._slots(), None)
        steps = TrialSteps(self.manifest, 1)
        request = self._request(steps)
        sums = blocks(request).reshape(TEXTS, self.width).copy()

        model = self.manifest.model
        tensors = {"output.quants": self.quants[0].reshape(-1), "output.scales": self.scales[0].reshape(-1)}
        manifest = SimpleNamespace(
            model=SimpleNamespace(
                width=model.width, query_width=model.query_width, vocabulary=self.neurons, qkv_rows=0, layers=1,
                tied_embeddings=False,
            ),
            quantization=self.manifest.quantization,
            quantization_of=self.manifest.quantization_of,
        )  # fmt: skip
        matrices = OffloadedMatrices(
            blocks.queue, device, manifest, tensors, names=("output",), tokens=TEXTS, instructions=instructions
        )
        products = np.zeros((TEXTS, self.neurons), np.float32)
        matrices(
            SimpleNamespace(
                matrix=lib.NP_OFFLOAD_OUTPUT, layer=0, tokens=TEXTS, vectors=request.vectors,
                vector_stride=request.vector_stride, out=ffi.from_buffer("float[]", products),
            )
        )  # fmt: skip
        matrices.close()
        blocks.close()
        return sums, products

    def _request(self, steps: TrialSteps) -> Any:
        request = steps.request(0, TEXTS)
        for text in range(TEXTS):
            vector = ffi.from_buffer("float[]", self.vectors[text])
            place = request.vectors + text * request.vector_stride
            lib.np_activation_prepare(self.type, vector, self.width, place)
        self._steps = steps  # which owns the vectors
        return request

    def _slots(self) -> NDArray[np.uint8]:
        """Return the weights as slots have them."""
        manifest, layout = self.manifest, self.manifest.layout
        clusters, each = layout.block_clusters, layout.cluster_neurons
        starts = {"trigger": 0, "value": manifest.trigger_slot_bytes}
        slots = np.zeros((clusters, manifest.trigger_slot_bytes + manifest.value_slot_bytes), np.uint8)
        for number, place in enumerate(layout.matrices):
            for part, offset, rows in (
                (place.part, place.quants, self.quants[number]),
                (place.scales_part, place.scales, self.scales[number]),
            ):
                at, row = starts[part] + offset, rows.shape[1]
                slots[:, at : at + each * row] = rows.reshape(clusters, each * row)
        return slots
