"""The native loader's description of experts that are read in place, and the table of their checksums."""

from __future__ import annotations

import mmap
from typing import Any

from neuronpipe.native import ROW_TYPES, ffi, lib
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.source_experts import GGUF_TYPES, SourceExperts
from neuronpipe.protocol.errors import UserError

PARTS = {"trigger": lib.NP_TRIGGER, "value": lib.NP_VALUE}


class NativeSource:
    """An np_source of a package.

    native: the np_source, valid as long as this object
    checksums: uint32 [clusters, 2], mapped from checksums.bin. The native loader adds those of clusters that it reads
        for the first time; 0: not known. They stay for later runs if the file can be written
    """

    def __init__(self, package: Package, experts: SourceExperts) -> None:
        manifest = package.manifest
        self.checksums = _map_checksums(package)
        files = [{"bytes": file.bytes, "modified_ns": file.modified_ns} for file in experts.files]
        for path in package.neuron_files[len(files) :]:  # the package's own, of which the manifest knows the content
            status = path.stat()
            files.append({"bytes": status.st_size, "modified_ns": status.st_mtime_ns})
        runs, model = manifest.model.runs, manifest.model
        first_experts = [model.first_ffns[layer] + first for layer, first, _ in runs]
        self._keep: list[Any] = [
            ffi.new("np_source_file[]", files),
            ffi.new("uint32_t[]", [*first_experts, model.ffns]),
        ]
        matrices = {}
        for place in manifest.layout.matrices:
            of_runs = experts.matrices[place.name]
            offsets = ffi.new("uint64_t[]", [rows.file << lib.NP_FILE_SHIFT | rows.offset for rows in of_runs])
            encodings = ffi.new("int32_t[]", [GGUF_TYPES[rows.encoding] for rows in of_runs])
            strides = ffi.new("uint64_t[]", [rows.stride for rows in of_runs])
            self._keep += [offsets, encodings, strides]
            rows, columns = manifest.layout.rows_and_columns(place.name, manifest.model.width)
            matrices[place.name] = {
                "part": PARTS[place.part],
                "quants": place.quants,
                "scales": place.scales,
                "rows": rows,
                "columns": columns,
                "type": ROW_TYPES[place.quantization or manifest.quantization],
                "offsets": offsets,
                "strides": strides,
                "encodings": encodings,
            }
        checksums = ffi.from_buffer("uint32_t[]", self.checksums)
        self._keep.append(checksums)
        self.native = ffi.new(
            "np_source *",
            matrices
            | {
                "runs": len(runs),
                "first_experts": self._keep[1],
                "files": self._keep[0],
                "file_count": len(files),
                "checksums": checksums,
            },
        )


def _map_checksums(package: Package) -> mmap.mmap:
    """Return checksums.bin as memory: shared with the file if it can be written, else a copy."""
    path = package.checksums_path
    length = package.manifest.files[path.name].bytes
    try:
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), length)
    except (OSError, ValueError):  # ValueError: shorter than the manifest says
        pass
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
