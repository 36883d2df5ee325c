"""Whole matrices in a device's memory beside blocks: attention's in every layer, and that of the logits.

dots.cl and rows.cl compute. A matrix takes three calls, however many texts there are: a copy to the device, one kernel,
and the rows' products back, which are waited for. Softmax, keys and values stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from neuronpipe.native import ffi
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.offloaded_blocks import matrix_shape
from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.offload.gpu.blocks import LANES, ORDERS, TOKENS, WORK_ITEMS, built_program, vector_bytes
from neuronpipe.services.offload.gpu.device import Device, opencl
from neuronpipe.services.worker.participant import HELD_MATRICES


@frozen
class _Matrix:
    """One that is held. kernel: with its weights as arguments; buffers: which a kernel does not keep."""

    kernel: Any
    rows: int
    buffers: tuple[Any, ...]


class HeldMatrices:
    """Those of these names, for steps of so many tokens, in the order of sums of this set of instructions. tensors: the
    package's fixed ones, by name. queue: of the same device. Calling it computes np_offloaded_matrix of
    native/neuronpipe.h;
    OpenCL's errors are raised as they are, and it is of no use after one."""

    def __init__(
        self,
        queue: Any,
        device: Device,
        manifest: Manifest,
        tensors: Mapping[str, Any],
        *,
        names: tuple[str, ...],
        tokens: int,
        instructions: str,
    ) -> None:
        self._queue, self._order = queue, ORDERS[instructions]
        model = manifest.model
        shapes = {name: matrix_shape(model, name) for name in names}
        kinds = {name: (columns, manifest.quantization_of(name)) for name, (_, columns) in shapes.items()}
        programs = {
            kind: built_program(queue.context, "rows.cl", self._options(device, *kind)) for kind in set(kinds.values())
        }
        self._vectors = self._buffer(tokens * vector_bytes(manifest))
        self._out = self._buffer(4 * tokens * max((rows for rows, _ in shapes.values()), default=0))
        self._no_bias = self._buffer(4)
        self._matrices: dict[tuple[int, int], _Matrix] = {}
        for name, (rows, _) in shapes.items():
            for layer, tensor in enumerate(tensors_of(model, name)):
                made = self._matrix(programs[kinds[name]], tensors, tensor, rows)
                self._matrices[HELD_MATRICES[name], layer] = made

    def __call__(self, wanted: Any) -> None:
        """Compute all rows of one matrix, and wait for them."""
        cl, matrix = opencl(), self._matrices[wanted.matrix, wanted.layer]
        vectors = ffi.buffer(wanted.vectors, wanted.tokens * wanted.vector_stride)
        # Who drops the event of a copy waits for it: this one is kept until the rows are there.
        copied = cl.enqueue_copy(self._queue, self._vectors, vectors, is_blocking=False)
        matrix.kernel.set_arg(6, np.uint32(wanted.vector_stride))
        matrix.kernel.set_arg(7, np.uint32(wanted.tokens))
        size = -(-matrix.rows * LANES[self._order] // WORK_ITEMS) * WORK_ITEMS, -(-wanted.tokens // TOKENS)
        cl.enqueue_nd_range_kernel(self._queue, matrix.kernel, size, (WORK_ITEMS, 1))
        found = ffi.buffer(wanted.out, 4 * wanted.tokens * matrix.rows)
        cl.enqueue_copy(self._queue, np.frombuffer(found, np.float32), self._out, is_blocking=True)
        del copied

    def close(self) -> None:
        """Let go of the device's memory."""
        for matrix in self._matrices.values():
            for buffer in matrix.buffers:
                buffer.release()
        self._matrices = {}

    def _matrix(self, program: Any, tensors: Mapping[str, Any], name: str, rows: int) -> _Matrix:
        cl = opencl()
        weights = [self._filled(tensors[f"{name}.{part}"]) for part in ("quants", "scales")]
        bias = tensors.get(f"{name}.bias")
        buffers = (*weights, *(() if bias is None else (self._filled(bias),)))
        kernel = cl.Kernel(program, "rows")
        kernel.set_args(
            *weights, self._no_bias if bias is None else buffers[-1], np.uint32(bias is not None), np.uint32(rows),
            self._vectors, np.uint32(0), np.uint32(0), self._out,
        )  # fmt: skip
        return _Matrix(kernel, rows, buffers)

    def _options(self, device: Device, columns: int, quantization: Quantization) -> list[str]:
        exact = ["-cl-fp32-correctly-rounded-divide-sqrt"] if device.divides_exactly else []
        sizes = {"ORDER": self._order, "TYPE_Q4": int(quantization == "q4"), "WIDTH": columns}
        return [*(f"-D{name}={value}" for name, value in sizes.items()), *exact]

    def _buffer(self, size_bytes: int) -> Any:
        cl = opencl()
        return cl.Buffer(self._queue.context, cl.mem_flags.READ_WRITE, max(size_bytes, 4))

    def _filled(self, tensor: Any) -> Any:
        content = np.frombuffer(tensor, np.uint8)
        made = self._buffer(content.nbytes)
        opencl().enqueue_copy(self._queue, made, content, is_blocking=True)
        return made


def tensors_of(model: ModelSpec, name: str) -> list[str]:
    """What the tensors of a held matrix begin with: of every layer, or of the one that there is."""
    if name == "output":
        return ["embedding" if model.tied_embeddings else "output"]
    return [f"layers.{layer}.{name}" for layer in range(model.layers)]
