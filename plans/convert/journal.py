"""The progress of a conversion, stored beside its work. It is all that the next process trusts after an
interruption."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.strict_json import read_json
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray

NAME = "journal.json"
MAX_PIECES = 1 << 20
Squares = dict[str, NDArray[np.float64]]
"""Kind of a tensor, a space, and its name in the source -> sums of squares of error and of weight."""


class Done(NamedTuple):
    """The number of pieces that are on disk, from the first one on, and the squared errors of their quantization."""

    pieces: int
    squares: Squares


class Journal:
    """The journal file in the folder of the work. It belongs to one package: to the manifest before the first byte is
    written, and to the versions of the source files in `sources`."""

    def __init__(self, folder: Path, manifest: Manifest, sources: Sequence[str]) -> None:
        self._path = folder / NAME
        self._package = hashlib.sha256(manifest.to_bytes() + "\n".join(sources).encode()).hexdigest()

    def read(self) -> Done:
        """Return the progress; nothing done if there is no journal, or one of another package, or a damaged one."""
        try:
            record = read_json(self._path)
            if record.text("package") != self._package:
                return Done(0, {})
            squares = record.record("squares")
            sums = {kind: np.array([float.fromhex(text) for text in squares.items(kind)]) for kind in squares.names()}
            return Done(record.integer("pieces", 0, MAX_PIECES), sums)
        except (UserError, TypeError, ValueError):
            return Done(0, {})

    def write(self, done: Done) -> None:
        """Record the progress. Sums are written exactly, so that the package does not depend on interruptions."""
        sums = {kind: [float(value).hex() for value in pair] for kind, pair in done.squares.items()}
        with whole_file(self._path) as place:
            place.write_text(json.dumps({"package": self._package, "pieces": done.pieces, "squares": sums}))

    def remove(self) -> None:
        """Remove the journal of complete work, and half-written journals of killed processes."""
        for path in (self._path, *self._path.parent.glob(f".{NAME}.partial-*")):
            path.unlink(missing_ok=True)
