"""Rewriting of a package hot-first: in every feed-forward the most frequently accessed neurons come first.

A neuron's rows, bias, predictor rows and frequencies move with it. Nothing is quantized again. Sums have the same terms
in another order, so that logits agree up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from neuronpipe.plans.activity.recorded_profile import Frequencies, binned, hottest_first
from neuronpipe.plans.activity.stored_profile import Stored, write_profiles
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.activity_profile import (
    ALWAYS,
    BATCHES,
    ActivityProfile,
    Points,
    Policy,
    ProfileMode,
    Unit,
)
from neuronpipe.plans.package.layout import quant_bytes, scale_bytes
from neuronpipe.plans.package.manifest import CHAT_TEMPLATE, Manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.safetensors_header import TensorEntry
from neuronpipe.plans.package.tensors import fixed_matrices, fixed_vectors, predictor_matrices, predictor_tensors
from neuronpipe.plans.package.writer import PackageWriter, Rows, cluster_checksums, package_bytes
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray

PIECE_BYTES = 16 << 20
Progress = Callable[[int, int], None]
Order = NDArray[np.intp]


def needed_bytes(package: Package) -> int:
    """Return the disk space that `reorder` needs: the new package exists beside the old one until it replaces it."""
    return package_bytes(package.manifest)


def reorder(package: Package, progress: Progress) -> Package:
    """Replace the package by one in the order of its activity profile, with a new id. Raises UserError if there is no
    profile, or for errors of package or disk.

    progress: receives the bytes of written neurons, and of all
    """
    manifest = package.manifest
    if not manifest.profiles:
        raise UserError(
            f"{package.path}: nobody measured how often its neurons fire; `neuronpipe profile PACKAGE --activity` does"
        )
    package.verify_fixed()
    orders = _orders(package)
    target = replace(
        manifest,
        layout=replace(manifest.layout, neuron_order="frequency"),
        files={},
        profiles=(),
        id="",
    )
    with PackageWriter(package.path, target, overwrite=True) as writer:
        _copy_fixed(package, writer, orders)
        _copy_predictor(package, writer, orders)
        _copy_neurons(package, writer, orders, progress)
        template = package.chat_template() if CHAT_TEMPLATE in manifest.files else None
        reordered = writer.complete(package.tokenizer(), dict(manifest.quantization_error), template)
        profiles = [_without_stale(profile, reordered.manifest) for profile in manifest.profiles]
        write_profiles(reordered, reordered.manifest, profiles, _frequencies(package, reordered.manifest, orders))
        return writer.publish()


def _orders(package: Package) -> list[Order]:
    """Return the numbers of each feed-forward's neurons, hottest first by the first profile: that of exact mode if it
    exists."""
    model, mode = package.manifest.model, package.manifest.profiles[0].mode
    return [
        hottest_first(
            np.stack(
                [
                    np.frombuffer(package.activity.neurons(mode, batch, layer, expert), np.uint16).astype(np.float32)
                    for batch in BATCHES
                ]
            )
        )
        for layer, expert in model.places
    ]


def _without_stale(profile: ActivityProfile, manifest: Manifest) -> ActivityProfile:
    """Return the profile without miss rates of clusters if a cluster has several neurons, because clusters have other
    neurons now."""
    if manifest.layout.cluster_neurons == 1 or profile.misses is None:
        return profile
    expert_misses: dict[Unit, Mapping[Policy, Points]] = {
        unit: policies for unit, policies in profile.misses.items() if unit == "expert"
    }
    return replace(profile, misses=expert_misses or None)


def _frequencies(package: Package, target: Manifest, orders: list[Order]) -> dict[ProfileMode, Stored]:
    model, stored = package.manifest.model, {}
    for profile in package.manifest.profiles:
        head, neurons = package.activity.stored(profile.mode)
        experts = np.frombuffer(head, "<u2")[: len(BATCHES) * model.ffns].reshape(len(BATCHES), model.ffns)
        stored_neurons = np.frombuffer(neurons, "<u2").reshape(len(BATCHES), model.ffns, model.neurons)
        ordered_neurons = np.stack([stored_neurons[:, ffn, order] for ffn, order in enumerate(orders)], axis=1)
        shares = (ordered_neurons / np.float32(ALWAYS)).astype(np.float32)
        frequencies = Frequencies((experts / np.float32(ALWAYS)).astype(np.float32), shares)
        stored[profile.mode] = frequencies.to_bytes(binned(target, shares))
    return stored


# ---- tensors -------------------------------------------------------------------------------------------------------
def _copy_fixed(package: Package, writer: PackageWriter, orders: list[Order]) -> None:
    model = package.manifest.model
    for name, _ in fixed_vectors(model):
        values = np.frombuffer(_bytes(package.fixed_path, package.fixed[name]), "<f4")
        if name.endswith((".gate.bias", ".up.bias")):
            ffns = model.ffns_of(int(name.split(".")[1]))
            of_experts = zip(values.reshape(len(ffns), -1), orders[ffns.start : ffns.stop], strict=True)
            values = np.concatenate([of_expert[order] for of_expert, order in of_experts])
        writer.vector(name, values)
    for name, rows, _ in fixed_matrices(model):
        for piece in _row_pieces(package.fixed_path, package.fixed, name, rows):
            writer.matrix(name, piece)


def _copy_predictor(package: Package, writer: PackageWriter, orders: list[Order]) -> None:
    manifest, tensors = package.manifest, package.predictor
    if manifest.predictor is None or tensors is None:
        return
    matrices_per_ffn = 1 + len(manifest.predictor.sides)  # the first factor, then those with a row per neuron
    for name in predictor_tensors(manifest.model, manifest.predictor):
        if name.endswith(".bias"):
            values = np.frombuffer(_bytes(package.predictor_path, tensors[name]), "<f4")
            writer.predictor_vector(name, values[orders[_ffn_of(name, manifest.model)]])
    for number, (name, rows, _) in enumerate(predictor_matrices(manifest.model, manifest.predictor)):
        ffn, matrix = divmod(number, matrices_per_ffn)
        (whole,) = _row_pieces(package.predictor_path, tensors, name, rows, at_once=rows)
        order = orders[ffn] if matrix else np.arange(rows)
        writer.predictor_matrix(name, Rows(whole.quants[order], whole.scales[order]))


def _ffn_of(name: str, model: ModelSpec) -> int:
    words = name.split(".")
    return model.first_ffns[int(words[1])] + (int(words[3]) if words[2] == "experts" else 0)


def _row_pieces(
    path: Path, tensors: dict[str, TensorEntry], name: str, rows: int, at_once: int | None = None
) -> Iterator[Rows]:
    quants, scales = tensors[f"{name}.quants"], tensors.get(f"{name}.scales")
    quants_bytes = (quants.stop - quants.start) // rows
    scales_bytes = 0 if scales is None else (scales.stop - scales.start) // rows
    at_once = at_once or max(1, PIECE_BYTES // quants_bytes)
    with path.open("rb") as file:
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            pieces = []
            for entry, row_bytes in ((quants, quants_bytes), (scales, scales_bytes)):
                file.seek((entry.start if entry else 0) + first * row_bytes)
                pieces.append(np.frombuffer(file.read(count * row_bytes), np.uint8).reshape(count, row_bytes))
            yield Rows(*pieces)


def _bytes(path: Path, entry: TensorEntry) -> bytes:
    with path.open("rb") as file:
        file.seek(entry.start)
        return file.read(entry.stop - entry.start)


# ---- neurons -------------------------------------------------------------------------------------------------------
def _copy_neurons(package: Package, writer: PackageWriter, orders: list[Order], progress: Progress) -> None:
    manifest = package.manifest
    layout = manifest.layout
    ffn_bytes = layout.clusters * layout.cluster_stride_bytes
    checksums = np.frombuffer(package.checksums(), "<u4").reshape(-1, layout.clusters, 2)
    with package.bundles_path.open("rb") as file:
        for ffn, order in enumerate(orders):
            clusters = np.frombuffer(file.read(ffn_bytes), np.uint8).reshape(layout.clusters, -1)
            _require_undamaged(package, clusters, checksums[ffn], ffn)
            writer.neurons(*(Rows(rows.quants[order], rows.scales[order]) for rows in _unpacked(manifest, clusters)))
            progress((ffn + 1) * ffn_bytes, len(orders) * ffn_bytes)


def _require_undamaged(package: Package, clusters: NDArray[np.uint8], expected: NDArray[np.uint32], ffn: int) -> None:
    """Raise UserError if a cluster does not match its checksum. Damaged data must not get a valid checksum."""
    damaged = np.flatnonzero((cluster_checksums(clusters, package.manifest.layout) != expected).any(axis=1))
    if len(damaged):
        number = ffn * package.manifest.layout.clusters + int(damaged[0])
        raise UserError(f"{package.bundles_path}: cluster {number} does not match its checksum: damaged")


def _unpacked(manifest: Manifest, clusters: NDArray[np.uint8]) -> Iterator[Rows]:
    layout, model = manifest.layout, manifest.model
    for place in layout.matrices:
        quantization = place.quantization or manifest.quantization
        sizes = quant_bytes(quantization, model.width), scale_bytes(quantization, model.width)
        starts = (
            layout.part_offset(place.part) + place.quants,
            layout.part_offset(place.scales_part) + place.scales,
        )
        rows = (
            clusters[:, start : start + layout.cluster_neurons * size].reshape(-1, size)[: model.neurons]
            if size
            else np.empty((model.neurons, 0), np.uint8)
            for start, size in zip(starts, sizes, strict=True)
        )
        yield Rows(*rows)
