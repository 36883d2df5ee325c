"""File names of a GGUF model in several parts: NAME-00001-of-00003.gguf and so on (gguf-split)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from neuronpipe.protocol.frozen import frozen

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


@frozen(slots=True)
class Part:
    """One part of a model, from its file name.

    number: from 1 to count
    """

    stem: str
    number: int
    count: int

    @property
    def model(self) -> str:
        """The name that the model's file would have if it were in one part."""
        return f"{self.stem}{SUFFIX}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parts, in their order."""
        return tuple(f"{self.stem}-{number:05}-of-{self.count:05}{SUFFIX}" for number in range(1, self.count + 1))


def part_of(name: str) -> Part | None:
    """Return the part that a file's name or path denotes; None if it is not the name of a part."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return None
    return Part(match["stem"], int(match["number"]), int(match["count"]))


def gguf_models(names: Iterable[str]) -> dict[str, Part | None]:
    """Return the GGUF models among these file names: a part of each, or None for a model in one file.

    The key is the name that the model has or would have as one file. Other names are ignored. Of two sets of parts, as
    a second download with another number of parts leaves them, the first complete one is taken, or else the last.
    """
    models: dict[str, Part | None] = {}
    files = {name for name in names if name.endswith(SUFFIX)}
    for name in sorted(files):
        part = part_of(name)
        if part is None:
            models[name] = None  # sorts behind its parts
            continue
        known = models.get(part.model)
        if known is None or not files.issuperset(known.names):
            models[part.model] = part
    return models


def gguf_file(path: Path) -> Path:
    """Return the first file of a GGUF model in several parts.

    path: one of its parts, or a folder with these parts and no other weights; any other path is returned unchanged
    """
    if path.is_dir():
        names = [file.name for file in path.iterdir() if file.suffix in (SUFFIX, ".safetensors")]
        parts = [part for part in gguf_models(names).values() if part is not None]
        whole = len(parts) == 1 and set(names) <= set(parts[0].names)
        return path / parts[0].names[0] if whole else path
    part = part_of(path.name)
    return path if part is None else path.with_name(part.names[0])


def gguf_files(path: Path) -> list[Path]:
    """Return all files of the GGUF model that begins with `path`."""
    part = part_of(path.name)
    return [path] if part is None else [path.with_name(name) for name in part.names]


def place_among_parts(path: Path) -> str:
    """Return a phrase to append to an error about a file: which part of a GGUF model it is.

    Empty if the model has no other part.
    """
    part = part_of(path.name)
    return (
        ""
        if part is None or part.count == 1
        else f"; it is part {part.number} of the {part.count} that the model is in"
    )


def model_stem(name: str) -> str:
    """Return the name of a GGUF model without folder, suffix and part number."""
    part = part_of(name)
    return PurePosixPath(name if part is None else part.model).stem
