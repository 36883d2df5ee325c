"""Giving a package a predictor: the file first, the manifest that names it last. Every state between is a package."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from neuronpipe.plans.package.manifest import MANIFEST, PREDICTOR, FileEntry, Manifest, Predictor, Side
from neuronpipe.plans.package.reader import Package, sha256_of
from neuronpipe.plans.package.safetensors_header import build_header
from neuronpipe.plans.package.tensors import predictor_names, predictor_tensors
from neuronpipe.plans.package.writer import Rows
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray


@dataclass(frozen=True)
class SideFactor:
    """One side's encoded rows [neurons, rank] and its bias float32 [neurons]."""

    rows: Rows
    bias: NDArray[np.float32]


@dataclass(frozen=True)
class LayerFactors:
    """The predictor of one feed-forward, a layer's or an expert's: encoded input rows [rank, width], and what each
    predicted side multiplies them with."""

    input: Rows
    sides: Mapping[Side, SideFactor]


@dataclass(frozen=True)
class FiringShares:
    """Mean shares of neurons that fire, and whose trigger fires, on the text that the predictor was judged on."""

    fired_by_layer: tuple[float, ...]
    trigger_fired_by_layer: tuple[float, ...]


def write_predictor(
    package: Package, predictor: Predictor, layers: Sequence[LayerFactors], shares: FiringShares
) -> Package:
    """Write predictor.safetensors and the manifest of the package with it, replacing an older predictor.

    The manifest's id changes. All files are complete before the first of them gets its name: a disk that is full leaves
    the package as it was. A process that is killed meanwhile leaves it as it was, or without a predictor.
    Raises UserError for what the disk refuses.
    """
    path, manifest = package.path, package.manifest
    tensors, lacking, complete = (path / f".{name}.partial-{os.getpid()}" for name in (PREDICTOR, "lacking", MANIFEST))
    try:
        _write_tensors(tensors, manifest, predictor, layers)
        entry = FileEntry(tensors.stat().st_size, sha256_of(tensors))
        with_it = replace(
            manifest,
            files={**manifest.files, PREDICTOR: entry},
            predictor=predictor,
            fired_by_layer=shares.fired_by_layer,
            trigger_fired_by_layer=shares.trigger_fired_by_layer,
        )
        _write(complete, with_it.sealed().to_bytes())
        if manifest.predictor is not None:
            _write(lacking, _without_predictor(manifest).to_bytes())
            _rename(lacking, path / MANIFEST)
        _rename(tensors, package.predictor_path)
        _rename(complete, path / MANIFEST)
    except OSError as error:
        raise UserError(f"{package.predictor_path}: cannot be written: {error.strerror}") from None
    finally:
        for partial in (tensors, lacking, complete):
            with contextlib.suppress(OSError):
                partial.unlink()
    return Package.open(path)


def _without_predictor(manifest: Manifest) -> Manifest:
    files = {name: entry for name, entry in manifest.files.items() if name != PREDICTOR}
    return replace(manifest, files=files, predictor=None).sealed()


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


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _rename(path: Path, name: Path) -> None:
    """Rename, and have it on disk before the next one."""
    path.rename(name)
    descriptor = os.open(name.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
