"""Offloaded weights of an accelerator: the first blocks of every feed-forward, and whole matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import Layout, row_bytes
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Compute, Memory
from neuronpipe.plans.plan.runtime_memory import runtime_of
from neuronpipe.plans.plan.segment_sizes import RunShape, offloaded_product_blocks
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

SHARED_PART = 4  # a device that shares this machine's memory may take one part in 4 of the run's limit
OWN_PERCENT = 90  # usable share of a device's memory
NEURON_BYTES = 3 * 4 + 2  # for each neuron that a runtime stores, besides weights: scales of three rows, and a factor
MATRICES = ("output", "qkv", "attention_output")
"""Matrices that may be offloaded, by their tensors' names. "output" exists once, the others in every layer."""


@frozen(kw_only=True)
class Accelerator:
    """A device that computes the hottest blocks of decode steps.

    shares_memory: its memory is that of this machine
    is_processor: it computes on the decode workers' cores
    limit_bytes: requested maximum of its memory to use
    """

    name: str
    memory_bytes: int
    max_buffer_bytes: int
    shares_memory: bool
    is_processor: bool = False
    limit_bytes: int | None = None


def offloaded_clusters(layout: Layout, blocks: int) -> int:
    """Return the number of clusters in the first `blocks` blocks of one feed-forward. Its last block may be short."""
    return min(layout.clusters, blocks * layout.block_clusters)


def offloaded_weights_bytes(manifest: Manifest, blocks: int, backend: str = "") -> int:
    """Return the bytes of the first `blocks` blocks of every feed-forward, as the device stores them.

    They are stored as in slots. A runtime stores one signed byte for a weight, and three scales and a factor for each
    neuron; blocks are padded to whole products.
    """
    model, layout = manifest.model, manifest.layout
    if runtime_of(backend) is None:
        return model.ffns * offloaded_clusters(layout, blocks) * _cluster_bytes(manifest)
    product = offloaded_product_blocks(layout, blocks)
    neurons = -(-blocks // product) * product * layout.block_neurons
    return model.ffns * neurons * (3 * model.width + NEURON_BYTES)


def matrix_shape(model: ModelSpec, name: str) -> tuple[int, int]:
    """Return the rows and columns of one of MATRICES."""
    shapes = {
        "output": (model.vocabulary, model.width),
        "qkv": (model.qkv_rows, model.width),
        "attention_output": (model.width, model.query_width),
    }
    return shapes[name]


def matrix_bytes(manifest: Manifest, name: str) -> int:
    """Return the bytes of one of MATRICES in one layer."""
    rows, columns = matrix_shape(manifest.model, name)
    return rows * row_bytes(manifest.quantization_of(name), columns)


def offloaded_matrices_bytes(manifest: Manifest, matrices: Sequence[str], batch: int) -> int:
    """Return the bytes of these matrices in all layers, with biases, and with vectors and products of `batch`
    sequences."""
    if not matrices:
        return 0
    model = manifest.model
    shapes = {name: matrix_shape(model, name) for name in matrices}
    layers = {name: 1 if name == "output" else model.layers for name in matrices}
    weights = sum(layers[name] * (matrix_bytes(manifest, name) + 4 * rows) for name, (rows, _) in shapes.items())
    return weights + batch * (
        2 * max(model.width, model.query_width) + 512 + 4 * max(rows for rows, _ in shapes.values())
    )


def offload_scratch_bytes(manifest: Manifest, blocks: int, batch: int, backend: str = "") -> int:
    """Return the bytes that steps of `batch` sequences with offloaded blocks need besides weights.

    These are vectors, values, lists of neurons and block sums. For a runtime they are the clusters of one layer, which
    it converts to signed bytes; runtime_memory.py counts its graphs.
    """
    model, layout = manifest.model, manifest.layout
    if runtime_of(backend) is not None:
        return model.most_experts * offloaded_clusters(layout, blocks) * _cluster_bytes(manifest)
    pairs, neurons = batch * model.most_active_experts, blocks * layout.block_neurons
    pair_bytes = 12 * neurons + 4 * blocks * (model.width + 1) + 32
    masks = min(model.most_experts, pairs) * neurons * -(-batch // 8)
    return pairs * pair_bytes + masks + batch * (2 * max(model.width, model.query_width) + 512)


def _cluster_bytes(manifest: Manifest) -> int:
    return manifest.trigger_slot_bytes + manifest.value_slot_bytes


def offload_bytes(manifest: Manifest, blocks: int, batch: int, backend: str) -> int:
    """Return the bytes of offloaded blocks and of the scratch for steps of `batch` sequences."""
    return offloaded_weights_bytes(manifest, blocks, backend) + offload_scratch_bytes(manifest, blocks, batch, backend)


def blocks_within(manifest: Manifest, limit_bytes: int, batch: int, backend: str = "") -> int:
    """Return how many blocks of every feed-forward fit the limit, with scratch for `batch` sequences; may be 0."""
    numbers = range(manifest.layout.blocks, 0, -1)
    return next((blocks for blocks in numbers if offload_bytes(manifest, blocks, batch, backend) <= limit_bytes), 0)


def device_usable_bytes(accelerator: Accelerator, run_bytes: int) -> int:
    """Return the bytes of the device's memory that offloading may take.

    run_bytes: the run's memory limit
    """
    usable = accelerator.memory_bytes * OWN_PERCENT // 100
    if accelerator.limit_bytes is not None:
        return min(usable, accelerator.limit_bytes)
    return min(usable, run_bytes // SHARED_PART) if accelerator.shares_memory else usable


def max_blocks(
    manifest: Manifest, accelerator: Accelerator, run_bytes: int, shape: RunShape, matrices: Sequence[str] = ()
) -> int:
    """Return how many blocks of every feed-forward fit the device besides these matrices.

    run_bytes: the run's memory limit

    Raises UserError if not even one block fits.
    """
    batch, backend = shape.sequences, shape.accelerator_backend
    remaining = device_usable_bytes(accelerator, run_bytes) - offloaded_matrices_bytes(manifest, matrices, batch)
    usable = min(remaining, accelerator.max_buffer_bytes * manifest.model.layers)
    blocks = blocks_within(manifest, usable, batch, backend)
    if not blocks:
        block_bytes = offload_bytes(manifest, 1, batch, backend)
        raise UserError(
            f"--gpu-memory: {max(0, usable) >> 20} MiB of {accelerator.name} may be used, and one block of every "
            f"feed-forward takes {-(-block_bytes >> 20)} MiB; give it more, or leave the accelerator out"
        )
    return blocks


def matrices_besides_all_blocks(
    manifest: Manifest, accelerator: Accelerator, run_bytes: int, shape: RunShape
) -> tuple[str, ...]:
    """Return the matrices that fit a device besides all blocks, in the order of MATRICES.

    Empty if not all blocks fit, and for a runtime, which computes blocks only.

    run_bytes: the run's memory limit
    """
    blocks, batch, backend = manifest.layout.blocks, shape.sequences, shape.accelerator_backend
    if runtime_of(backend) is not None or max_blocks(manifest, accelerator, run_bytes, shape) < blocks:
        return ()
    remaining = device_usable_bytes(accelerator, run_bytes) - offload_bytes(manifest, blocks, batch, backend)
    matrices: tuple[str, ...] = ()
    for name in MATRICES:
        if offloaded_matrices_bytes(manifest, (*matrices, name), batch) <= remaining and fits_buffer(
            manifest, accelerator, name
        ):
            matrices = (*matrices, name)
    return matrices


def offload_shape(
    manifest: Manifest,
    accelerator: Accelerator,
    profile: DeviceProfile | None,
    run_bytes: int,
    shape: RunShape,
    blocks: tuple[int, ...] | None,
    matrices: tuple[str, ...] | None,
) -> RunShape:
    """Return the shape of a run with the offloaded blocks and matrices for which the accelerator has room.

    run_bytes: the run's memory limit
    blocks: maximum, in the form of `Compute.held_blocks`; None: as many as fit
    matrices: None: for an unmeasured accelerator, those that fit besides all blocks, else none

    Raises UserError if not even one block fits.
    """
    if matrices is None:
        measured = was_measured(accelerator, profile)
        matrices = () if measured else matrices_besides_all_blocks(manifest, accelerator, run_bytes, shape)
    fitting = max_blocks(manifest, accelerator, run_bytes, shape, matrices)
    block_count = fitting if blocks is None else min(fitting, max(blocks))
    shares_memory = accelerator.shares_memory
    return dataclasses.replace(
        shape, max_offloaded_blocks=block_count, offloaded_matrices=matrices, device_shares_memory=shares_memory
    )


def fits_buffer(manifest: Manifest, accelerator: Accelerator, name: str) -> bool:
    """Return True if one buffer of the device is large enough for this matrix."""
    return matrix_bytes(manifest, name) <= accelerator.max_buffer_bytes


def was_measured(accelerator: Accelerator, profile: DeviceProfile | None) -> bool:
    """Return True if the profile has figures of this accelerator."""
    measured = profile.accelerator if profile is not None else None
    return measured is not None and measured.name == accelerator.name


def offload_reasons(
    manifest: Manifest,
    accelerator: Accelerator | None,
    compute: Compute,
    memory: Memory,
    profile: DeviceProfile | None,
) -> tuple[str, ...]:
    """Return the reason of a plan that names the offloaded weights; empty without an accelerator."""
    if accelerator is None:
        return ()
    location = ", which is this machine's memory" if accelerator.shares_memory else " of its own memory"
    bits, fallback = "with the same bits", ""
    if runtime_of(compute.accelerator_backend()) is not None:
        why = "as many as it may hold; its speed is not measured, so none is expected"
        bits = f"densely, in numerics of its own ({compute.accelerator_backend()})"
        fallback = ", in theirs"
    elif not was_measured(accelerator, profile):
        why = "it was not measured: as many as it holds, and no speed is expected; `neuronpipe profile device` "
        why += "measures it"
    else:
        why = "as many as make the shortest step"
        if accelerator.is_processor:
            why += "; it computes on the decode workers' own cores, so that it makes none shorter"
    return (
        f"the first {show_offloaded_blocks(compute.held_blocks)} of {manifest.layout.blocks} blocks of every "
        f"feed-forward"
        f"{show_offloaded_matrices(compute.held_matrices)} are computed by {accelerator.name}, {bits}: "
        f"{memory.accelerator_bytes >> 20} MiB{location} ({why}); "
        f"while it is lost the decode workers compute them{fallback}, from memory and flash",
    )


def show_offloaded_matrices(matrices: Sequence[str]) -> str:
    """Return the offloaded matrices as text, like ", attention's qkv and output, and the output matrix"."""
    attention = [name for matrix, name in (("qkv", "qkv"), ("attention_output", "output")) if matrix in matrices]
    text = f", attention's {' and '.join(attention)} of every layer" if attention else ""
    return f"{text} and the output matrix" if "output" in matrices else text


def show_offloaded_blocks(blocks_by_batch: tuple[int, ...]) -> str:
    """Return the numbers of blocks as text, by sequences if they differ, like "7 (1 text), 5 (2), 3 (3 and more)"."""
    if len(blocks_by_batch) == 1:
        return str(blocks_by_batch[0])
    count = len(blocks_by_batch)
    names = ["1 text", *(str(batch) for batch in range(2, count)), f"{count} and more"]
    return ", ".join(f"{number} ({name})" for number, name in zip(blocks_by_batch, names, strict=True))
