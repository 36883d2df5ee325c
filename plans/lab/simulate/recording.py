"""Recordings of a package's activations: the clusters that each token accesses in each feed-forward.

A recording is an .npz file:

    wanted      uint8 [tokens, layers, ceil(experts * clusters / 8)]  a bit for each cluster, lowest bit first
    chosen      bool  [tokens, layers, experts]                       the experts that compute the token
    clusters    int                                                   number of clusters of an expert
    ordered     bool                                                  an expert's hottest clusters come first
    package     str                                                   names of package and text, and the mode

Mode `predicted` records clusters with a predicted neuron, `exact` those with a neuron that fired.
"""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Mode
from neuronpipe.plans.predictor.predictions import StoredPredictor
from neuronpipe.plans.reference.engine import LayerRun, ReferenceEngine
from neuronpipe.plans.strict_json import one_line
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

Ids = NDArray[np.intp]
MAX_RECORDING_BYTES = 1 << 30  # without compression: 9,000 tokens of a 47B mixture


_NO_ARCHIVE = (  # errors of reading a file that numpy did not write
    OSError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    MemoryError,
    NotImplementedError,
    zlib.error,
    zipfile.BadZipFile,
)


@frozen
class Recording:
    """A recording, with the arrays in the table at the top of this file."""

    wanted: NDArray[np.uint8]
    chosen: NDArray[np.bool_]
    clusters: int
    ordered: bool
    package: str

    @property
    def all(self) -> int:
        """Number of clusters of the model."""
        return int(self.chosen.shape[1] * self.chosen.shape[2] * self.clusters)

    def by_cluster(self) -> tuple[Ids, list[list[Ids]]]:
        """Return all clusters, hottest first if `ordered`, and the accessed clusters [token][layer]. Clusters are
        numbered over all layers."""
        of_layer = self.chosen.shape[2] * self.clusters
        steps = [
            [np.flatnonzero(bits) + layer * of_layer for layer, bits in enumerate(_bits(token, of_layer))]
            for token in self.wanted
        ]
        order = np.arange(self.all)
        return (order.reshape(-1, self.clusters).T.reshape(-1) if self.ordered else order), steps

    def by_expert(self) -> tuple[Ids, list[list[Ids]]]:
        """Return the same as `by_cluster`, for whole experts instead of clusters."""
        layers, experts = self.chosen.shape[1:]
        steps = [[np.flatnonzero(layer) + n * experts for n, layer in enumerate(token)] for token in self.chosen]
        return np.arange(layers * experts).reshape(layers, experts).T.reshape(-1), steps

    def save(self, file: Path) -> None:
        np.savez_compressed(file, **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @classmethod
    def load(cls, file: Path) -> Recording:
        """Return the recording in a file. Raises UserError if it has none or cannot be read."""
        try:
            with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
                if sum(entry.file_size for entry in arrays.zip.infolist()) > MAX_RECORDING_BYTES:
                    raise UserError(f"{file}: larger than the {MAX_RECORDING_BYTES} bytes a recording may have")
                recording = cls(
                    wanted=arrays["wanted"],
                    chosen=arrays["chosen"],
                    clusters=int(arrays["clusters"]),
                    ordered=bool(arrays["ordered"]),
                    package=str(arrays["package"]),
                )
        except UserError:
            raise
        except _NO_ARCHIVE as wrong:
            why = one_line(str(wrong))[:80]
            raise UserError(
                f"{file}: is no recording ({why}); make one with `python -m neuronpipe.plans.lab.simulate record`"
            ) from None
        recording._check(file)
        return recording

    def _check(self, file: Path) -> None:
        if self.chosen.ndim != 3 or self.chosen.dtype != bool:
            raise UserError(f"{file}: chosen: expected bool [tokens, layers, experts]")
        if self.clusters < 1:
            raise UserError(f"{file}: clusters: {self.clusters}, expected 1 or more")
        if self.wanted.ndim != 3 or self.wanted.shape[:2] != self.chosen.shape[:2]:
            raise UserError(f"{file}: wanted and chosen disagree about tokens and layers")
        wide = -(-self.chosen.shape[2] * self.clusters // 8)
        if self.wanted.dtype != np.uint8 or self.wanted.shape[2] != wide:
            raise UserError(f"{file}: wanted: expected uint8, {wide} bytes for a layer's clusters")


def _bits(token: NDArray[np.uint8], count: int) -> Iterator[NDArray[np.uint8]]:
    yield from np.unpackbits(token, axis=1, count=count, bitorder="little")


def record(package: Package, mode: Mode, tokens: Sequence[int], of: str) -> Recording:
    """Compute a sequence with the reference engine and return the recording of its clusters.

    of: name of the text, for people
    """
    model, layout = package.manifest.model, package.manifest.layout
    if len(set(model.expert_counts)) > 1:
        raise UserError(f"{package.path}: its layers have different numbers of experts; recordings have equal ones")
    experts = model.most_experts
    predictor = StoredPredictor(package) if mode == "predicted" else None
    chosen = np.zeros((len(tokens), model.layers, experts), dtype=bool)
    accessed = np.zeros((len(tokens), model.layers, experts, layout.clusters), dtype=bool)

    def observe(run: LayerRun) -> None:
        layer, expert = model.place_of(run.ffn)
        neurons = predictor.mask(run) if predictor is not None else run.inner != 0
        padded = np.zeros((len(neurons), layout.clusters * layout.cluster_neurons), dtype=bool)
        padded[:, : neurons.shape[1]] = neurons
        chosen[run.tokens, layer, expert] = True
        accessed[run.tokens, layer, expert] = padded.reshape(len(neurons), layout.clusters, -1).any(axis=2)

    mask = predictor.mask if predictor is not None else None
    ReferenceEngine(package, observe=observe, mask=mask).hidden([tokens])
    flat = accessed.reshape(len(tokens), model.layers, -1)
    return Recording(
        wanted=np.packbits(flat, axis=2, bitorder="little"),
        chosen=chosen,
        clusters=layout.clusters,
        ordered=layout.neuron_order == "frequency",
        package=f"{package.manifest.name}, {of}, {mode}",
    )
