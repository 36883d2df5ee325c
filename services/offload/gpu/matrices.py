"""Offloaded matrices in a device's memory: those of attention in every layer, and the output matrix.

The kernels are in dots.cl and rows.cl. A matrix takes three calls for any number of sequences: a copy to the device,
one kernel, and a blocking copy of the products back. Softmax, keys and values stay on the processor.
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
from neuronpipe.services.offload.gpu.blocks import (
    LANES,
    ORDERS,
    TOKENS,
    WORK_ITEMS,
    built_program,
    type_options,
    vector_bytes,
)
from neuronpipe.services.offload.gpu.device import Device, opencl
from neuronpipe.services.worker.participant import OFFLOADED_MATRICES


@frozen
class _Matrix:
    """One offloaded matrix.

    kernel: a kernel object whose weight arguments are set
    buffers: referenced because kernel objects do not keep them alive
    """

    kernel: Any
    rows: int
    buffers: tuple[Any, ...]


class OffloadedMatrices:
    """The offloaded matrices `names`, for steps of up to `tokens` tokens.

    queue: a command queue of the device
    tensors: the package's fixed tensors, by name
    instructions: the instruction set whose order of summation the device follows

    Calling it computes a request of native/neuronpipe.h for rows of a matrix. OpenCL's errors are raised unchanged, and
    the object cannot be used after one.
    """

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
        kinds = {
            tensor: (columns, manifest.quantization_of(tensor))
            for name, (_, columns) in shapes.items()
            for tensor in tensors_of(model, name)
        }
        programs = {
            kind: built_program(queue.context, "rows.cl", options=self._options(device, *kind))
            for kind in set(kinds.values())
        }
        self._vectors = self._buffer(tokens * vector_bytes(manifest))
        self._out = self._buffer(4 * tokens * max((rows for rows, _ in shapes.values()), default=0))
        self._no_bias = self._buffer(4)
        self._matrices: dict[tuple[int, int], _Matrix] = {}
        for name, (rows, _) in shapes.items():
            for layer, tensor in enumerate(tensors_of(model, name)):
                matrix = self._matrix(programs[kinds[tensor]], tensors, tensor, rows)
                self._matrices[OFFLOADED_MATRICES[name], layer] = matrix

    def __call__(self, request: Any) -> None:
        """Compute all rows of one matrix, and wait for them."""
        cl, matrix = opencl(), self._matrices[request.matrix, request.layer]
        vectors = ffi.buffer(request.vectors, request.tokens * request.vector_stride)
        # Dropping the event of a copy waits for the copy, so the event is referenced until the products have arrived.
        event = cl.enqueue_copy(self._queue, self._vectors, vectors, is_blocking=False)
        matrix.kernel.set_arg(6, np.uint32(request.vector_stride))
        matrix.kernel.set_arg(7, np.uint32(request.tokens))
        size = -(-matrix.rows * LANES[self._order] // WORK_ITEMS) * WORK_ITEMS, -(-request.tokens // TOKENS)
        cl.enqueue_nd_range_kernel(self._queue, matrix.kernel, size, (WORK_ITEMS, 1))
        products = ffi.buffer(request.out, 4 * request.tokens * matrix.rows)
        cl.enqueue_copy(self._queue, np.frombuffer(products, np.float32), self._out, is_blocking=True)
        del event

    def close(self) -> None:
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
        sizes: dict[str, int | str] = {"ORDER": self._order, **type_options(quantization), "WIDTH": columns}
        return [*(f"-D{name}={value}" for name, value in sizes.items()), *exact]

    def _buffer(self, size_bytes: int) -> Any:
        cl = opencl()
        return cl.Buffer(self._queue.context, cl.mem_flags.READ_WRITE, max(size_bytes, 4))

    def _filled(self, tensor: Any) -> Any:
        content = np.frombuffer(tensor, np.uint8)
        buffer = self._buffer(content.nbytes)
        opencl().enqueue_copy(self._queue, buffer, content, is_blocking=True)
        return buffer


def tensors_of(model: ModelSpec, name: str) -> list[str]:
    """Return the tensor names of an offloaded matrix, without the suffix: one per layer, or the only one."""
    if name == "output":
        return ["embedding" if model.tied_embeddings else "output"]
    return [f"layers.{layer}.{name}" for layer in range(model.layers)]
