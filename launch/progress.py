"""Progress of long work on stderr: live on a terminal, a few plain lines elsewhere, and nothing for the first seconds.

Progress  work of a known amount: a bar, or a line at each tenth and after QUIET_S without a line
Elapsed   a wait of unknown length: the seconds so far

Nothing is shown before the command has been silent for SILENT_S. The silence counts from the start of the process,
imports and planning included, or from the last output (`note_output`).
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

if TYPE_CHECKING:
    from rich.progress import Progress as ProgressBar

SILENT_S = 2.0
QUIET_S = 15.0
TICK_S = 0.5
REDRAW_S = 0.1
REFRESH_S = 1.0  # not more often: drawing disturbs what is measured meanwhile
WIDE_COLUMNS = 76  # the narrowest terminal with room for a bar
WIPE = "\r\x1b[K"
CANNOT_WIPE = ("dumb", "unknown")  # values of TERM
MAX_START_S = 10.0  # an older process was preceded by an installation, which has printed lines

_open: list[Progress] = []
_silent_since_s: float | None = None  # None outside of a command: each object counts from its creation


def begin_command() -> None:
    """Count the silence from the start of this process, for a command that a person waits for."""
    global _silent_since_s
    began_s = time.monotonic()
    with contextlib.suppress(OSError, ValueError, IndexError):  # /proc may be hidden
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])  # from the machine's start
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        if 0 < age_s < MAX_START_S:
            began_s -= age_s
    _silent_since_s = began_s


def note_output() -> None:
    """Restart the count of the silence: there was output, or the user typed something."""
    global _silent_since_s
    if _silent_since_s is not None:
        _silent_since_s = time.monotonic()


def refresh() -> None:
    """Refresh the elapsed time of open `Progress` objects.

    For loops that wait in a process that forks, which must have no thread (`steady`).
    """
    for progress in _open:
        progress.refresh()


@contextlib.contextmanager
def refreshing() -> Iterator[None]:
    """Call `refresh` from a thread within the block, in which the process must not fork."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(TICK_S):
            refresh()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _began() -> float:
    return time.monotonic() if _silent_since_s is None else _silent_since_s


class Progress:
    """A progress bar: call it with (done, total), as often as you like, within its context.

    with Progress("converting", "bytes") as progress:
        convert(source, target, progress=progress)

    plain: write lines even on a terminal, as with `--json`
    steady: refresh the elapsed time from a thread. Not for a process that forks: it calls `refresh` instead.
    """

    def __init__(
        self,
        what: str,
        unit: Literal["bytes", "tokens", "requests", "checks", "figures", "graphs", "models", "ms"],
        *,
        plain: bool = False,
        steady: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self._what, self._unit = what, unit
        self._stream = sys.stderr if stream is None else stream
        self._plain = plain or not self._stream.isatty()
        self._began = _began()
        self._line_at = self._began - QUIET_S + SILENT_S  # so that the first line comes after SILENT_S
        self._done, self._total, self._tenths = 0, 0, 0
        self._first: tuple[float, int] | None = None  # time and amount of the first call
        self._has_printed = False
        self._bar: ProgressBar | None = None
        self._drawn_at = self._shown_at = float("-inf")
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True) if steady else None

    def __call__(self, done: int, total: int) -> None:
        with self._lock:
            self._done, self._total = done, total
            if self._first is None or done < self._first[1]:
                self._first = time.monotonic(), done
            self._show()

    def refresh(self) -> None:
        """Refresh the elapsed time, unless the object was not called yet: then this work has not begun."""
        with self._lock:
            if self._first is not None and time.monotonic() - self._shown_at >= REFRESH_S:
                self._show()

    def print(self, line: str) -> None:
        """Print a line to stdout, which may be the same terminal."""
        self._print(line, sys.stdout)

    def note(self, line: str) -> None:
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
        if tenths > self._tenths or now - self._line_at > QUIET_S:
            self._tenths, self._line_at, self._has_printed = tenths, now, True
            share = f"{100 * self._done // self._total} %, " if self._total else ""
            amount = f"{self._amount(now)}, " if self._total else ""
            print(f"neuronpipe: {self._what}: {share}{amount}{now - self._began:.0f} s", file=self._stream, flush=True)

    def _amount(self, now_s: float) -> str:
        """Return the amount done; for bytes, which come evenly, also the speed and the time left."""
        if self._unit != "bytes":
            return f"{self._done:,} of {self._total:,} {self._unit}"
        pace = self._pace(now_s)
        return f"{show_bytes(self._done)} of {show_bytes(self._total)}{pace and f', {pace}'}"

    def _pace(self, now_s: float) -> str:
        """Return the speed since the first call and the time left; empty unless the unit is bytes and some are done."""
        if self._unit != "bytes" or self._first is None or now_s <= self._first[0] or self._done == self._first[1]:
            return ""
        speed = (self._done - self._first[1]) / (now_s - self._first[0])
        left = f", {show_left((self._total - self._done) / speed)}" if self._total else ""
        return f"{show_bytes(speed)}/s{left}"

    @property
    def was_shown(self) -> bool:
        """True if the work took so long that something was shown."""
        return self._bar is not None or self._has_printed

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
        bar.start()  # it was stopped for a line on stdout
        bar.refresh()

    def _first_bar(self) -> ProgressBar:
        """Create the bar. Importing rich can take a second, so the activity is shown as text meanwhile."""
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
            note_output()


def _bar(what: str, unit: str, began: float, stream: TextIO) -> ProgressBar:
    """Return a bar that is drawn on refresh and disappears when it is stopped."""
    from rich import progress  # imported here: only long work on a terminal pays for it
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
    """A wait of unknown length: call `say` a few times a second within its context.

    Without a terminal, or with `plain`, a line is written after SILENT_S, and again each time the wait has doubled.
    """

    def __init__(self, *, plain: bool = False, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._plain = plain or not self._stream.isatty()
        self._began = _began()
        self._due_s = SILENT_S
        self._drawn = self._has_printed = False
        self._over = False

    def say(self, what: str) -> None:
        """Show what the wait is for, and how long it has taken."""
        took_s = time.monotonic() - self._began
        if self._over or took_s < self._due_s:
            return
        if self._plain:
            print(f"neuronpipe: {what}, {took_s:.0f} s", file=self._stream, flush=True)
            self._due_s = 2 * took_s
            self._has_printed = True
        else:
            columns = shutil.get_terminal_size().columns
            self._stream.write(f"{WIPE}{f'{what}, {took_s:.0f} s'[: columns - 1]}")
            self._stream.flush()
            self._drawn = self._has_printed = True

    def end(self) -> None:
        """End the wait: erase the line, and ignore later calls of `say`."""
        self._over = True
        if self._drawn:
            self._stream.write(WIPE)
            self._stream.flush()
            self._drawn = False
        if self._has_printed:
            note_output()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
