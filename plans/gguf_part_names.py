"""The names of a GGUF model's files where there are several: NAME-00001-of-00003.gguf and so on (gguf-split)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from neuronpipe.protocol.frozen import frozen

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


@frozen(slots=True)
class Part:
    """What the name of a part says: which one of how many it is, and of which model. number: from 1 on."""

    stem: str
    number: int
    count: int

    @property
    def model(self) -> str:
        """What the model's file would be called if it were one."""
        return f"{self.stem}{SUFFIX}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parts, in their order."""
        return tuple(f"{self.stem}-{number:05}-of-{self.count:05}{SUFFIX}" for number in range(1, self.count + 1))


def part_of(name: str) -> Part | None:
    """What a file's name, or path, says of a part; None where it is not the name of one."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return None
    return Part(match["stem"], int(match["number"]), int(match["count"]))


def gguf_models(names: Iterable[str]) -> dict[str, Part | None]:
    """The GGUF models among files, by what each would be called as one file; None: it is one."""
    models: dict[str, Part | None] = {}
    for name in sorted(names):
        if name.endswith(SUFFIX) and (name not in models or part_of(name) is None):
            part = part_of(name)
            models[name if part is None else part.model] = part
    return models


def gguf_file(path: Path) -> Path:
    """The file that a GGUF model begins with: the first part of the model that a part is named of, or that is all that
    a folder without other weights holds. Any other path is returned as it is."""
    if path.is_dir():
        names = [file.name for file in path.iterdir() if file.suffix in (SUFFIX, ".safetensors")]
        parts = [part for part in gguf_models(names).values() if part is not None]
        whole = len(parts) == 1 and set(names) <= set(parts[0].names)
        return path / parts[0].names[0] if whole else path
    part = part_of(path.name)
    return path if part is None else path.with_name(part.names[0])


def gguf_files(path: Path) -> list[Path]:
    """All files of the GGUF model that begins with `path`."""
    part = part_of(path.name)
    return [path] if part is None else [path.with_name(name) for name in part.names]


def place_among_parts(path: Path) -> str:
    """Which part of a GGUF model a file is, for the end of an error about it; empty where it is no part."""
    part = part_of(path.name)
    return (
        ""
        if part is None or part.count == 1
        else f"; it is part {part.number} of the {part.count} that the model is in"
    )


def model_stem(name: str) -> str:
    """The name of a GGUF model without its suffix, its folder, and which part the file is."""
    part = part_of(name)
    return PurePosixPath(name if part is None else part.model).stem
