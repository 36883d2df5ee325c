"""A file of a model's source, read by offset. Subclasses download it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
from neuronpipe.plans.strict_json import open_file
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray


class SourceFile:
    """A file on this disk. All methods raise UserError if it cannot be read, or is shorter than expected.

    A conversion calls `fetch` before and `release` after it reads most of a file. Subclasses download and delete the
    file then; before `fetch`, they read small ranges from elsewhere.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def beginning(self) -> BinaryIO:
        """Return the file, opened to read its header."""
        return open_file(self.path)

    @property
    def version(self) -> str:
        """A string that identifies the content: name, size and time of modification."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from None
        return f"{self.path.name} {status.st_size} {status.st_mtime_ns}"

    def fetch(self) -> None:
        """Prepare for reading most of the file."""

    def release(self) -> None:
        """Note that the file is not needed any more."""

    def close(self) -> None:
        """Close the descriptor. A later read opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def read_into(self, offset: int, target: NDArray[np.uint8]) -> None:
        """Fill `target` with the bytes from `offset` on."""
        view = target.data.cast("B")
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_RDONLY)
            while view:
                count = os.preadv(self._descriptor, [view], offset)
                if count == 0:
                    raise UserError(f"{self.path}: ends at byte {offset}, where a tensor should lie: truncated")
                view, offset = view[count:], offset + count
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from None
