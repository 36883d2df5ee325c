"""Progress of long work, on stderr: live on a terminal, elsewhere a few plain lines; silent at first.

Progress  of work whose amount is known: a bar, or a line per tenth and when nothing was said for long
Elapsed   of a wait for nobody knows how long: seconds

What is silent is the command, not its parts: the first of these counts the time since the process began, imports and
planning included, and each later one the time since a person heard something last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TextIO

from neuronpipe.launch.formats import show_bytes, show_left
from neuronpipe.protocol.process_facts import start_ticks

if TYPE_CHECKING:
    from rich.progress import Progress as ProgressBar

SILENT_S = 2.0
QUIET_S = 15.0
TICK_S = 0.5
REDRAW_S = 0.1
PASSES_S = 1.0  # what is measured meanwhile is disturbed by every drawing
WIDE_COLUMNS = 76  # from here on there is room for more than figures
WIPE = "\r\x1b[K"
CANNOT_WIPE = ("dumb", "unknown")  # terminals, by TERM
MAX_START_S = 10.0  # what began longer ago has set itself up first, and said so

_open: list[Progress] = []  # those that are shown
_quiet_since_s: float | None = None  # None: nobody counts, and work is silent from its own beginning


def begin_command() -> None:
    """This process is a command that a person waits for, and has said nothing since it began."""
    global _quiet_since_s
    began_s = time.monotonic()
    with contextlib.suppress(OSError, ValueError, IndexError):  # /proc may be hidden
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks() / os.sysconf("SC_CLK_TCK")
        if 0 < age_s < MAX_START_S:
            began_s -= age_s
    _quiet_since_s = began_s


def heard() -> None:
    """A person has heard something of the command just now, or has told it something."""
    global _quiet_since_s
    if _quiet_since_s is not None:
        _quiet_since_s = time.monotonic()


def passes() -> None:
    """Time passes: call it while you wait for what a Progress that is open tells of, so that it shows that. A thread
    (`steady`) cannot, in work that forks."""
    for one in _open:
        one.pass_on_time()


@contextlib.contextmanager
def passing() -> Iterator[None]:
    """A thread tells that time passes: round a part that computes and does not fork, of work that does."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(TICK_S):
            passes()

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _began() -> float:
    return time.monotonic() if _quiet_since_s is None else _quiet_since_s


class Progress:
    """Call it with (done, total) as often as you like; as a context manager, so that the bar goes when work ends.

    with Progress("converting", "bytes") as progress:
        convert(source, target, progress=progress)

    `plain` asks for lines even on a terminal, as `--json` does. `steady` has a thread show that time passes while the
    work does not call: not for work that forks. That calls `passes` where it waits.
    """

    def __init__(
        self,
        what: str,
        unit: Literal["bytes", "tokens", "requests", "checks", "figures", "graphs", "ms"],
        *,
        plain: bool = False,
        steady: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self._what, self._unit = what, unit
        self._stream = sys.stderr if stream is None else stream
        self._plain = plain or not self._stream.isatty()
        self._began = _began()
        self._said_at = self._began - QUIET_S + SILENT_S  # so that the first line comes after SILENT_S
        self._done, self._total, self._tenths = 0, 0, 0
        self._first: tuple[float, int] | None = None  # when it was called first, and how much was done then
        self._said = False
        self._bar: ProgressBar | None = None
        self._drawn_at = self._shown_at = float("-inf")
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True) if steady else None

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` is done."""
        with self._lock:
            self._done, self._total = done, total
            if self._first is None or done < self._first[1]:
                self._first = time.monotonic(), done
            self._show()

    def pass_on_time(self) -> None:
        """Show that time passes, once it was called first: then it is this that goes on."""
        with self._lock:
            if self._first is not None and time.monotonic() - self._shown_at >= PASSES_S:
                self._show()

    def print(self, line: str) -> None:
        """A line for stdout, which may be the same terminal."""
        self._print(line, sys.stdout)

    def note(self, line: str) -> None:
        """Write a line about the work where its progress is shown."""
        self._print(f"neuronpipe: {line}", self._stream)

    def _print(self, line: str, stream: TextIO) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._drawn_at = float("-inf")
            print(line, file=stream, flush=True)

    def _tick(self) -> None:
        while not self._ended.wait(TICK_S):
            with self._lock:
                self._show()

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        if self._shown_at - self._began <= SILENT_S:
            return
        if self._plain:
            self._line()
        else:
            self._draw()

    def _line(self) -> None:
        now, tenths = time.monotonic(), 10 * self._done // self._total if self._total else 0
        if tenths > self._tenths or now - self._said_at > QUIET_S:
            self._tenths, self._said_at, self._said = tenths, now, True
            share = f"{100 * self._done // self._total} %, " if self._total else ""
            amount = f"{self._amount(now)}, " if self._total else ""
            print(f"neuronpipe: {self._what}: {share}{amount}{now - self._began:.0f} s", file=self._stream, flush=True)

    def _amount(self, now_s: float) -> str:
        """How much of it is done; of bytes, which come evenly, how fast, and when the rest will have come."""
        if self._unit != "bytes":
            return f"{self._done:,} of {self._total:,} {self._unit}"
        pace = self._pace(now_s)
        return f"{show_bytes(self._done)} of {show_bytes(self._total)}{pace and f', {pace}'}"

    def _pace(self, now_s: float) -> str:
        """Of bytes, since the first call, which may have found some done; empty: nothing has come since."""
        if self._unit != "bytes" or self._first is None or now_s <= self._first[0] or self._done == self._first[1]:
            return ""
        speed = (self._done - self._first[1]) / (now_s - self._first[0])
        left = f", {show_left((self._total - self._done) / speed)}" if self._total else ""
        return f"{show_bytes(speed)}/s{left}"

    @property
    def was_shown(self) -> bool:
        """Whether it took so long that something was said."""
        return self._bar is not None or self._said

    def _draw(self) -> None:
        if time.monotonic() - self._drawn_at < REDRAW_S:
            return
        self._drawn_at = time.monotonic()
        if os.environ.get("TERM", "") in CANNOT_WIPE:
            self._plain = True
            self._line()
            return
        if self._bar is None:
            self._bar = self._first_bar()
        bar = self._bar
        pace = self._pace(self._drawn_at)
        bar.update(bar.task_ids[0], completed=self._done, total=self._total or None, pace=pace)
        bar.start()  # again, after a line for stdout
        bar.refresh()

    def _first_bar(self) -> ProgressBar:
        """What draws it takes a second to import where all cores are busy: until then a word."""
        self._stream.write(f"{WIPE}{self._what} ...")
        self._stream.flush()
        bar = _bar(self._what, self._unit, self._began, self._stream)
        self._stream.write(WIPE)
        return bar

    def __enter__(self) -> Self:
        _open.append(self)
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _open.remove(self)
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._bar is not None:
            self._bar.stop()
        if self.was_shown:
            heard()


def _bar(what: str, unit: str, began: float, stream: TextIO) -> ProgressBar:
    """A bar that is drawn when it is told to, and goes when it is stopped."""
    from rich import progress  # only long work on a terminal pays for the import
    from rich.console import Console

    console = Console(file=stream)
    columns: list[str | progress.ProgressColumn] = ["{task.description}:", progress.TaskProgressColumn()]
    wide = console.width >= WIDE_COLUMNS
    if wide:
        columns.append(progress.BarColumn(bar_width=None))
    if unit == "bytes":
        columns.append(progress.DownloadColumn(binary_units=True))
        if wide:
            columns.append(progress.TextColumn("{task.fields[pace]}"))
    else:
        columns += [progress.MofNCompleteColumn(), unit]
    if wide:
        columns.append(progress.TimeElapsedColumn())
    if wide and unit != "bytes":
        columns.append(progress.TimeRemainingColumn())
    bar = progress.Progress(
        *columns,
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        expand=wide,
        get_time=time.monotonic,
    )
    bar.add_task(what, total=None, pace="")
    bar.tasks[0].start_time = began
    return bar


class Elapsed:
    """Call `say` a few times a second while waiting; as a context manager, so that the line goes when the wait ends.

    Without a terminal, or when `plain` asks for it, a line is written after SILENT_S, and whenever twice as much time
    has passed.
    """

    def __init__(self, *, plain: bool = False, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._plain = plain or not self._stream.isatty()
        self._began = _began()
        self._due_s = SILENT_S
        self._drawn = self._said = False
        self._over = False

    def say(self, what: str) -> None:
        """What is waited for."""
        took_s = time.monotonic() - self._began
        if self._over or took_s < self._due_s:
            return
        if self._plain:
            print(f"neuronpipe: {what}, {took_s:.0f} s", file=self._stream, flush=True)
            self._due_s = 2 * took_s
            self._said = True
        else:
            columns = shutil.get_terminal_size().columns
            self._stream.write(f"{WIPE}{f'{what}, {took_s:.0f} s'[: columns - 1]}")
            self._stream.flush()
            self._drawn = self._said = True

    def end(self) -> None:
        """The wait is over: nothing is said any more."""
        self._over = True
        if self._drawn:
            self._stream.write(WIPE)
            self._stream.flush()
            self._drawn = False
        if self._said:
            heard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
