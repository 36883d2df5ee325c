"""Notices that a user gets once: which ones were shown is kept in the cache folder, as empty files."""

from __future__ import annotations

import os

from neuronpipe.plans.measure.probe import cache_folder

SHOWN = "notices"
"""The folder of the empty files, in the cache folder: NOTICE-SUBJECT."""


def first_time(notice: str, subject: str) -> bool:
    """True if this user was not shown the notice of this subject before; from now on it counts as shown. Where nothing
    can be kept, every time is the first. notice, subject: file names, such as an id."""
    if (folder := cache_folder()) is None:
        return True
    try:
        (folder / SHOWN).mkdir(parents=True, exist_ok=True)
        os.close(os.open(folder / SHOWN / f"{notice}-{subject}", os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    except OSError:  # a home that cannot be written
        return True
    return True
