"""Opens the files of a GGUF model: one file, or several parts that have to belong together.

The first part has all metadata. Every part has its number (`split.no`, from 0 on), the number of parts (`split.count`),
and the number of tensors in all parts (`split.tensors.count`). Each tensor is in one part.
"""

from __future__ import annotations

from pathlib import Path

from neuronpipe.plans.convert.gguf.gguf_header import MAX_TENSORS, GgufHeader, parse_gguf_header
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.convert.stored_tensors import OpenFile
from neuronpipe.plans.gguf_part_names import gguf_files, part_of, place_among_parts
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

MAX_PARTS = 1000
COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"


@frozen(slots=True)
class OpenPart:
    file: SourceFile
    header: GgufHeader


def open_parts(path: Path, open_file: OpenFile) -> list[OpenPart]:
    """Return the opened files of the model whose first file is `path`, in order. Raises UserError if a file is missing,
    or is not the part that its name says."""
    paths = gguf_files(path)
    if len(paths) > MAX_PARTS:
        raise UserError(f"{path}: {len(paths)} parts are more than the {MAX_PARTS} a model may have")
    parts: list[OpenPart] = []
    for number, part in enumerate(paths):
        try:
            file = open_file(part)
            with file.beginning() as beginning:
                header = parse_gguf_header(beginning, part)
        except UserError as error:
            raise UserError(f"{error}{place_among_parts(part)}") from None
        _require_place(header, part, number, len(paths))
        if header.powerinfer != (parts[0].header if parts else header).powerinfer:
            raise UserError(f"{part}: magic: is another than that of {paths[0].name}: parts of two models")
        parts.append(OpenPart(file, header))
    _require_tensors(parts)
    return parts


def _require_place(header: GgufHeader, path: Path, number: int, count: int) -> None:
    metadata = header.metadata
    stated_count = metadata.integer(COUNT, 0, 1 << 16) if metadata.has(COUNT) else 0
    if stated_count <= 1 and count == 1:
        return
    stated_number = metadata.integer(NUMBER, 0, 1 << 16) if metadata.has(NUMBER) else 0
    if part_of(path.name) is None:
        metadata.fail(
            COUNT,
            f"the file is part {stated_number + 1} of {stated_count} of a model, and its name does not say so; call "
            f"it NAME-{stated_number + 1:05}-of-{stated_count:05}.gguf, as it was published, with the other parts "
            "beside it",
        )
    if stated_count != count:
        metadata.fail(COUNT, f"{stated_count} parts, and {count} by the file's name: not a part of this model")
    if stated_number != number:
        metadata.fail(NUMBER, f"part {stated_number + 1} by the file's metadata, and {number + 1} by its name")


def _require_tensors(parts: list[OpenPart]) -> None:
    tensors = sum(len(part.header.tensors) for part in parts)
    for part in parts:
        metadata = part.header.metadata
        if (
            len(parts) > 1
            and metadata.has(TENSORS)
            and (stated := metadata.integer(TENSORS, 0, MAX_TENSORS)) != tensors
        ):
            metadata.fail(
                TENSORS, f"{stated} tensors, and the {len(parts)} parts have {tensors}: not parts of one model"
            )
