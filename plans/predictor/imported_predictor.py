"""Import of predictors trained elsewhere, from safetensors or PowerInfer's variant of GGUF.

PowerInfer has two matrices per feed-forward (per expert of a mixture): score = fc2 · relu(fc1 · x), with x the residual
stream before the norm. Thresholds are not imported, but calibrated on the quantized factors.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from neuronpipe.plans.convert.encodings import ENCODINGS, decode_stored
from neuronpipe.plans.convert.gguf.gguf_header import POWERINFER_MAGIC, parse_gguf_header
from neuronpipe.plans.package.manifest import Manifest, package_rank
from neuronpipe.plans.package.safetensors_header import TensorEntry, read_header
from neuronpipe.plans.strict_json import open_file
from neuronpipe.protocol.errors import UserError, safe_name
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

Array = NDArray[np.float32]
OF_EXPERT = re.compile(r"(?:.*\.)?(\d+)\.(?:[a-z_]+\.)*experts\.(\d+)\.(?:mlp\.)?(?:predictor\.)?fc([12])\.weight")
OF_LAYER = re.compile(r"(?:.*\.)?(\d+)(\.)(?:mlp\.)?(?:predictor\.)?fc([12])\.weight")


@frozen
class ImportedPredictor:
    """The predictors in a file, from `open_imported`. Feed-forwards are numbered layer * experts + expert.

    entries: (feed-forward, 1 or 2) -> its matrix fc1 or fc2
    ranks: rank of each feed-forward in a package: rounded up to whole groups
    """

    path: Path
    entries: dict[tuple[int, int], TensorEntry]
    ranks: tuple[int, ...]

    def of_ffn(self, number: int) -> tuple[Array, Array]:
        """Return fc1 [rank, width] and fc2 [neurons, rank] of a feed-forward, padded with zeros to its rank. Raises
        UserError if values are not finite."""
        first, second = self._read(number, 1), self._read(number, 2)
        missing = self.ranks[number] - len(first)
        return np.pad(first, ((0, missing), (0, 0))), np.pad(second, ((0, 0), (0, missing)))

    def _read(self, ffn: int, matrix: int) -> Array:
        entry = self.entries[ffn, matrix]
        with self.path.open("rb") as file:
            file.seek(entry.start)
            stored = np.frombuffer(file.read(entry.stop - entry.start), dtype=np.uint8)
        values = decode_stored(entry.dtype, stored.reshape(entry.shape[0], -1)).reshape(entry.shape)
        if not np.isfinite(values).all():
            raise UserError(
                f"{self.path}: fc{matrix} of feed-forward {ffn}: contains values that are not finite: damaged"
            )
        return values


def open_imported(path: Path, manifest: Manifest) -> ImportedPredictor:
    """Return the predictors in a file. Raises UserError if they do not fit the package or the order of its neurons."""
    if path.is_dir() or path.suffix in (".pt", ".pth", ".bin"):
        raise UserError(
            f"{path}: predictors are read from one safetensors file or from PowerInfer's GGUF; pickled ones can run "
            "code, so convert them first: "
            "safetensors.torch.save_file({'N.fc1.weight': ..., 'N.fc2.weight': ...}, FILE)"
        )
    if manifest.layout.neuron_order != "source":
        raise UserError(
            f"{path}: the package's neurons are stored by frequency, a predictor's rows are in the source's order; "
            "convert the model again without --frequencies"
        )
    model = manifest.model
    entries: dict[tuple[int, int], TensorEntry] = {}
    pattern, example = (OF_EXPERT, "N.experts.E.fc") if model.experts > 1 else (OF_LAYER, "N.fc")
    for name, entry in _header(path).items():
        if match := pattern.fullmatch(name):
            if entry.dtype not in ENCODINGS or len(entry.shape) != 2:
                raise UserError(f"{path}: {safe_name(name)}: expected a matrix of {', '.join(ENCODINGS)}")
            layer, expert = int(match[1]), int(match[2]) if model.experts > 1 else 0
            if layer < model.layers and expert < model.expert_counts[layer]:
                entries[model.first_ffns[layer] + expert, int(match[3])] = entry
    for ffn in range(model.ffns):
        layer, expert = model.place_of(ffn)
        where = model.name_of(layer, expert)
        for matrix in (1, 2):
            if (ffn, matrix) not in entries:
                raise UserError(f"{path}: fc{matrix} of {where} is missing; names end in {example}{matrix}.weight")
        first, second = entries[ffn, 1].shape, entries[ffn, 2].shape
        if first[1] != model.width or second != (model.neurons, first[0]):
            raise UserError(
                f"{path}: {where}: fc1 {list(first)} and fc2 {list(second)} do not fit a width of {model.width} "
                f"and {model.neurons} neurons"
            )
    return ImportedPredictor(path, entries, tuple(package_rank(entries[ffn, 1].shape[0]) for ffn in range(model.ffns)))


def _header(path: Path) -> dict[str, TensorEntry]:
    with open_file(path) as file:
        if file.read(len(POWERINFER_MAGIC)) != POWERINFER_MAGIC:
            return read_header(path)
        tensors = parse_gguf_header(file, path).tensors
    return {name: TensorEntry(entry.encoding, entry.shape, entry.start, entry.stop) for name, entry in tensors.items()}
