"""A file of a model's source, read by offset, on this disk or elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
from neuronpipe.plans.strict_json import open_file
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray


class SourceFile:
    """A file that is read by offset. Reading past its end is an error, also if it shrinks meanwhile.

    A conversion says when it begins to need a file and when it no longer does (`fetch`, `release`). Both do nothing for
    a file on this disk; a file elsewhere is downloaded and deleted then, and is read in small pieces before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def beginning(self) -> BinaryIO:
        """Return the file, opened to read its header. Raises UserError."""
        return open_file(self.path)

    @property
    def version(self) -> str:
        """A text that changes when the file's content does. Raises UserError."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from None
        return f"{self.path.name} {status.st_size} {status.st_mtime_ns}"

    def fetch(self) -> None:
        """Prepare for reading many bytes."""

    def release(self) -> None:
        """Release the file after the last read."""

    def close(self) -> None:
        """Close the descriptor; it is opened again on demand."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def read_into(self, offset: int, target: NDArray[np.uint8]) -> None:
        """Fill `target` from `offset` on."""
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
