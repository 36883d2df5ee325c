"""The run directory: where a run's sockets, its logs and the file that describes it live, and nothing outlives it.

    run.json    what a client needs to attach (`RunFile`); written last, atomically
    plan.json   the run's plan
    neuronpipe.lock
                locked for as long as the run lives: see locked_directory.py
    control, cache, events
                sockets, one per link
    doorbell    a FIFO: a byte in it wakes the loader
    supervisor  a socket of the supervisor's: a person asks for changes to the run, or for its end
    overdue     why processes are overdue, in words: from the coordinator to the supervisor

Only its user can enter it. To attach, a client reads run.json, checks that the lock is held, and connects to the
endpoints; segments are opened through the supervisor's descriptors.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from neuronpipe.protocol.codec import MAJOR, VERSION, Message, from_map, message, to_map
from neuronpipe.protocol.errors import NotRunning, UserError, WireError, quoted
from neuronpipe.protocol.layout import Layout
from neuronpipe.protocol.layouts import KINDS
from neuronpipe.protocol.links import LINKS, Link
from neuronpipe.protocol.locked_directory import LOCK_FILE, LockedDirectory
from neuronpipe.protocol.process_facts import stat_fields
from neuronpipe.protocol.schema import json_object
from neuronpipe.protocol.segments import Segment

MAX_SOCKET_PATH_BYTES = 107  # sun_path holds 108, with its end
RUN_FILE = "run.json"
PLAN_FILE = "plan.json"
MAX_RUN_FILE_BYTES = 1 << 20
PREFIX = "neuronpipe-"
DOORBELL = "doorbell"
SUPERVISOR_SOCKET = "supervisor"
OVERDUE_FILE = "overdue"
BOUND_SOCKETS = Path("/proc/net/unix")


@message
class SegmentHandle(Message):
    """Where a segment can be opened: /proc/<supervisor_pid>/fd/<fd>.

    fd: descriptor in the supervisor, read-only where clients are only to read
    total_bytes: size of the segment, header page included
    layout: the text of its layout: a line for each field
    """

    fd: int
    total_bytes: int
    layout: str


@message
class RunSummary(Message):
    """Names, counts and sizes that stay the same while a run lives; monitors need them.

    model: name of the package
    mode: "exact", "predicted" or "thresholded"
    quantization: of the neurons
    processes: all processes of the plan, "role.index", separated by blanks, in the order of the board's lines and the
        trace's rings
    layers: of the model
    neurons: of one layer, of all its experts
    clusters: of one layer: as many residency entries of each part
    participants: of the residency segment
    trigger_slots: slots for trigger parts, those that are lent to them left out
    value_slots: slots for value parts, likewise
    trigger_slot_bytes: size of one
    value_slot_bytes: size of one
    fixed_bytes: attention, norms, embeddings, predictor
    kv_bytes: keys and values of all sequences
    step_bytes: read from memory by every step, whatever its tokens are
    row_bytes: of one row of a neuron: up or down, and at most a gate
    position_bytes: keys and values of one position, of all layers and heads
    context_tokens: positions that a sequence has
    lends: whether slots may lie in memory of the KV cache that no text needs yet
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

    protocol: version of the wire, "major.minor"
    run: id of the run
    supervisor_pid: process id of the supervisor, as its /proc shows it; its descriptors are the segments
    supervisor_started: its start time in clock ticks since boot, field 22 of /proc/<pid>/stat: another process may have
        this id, later or in another PID namespace
    endpoints: address of each link that exists, by the link's name
    segments: the segments, by name
    private: the layouts of what processes map for themselves, by name, as texts; offsets count from where it is mapped
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
        """The segment of this name, laid out as stands here, to be read. Raises UserError when the run has none, or
        when the supervisor cannot be seen from here."""
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
    """One run directory; `create` makes one, `find` attaches to the one of a live run."""

    @classmethod
    def create(cls, path: Path | None = None) -> RunDirectory:
        """A new directory at `path`, or at a place of its own, locked: the run lives as long as this process and its
        copies do not `release` it. What runs that died without cleaning up left there is removed. Raises UserError when
        the place cannot serve; nothing is left there then."""
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
        """The run at `path`, or the only live run of this user: see `live`. Raises NotRunning, or UserError when there
        are several."""
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
        """Every live run of this user below the folder for run directories; when there is none, every other one, which
        was started with another folder or at a place of its own. Raises NotRunning when there is none at all."""
        here, bound = base(), _bound_places()
        below = {place for place in bound if place.is_relative_to(here)}
        live = cls._live({*here.glob(f"{PREFIX}*"), *below}) or cls._live(bound - below)
        if not live:
            raise NotRunning("no run of yours is live; start one with `neuronpipe up`")
        return live

    @classmethod
    def _sweep(cls, folder: Path) -> None:
        """Remove what dead runs left."""
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
        self.write(PLAN_FILE, plan)
        self.write(RUN_FILE, json.dumps(to_map(run_file), indent=1) + "\n")

    def clear(self) -> None:
        """Remove everything but the lock; run.json first, by which the run is found."""
        (self.path / RUN_FILE).unlink(missing_ok=True)
        super().clear()

    def read(self) -> RunFile:
        """run.json of a live run. Raises NotRunning when there is none, UserError when it is not ours to use."""
        run_file = self._read()
        try:
            lives = self.is_held()
        except FileNotFoundError:
            self._read()  # raises when both have gone: it has just ended
            raise UserError(
                f"{self.path}: no {LOCK_FILE}: an older neuronpipe started this run; use that one"
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
    """The folder for run directories: the first there is of $XDG_RUNTIME_DIR, $TMPDIR, $PREFIX/tmp (Termux), /tmp."""
    prefix = os.environ.get("PREFIX")
    for place in (os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR"), prefix and f"{prefix}/tmp", "/tmp"):
        if place and os.path.isabs(place) and os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
            return Path(place)
    raise UserError("no folder for the run directory can be written; set TMPDIR to one that can")


def started(pid: int) -> int:
    """Start time of a process in clock ticks since boot. Raises ProcessLookupError when it does not run. By hand:
    psutil turns the ticks into a time of day, which changes when the clock is set."""
    try:
        fields = stat_fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process {pid}") from None
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return int(fields[19])


def own_pid() -> int:
    """This process as /proc shows it, which may be that of an outer PID namespace."""
    return int(os.readlink("/proc/self"))


def is_alive(pid: int, started_ticks: int) -> bool:
    """Whether the very process that had this id and start time still runs."""
    try:
        return started(pid) == started_ticks
    except ProcessLookupError:
        return False


def _bound_places() -> set[Path]:
    """Folders in which a process, of whatever PID namespace, has bound a socket that is named like a
    supervisor's, but for those of runs that serve another run. None where the kernel does not tell."""
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
