"""Notices that a user gets once. Empty files in the cache folder record which ones were shown."""

from __future__ import annotations

import os

from neuronpipe.plans.measure.probe import cache_folder

FOLDER = "notices"
"""The folder of the empty files, within the cache folder. They are called NOTICE-SUBJECT."""


def first_time(notice: str, subject: str) -> bool:
    """Return True if this user was not shown the notice about this subject before, and record that it is shown.

    Without a writable cache folder every time is the first.

    notice, subject: file names, such as an id
    """
    if (folder := cache_folder()) is None:
        return True
    try:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        os.close(os.open(folder / FOLDER / f"{notice}-{subject}", os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    except OSError:  # a home that cannot be written
        return True
    return True
