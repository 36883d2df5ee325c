"""The first blocks of every feed-forward in a device's memory: what a participant of decode steps has computed there.

kernels.cl computes. A layer takes the same few calls however many texts and experts there are: copies to the device,
four kernels, and sums back, which are waited for. Sums of blocks that meet in a node of the fixed tree come back as
one: in the place of the first of them, with zeros for the others, which change no bit of the tree above.
"""

from __future__ import annotations

import warnings
from importlib import resources
from typing import Any

import numpy as np
from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.held import held_clusters
from neuronpipe.services.worker.gpu.device import Device, opencl
from numpy.typing import NDArray

ORDERS = {"scalar": 0, "avx2": 1, "avx512": 2, "amx": 2, "neon": 3, "dotprod": 4}
"""The order of sums in kernels.cl, by set of vector instructions."""

WORK_ITEMS = 64
TOKENS = 4
LANES = {0: 1, 1: 8, 2: 16, 3: 4, 4: 4}
COUNTERS = ("predicted", "fired", "active")


class HeldBlocks:
    """The first `blocks` blocks, for steps of so many tokens, in the order of sums of this set of instructions. `load`
    each layer's weights before the first step. Calling it computes np_wanted_blocks of native/neuronpipe.h; OpenCL's
    errors are raised as they are, and it is of no use after one."""

    def __init__(self, device: Device, manifest: Manifest, *, blocks: int, tokens: int, instructions: str) -> None:
        cl = opencl()
        model, layout = manifest.model, manifest.layout
        self._manifest, self._order = manifest, ORDERS[instructions]
        self._context = cl.Context([device.handle])
        self._queue = cl.CommandQueue(self._context)
        self.blocks = blocks
        self.gated = model.gated
        self._stored = min(blocks * layout.block_neurons, layout.clusters * layout.cluster_neurons)
        self._width, self._block_neurons = model.width, layout.block_neurons
        pairs, neurons = tokens * model.experts_per_token, blocks * layout.block_neurons
        program = cl.Program(self._context, resources.files(__package__).joinpath("kernels.cl").read_text("utf-8"))
        with (
            warnings.catch_warnings()
        ):  # a compiler that says anything, say that all went well, is reported as a warning
            warnings.simplefilter("ignore", cl.CompilerWarning)
            program.build(options=self._options(device))
        self._values, self._lists, self._downs, self._trees = (
            program.values,
            program.lists,
            program.downs,
            program.trees,
        )
        self._weights: list[Any] = []
        self._biases: list[Any] = []
        mask_bytes = min(model.experts, pairs) * neurons * -(-tokens // 8)
        self._vectors = self._buffer(tokens * _vector_bytes(manifest))
        self._pairs, self._chunks = self._buffer(16 * pairs), self._buffer(16 * pairs)
        self._predicted = self._buffer(mask_bytes)
        self._counters = self._buffer(4 * len(COUNTERS))
        hidden = self._buffer(4 * pairs * neurons)
        list_neurons, list_factors = self._buffer(4 * pairs * neurons), self._buffer(4 * pairs * neurons)
        list_counts = self._buffer(4 * pairs * blocks)
        self._sums = self._buffer(4 * pairs * blocks * model.width)
        self._nodes = self._buffer(4 * pairs * blocks.bit_length() * model.width)
        self._node_sums = np.zeros(pairs * blocks.bit_length() * model.width, np.float32)
        self._no_bias = self._buffer(4)
        self._between = hidden, list_neurons, list_factors, list_counts  # kernels do not keep their buffers
        self._told: tuple[int, ...] = ()  # pairs and blocks of which the tables below are
        self._chunk_count = 0
        self._values.set_args(
            self._sums, self._vectors, np.uint32(0), self._pairs, self._chunks, self._predicted, np.uint32(0),
            self._no_bias, np.uint32(0), hidden, self._counters,
        )  # fmt: skip
        self._lists.set_args(self._pairs, hidden, list_neurons, list_factors, list_counts, self._counters)
        self._downs.set_args(self._sums, self._pairs, list_neurons, list_factors, list_counts, self._sums)
        self._trees.set_args(self._sums, np.uint32(0), self._nodes)
        self.clear_counters()

    def load(self, weights: NDArray[np.uint8], bias: NDArray[np.float32] | None) -> None:
        """The next layer's clusters, [experts][held clusters][bytes of both slots]; bias: of its Ups, if it has any."""
        self._weights.append(self._filled(weights))
        self._biases.append(self._no_bias if bias is None else self._filled(bias))

    def __call__(self, wanted: Any) -> None:
        """Compute one layer's block sums, and wait for them."""
        if not wanted.blocks:
            return
        kept = self.send(wanted)
        self.start(wanted)
        self._receive(wanted)
        del kept

    def send(self, wanted: Any) -> list[Any]:
        """Copy what the kernels read to the device. Returns what must stay until that was done."""
        cl = opencl()
        vectors = ffi.buffer(wanted.vectors, wanted.tokens * wanted.vector_stride)
        cl.enqueue_copy(self._queue, self._vectors, vectors, is_blocking=False)
        kept = self._tell_pairs(wanted)
        mask_bytes = self._tell_predictions(wanted)
        weights, values = self._weights[wanted.layer], self._values
        values.set_arg(0, weights)
        values.set_arg(2, np.uint32(wanted.vector_stride))
        values.set_arg(6, np.uint32(mask_bytes))
        values.set_arg(7, self._biases[wanted.layer])
        values.set_arg(8, np.uint32(min(wanted.blocks * self._block_neurons, self._stored)))
        self._downs.set_arg(0, weights)
        self._trees.set_arg(1, np.uint32(wanted.blocks))
        return kept

    def start(self, wanted: Any) -> None:
        """Start the kernels of a layer whose vectors were sent."""
        cl, queue, pairs, blocks = opencl(), self._queue, wanted.pairs, wanted.blocks
        rows = WORK_ITEMS // LANES[self._order]
        size = -(-blocks * self._block_neurons // rows) * WORK_ITEMS
        cl.enqueue_nd_range_kernel(queue, self._values, (size, self._chunk_count), (WORK_ITEMS, 1))
        cl.enqueue_nd_range_kernel(queue, self._lists, (blocks * WORK_ITEMS, pairs), (WORK_ITEMS, 1))
        columns = -(-self._width // 32 * self._group_items // WORK_ITEMS) * WORK_ITEMS
        cl.enqueue_nd_range_kernel(queue, self._downs, (columns, blocks, pairs), (WORK_ITEMS, 1, 1))
        columns = -(-self._width // WORK_ITEMS) * WORK_ITEMS
        cl.enqueue_nd_range_kernel(queue, self._trees, (columns, len(_nodes(blocks)), pairs), (WORK_ITEMS, 1, 1))
        queue.flush()  # the device begins

    def finish(self) -> None:
        """Wait for all that was started."""
        self._queue.finish()

    def _receive(self, wanted: Any) -> None:
        """Sums of nodes to where they are wanted, and wait for them. Until they are there, zeros for the others."""
        width, nodes = self._width, _nodes(wanted.blocks)
        partials = _partials(wanted, width)
        partials[:] = 0
        found = self._node_sums[: wanted.pairs * len(nodes) * width]
        opencl().enqueue_copy(self._queue, found, self._nodes, is_blocking=True)
        partials[:, nodes] = found.reshape(wanted.pairs, len(nodes), width)

    def counters(self) -> dict[str, int]:
        """What was computed since they were cleared."""
        counts = np.zeros(len(COUNTERS), np.uint32)
        opencl().enqueue_copy(self._queue, counts, self._counters)
        return dict(zip(COUNTERS, counts.tolist(), strict=True))

    def clear_counters(self) -> None:
        """From now on they are of what follows."""
        opencl().enqueue_fill_buffer(self._queue, self._counters, np.uint32(0), 0, 4 * len(COUNTERS))

    def close(self) -> None:
        """Let go of the device's memory."""
        for buffer in self._weights:
            buffer.release()
        self._weights = []

    def _buffer(self, size_bytes: int) -> Any:
        cl = opencl()
        return cl.Buffer(self._context, cl.mem_flags.READ_WRITE, max(size_bytes, 4))

    def _filled(self, array: NDArray[Any]) -> Any:
        """A buffer with this in it. It is copied by itself: of what a buffer is made from, a driver may keep a copy."""
        made = self._buffer(array.nbytes)
        opencl().enqueue_copy(self._queue, made, array, is_blocking=True)
        return made

    @property
    def _group_items(self) -> int:
        """Work items that compute 32 columns of Down."""
        return 4 if self._manifest.quantization == "q4" else 8

    def _tell_pairs(self, wanted: Any) -> list[Any]:
        """The tables of pairs, and of the pairs that a work item computes at once. Of a dense layer they are those of
        the layer before. Returns what must stay until it was copied."""
        dense = self._manifest.model.experts == 1
        if dense and self._told == (wanted.pairs,):
            return []
        cl = opencl()
        pairs = np.zeros((wanted.pairs, 4), np.uint32)
        pairs[:, 0] = np.frombuffer(ffi.buffer(wanted.pair_token, 4 * wanted.pairs), np.uint32)
        pairs[:, 2] = np.frombuffer(ffi.buffer(wanted.pair_weight, 4 * wanted.pairs), np.uint32)
        chunks = []
        for number in range(wanted.groups):
            group = wanted.group[number]
            pairs[group.first : group.first + group.count, 1] = group.expert
            chunks += [
                (group.first + at, min(TOKENS, group.count - at), number, at) for at in range(0, group.count, TOKENS)
            ]
        table = np.array(chunks, np.uint32)
        cl.enqueue_copy(self._queue, self._pairs, pairs, is_blocking=False)
        cl.enqueue_copy(self._queue, self._chunks, table, is_blocking=False)
        self._chunk_count = len(chunks)
        self._told = (wanted.pairs,)
        return [pairs, table]

    def _tell_predictions(self, wanted: Any) -> int:
        """Who is predicted, of the blocks held. Returns the bytes of a neuron's predictions; 0: nobody predicts."""
        if wanted.predicted == ffi.NULL:
            return 0
        cl = opencl()
        mask_bytes, held = wanted.mask_bytes, self.blocks * self._block_neurons
        for number in range(wanted.groups):
            source = wanted.predicted + number * wanted.predicted_neurons * mask_bytes
            cl.enqueue_copy(
                self._queue,
                self._predicted,
                ffi.buffer(source, held * mask_bytes),
                dst_offset=number * held * mask_bytes,
                is_blocking=False,
            )
        return int(mask_bytes)

    def _options(self, device: Device) -> list[str]:
        manifest, model, layout = self._manifest, self._manifest.model, self._manifest.layout
        starts = {"trigger": 0, "value": manifest.trigger_slot_bytes}
        places = {matrix.name: matrix for matrix in layout.matrices}
        trigger = layout.matrices[0].name
        sizes: dict[str, int | str] = {
            "ORDER": self._order,
            "TYPE_Q4": int(manifest.quantization == "q4"),
            "WIDTH": model.width,
            "NEURONS": model.neurons,
            "GATED": int(model.gated),
            "HAS_BIAS": int(model.ffn_bias),
            "ACTIVATION_RELU": int(model.activation == "relu"),
            "ACTIVATION_DRELU": int(model.activation == "drelu"),
            "THRESHOLD": f"{float(np.float32(model.activation_threshold)).hex()}f",
            "CLUSTER_NEURONS": layout.cluster_neurons,
            "CLUSTER_BYTES": manifest.trigger_slot_bytes + manifest.value_slot_bytes,
            "HELD_CLUSTERS": held_clusters(layout, self.blocks),
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


def _nodes(blocks: int) -> list[int]:
    """Where the nodes begin that so many first blocks make up: one for each bit set, from the highest."""
    sizes = [1 << bit for bit in range(blocks.bit_length() - 1, -1, -1) if blocks >> bit & 1]
    return [sum(sizes[:number]) for number in range(len(sizes))]


def _partials(wanted: Any, width: int) -> NDArray[np.float32]:
    """Where block sums of a layer go: [pairs][blocks][width]."""
    stride = wanted.partials_stride
    count = stride * (wanted.pairs - 1) + wanted.blocks * width
    flat = np.frombuffer(ffi.buffer(wanted.partials, 4 * count), np.float32)
    return np.lib.stride_tricks.as_strided(
        flat, (wanted.pairs, wanted.blocks, width), (4 * stride, 4 * width, 4), writeable=True
    )


def _vector_bytes(manifest: Manifest) -> int:
    """From one token's prepared vector to the next at most: those of attention's output are as long."""
    kind = {"q8": lib.NP_Q8, "q4": lib.NP_Q4}[manifest.quantization]
    longest = max(manifest.model.width, manifest.model.query_width)
    return int(lib.np_activation_bytes(kind, longest)) + 64
