"""The progress of a conversion, stored in the folder of the unfinished package. After an interruption, the next process
relies on it alone."""

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
"""Kind of a tensor, a space, and its name in the source -> [sum of squared errors, sum of squared weights]."""


class Done(NamedTuple):
    """The number of pieces that are on disk, from the first one on, and the sums of squares of their tensors."""

    pieces: int
    squares: Squares


class Journal:
    """The journal file in a folder. It is valid for one package.

    manifest: the package's, before the first byte is written
    sources: versions of the source files, and digests of other inputs
    """

    def __init__(self, folder: Path, manifest: Manifest, sources: Sequence[str]) -> None:
        self._path = folder / NAME
        self._package = hashlib.sha256(manifest.to_bytes() + "\n".join(sources).encode()).hexdigest()

    def read(self) -> Done:
        """Return the progress; 0 pieces if the journal is missing, damaged, or of another package."""
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
        """Write the progress. Sums are written exactly, so that the package does not depend on interruptions."""
        sums = {kind: [float(value).hex() for value in pair] for kind, pair in done.squares.items()}
        with whole_file(self._path) as place:
            place.write_text(json.dumps({"package": self._package, "pieces": done.pieces, "squares": sums}))

    def remove(self) -> None:
        """Remove the journal and half-written journals of killed processes."""
        for path in (self._path, *self._path.parent.glob(f".{NAME}.partial-*")):
            path.unlink(missing_ok=True)
