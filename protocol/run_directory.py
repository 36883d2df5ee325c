"""The run directory: the place of a run's sockets, its logs and the file that describes it. It does not outlive the
run.

    run.json    what a client needs to attach (`RunFile`); written last, atomically
    plan.json   the run's plan
    engine.json the numbers of the engine's structures, for programs without Python
    neuronpipe.lock
                locked while the run lives: see locked_directory.py
    control, cache, events
                sockets, one per link
    doorbell    a FIFO: a byte in it wakes the loader
    supervisor  a socket of the supervisor, for requests to change the run or to end it
    overdue     why processes are overdue, written by the coordinator for the supervisor

Only its user can enter it. To attach, a client reads run.json, checks that the lock is held, and connects to the
endpoints. It opens segments through the supervisor's descriptors.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from neuronpipe.protocol.codec import MAJOR, VERSION, Message, from_map, message, to_map
from neuronpipe.protocol.errors import NotRunning, UserError, WireError, quoted
from neuronpipe.protocol.layouts import KINDS
from neuronpipe.protocol.links import LINKS, Link
from neuronpipe.protocol.locked_directory import LOCK_FILE, LockedDirectory
from neuronpipe.protocol.memory.layout import Layout
from neuronpipe.protocol.memory.segments import Segment
from neuronpipe.protocol.process_facts import stat_fields
from neuronpipe.protocol.schema import json_object

MAX_SOCKET_PATH_BYTES = 107  # sun_path has 108 bytes, one of them for the terminating zero
RUN_FILE = "run.json"
PLAN_FILE = "plan.json"
ENGINE_FILE = "engine.json"
MAX_RUN_FILE_BYTES = 1 << 20
PREFIX = "neuronpipe-"
DOORBELL = "doorbell"
SUPERVISOR_SOCKET = "supervisor"
OVERDUE_FILE = "overdue"
SHOWN_RUNS = 3  # of several, in an error
BOUND_SOCKETS = Path("/proc/net/unix")


@message
class SegmentHandle(Message):
    """A segment's descriptor in the supervisor, which can be opened as /proc/<supervisor_pid>/fd/<fd>.

    fd: descriptor in the supervisor; read-only if clients may only read
    total_bytes: size of the segment, header page included
    layout: the text of its layout, one line for each field
    """

    fd: int
    total_bytes: int
    layout: str


@message
class RunSummary(Message):
    """Names, counts and sizes that do not change while a run lives. Monitors need them.

    model: name of the package
    mode: "exact", "predicted" or "thresholded"
    quantization: quantization of the neurons
    processes: all processes of the plan, as "role.index" separated by blanks, in the order of the board's lines and the
        trace's rings
    layers: number of layers
    neurons: neurons of one layer, in all its experts
    clusters: clusters of one layer; each part has as many residency entries per layer
    participants: participants of the residency segment
    trigger_slots: slots for trigger parts, without borrowed ones
    value_slots: slots for value parts, without borrowed ones
    trigger_slot_bytes: size of one trigger slot
    value_slot_bytes: size of one value slot
    fixed_bytes: size of attention, norms, embeddings and predictor
    kv_bytes: size of the keys and values of all sequences
    step_bytes: bytes that every step reads from memory, whatever its tokens are
    row_bytes: size of one row of a neuron: the larger of up or down and gate
    position_bytes: size of the keys and values of one position, in all layers and heads
    context_tokens: positions of one sequence
    lends: true if weight slots may borrow memory of the KV cache that no sequence needs yet
    """

    model: str
    mode: str
    quantization: str
    processes: str
    layers: int
    neurons: int
    clusters: int
    participants: int
    trigger_slots: int
    value_slots: int
    trigger_slot_bytes: int
    value_slot_bytes: int
    fixed_bytes: int
    kv_bytes: int
    step_bytes: int
    row_bytes: int
    position_bytes: int
    context_tokens: int
    lends: bool = False


@message
class RunFile(Message):
    """The content of run.json, in JSON.

    protocol: version of the protocol, "major.minor"
    run: id of the run
    supervisor_pid: process id of the supervisor, as its /proc shows it; its descriptors are the segments
    supervisor_started: start time of the supervisor in clock ticks since boot, field 22 of /proc/<pid>/stat. Another
        process may have the same id, later or in another PID namespace
    endpoints: address of each link of the run, by the link's name
    segments: the segments, by name
    private: layouts of memory that a process maps for itself, by name, as texts; offsets count from the start of the
        mapping
    plan: id of the plan, which lies beside this file as plan.json
    package: path of the package
    summary: names, counts and sizes of the run, for monitors; see `RunSummary`
    """

    protocol: str
    run: str
    supervisor_pid: int
    supervisor_started: int
    endpoints: dict[str, str]
    segments: dict[str, SegmentHandle]
    private: dict[str, str]
    plan: str
    package: str = ""
    summary: RunSummary | None = None

    def open_segment(self, name: str) -> Segment:
        """Open the segment of this name for reading, with the layout that this file describes. Raises UserError if the
        run has no such segment, its layout is damaged, or this process cannot see the supervisor."""
        handle = self.segments.get(name)
        if handle is None:
            raise UserError(f"segment {name}: this run has none; is it of this version?")
        if not is_alive(self.supervisor_pid, self.supervisor_started):
            raise UserError(
                f"segment {name}: the run's supervisor, process {self.supervisor_pid}, is not to be seen from "
                "here; do this in the container where the run was started, if it is still live"
            )
        try:
            layout = Layout.parse(name, KINDS.get(name, 0), handle.layout, handle.total_bytes)
        except ValueError as error:
            raise UserError(f"{RUN_FILE}: segments.{name}.layout: {error}; start the run again") from None
        return Segment.open(layout, self.supervisor_pid, handle.fd)


class RunDirectory(LockedDirectory):
    """The directory of a run. `create` makes one, `find` attaches to the one of a live run."""

    @classmethod
    def create(cls, path: Path | None = None) -> RunDirectory:
        """Make and lock a directory at `path`, and remove what a dead run left there. None: choose a new path in
        `base()`, and remove the dead runs there. The run lives until this process and its forks have released the lock.
        Raises UserError if the place cannot be used."""
        if path is None:
            cls._sweep(base())
        place = (base() / f"{PREFIX}{os.urandom(4).hex()}") if path is None else Path(os.path.abspath(path))
        _check_length(place)
        directory = cls(place)
        try:
            directory.claim()
            directory.clear()
            place.chmod(0o700)
            os.mkfifo(place / DOORBELL, 0o600)
        except OSError as error:
            directory.unmake()
            raise UserError(f"{place}: cannot make the run directory: {error.strerror}; name another place") from error
        return directory

    @classmethod
    def find(cls, path: Path | None = None) -> tuple[RunDirectory, RunFile]:
        """Return the run at `path`, or if that is None the only run in `live`. Raises NotRunning if there is none,
        UserError if there are several or the one at `path` cannot be used."""
        if path is not None:
            directory = cls(Path(os.path.abspath(path)))
            return directory, directory.read()
        live = cls.live()
        if len(live) > 1:
            raise several_runs(live)
        return live[0]

    @classmethod
    def live(cls) -> list[tuple[RunDirectory, RunFile]]:
        """Return every live run of this user below `base()`. If there is none, return the live runs elsewhere, which
        were started with another folder or path. Raises NotRunning if there is none at all."""
        folder, bound = base(), _bound_places()
        below = {place for place in bound if place.is_relative_to(folder)}
        live = cls._live({*folder.glob(f"{PREFIX}*"), *below}) or cls._live(bound - below)
        if not live:
            raise NotRunning("no run of yours is live; start one with `neuronpipe up`")
        return live

    @classmethod
    def _sweep(cls, folder: Path) -> None:
        for place in folder.glob(f"{PREFIX}*"):
            cls(place).remove_if_dead()

    @classmethod
    def _live(cls, places: Iterable[Path]) -> list[tuple[RunDirectory, RunFile]]:
        live = []
        for place in sorted(places):
            with contextlib.suppress(UserError):
                live.append((cls(place), cls(place).read()))
        return live

    @property
    def doorbell(self) -> Path:
        """The FIFO whose bytes wake the loader. Open it for reading and writing, so that neither open nor write depends
        on the peer."""
        return self.path / DOORBELL

    def endpoint(self, link: Link) -> str:
        return f"ipc://{self.path}/{link.name}"

    def endpoints(self) -> dict[str, str]:
        return {link.name: self.endpoint(link) for link in LINKS}

    def publish(self, run_file: RunFile, plan: str, engine: str) -> None:
        """Write plan.json and engine.json, then run.json, by which the run can be found."""
        self.write(PLAN_FILE, plan)
        self.write(ENGINE_FILE, engine)
        self.write(RUN_FILE, json.dumps(to_map(run_file), indent=1) + "\n")

    def clear(self) -> None:
        """Remove everything except the lock; run.json, by which the run is found, first."""
        (self.path / RUN_FILE).unlink(missing_ok=True)
        super().clear()

    def read(self) -> RunFile:
        """Read run.json of a live run. Raises NotRunning if there is no run, UserError if this process cannot use
        it."""
        run_file = self._read()
        try:
            lives = self.is_held()
        except FileNotFoundError:
            self._read()  # raises NotRunning if both files are gone: the run has just ended
            raise UserError(
                f"{self.path}: no {LOCK_FILE}, so nothing shows whether the run lives; if it has ended, remove it"
            ) from None
        if not lives:
            raise NotRunning(f"{self.path}: not running: its supervisor has ended; start a run with `neuronpipe up`")
        return run_file

    def _read(self) -> RunFile:
        path = self.path / RUN_FILE
        try:
            if path.stat().st_uid != os.getuid():
                raise UserError(f"{path}: belongs to another user; attach as that user")
            with path.open("rb") as stream:
                data = stream.read(MAX_RUN_FILE_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            raise NotRunning(f"{self.path}: no run here; start one with `neuronpipe up`") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}; name another run") from error
        damaged = f"the file is damaged, remove {self.path}"
        try:
            content = json_object(data, str(path))
        except UserError as error:
            raise UserError(f"{error}; {damaged}") from None
        spoken = content.get("protocol")
        if isinstance(spoken, str) and spoken.partition(".")[0] != str(MAJOR):
            raise UserError(
                f"{path}: protocol: {quoted(spoken)} is not {VERSION}; use the neuronpipe that started the run"
            )
        try:
            return from_map(RunFile, content)
        except WireError as error:
            raise UserError(f"{path}: {error}; {damaged}") from None


def base() -> Path:
    """Return the folder for run directories: the first of $XDG_RUNTIME_DIR, $TMPDIR, $PREFIX/tmp (Termux) and /tmp that
    can be written. Raises UserError if none can."""
    prefix = os.environ.get("PREFIX")
    for place in (os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR"), prefix and f"{prefix}/tmp", "/tmp"):
        if place and os.path.isabs(place) and os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
            return Path(place)
    raise UserError("no folder for the run directory can be written; set TMPDIR to one that can")


def several_runs(live: Sequence[tuple[RunDirectory, RunFile]]) -> UserError:
    """Return the error where one of several live runs must be named. It shows a few of them with their packages."""
    shown = [f"{directory.path} ({Path(file.package).name})" for directory, file in live[:SHOWN_RUNS]]
    more = f" and {len(live) - len(shown)} more" if len(live) > len(shown) else ""
    return UserError(
        f"several runs are live, name one with --run, as `neuronpipe ps` lists them: {', '.join(shown)}{more}"
    )


def started(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot. Raises ProcessLookupError if it does not run, or
    has ended without being reaped."""
    try:
        fields = stat_fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process {pid}") from None
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return int(fields[19])


def own_pid() -> int:
    """Return this process's id as /proc shows it, which may be the id in an outer PID namespace."""
    return int(os.readlink("/proc/self"))


def is_alive(pid: int, started_ticks: int) -> bool:
    """Return True if the process with this id and start time still runs."""
    try:
        return started(pid) == started_ticks
    except ProcessLookupError:
        return False


def _bound_places() -> set[Path]:
    """Return the folders in which a process of any PID namespace has bound a supervisor's socket, except folders inside
    another such folder. Empty if /proc/net/unix cannot be read."""
    try:
        lines = BOUND_SOCKETS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()[1:]
    except OSError:
        return set()
    paths = [Path(words[7]) for line in lines if len(words := line.split(None, 7)) == 8]
    places = {path.parent for path in paths if path.name == SUPERVISOR_SOCKET and path.is_absolute()}
    return {place for place in places if place.parent not in places}


def _check_length(place: Path) -> None:
    longest = max((os.fsencode(name) for name in (*(link.name for link in LINKS), SUPERVISOR_SOCKET)), key=len)
    length = len(os.fsencode(place)) + 1 + len(longest)
    if length > MAX_SOCKET_PATH_BYTES:
        raise UserError(
            f"{place}: too long for a socket: {length} bytes with /{longest.decode()}, the system allows "
            f"{MAX_SOCKET_PATH_BYTES}; name a shorter place or set TMPDIR to one"
        )
