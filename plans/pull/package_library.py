"""The user's packages by name, and the working folders of pulls.

    DATA/packages/NAME/  a complete package
    DATA/pulls/NAME/     the working folder of a pull, which stays after an interruption, or of a conversion by
                         source_models.py, which stays after a kill. This module calls both a pull.

DATA is $NEURONPIPE_DATA, or `neuronpipe` in the user's data folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from neuronpipe.plans.package.atomic_output import make_folder, whole_file
from neuronpipe.plans.package.manifest import MANIFEST
from neuronpipe.plans.strict_json import read_json
from neuronpipe.protocol.errors import NotRunning, UserError, quoted, safe_name
from neuronpipe.protocol.frozen import frozen

VARIABLE = "NEURONPIPE_DATA"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")
REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
MAX_SHOWN = 12
FIRST_MODEL = "qwen3-0.6b"
"""The smallest model of the catalog that answers simple questions well: 640 MB, under the Apache licence. The gateway's
page names it, too."""

EXAMPLE = f", e.g. `neuronpipe pull {FIRST_MODEL}`"
_HUB = re.compile(r"(?:https?:/+[^/]+/|hf\.co/|huggingface\.co/)?(?P<reference>[\w.-]+/[\w.-]+(?::[^:]*)?)", re.ASCII)
LOCK, STATE = "lock", "pull.json"  # in the folder of a pull; STATE exists from `begin` to the end of the pull


class Busy(UserError):
    """Another command works on the package."""


def data_folder() -> Path:
    """Return the folder DATA. Raises UserError if the user has no home and $NEURONPIPE_DATA is not set."""
    if folder := os.environ.get(VARIABLE):
        return Path(folder).absolute()
    if os.path.isabs(base := os.environ.get("XDG_DATA_HOME", "")):  # its specification says to ignore relative paths
        return Path(base) / "neuronpipe"
    try:
        return Path.home() / ".local" / "share" / "neuronpipe"
    except RuntimeError:  # no HOME, and the user is not in the user database
        raise UserError(f"this user has no home folder to keep packages in; set {VARIABLE} to a folder") from None


def packages_folder() -> Path:
    return data_folder() / "packages"


def pulls_folder() -> Path:
    return data_folder() / "pulls"


def package_names() -> list[str]:
    return _names(packages_folder(), MANIFEST)


def pull_names() -> list[str]:
    """Return the names of the pulls that have begun and are not complete."""
    return _names(pulls_folder(), STATE)


def _names(folder: Path, holds: str) -> list[str]:
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(name for name in names if NAME.fullmatch(name) and (folder / name / holds).is_file())


def checked_name(text: str) -> str:
    """Return `text`. Raises UserError if it is no valid name of a package."""
    if not NAME.fullmatch(text):
        raise UserError(f"{quoted(text)} is no name for a package: letters, digits, - _ and . only, 96 at most")
    return text


def name_like(text: str) -> str:
    """Return a valid name of a package that is similar to `text`."""
    return text if NAME.fullmatch(text) else re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:96].lstrip(".-") or "model"


def package_path(text: str) -> Path:
    """Return `text` as a path if it exists, else the folder of the package of that name; case is ignored if only one
    name matches then. If there is neither, return `text` as a path, which `refuse_unknown` refuses."""
    if os.path.exists(text) or not NAME.fullmatch(text):
        return Path(text)
    names = package_names()
    same = [text] if text in names else [name for name in names if name.casefold() == text.casefold()]
    return packages_folder() / same[0] if len(same) == 1 else Path(text)


def refuse_unknown(path: Path) -> None:
    """Raise UserError, which lists packages or names the next command, for a path that does not exist and that can be
    the name of a package, repository or GGUF file."""
    if os.path.exists(path):
        return
    text = str(path)
    on_hub = None if text.startswith("/") else _HUB.fullmatch(text)
    if text.endswith(".gguf") and (on_hub is None or ":" not in on_hub["reference"]):
        raise UserError(f"{safe_name(text)}: no such file{_ggufs_beside(path)}")
    if on_hub is not None:
        raise UserError(
            f"{safe_name(text)}: no such package directory; from a hub it comes with "
            f"`neuronpipe pull {safe_name(on_hub['reference'])}`"
        )
    name = text.partition(":")[0]  # other programs write NAME:TAG
    if not NAME.fullmatch(name):
        return
    raise UserError(
        f"{safe_name(text)}: no such package directory, and no package has that name; {_what_there_is(name)}"
    )


def _ggufs_beside(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.name.endswith(".gguf"))
    except OSError:
        return ""
    return f"; in that folder {_there_are(names)}" if names else ""


def _what_there_is(text: str) -> str:
    if text in pull_names():
        return "its pull was interrupted: `neuronpipe list` says how to go on"
    names = package_names()
    if not names:
        return f"make one with `neuronpipe convert`, or get one with `neuronpipe pull ORG/NAME`{EXAMPLE}"
    import difflib  # imported only after a mistake

    by_folded = {name.casefold(): name for name in names}
    there_are = f"{_there_are(names)}{': `neuronpipe list`' if len(names) > MAX_SHOWN else ''}"
    if near := difflib.get_close_matches(text.casefold(), by_folded, n=1):
        return f"did you mean {by_folded[near[0]]}? T{there_are[1:]}"
    return f"{there_are}; `neuronpipe pull ORG/NAME` gets another{EXAMPLE}"


def _there_are(names: list[str]) -> str:
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return f"there {'is' if len(names) == 1 else 'are'} {', '.join(map(safe_name, names[:MAX_SHOWN]))}{more}"


def refuse_used(name: str) -> None:
    """Raise UserError if a live run uses the package of this name."""
    from neuronpipe.protocol.run_directory import RunDirectory  # all messages: a fifth of the time of `list`

    used = (packages_folder() / name).resolve()
    try:
        live = RunDirectory.live()
    except NotRunning:
        return
    for directory, facts in live:
        if Path(facts.package).resolve() == used:
            raise UserError(f"{name}: the run at {directory.path} uses it; `neuronpipe down` stops that")


def remove_package(name: str) -> None:
    """Remove a package. Raises UserError for errors of the file system."""
    package = packages_folder() / name
    # Renamed first, so that no incomplete package is visible. After a kill the next pull of that name removes the rest.
    leaving = package.with_name(f".{name}.partial-{os.getpid()}")
    try:
        package.rename(leaving)
        shutil.rmtree(leaving)
    except OSError as error:
        raise UserError(f"{error.filename or package}: cannot be removed: {error.strerror}") from None


def remove_pull(name: str) -> None:
    """Remove the working folder of an interrupted pull. Raises Busy if the pull is under way, or UserError."""
    with working_folder(name) as folder:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise UserError(f"{error.filename or folder}: cannot be removed: {error.strerror}") from None


@contextlib.contextmanager
def working_folder(name: str) -> Iterator[Path]:
    """Yield the working folder of a pull, locked for this process. Raises Busy, or UserError if it cannot be
    written."""
    folder = pulls_folder() / name
    try:
        make_folder(folder)
    except UserError as error:
        raise UserError(f"{error}; packages can lie elsewhere: set {VARIABLE} to a folder") from None
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"{folder / LOCK}: cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = os.path.samestat(os.fstat(lock), os.stat(folder / LOCK))
        except (BlockingIOError, FileNotFoundError):  # the other process may just have removed the folder at its end
            is_locked = False
        if not is_locked:
            raise Busy(f"{name}: is being made by another command; wait for it, or end it")
        yield folder
    finally:
        os.close(lock)


@frozen(slots=True)
class Unfinished:
    """A pull that has begun and is not complete.

    reference: the repository's reference, or the path of a model on this disk
    commit: the repository's commit, or the fingerprint of the model's files
    command: the words of the command that continues it
    """

    reference: str
    commit: str
    command: tuple[str, ...]


def begin(folder: Path, pull: Unfinished) -> None:
    """Write STATE to the folder of a pull, which counts as unfinished until the file is removed."""
    with whole_file(folder / STATE) as place:
        place.write_text(json.dumps(dataclasses.asdict(pull)))


def unfinished_pull(name: str) -> Unfinished | None:
    """Return the unfinished pull of a package; None if there is none or its file is damaged."""
    try:
        state = read_json(pulls_folder() / name / STATE)
        command = tuple(str(word) for word in state.items("command"))
        return Unfinished(state.line("reference"), state.line("commit"), command)
    except UserError:
        return None


def is_under_way(name: str) -> bool:
    """Return True if a command works on the pull of this name now."""
    try:
        with (pulls_folder() / name / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
