"""Progress of long work, on stderr: live on a terminal, elsewhere a few plain lines; silent at first.

Progress  of work whose amount is known: a bar, or a line per tenth
Elapsed   of a wait for nobody knows how long: seconds
"""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import Any, Literal, Self, TextIO

SILENT_S = 2.0
WIPE = "\r\x1b[K"


class Progress:
    """Call it with (done, total) as often as you like; as a context manager, so that the bar goes when work ends.

    with Progress("converting", "bytes") as progress:
        convert(source, target, progress=progress)

    `plain` asks for lines even on a terminal, as `--json` does.
    """

    def __init__(
        self,
        what: str,
        unit: Literal["bytes", "tokens", "requests", "ms"],
        *,
        plain: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self._what, self._unit = what, unit
        self._stream = sys.stderr if stream is None else stream
        self._plain = plain or not self._stream.isatty()
        self._began = time.monotonic()
        self._tenths = 0
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """So much of so much is done."""
        if self._plain:
            self._line(done, total)
        else:
            self._draw(done, total)

    def _line(self, done: int, total: int) -> None:
        tenths = 10 * done // total if total else 10
        took_s = time.monotonic() - self._began
        if tenths > self._tenths and took_s > SILENT_S:
            self._tenths = tenths
            text = f"{self._what}: {10 * tenths} %, {done:,} of {total:,} {self._unit}, {took_s:.0f} s"
            print(f"neuronpipe: {text}", file=self._stream, flush=True)

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            from tqdm import tqdm  # only long work on a terminal pays for the import

            kind: dict[str, Any] = {"unit": self._unit}
            if self._unit == "bytes":
                kind = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
            self._bar = tqdm(desc=self._what, total=total, delay=SILENT_S, leave=False, file=self._stream, **kind)
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


class Elapsed:
    """Call `say` a few times a second while waiting; as a context manager, so that the line goes when the wait ends.

    Without a terminal, or when `plain` asks for it, a line is written after SILENT_S, and whenever twice as much time
    has passed.
    """

    def __init__(self, *, plain: bool = False, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._plain = plain or not self._stream.isatty()
        self._began = time.monotonic()
        self._due_s = SILENT_S
        self._drawn = False
        self._over = False

    def say(self, what: str) -> None:
        """What is waited for."""
        took_s = time.monotonic() - self._began
        if self._over or took_s < self._due_s:
            return
        if self._plain:
            print(f"neuronpipe: {what}, {took_s:.0f} s", file=self._stream, flush=True)
            self._due_s = 2 * took_s
        else:
            columns = shutil.get_terminal_size().columns
            self._stream.write(f"{WIPE}{f'{what}, {took_s:.0f} s'[: columns - 1]}")
            self._stream.flush()
            self._drawn = True

    def end(self) -> None:
        """The wait is over: nothing is said any more."""
        self._over = True
        if self._drawn:
            self._stream.write(WIPE)
            self._stream.flush()
            self._drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
