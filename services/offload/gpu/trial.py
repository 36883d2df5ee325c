"""Offloaded blocks without a package, for measuring a device: made-up weights, and steps whose firing neurons are
known.

The vector of a sequence is one in its own quarter of the columns and zero elsewhere. The gate row of a neuron is
positive in the quarters of the sequences for which it fires.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from neuronpipe.native import ROW_TYPES, ffi, lib
from neuronpipe.plans.models.spec import LayerKind, ModelSpec
from neuronpipe.plans.package.layout import Quantization, compute_layout, quant_bytes, scale_bytes
from neuronpipe.plans.package.manifest import Manifest, Source
from neuronpipe.services.offload.gpu.blocks import OffloadedBlocks
from neuronpipe.services.offload.gpu.device import Device
from numpy.typing import NDArray

SEQUENCES = 4
NEURONS_PER_WEIGHT = 3.5
SCALE_BYTE = 0x11  # two bytes are 0.00065 in fp16; with minimums one byte is 17 steps of a scale and 1 of a minimum
PLUS_MINUS: dict[str, tuple[int, int]] = {"q4": (0x99, 0x77), "q8": (0x01, 0xFF)}  # weights of 1, and of -1
CODES = 0x11, 0x00  # with minimums: weights of 16, and of -1


def manifest_of(quantization: Quantization, width: int, experts: int = 1, experts_per_token: int = 1) -> Manifest:
    """Return the manifest of a dReLU model with one layer, which has no package."""
    model = ModelSpec(
        family="llama",
        width=width,
        neurons=int(NEURONS_PER_WEIGHT * width),
        experts=experts,
        experts_per_token=experts_per_token,
        layer_kinds=(LayerKind(1),),
        query_heads=width // 64,
        key_heads=width // 64,
        head_width=64,
        vocabulary=64,
        context_tokens=64,
        norm_epsilon=1e-5,
        activation="drelu",
    )
    return Manifest(
        name="trial",
        source=Source("synthetic", "trial", "drelu"),
        model=model,
        quantization=quantization,
        end_tokens=(),
        layout=compute_layout(quantization, width, model.neurons, model.ffn_matrices, "frequency"),
        files={},
        quantization_error={},
        fired_by_layer=None,
    )


def blocks_within(manifest: Manifest, size_bytes: int) -> int:
    """Return the number of blocks of a layer that fit in size_bytes, at least one."""
    cluster_bytes = manifest.trigger_slot_bytes + manifest.value_slot_bytes
    block_bytes = manifest.model.most_experts * manifest.layout.block_clusters * cluster_bytes
    return max(1, min(manifest.layout.blocks, size_bytes // block_bytes))


def fired_of(neurons: int, share: float) -> NDArray[np.bool_]:
    """Return True for each neuron and sequence for which it fires, [neurons][SEQUENCES]; the same at every call.

    share: share of neurons that fire for a sequence
    """
    return np.random.default_rng(7).random((neurons, SEQUENCES)) < share


def weights_of(manifest: Manifest, blocks: int, fired: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return the weights of one layer's first blocks as a device gets them: uint8 [clusters][bytes of both slots]."""
    layout, width, quantization = manifest.layout, manifest.model.width, manifest.quantization
    plus, minus = PLUS_MINUS.get(quantization, CODES)
    clusters = blocks * layout.block_clusters
    starts = {"trigger": 0, "value": manifest.trigger_slot_bytes}
    weights = np.full((clusters, manifest.trigger_slot_bytes + manifest.value_slot_bytes), plus, np.uint8)
    row_bytes, row_scale_bytes = quant_bytes(quantization, width), scale_bytes(quantization, width)
    of_cluster = fired[: clusters * layout.cluster_neurons].reshape(clusters, layout.cluster_neurons, SEQUENCES)
    for number, place in enumerate(layout.matrices):
        scales = starts[place.scales_part] + place.scales
        weights[:, scales : scales + layout.cluster_neurons * row_scale_bytes] = SCALE_BYTE
        if number == 0:
            in_order_bytes = width if quantization == "q8" else width // 2  # the planes of bits behind them are zeros
            rows = np.zeros((clusters, layout.cluster_neurons, row_bytes), np.uint8)
            signs = np.where(of_cluster, np.uint8(plus), np.uint8(minus))
            rows[:, :, :in_order_bytes] = signs.repeat(in_order_bytes // SEQUENCES, axis=2)
            at = starts[place.part] + place.quants
            weights[:, at : at + layout.cluster_neurons * row_bytes] = rows.reshape(clusters, -1)
    return weights


class TrialSteps:
    """Requests of steps for `OffloadedBlocks`, without predictor or with known predictions."""

    def __init__(self, manifest: Manifest, blocks: int) -> None:
        self._manifest, self.blocks = manifest, blocks
        width, kind = manifest.model.width, ROW_TYPES[manifest.quantization]
        self._stride = -(-lib.np_activation_bytes(kind, width) // 64) * 64
        self._vectors = ffi.new("uint8_t[]", SEQUENCES * self._stride + 64)
        aligned = -int(ffi.cast("uintptr_t", self._vectors)) % 64
        self._first = self._vectors + aligned
        for sequence in range(SEQUENCES):
            vector = np.zeros(width, np.float32)
            vector[sequence * width // SEQUENCES : (sequence + 1) * width // SEQUENCES] = 1.0
            lib.np_activation_prepare(
                kind, ffi.from_buffer("float[]", vector), width, self._first + sequence * self._stride
            )
        self._keep: list[Any] = []

    def request(self, layer: int, sequences: int, predicted: NDArray[np.bool_] | None = None) -> Any:
        """Return an np_offloaded_blocks for a layer, valid until `forget`.

        sequences: number of sequences, at most SEQUENCES
        predicted: the predicted neurons, in the form that `fired_of` returns; None: no predictor
        """
        model, per_token = self._manifest.model, self._manifest.model.experts_per_token
        pairs = sequences * per_token
        if model.experts == 1:
            groups, tokens = [(0, 0, pairs)], list(range(sequences))
        else:  # different experts for every sequence, as far as there are enough
            groups = [(pair % model.experts, pair, 1) for pair in range(pairs)]
            tokens = [pair // per_token for pair in range(pairs)]
        group, token = ffi.new("np_group[]", groups), ffi.new("uint32_t[]", tokens)
        weight, mask = ffi.new("float[]", [1.0] * pairs), ffi.NULL
        if predicted is not None:
            bits = np.packbits(predicted[:, :sequences], axis=1, bitorder="little").reshape(-1)
            mask = ffi.from_buffer("uint8_t[]", bits)
            self._keep.append(bits)
        request = ffi.new(
            "np_offloaded_blocks *",
            {
                "layer": layer, "tokens": sequences, "pairs": pairs, "blocks": self.blocks, "groups": len(groups),
                "group": group, "pair_token": token, "pair_weight": weight,
                "vectors": self._first, "vector_stride": self._stride,
                "predicted": mask, "mask_bytes": 1 if predicted is not None else 0,
                "predicted_neurons": 0 if predicted is None else len(predicted),
            },
        )  # fmt: skip
        self._keep += [group, token, weight, mask]
        return request

    def forget(self) -> None:
        """Free the requests, which must not be used any more."""
        self._keep.clear()


def trial_blocks(
    device: Device, manifest: Manifest, blocks: int, instructions: str, shares: tuple[float, ...], layers: int
) -> OffloadedBlocks:
    """Return offloaded blocks with `layers` layers for each share of firing neurons, in the order of `shares`."""
    offloaded = OffloadedBlocks(device, manifest, blocks=blocks, tokens=SEQUENCES, instructions=instructions)
    neurons = blocks * manifest.layout.block_neurons
    for share in shares:
        weights = weights_of(manifest, blocks, fired_of(neurons, share))
        for _ in range(layers):
            experts = manifest.model.experts
            offloaded.load(weights if experts == 1 else np.tile(weights, (experts, 1)), None)
    return offloaded
