"""The run directory: where a run's sockets, its logs and the file that describes it live, and nothing outlives it.

    run.json    what a client needs to attach (`RunFile`); written last, atomically
    plan.json   the plan that the run obeys
    control, cache, events
                sockets, one per link
    doorbell    a FIFO: a byte in it wakes the loader
    door        a socket of the supervisor's: a person asks for changes to the run

Only its user can enter it. Whoever wants to attach reads run.json, checks that the supervisor it names is alive, and
connects to the endpoints; segments are opened through the supervisor's descriptors.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path

from neuronpipe.protocol.codec import Message, from_map, message, to_map
from neuronpipe.protocol.errors import NotRunning, UserError, WireError
from neuronpipe.protocol.links import LINKS, Link
from neuronpipe.protocol.version import MAJOR, VERSION

SOCKET_PATH_MOST_BYTES = 107  # sun_path holds 108, with its end
RUN_FILE = "run.json"
PLAN_FILE = "plan.json"
RUN_FILE_MOST_BYTES = 1 << 20
PREFIX = "neuronpipe-"
DOORBELL = "doorbell"


@message
class SegmentHandle(Message):
    """Where a segment can be opened: /proc/<supervisor_pid>/fd/<fd>.

    fd: descriptor in the supervisor, read-only where clients are only to read
    total_bytes: size of the segment, header page included
    layout: the text of its layout: a line for each field
    """

    fd: int
    total_bytes: int
    layout: str = ""


@message
class RunFacts(Message):
    """What does not change while a run lives, for monitors.

    model: name of the package
    mode: "exact" or "predicted"
    quantization: of the neurons
    seats: every process there is to be, "role.index", with blanks between them, in the order of the board's lines and
        the trace's rings
    layers: of the model
    neurons: of one layer, of all its experts
    clusters: of one layer: words of the residency segment, for each part
    members: of the residency segment
    gate_slots: slots for gate parts
    rest_slots: slots for up and down parts
    gate_slot_bytes: size of one
    rest_slot_bytes: size of one
    fixed_bytes: attention, norms, embeddings, predictor
    kv_bytes: keys and values of all sequences
    step_bytes: read from memory by every step, whatever its tokens are
    row_bytes: of a neuron's gate, up or down
    position_bytes: keys and values of one position, of all layers and heads
    context_tokens: positions that a sequence has
    """

    model: str
    mode: str
    quantization: str
    seats: str
    layers: int
    neurons: int
    clusters: int
    members: int
    gate_slots: int
    rest_slots: int
    gate_slot_bytes: int
    rest_slot_bytes: int
    fixed_bytes: int
    kv_bytes: int
    step_bytes: int
    row_bytes: int
    position_bytes: int
    context_tokens: int


@message
class RunFile(Message):
    """The content of run.json, in JSON.

    protocol: version of the wire, "major.minor"
    run: id of the run
    supervisor_pid: process id of the supervisor; when it is gone, so is the run
    supervisor_started: its start time in clock ticks since boot, field 22 of /proc/<pid>/stat: process ids come again
    endpoints: address of each link that exists, by the link's name
    segments: the segments, by name
    plan: id of the plan, which lies beside this file as plan.json
    package: path of the package
    facts: see `RunFacts`
    """

    protocol: str
    run: str
    supervisor_pid: int
    supervisor_started: int
    endpoints: dict[str, str]
    segments: dict[str, SegmentHandle]
    plan: str
    package: str = ""
    facts: RunFacts | None = None


class RunDirectory:
    """One run directory; `create` makes one, `find` attaches to the one of a live run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path | None = None) -> RunDirectory:
        """A new directory at `path`, or at a place of its own. What runs that died without cleaning up left there is
        removed. Raises UserError when the place cannot serve."""
        if path is None:
            _sweep(base())
        place = (base() / f"{PREFIX}{os.urandom(4).hex()}") if path is None else Path(os.path.abspath(path))
        _check_length(place)
        directory = cls(place)
        try:
            if os.path.lexists(place):
                directory._take_over()
            place.mkdir(mode=0o700, parents=False, exist_ok=True)
            place.chmod(0o700)
            os.mkfifo(place / DOORBELL, 0o600)
            if not os.access(place, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise UserError(f"{place}: cannot make the run directory: {error.strerror}; name another place") from error
        return directory

    @classmethod
    def find(cls, path: Path | None = None) -> tuple[RunDirectory, RunFile]:
        """The run at `path`, or the only live run of this user. Raises NotRunning, or UserError when there are
        several."""
        if path is not None:
            directory = cls(Path(os.path.abspath(path)))
            return directory, directory.read()
        live = cls.live()
        if len(live) > 1:
            places = ", ".join(str(found.path) for found, _ in live)
            raise UserError(f"several runs are live, name one with --run: {places}")
        return live[0]

    @classmethod
    def live(cls) -> list[tuple[RunDirectory, RunFile]]:
        """Every live run of this user that has a directory of its own. Raises NotRunning when there is none."""
        live = []
        for place in sorted(base().glob(f"{PREFIX}*")):
            try:
                live.append((cls(place), cls(place).read()))
            except UserError:
                continue
        if not live:
            raise NotRunning(f"no run of yours in {base()}; start one with `neuronpipe up`")
        return live

    @property
    def doorbell(self) -> Path:
        """The FIFO whose bytes wake the loader. Open it for reading and writing, so that neither open nor write ever
        depends on the other side."""
        return self.path / DOORBELL

    def endpoint(self, link: Link) -> str:
        """The address of a link of this run."""
        return f"ipc://{self.path}/{link.name}"

    def endpoints(self) -> dict[str, str]:
        """The addresses of all links, for `RunFile`."""
        return {link.name: self.endpoint(link) for link in LINKS}

    def publish(self, run_file: RunFile, plan: str) -> None:
        """Write plan.json, then run.json: from now on the run can be found."""
        self._write(PLAN_FILE, plan)
        self._write(RUN_FILE, json.dumps(to_map(run_file), indent=1) + "\n")

    def read(self) -> RunFile:
        """run.json of a live run. Raises NotRunning when there is none, UserError when it is not ours to use."""
        run_file = self._read()
        if not is_alive(run_file.supervisor_pid, run_file.supervisor_started):
            raise NotRunning(
                f"{self.path}: not running: its supervisor, process {run_file.supervisor_pid}, has ended; "
                "start a run with `neuronpipe up`"
            )
        return run_file

    def remove(self) -> None:
        """Remove the directory and everything in it; what has gone already is no error. What is no directory of ours
        (a link, another user's) is left alone."""
        if not self._is_ours():
            return
        for folder, folders, files in os.walk(self.path, topdown=False):
            for name in files:
                Path(folder, name).unlink(missing_ok=True)
            for name in folders:
                inner = Path(folder, name)
                inner.unlink() if inner.is_symlink() else inner.rmdir()
        with contextlib.suppress(FileNotFoundError):
            self.path.rmdir()

    def _write(self, name: str, text: str) -> None:
        """Write a file at once or not at all."""
        fresh = self.path / f".{name}"
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:
            stream.write(text)
        fresh.rename(self.path / name)

    def _is_ours(self) -> bool:
        """Whether the place itself, not what a link there points to, is a directory of this user."""
        try:
            status = self.path.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()

    def _is_of_a_dead_run(self) -> bool:
        """Whether run.json is there and names a supervisor that has ended. One that vanished says nothing."""
        try:
            run_file = self._read()
        except UserError:  # gone meanwhile, another user's, or damaged: not ours to judge
            return False
        return not is_alive(run_file.supervisor_pid, run_file.supervisor_started)

    def _take_over(self) -> None:
        """Make sure that the place, which exists, is ours and serves no live run; clear it of a dead one."""
        if not self._is_ours():
            raise UserError(f"{self.path}: not a directory of yours; name another place")
        names = os.listdir(self.path)
        if RUN_FILE in names:
            try:
                run_file = self.read()
            except NotRunning:
                self.remove()
            else:
                raise UserError(f"{self.path}: run {run_file.run} is live here; stop it or name another place")
        elif names:
            raise UserError(f"{self.path}: not empty and no run directory; name another place")

    def _read(self) -> RunFile:
        path = self.path / RUN_FILE
        try:
            if path.stat().st_uid != os.getuid():
                raise UserError(f"{path}: belongs to another user; attach as that user")
            with path.open("rb") as stream:
                content = json.loads(stream.read(RUN_FILE_MOST_BYTES))
            spoken = content.get("protocol") if isinstance(content, dict) else None
            if isinstance(spoken, str) and spoken.partition(".")[0] != str(MAJOR):
                raise UserError(f"{path}: protocol: {spoken} is not {VERSION}; use the neuronpipe that started the run")
            return from_map(RunFile, content)
        except (FileNotFoundError, NotADirectoryError):
            raise NotRunning(f"{self.path}: no run here; start one with `neuronpipe up`") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}; name another run") from error
        except WireError as error:
            raise UserError(f"{path}: {error}; the file is damaged, remove {self.path}") from error
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path}: no JSON; the file is damaged, remove {self.path}") from error


def base() -> Path:
    """The folder for run directories: the first there is of $XDG_RUNTIME_DIR, $TMPDIR, $PREFIX/tmp (Termux), /tmp."""
    prefix = os.environ.get("PREFIX")
    for place in (os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR"), prefix and f"{prefix}/tmp", "/tmp"):
        if place and os.path.isabs(place) and os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
            return Path(place)
    raise UserError("no folder for the run directory can be written; set TMPDIR to one that can")


def started(pid: int) -> int:
    """Start time of a process in clock ticks since boot. Raises ProcessLookupError when it does not run."""
    try:
        # Its main thread has the same figures; in /proc/PID/stat user-mode QEMU shows a process made-up ones of itself.
        stat = Path(f"/proc/{pid}/task/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process {pid}") from None
    state, *rest = stat.rpartition(")")[2].split()  # the name before it may hold blanks and brackets
    if state in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return int(rest[18])


def is_alive(pid: int, started_ticks: int) -> bool:
    """Whether the very process that had this id and start time still runs."""
    try:
        return started(pid) == started_ticks
    except ProcessLookupError:
        return False


def _sweep(folder: Path) -> None:
    """Remove what dead runs left. A directory without run.json may be that of a run about to start: it stays."""
    for file in folder.glob(f"{PREFIX}*/{RUN_FILE}"):
        directory = RunDirectory(file.parent)
        if directory._is_ours() and directory._is_of_a_dead_run():
            directory.remove()


def _check_length(place: Path) -> None:
    longest = max((os.fsencode(link.name) for link in LINKS), key=len)
    length = len(os.fsencode(place)) + 1 + len(longest)
    if length > SOCKET_PATH_MOST_BYTES:
        raise UserError(
            f"{place}: too long for a socket: {length} bytes with /{longest.decode()}, the system allows "
            f"{SOCKET_PATH_MOST_BYTES}; name a shorter place or set TMPDIR to one"
        )
