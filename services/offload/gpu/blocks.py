"""The offloaded blocks of every feed-forward in a device's memory, and the OpenCL calls that compute them.

The kernels are in values.cl and sums.cl. A layer takes the same few calls for any number of sequences and experts:
copies to the device, four kernels, and one blocking copy of the sums back, one sum for each node of the fixed tree of
blocks. Arguments that do not change from step to step are set once: each layer has its own kernel objects.
"""

from __future__ import annotations

import dataclasses
import warnings
from importlib import resources
from typing import Any

import numpy as np
from neuronpipe.native import ROW_TYPES, ffi, lib
from neuronpipe.plans.package.layout import (
    BITS,
    CODEBOOK_QUANTIZATIONS,
    HALF_QUANTIZATIONS,
    MINIMUM_QUANTIZATIONS,
    Quantization,
)
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.offloaded_blocks import offloaded_clusters
from neuronpipe.services.offload.gpu.device import Device, opencl
from numpy.typing import NDArray

ORDERS = {"scalar": 0, "avx2": 1, "avx512": 2, "amx": 2, "neon": 3, "dotprod": 4}
"""The order of summation in dots.cl and sums.cl, by instruction set."""

WORK_ITEMS = 64
TOKENS = 4
LANES = {0: 1, 1: 8, 2: 16, 3: 4, 4: 4}  # work items that compute one row, by order
COUNTERS = ("predicted", "fired", "active")


@dataclasses.dataclass
class _Layer:
    """The device memory and the kernels of one layer.

    weights, bias: buffers
    values, downs: kernel objects whose arguments are set
    sizes: the size arguments that `values` has
    """

    weights: Any
    bias: Any
    values: Any
    downs: Any
    sizes: tuple[int, int, int] = (-1, -1, -1)


def built_program(context: Any, *files: str, options: list[str]) -> Any:
    """Compile dots.cl and these files behind it as one program."""
    cl = opencl()
    folder = resources.files(__package__)
    program = cl.Program(context, "".join(folder.joinpath(file).read_text("utf-8") for file in ("dots.cl", *files)))
    with warnings.catch_warnings():  # pyopencl warns about any output of a compiler, even on success
        warnings.simplefilter("ignore", cl.CompilerWarning)
        return program.build(options=options)


def type_options(quantization: Quantization) -> dict[str, int | str]:
    """Return the macros that dots.cl requires for a type of weights."""
    options: dict[str, int | str] = {
        "NIBBLES": int(quantization != "q8"),
        "HAS_MINIMUM": int(quantization in MINIMUM_QUANTIZATIONS),
        "HALF_SCALES": int(quantization in HALF_QUANTIZATIONS),
        "HIGH_BITS": BITS[quantization] - 4 if quantization in MINIMUM_QUANTIZATIONS else 0,
    }
    if quantization in CODEBOOK_QUANTIZATIONS:
        options["CODEBOOK"] = ",".join(map(str, _code_values(quantization)))
    return options


def _code_values(quantization: Quantization) -> list[int]:
    """Return the values of the 16 codes, as the native library decodes a group with scale 1."""
    values = ffi.new("float[32]")
    scale = np.ones(1, dtype="<f2").tobytes()
    lib.np_decode_row(ROW_TYPES[quantization], bytes(code | code << 4 for code in range(16)), scale, 32, values)
    return [int(value) for value in values[0:16]]


class OffloadedBlocks:
    """The first `blocks` blocks of every feed-forward, for steps of up to `tokens` tokens.

    Call `load` with the weights of each layer before the first step. A call of the object computes an
    np_offloaded_blocks, as `ComputeBlocks` of services/worker/external_products.py. OpenCL's errors are raised
    unchanged, and the object cannot be used after one.

    instructions: the instruction set whose order of summation the device follows
    """

    def __init__(self, device: Device, manifest: Manifest, *, blocks: int, tokens: int, instructions: str) -> None:
        cl = opencl()
        model, layout = manifest.model, manifest.layout
        self._manifest, self._order = manifest, ORDERS[instructions]
        self._context = cl.Context([device.handle])
        self._queue = cl.CommandQueue(self._context)
        self.blocks, self._offloaded_neurons = blocks, blocks * layout.block_neurons
        self.gated = model.gated
        self._stored = min(blocks * layout.block_neurons, layout.clusters * layout.cluster_neurons)
        self._width, self._block_neurons = model.width, layout.block_neurons
        pairs, neurons = tokens * model.most_active_experts, blocks * layout.block_neurons
        self._down_quantization = manifest.row_quantization("down")
        files = (("values.cl", manifest.quantization), ("sums.cl", self._down_quantization))
        self._values_program, self._sums_program = (
            built_program(self._context, "clusters.cl", file, options=self._options(device, quantization))
            for file, quantization in files
        )
        self._lists, self._trees = (cl.Kernel(self._sums_program, name) for name in ("lists", "trees"))
        self._layers: list[_Layer] = []
        mask_bytes = min(model.most_experts, pairs) * neurons * -(-tokens // 8)
        self._vectors = self._buffer(tokens * vector_bytes(manifest))
        self._pairs, self._chunks = self._buffer(16 * pairs), self._buffer(16 * pairs)
        self._predicted = self._buffer(mask_bytes)
        self._counters = self._buffer(4 * len(COUNTERS))
        self._hidden = self._buffer(4 * pairs * neurons)
        # Lists of active neurons, of their factors, and the lengths of the lists by block.
        self._list = tuple(self._buffer(4 * pairs * count) for count in (neurons, neurons, blocks))
        self._sums = self._buffer(4 * pairs * blocks * model.width)
        self._nodes = self._buffer(4 * pairs * blocks.bit_length() * model.width)
        self._node_sums = np.zeros(pairs * blocks.bit_length() * model.width, np.float32)
        self._no_bias = self._buffer(4)
        self._dense_pairs = 0  # pairs in the device's tables, if the model is dense
        self._tree_blocks = 0  # the argument `blocks` that is set in `_trees`
        self._chunk_count = 0
        self._lists.set_args(self._pairs, self._hidden, *self._list, self._counters)
        self._trees.set_args(self._sums, np.uint32(0), self._nodes)
        self.clear_counters()

    def load(self, weights: NDArray[np.uint8], bias: NDArray[np.float32] | None) -> None:
        """Copy the clusters of the next layer to the device.

        weights: uint8 [experts][offloaded clusters][bytes of both slots]
        bias: bias of the up projection, or None
        """
        cl = opencl()
        weight_buffer, bias_buffer = self._filled(weights), self._no_bias if bias is None else self._filled(bias)
        values, downs = cl.Kernel(self._values_program, "values"), cl.Kernel(self._sums_program, "downs")
        values.set_args(
            weight_buffer, self._vectors, np.uint32(0), self._pairs, self._chunks, self._predicted, np.uint32(0),
            bias_buffer, np.uint32(0), self._hidden, self._counters,
        )  # fmt: skip
        downs.set_args(weight_buffer, self._pairs, *self._list, self._sums)
        self._layers.append(
            _Layer(weight_buffer, bias_buffer, values, downs)
        )  # kernels do not keep their buffers alive

    def __call__(self, request: Any) -> NDArray[np.float32]:
        """Return one layer's sums, [pairs][nodes of the tree][width], flat; valid until the next call."""
        events = self.send(request)
        self.start(request)
        sums = self._node_sums[: request.pairs * request.blocks.bit_count() * self._width]
        opencl().enqueue_copy(self._queue, sums, self._nodes, is_blocking=True)
        del events
        return sums

    def send(self, request: Any) -> list[Any]:
        """Copy the inputs of the kernels to the device. Return the events of the copies, which the caller must keep
        until they are done: dropping an event waits for it."""
        vectors = ffi.buffer(request.vectors, request.tokens * request.vector_stride)
        events = [opencl().enqueue_copy(self._queue, self._vectors, vectors, is_blocking=False)]
        events += self._send_pairs(request)
        events += self._send_predictions(request)
        return events

    def start(self, request: Any) -> None:
        """Start the kernels of a layer whose inputs were sent."""
        cl, queue, pairs, blocks = opencl(), self._queue, request.pairs, request.blocks
        layer = self._layers[request.layer]
        self._set_sizes(layer, request)
        rows = WORK_ITEMS // LANES[self._order]
        size = -(-blocks * self._block_neurons // rows) * WORK_ITEMS
        cl.enqueue_nd_range_kernel(queue, layer.values, (size, self._chunk_count), (WORK_ITEMS, 1))
        cl.enqueue_nd_range_kernel(queue, self._lists, (blocks * WORK_ITEMS, pairs), (WORK_ITEMS, 1))
        columns = -(-self._width // 32 * self._group_items // WORK_ITEMS) * WORK_ITEMS
        cl.enqueue_nd_range_kernel(queue, layer.downs, (columns, blocks, pairs), (WORK_ITEMS, 1, 1))
        columns = -(-self._width // WORK_ITEMS) * WORK_ITEMS
        cl.enqueue_nd_range_kernel(queue, self._trees, (columns, blocks.bit_count(), pairs), (WORK_ITEMS, 1, 1))
        queue.flush()  # the device begins

    def finish(self) -> None:
        self._queue.finish()

    def counters(self) -> dict[str, int]:
        """Return the counters since `clear_counters`: predicted, fired and active neurons."""
        counts = np.zeros(len(COUNTERS), np.uint32)
        opencl().enqueue_copy(self._queue, counts, self._counters)
        return dict(zip(COUNTERS, counts.tolist(), strict=True))

    def clear_counters(self) -> None:
        opencl().enqueue_fill_buffer(self._queue, self._counters, np.uint32(0), 0, 4 * len(COUNTERS))

    @property
    def queue(self) -> Any:
        """The command queue of the device, which offloaded matrices share."""
        return self._queue

    def close(self) -> None:
        for layer in self._layers:
            layer.weights.release()
        self._layers = []

    def _buffer(self, size_bytes: int) -> Any:
        cl = opencl()
        return cl.Buffer(self._context, cl.mem_flags.READ_WRITE, max(size_bytes, 4))

    def _filled(self, array: NDArray[Any]) -> Any:
        """Return a buffer with this content. It is copied in a second call, since a driver may keep a copy of the host
        memory that a buffer is created from."""
        buffer = self._buffer(array.nbytes)
        opencl().enqueue_copy(self._queue, buffer, array, is_blocking=True)
        return buffer

    @property
    def _group_items(self) -> int:
        """The number of work items that compute 32 columns of the down projection."""
        return 8 if self._down_quantization == "q8" else 4

    def _send_pairs(self, request: Any) -> list[Any]:
        """Send the tables of (token, expert) pairs and of chunks, which are pairs that a work item computes at once.

        Return the events of the copies: none if a dense model has sent the same tables for an earlier layer.
        """
        dense = self._manifest.model.experts == 1
        if dense and self._dense_pairs == request.pairs:
            return []
        cl = opencl()
        pairs = np.zeros((request.pairs, 4), np.uint32)
        pairs[:, 0] = np.frombuffer(ffi.buffer(request.pair_token, 4 * request.pairs), np.uint32)
        pairs[:, 2] = np.frombuffer(ffi.buffer(request.pair_weight, 4 * request.pairs), np.uint32)
        chunks = []
        for number in range(request.groups):
            group = request.group[number]
            pairs[group.first : group.first + group.count, 1] = group.expert
            chunks += [
                (group.first + at, min(TOKENS, group.count - at), number, at) for at in range(0, group.count, TOKENS)
            ]
        table = np.array(chunks, np.uint32)
        self._chunk_count, self._dense_pairs = len(chunks), request.pairs if dense else 0
        return [
            cl.enqueue_copy(self._queue, self._pairs, pairs, is_blocking=False),
            cl.enqueue_copy(self._queue, self._chunks, table, is_blocking=False),
        ]

    def _send_predictions(self, request: Any) -> list[Any]:
        """Send the predicted neurons of the offloaded blocks, all groups in one copy from the shared stage. Return the
        events of the copies."""
        if not _is_predicted(request):
            return []
        cl, groups, mask_bytes = opencl(), request.groups, request.mask_bytes
        row_bytes, group_bytes = self._offloaded_neurons * mask_bytes, request.predicted_neurons * mask_bytes
        source = ffi.buffer(request.predicted, (groups - 1) * group_bytes + row_bytes)
        if groups == 1:
            return [cl.enqueue_copy(self._queue, self._predicted, source, is_blocking=False)]
        copy = cl.enqueue_copy(
            self._queue, self._predicted, source, buffer_origin=(0, 0), host_origin=(0, 0), region=(row_bytes, groups),
            buffer_pitches=(row_bytes,), host_pitches=(group_bytes,), is_blocking=False,
        )  # fmt: skip
        return [copy]

    def _set_sizes(self, layer: _Layer, request: Any) -> None:
        """Set the kernel arguments that depend on the sequences of a step, if they have changed."""
        mask_bytes = request.mask_bytes if _is_predicted(request) else 0
        sizes = request.vector_stride, mask_bytes, min(request.blocks * self._block_neurons, self._stored)
        if layer.sizes != sizes:
            for place, size in zip((2, 6, 8), sizes, strict=True):
                layer.values.set_arg(place, np.uint32(size))
            layer.sizes = sizes
        if self._tree_blocks != request.blocks:
            self._trees.set_arg(1, np.uint32(request.blocks))
            self._tree_blocks = request.blocks

    def _options(self, device: Device, quantization: Quantization) -> list[str]:
        """Return the compiler's options for a program; `quantization` is that of its rows."""
        manifest, model, layout = self._manifest, self._manifest.model, self._manifest.layout
        starts = {"trigger": 0, "value": manifest.trigger_slot_bytes}
        places = {matrix.name: matrix for matrix in layout.matrices}
        trigger = layout.matrices[0].name
        sizes: dict[str, int | str] = {
            "ORDER": self._order,
            **type_options(quantization),
            "WIDTH": model.width,
            "NEURONS": model.neurons,
            "GATED": int(model.gated),
            "HAS_BIAS": int(model.ffn_bias),
            "ACTIVATION_RELU": int(model.activation == "relu"),
            "ACTIVATION_DRELU": int(model.activation == "drelu"),
            "THRESHOLD": f"{float(np.float32(model.activation_threshold)).hex()}f",
            "CLUSTER_NEURONS": layout.cluster_neurons,
            "CLUSTER_BYTES": manifest.trigger_slot_bytes + manifest.value_slot_bytes,
            "HELD_CLUSTERS": offloaded_clusters(layout, self.blocks),
            "HELD_NEURONS": self.blocks * layout.block_neurons,
            "BLOCK_NEURONS": layout.block_neurons,
            "DIVIDE_IN_DOUBLE": int(not device.divides_exactly),
        }
        for name, matrix in (("TRIGGER", trigger), ("UP", "up"), ("DOWN", "down")):
            place = places[matrix]
            sizes[f"{name}_QUANTS"] = starts[place.part] + place.quants
            sizes[f"{name}_SCALES"] = starts[place.scales_part] + place.scales
        exact = ["-cl-fp32-correctly-rounded-divide-sqrt"] if device.divides_exactly else []
        return [*(f"-D{name}={value}" for name, value in sizes.items()), *exact]


def _is_predicted(request: Any) -> bool:
    return bool(request.predicted != ffi.NULL)


def vector_bytes(manifest: Manifest) -> int:
    """Return the largest stride of prepared vectors, those of the attention output included."""
    max_elements = max(manifest.model.width, manifest.model.query_width)
    return int(lib.np_activation_bytes(ROW_TYPES[manifest.quantization], max_elements)) + 64
