"""What an accelerator holds in memory of its own: the first blocks of every feed-forward, and whole matrices beside
them: attention's of every layer, and that of the logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import Layout, row_bytes
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Compute, Memory
from neuronpipe.plans.plan.runtime_memory import runtime_of
from neuronpipe.plans.plan.segment_sizes import RunShape, held_product_blocks
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

SHARED_PART = 4  # of the run's limit, or less: what a device may take of memory that it shares
OWN_PERCENT = 90  # of a device's own memory
NEURON_BYTES = 3 * 4 + 2  # a runtime's: scales of three rows, and a factor
MATRICES = ("output", "qkv", "attention_output")
"""Matrices that may be held, by the names of their tensors: the first once, the others in every layer."""


@frozen(kw_only=True)
class Accelerator:
    """A device that is to compute the hottest blocks. is_processor: it computes on the cores that the decode workers
    have. limit_bytes: what it may take of its memory, by request."""

    name: str
    memory_bytes: int
    max_buffer_bytes: int
    shares_memory: bool
    is_processor: bool = False
    limit_bytes: int | None = None


def held_clusters(layout: Layout, blocks: int) -> int:
    """Clusters of the first blocks of one feed-forward; its last block may be short."""
    return min(layout.clusters, blocks * layout.block_clusters)


def held_weights_bytes(manifest: Manifest, blocks: int, backend: str = "") -> int:
    """Of so many blocks of every feed-forward: the clusters, as slots have them; for a runtime signed bytes, padded to
    whole products, with three scales and a factor for each neuron."""
    model, layout = manifest.model, manifest.layout
    if runtime_of(backend) is None:
        return model.ffns * held_clusters(layout, blocks) * _cluster_bytes(manifest)
    product = held_product_blocks(layout, blocks)
    neurons = -(-blocks // product) * product * layout.block_neurons
    return model.ffns * neurons * (3 * model.width + NEURON_BYTES)


def matrix_shape(model: ModelSpec, name: str) -> tuple[int, int]:
    """Rows and columns of one of MATRICES."""
    shapes = {
        "output": (model.vocabulary, model.width),
        "qkv": (model.qkv_rows, model.width),
        "attention_output": (model.width, model.query_width),
    }
    return shapes[name]


def matrix_bytes(manifest: Manifest, name: str) -> int:
    """Of one such matrix, of one layer."""
    rows, columns = matrix_shape(manifest.model, name)
    return rows * row_bytes(manifest.quantization_of(name), columns)


def held_matrices_bytes(manifest: Manifest, matrices: Sequence[str], texts: int) -> int:
    """Of these matrices in all layers, with what steps of so many texts need for them: biases, vectors, products."""
    if not matrices:
        return 0
    model = manifest.model
    shapes = {name: matrix_shape(model, name) for name in matrices}
    layers = {name: 1 if name == "output" else model.layers for name in matrices}
    weights = sum(layers[name] * (matrix_bytes(manifest, name) + 4 * rows) for name, (rows, _) in shapes.items())
    return weights + texts * (
        2 * max(model.width, model.query_width) + 512 + 4 * max(rows for rows, _ in shapes.values())
    )


def held_steps_bytes(manifest: Manifest, blocks: int, texts: int, backend: str = "") -> int:
    """What steps of so many texts need beside the weights: vectors, values, lists of neurons, block sums. A runtime's
    graphs are counted by runtime_memory.py; here is one layer's clusters, from which it makes bytes."""
    model, layout = manifest.model, manifest.layout
    if runtime_of(backend) is not None:
        return model.experts * held_clusters(layout, blocks) * _cluster_bytes(manifest)
    pairs, neurons = texts * model.experts_per_token, blocks * layout.block_neurons
    of_pair = 12 * neurons + 4 * blocks * (model.width + 1) + 32
    masks = min(model.experts, pairs) * neurons * -(-texts // 8)
    return pairs * of_pair + masks + texts * (2 * max(model.width, model.query_width) + 512)


def _cluster_bytes(manifest: Manifest) -> int:
    return manifest.trigger_slot_bytes + manifest.value_slot_bytes


def holding_bytes(manifest: Manifest, blocks: int, texts: int, backend: str) -> int:
    """Weights, and what steps of so many texts need."""
    return held_weights_bytes(manifest, blocks, backend) + held_steps_bytes(manifest, blocks, texts, backend)


def blocks_within(manifest: Manifest, limit_bytes: int, texts: int, backend: str = "") -> int:
    """The most blocks of every feed-forward that fit so much memory with steps of so many texts; 0: not one."""
    numbers = range(manifest.layout.blocks, 0, -1)
    return next((blocks for blocks in numbers if holding_bytes(manifest, blocks, texts, backend) <= limit_bytes), 0)


def device_usable_bytes(accelerator: Accelerator, run_bytes: int) -> int:
    """What of its memory may be used; run_bytes: the run's limit."""
    usable = accelerator.memory_bytes * OWN_PERCENT // 100
    if accelerator.limit_bytes is not None:
        return min(usable, accelerator.limit_bytes)
    return min(usable, run_bytes // SHARED_PART) if accelerator.shares_memory else usable


def most_blocks(
    manifest: Manifest, accelerator: Accelerator, run_bytes: int, shape: RunShape, matrices: Sequence[str] = ()
) -> int:
    """How many blocks of every feed-forward it can hold beside these matrices for runs of this shape; run_bytes: their
    limit. Raises UserError where that is none."""
    texts, backend = shape.sequences, shape.accelerator_backend
    left = device_usable_bytes(accelerator, run_bytes) - held_matrices_bytes(manifest, matrices, texts)
    usable = min(left, accelerator.max_buffer_bytes * manifest.model.layers)
    blocks = blocks_within(manifest, usable, texts, backend)
    if not blocks:
        least = holding_bytes(manifest, 1, texts, backend)
        raise UserError(
            f"--gpu-memory: {max(0, usable) >> 20} MiB of {accelerator.name} may be used, and one block of every "
            f"feed-forward takes {-(-least >> 20)} MiB; give it more, or leave the accelerator out"
        )
    return blocks


def matrices_beside_all(
    manifest: Manifest, accelerator: Accelerator, run_bytes: int, shape: RunShape
) -> tuple[str, ...]:
    """What a device that was not measured gets: the matrices for which there is room beside all blocks. A runtime
    computes blocks alone."""
    blocks, texts, backend = manifest.layout.blocks, shape.sequences, shape.accelerator_backend
    if runtime_of(backend) is not None or most_blocks(manifest, accelerator, run_bytes, shape) < blocks:
        return ()
    left = device_usable_bytes(accelerator, run_bytes) - holding_bytes(manifest, blocks, texts, backend)
    found: tuple[str, ...] = ()
    for name in MATRICES:
        if held_matrices_bytes(manifest, (*found, name), texts) <= left and fits_buffer(manifest, accelerator, name):
            found = (*found, name)
    return found


def most_held(
    manifest: Manifest,
    accelerator: Accelerator,
    profile: DeviceProfile | None,
    run_bytes: int,
    shape: RunShape,
    blocks: tuple[int, ...] | None,
    matrices: tuple[str, ...] | None,
) -> RunShape:
    """The shape with the most blocks of every feed-forward, and the matrices, that it is to have room for. blocks,
    matrices: what is asked for, as `Compute` has it; None: blocks that fit, and of a device that was not measured
    matrices beside all of them. Raises UserError where not one block fits."""
    if matrices is None:
        measured = was_measured(accelerator, profile)
        matrices = () if measured else matrices_beside_all(manifest, accelerator, run_bytes, shape)
    fit = most_blocks(manifest, accelerator, run_bytes, shape, matrices)
    most = fit if blocks is None else min(fit, max(blocks))
    shared = accelerator.shares_memory
    return dataclasses.replace(shape, held_blocks=most, held_matrices=matrices, device_shares_memory=shared)


def fits_buffer(manifest: Manifest, accelerator: Accelerator, name: str) -> bool:
    """Whether the device can have this matrix in one piece."""
    return matrix_bytes(manifest, name) <= accelerator.max_buffer_bytes


def was_measured(accelerator: Accelerator, profile: DeviceProfile | None) -> bool:
    """Whether this profile has figures of it."""
    measured = profile.accelerator if profile is not None else None
    return measured is not None and measured.name == accelerator.name


def held_reasons(
    manifest: Manifest,
    accelerator: Accelerator | None,
    compute: Compute,
    memory: Memory,
    profile: DeviceProfile | None,
) -> tuple[str, ...]:
    """What a plan says of it."""
    if accelerator is None:
        return ()
    whose = ", which is this machine's memory" if accelerator.shares_memory else " of its own memory"
    bits, lost = "with the same bits", ""
    if runtime_of(compute.accelerator_backend()) is not None:
        why = "as many as it may hold; its speed is not measured, so none is expected"
        bits = f"densely, in numerics of its own ({compute.accelerator_backend()})"
        lost = ", in theirs"
    elif not was_measured(accelerator, profile):
        why = "it was not measured: as many as it holds, and no speed is expected; `neuronpipe profile device` "
        why += "measures it"
    else:
        why = "as many as make the shortest step"
        if accelerator.is_processor:
            why += "; it computes on the decode workers' own cores, so that it makes none shorter"
    return (
        f"the first {show_held(compute.held_blocks)} of {manifest.layout.blocks} blocks of every feed-forward"
        f"{show_matrices(compute.held_matrices)} are computed by {accelerator.name}, {bits}: "
        f"{memory.accelerator_bytes >> 20} MiB{whose} ({why}); "
        f"while it is lost the decode workers compute them{lost}, from memory and flash",
    )


def show_matrices(matrices: Sequence[str]) -> str:
    """What is held besides blocks: ", attention's qkv and output, and the output matrix"."""
    of_attention = [name for matrix, name in (("qkv", "qkv"), ("attention_output", "output")) if matrix in matrices]
    shown = f", attention's {' and '.join(of_attention)} of every layer" if of_attention else ""
    return f"{shown} and the output matrix" if "output" in matrices else shown


def show_held(held_blocks: tuple[int, ...]) -> str:
    """How many blocks, by texts where that differs: "7 (1 text), 5 (2), 3 (3 and more)"."""
    if len(held_blocks) == 1:
        return str(held_blocks[0])
    last = len(held_blocks)
    names = ["1 text", *(str(texts) for texts in range(2, last)), f"{last} and more"]
    return ", ".join(f"{blocks} ({name})" for blocks, name in zip(held_blocks, names, strict=True))
