"""A file that appears whole or not at all, for whatever a command writes where a person said."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from neuronpipe.protocol.errors import UserError


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what is to become `path`: beside it, and what was there before stays until all is written. A
    device or a pipe has nothing beside it and is written to. Raises UserError for what the disk refuses."""
    try:
        beside = path.is_file() or not path.exists()
        target = path.resolve()  # a link stays a link
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    place = target.with_name(f".{target.name}.partial-{os.getpid()}") if beside else path
    try:
        yield place
        if beside:
            place.replace(target)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        if beside:
            with contextlib.suppress(OSError):
                place.unlink()
