"""Adds a predictor to a package."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from neuronpipe.plans.package.manifest import PREDICTOR, Manifest, Predictor, Side
from neuronpipe.plans.package.optional_file import give_file
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.safetensors_header import build_header
from neuronpipe.plans.package.tensors import predictor_names, predictor_tensors
from neuronpipe.plans.package.writer import Rows
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray


@frozen
class SideFactor:
    """The second factor of a predictor, for one side: encoded rows [neurons, rank] and bias [neurons]."""

    rows: Rows
    bias: NDArray[np.float32]


@frozen
class LayerFactors:
    """The predictor of one feed-forward (of a layer, or of an expert in a mixture).

    input: the first factor, encoded rows [rank, width]
    sides: the second factor of each predicted side
    """

    input: Rows
    sides: Mapping[Side, SideFactor]


@frozen
class FiringShares:
    """Mean share of neurons that fire, and of neurons whose trigger fires, for each layer; on the text that evaluated
    the predictor."""

    fired_by_layer: tuple[float, ...]
    trigger_fired_by_layer: tuple[float, ...]


def write_predictor(
    package: Package, predictor: Predictor, layers: Sequence[LayerFactors], shares: FiringShares
) -> Package:
    """Add a predictor to a package, or replace it, as `give_file`. Return the package with its new id.

    layers: one predictor for each feed-forward, by layer, then expert
    """
    manifest = package.manifest
    return give_file(
        package,
        PREDICTOR,
        lambda path: _write_tensors(path, manifest, predictor, layers),
        with_it=lambda entry: replace(
            manifest,
            files={**manifest.files, PREDICTOR: entry},
            predictor=predictor,
            fired_by_layer=shares.fired_by_layer,
            trigger_fired_by_layer=shares.trigger_fired_by_layer,
        ),
        without=None if manifest.predictor is None else _without_predictor(manifest),
    )


def _without_predictor(manifest: Manifest) -> Manifest:
    files = {name: entry for name, entry in manifest.files.items() if name != PREDICTOR}
    return replace(manifest, files=files, predictor=None)


def _write_tensors(path: Path, manifest: Manifest, predictor: Predictor, layers: Sequence[LayerFactors]) -> None:
    header, entries = build_header(predictor_tensors(manifest.model, predictor))
    with path.open("wb") as file:
        file.write(header)
        for name, layer in zip(predictor_names(manifest.model), layers, strict=True):
            tensors: dict[str, NDArray[np.generic]] = _encoded(f"{name}.input", layer.input)
            for side, factor in layer.sides.items():
                tensors |= _encoded(f"{name}.{side}", factor.rows)
                tensors[f"{name}.{side}.bias"] = factor.bias.astype("<f4")
            for tensor, data in tensors.items():
                if data.nbytes != entries[tensor].stop - entries[tensor].start:
                    raise ValueError(f"{tensor}: {data.nbytes} bytes do not fill its shape")
                file.seek(entries[tensor].start)
                file.write(np.ascontiguousarray(data).data)
        file.truncate(max(entry.stop for entry in entries.values()))
        file.flush()
        os.fsync(file.fileno())


def _encoded(name: str, rows: Rows) -> dict[str, NDArray[np.generic]]:
    quants: dict[str, NDArray[np.generic]] = {f"{name}.quants": rows.quants}
    return quants | ({f"{name}.scales": rows.scales} if rows.scales.size else {})
