"""The file of a history, in this user's data folder: one for each package and device.

It is a file of the user, not of the package: a package may be shared or read-only. A file that cannot be read counts as
none, and the next run replaces it.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from neuronpipe.plans.history.history import VERSION, History
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.plans.pull.package_library import data_folder
from neuronpipe.plans.strict_json import read_file
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.schema import from_json, json_object, to_json

MAX_BYTES = 1 << 20
MAX_FILES = 64
ID_CHARACTERS = 16


def history_folder() -> Path:
    """Return the folder of all histories. Raises UserError for a user without a home."""
    return data_folder() / "history"


def history_file(package_id: str, device_id: str) -> Path:
    """Return the path of a history, which may not exist. Raises UserError for a user without a home."""
    return history_folder() / f"{package_id[:ID_CHARACTERS]}-{device_id[:ID_CHARACTERS]}.json"


def read_history(package_id: str, device_id: str) -> History:
    """Return the history of a package on a device; an empty one if there is none that can be read."""
    with contextlib.suppress(UserError):
        path = history_file(package_id, device_id)
        if path.exists():
            history = from_json(History, json_object(read_file(path, MAX_BYTES), str(path)), str(path))
            history.check(package_id=package_id, device_id=device_id, where=str(path))
            return history
    return History(version=VERSION, package_id=package_id, device_id=device_id)


def write_history(history: History) -> None:
    """Write a history atomically, and remove the oldest files beyond MAX_FILES. Raises OSError or UserError."""
    path = history_file(history.package_id, history.device_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as place:
        place.write_text(json.dumps(to_json(history)), encoding="utf-8")
    by_age = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
    for file in by_age[:-MAX_FILES]:
        file.unlink(missing_ok=True)


def forget_history(package_id: str) -> int:
    """Remove the histories of a package on all devices. Returns the number of removed files."""
    files = list(history_folder().glob(f"{package_id[:ID_CHARACTERS]}-*.json"))
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)
