"""What a person can do where files may not be as large as a command needs them, or nowhere be."""

from __future__ import annotations

import errno
import os
import resource


def remedy(message: str) -> str:
    """What follows a message about a file that is too large: the limit of this shell, where that is the cause."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if os.strerror(errno.EFBIG) not in message or limit_bytes == resource.RLIM_INFINITY:
        return ""
    return f"; this shell allows files of {limit_bytes:,} bytes at most (`ulimit -f`): allow larger ones, and try again"


def without_temporary_folder(error: OSError) -> str | None:
    """What to say where Python found no folder for temporary files; None where the error is another one."""
    if error.errno != errno.ENOENT or "temporary directory" not in str(error.strerror):
        return None
    too_large = remedy(os.strerror(errno.EFBIG))
    return f"no file can be written in /tmp or another temporary folder; set TMPDIR to one{too_large}"
