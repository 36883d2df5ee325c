"""The first blocks of every feed-forward in a device's memory: what a participant of decode steps has computed there.

dots.cl and kernels.cl compute. A layer takes the same few calls however many texts and experts there are: copies to
the device, four kernels, and sums back, which alone are waited for. Sums of blocks that meet in a node of the fixed
tree come back as one. What does not change from step to step is told once: each layer has kernels of its own, with
their arguments.
"""

from __future__ import annotations

import dataclasses
import warnings
from importlib import resources
from typing import Any

import numpy as np
from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.offloaded_blocks import offloaded_clusters
from neuronpipe.services.offload.gpu.device import Device, opencl
from numpy.typing import NDArray

ORDERS = {"scalar": 0, "avx2": 1, "avx512": 2, "amx": 2, "neon": 3, "dotprod": 4}
"""The order of sums in dots.cl and kernels.cl, by set of vector instructions."""

WORK_ITEMS = 64
TOKENS = 4
LANES = {0: 1, 1: 8, 2: 16, 3: 4, 4: 4}
COUNTERS = ("predicted", "fired", "active")


@dataclasses.dataclass
class _Layer:
    """weights, bias: in the device's memory. values, downs: kernels with what they read of this layer; of texts they
    were last told `told`."""

    weights: Any
    bias: Any
    values: Any
    downs: Any
    told: tuple[int, int, int] = (-1, -1, -1)


def built_program(context: Any, name: str, options: list[str]) -> Any:
    """The kernels of dots.cl and of this file behind it, compiled."""
    cl = opencl()
    folder = resources.files(__package__)
    program = cl.Program(context, "".join(folder.joinpath(file).read_text("utf-8") for file in ("dots.cl", name)))
    with warnings.catch_warnings():  # a compiler that says anything, say that all went well, is reported as a warning
        warnings.simplefilter("ignore", cl.CompilerWarning)
        return program.build(options=options)


class HeldBlocks:
    """The first `blocks` blocks, for steps of so many tokens, in the order of sums of this set of instructions. `load`
    each layer's weights before the first step. Calling it computes np_wanted_blocks of native/neuronpipe.h, as
    ComputeBlocks of participant.py says; OpenCL's errors are raised as they are, and it is of no use after one."""

    def __init__(self, device: Device, manifest: Manifest, *, blocks: int, tokens: int, instructions: str) -> None:
        cl = opencl()
        model, layout = manifest.model, manifest.layout
        self._manifest, self._order = manifest, ORDERS[instructions]
        self._context = cl.Context([device.handle])
        self._queue = cl.CommandQueue(self._context)
        self.blocks, self._held_neurons = blocks, blocks * layout.block_neurons
        self.gated = model.gated
        self._stored = min(blocks * layout.block_neurons, layout.clusters * layout.cluster_neurons)
        self._width, self._block_neurons = model.width, layout.block_neurons
        pairs, neurons = tokens * model.experts_per_token, blocks * layout.block_neurons
        program = built_program(self._context, "kernels.cl", self._options(device))
        self._program, self._lists, self._trees = program, cl.Kernel(program, "lists"), cl.Kernel(program, "trees")
        self._layers: list[_Layer] = []
        mask_bytes = min(model.experts, pairs) * neurons * -(-tokens // 8)
        self._vectors = self._buffer(tokens * vector_bytes(manifest))
        self._pairs, self._chunks = self._buffer(16 * pairs), self._buffer(16 * pairs)
        self._predicted = self._buffer(mask_bytes)
        self._counters = self._buffer(4 * len(COUNTERS))
        self._hidden = self._buffer(4 * pairs * neurons)
        self._list = tuple(
            self._buffer(4 * pairs * many) for many in (neurons, neurons, blocks)
        )  # neurons, factors, counts
        self._sums = self._buffer(4 * pairs * blocks * model.width)
        self._nodes = self._buffer(4 * pairs * blocks.bit_length() * model.width)
        self._node_sums = np.zeros(pairs * blocks.bit_length() * model.width, np.float32)
        self._no_bias = self._buffer(4)
        self._dense_pairs = 0  # of which the tables of pairs are, of a dense model
        self._tree_blocks = 0  # of which the kernel of trees was told
        self._chunk_count = 0
        self._lists.set_args(self._pairs, self._hidden, *self._list, self._counters)
        self._trees.set_args(self._sums, np.uint32(0), self._nodes)
        self.clear_counters()

    def load(self, weights: NDArray[np.uint8], bias: NDArray[np.float32] | None) -> None:
        """The next layer's clusters, [experts][held clusters][bytes of both slots]; bias: of its Ups, if it has any."""
        cl = opencl()
        of_weights, of_bias = self._filled(weights), self._no_bias if bias is None else self._filled(bias)
        values, downs = cl.Kernel(self._program, "values"), cl.Kernel(self._program, "downs")
        values.set_args(
            of_weights, self._vectors, np.uint32(0), self._pairs, self._chunks, self._predicted, np.uint32(0),
            of_bias, np.uint32(0), self._hidden, self._counters,
        )  # fmt: skip
        downs.set_args(of_weights, self._pairs, *self._list, self._sums)
        self._layers.append(_Layer(of_weights, of_bias, values, downs))  # kernels do not keep their buffers

    def __call__(self, wanted: Any) -> NDArray[np.float32]:
        """One layer's sums, by pair and node of the tree; good until the next call."""
        sent = self.send(wanted)
        self.start(wanted)
        found = self._node_sums[: wanted.pairs * wanted.blocks.bit_count() * self._width]
        opencl().enqueue_copy(self._queue, found, self._nodes, is_blocking=True)
        del sent
        return found

    def send(self, wanted: Any) -> list[Any]:
        """Copy what the kernels read to the device. Returns what must stay until that was done: who drops the event of
        a copy waits for it."""
        vectors = ffi.buffer(wanted.vectors, wanted.tokens * wanted.vector_stride)
        sent = [opencl().enqueue_copy(self._queue, self._vectors, vectors, is_blocking=False)]
        sent += self._tell_pairs(wanted)
        sent += self._tell_predictions(wanted)
        return sent

    def start(self, wanted: Any) -> None:
        """Start the kernels of a layer whose vectors were sent."""
        cl, queue, pairs, blocks = opencl(), self._queue, wanted.pairs, wanted.blocks
        layer = self._layers[wanted.layer]
        self._tell_sizes(layer, wanted)
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
        """Wait for all that was started."""
        self._queue.finish()

    def counters(self) -> dict[str, int]:
        """What was computed since they were cleared."""
        counts = np.zeros(len(COUNTERS), np.uint32)
        opencl().enqueue_copy(self._queue, counts, self._counters)
        return dict(zip(COUNTERS, counts.tolist(), strict=True))

    def clear_counters(self) -> None:
        """From now on they are of what follows."""
        opencl().enqueue_fill_buffer(self._queue, self._counters, np.uint32(0), 0, 4 * len(COUNTERS))

    @property
    def queue(self) -> Any:
        """Where the device's work is put, for who computes there as well."""
        return self._queue

    def close(self) -> None:
        """Let go of the device's memory."""
        for layer in self._layers:
            layer.weights.release()
        self._layers = []

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
        if dense and self._dense_pairs == wanted.pairs:
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
        self._chunk_count, self._dense_pairs = len(chunks), wanted.pairs if dense else 0
        return [
            cl.enqueue_copy(self._queue, self._pairs, pairs, is_blocking=False),
            cl.enqueue_copy(self._queue, self._chunks, table, is_blocking=False),
        ]

    def _tell_predictions(self, wanted: Any) -> list[Any]:
        """Who is predicted, of the blocks held: from where the participants have it, by one copy for all groups.
        Returns what must stay until it was copied."""
        if not _names_triggers(wanted):
            return []
        cl, groups, mask_bytes = opencl(), wanted.groups, wanted.mask_bytes
        held_bytes, group_bytes = self._held_neurons * mask_bytes, wanted.predicted_neurons * mask_bytes
        source = ffi.buffer(wanted.predicted, (groups - 1) * group_bytes + held_bytes)
        if groups == 1:
            return [cl.enqueue_copy(self._queue, self._predicted, source, is_blocking=False)]
        copy = cl.enqueue_copy(
            self._queue, self._predicted, source, buffer_origin=(0, 0), host_origin=(0, 0), region=(held_bytes, groups),
            buffer_pitches=(held_bytes,), host_pitches=(group_bytes,), is_blocking=False,
        )  # fmt: skip
        return [copy]

    def _tell_sizes(self, layer: _Layer, wanted: Any) -> None:
        """What changes with the texts of a step, where it has changed."""
        mask_bytes = wanted.mask_bytes if _names_triggers(wanted) else 0
        told = wanted.vector_stride, mask_bytes, min(wanted.blocks * self._block_neurons, self._stored)
        if layer.told != told:
            for place, size in zip((2, 6, 8), told, strict=True):
                layer.values.set_arg(place, np.uint32(size))
            layer.told = told
        if self._tree_blocks != wanted.blocks:
            self._trees.set_arg(1, np.uint32(wanted.blocks))
            self._tree_blocks = wanted.blocks

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


def _names_triggers(wanted: Any) -> bool:
    """Whether a predictor decides which triggers are computed."""
    return bool(wanted.predicted != ffi.NULL)


def vector_bytes(manifest: Manifest) -> int:
    """From one token's prepared vector to the next at most: those of attention's output are as long."""
    kind = {"q8": lib.NP_Q8, "q4": lib.NP_Q4}[manifest.quantization]
    longest = max(manifest.model.width, manifest.model.query_width)
    return int(lib.np_activation_bytes(kind, longest)) + 64
