"""The display of a snapshot in a terminal: figures, memory, processes, layers and the last steps; from 40 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from neuronpipe.launch.watch.charts import BAD, FAINT, STRONG
from neuronpipe.launch.watch.sections import layers, memory, processes, speed, strip
from neuronpipe.protocol.messages.snapshot import Snapshot
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

WIDE_COLUMNS = 100  # the narrowest terminal with two columns of sections
HISTORY = 240


@dataclass
class View:
    """One run on the screen.

    awaits: what the screen waits for before the first snapshot
    speeds: tokens per second at each of the last snapshots
    """

    name: str
    snapshot: Snapshot | None = None
    ended: str | None = None
    awaits: str = ""
    speeds: list[float] = field(default_factory=list)

    def show(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.speeds = [*self.speeds[1 - HISTORY :], snapshot.tokens_per_s]


def render(views: Sequence[View], columns: int) -> RenderableType:
    parts: list[RenderableType] = []
    for view in views:
        parts += [*_run(view, columns), Text()]
    return Group(*parts[:-1])


def _run(view: View, columns: int) -> Iterable[RenderableType]:
    shot = view.snapshot
    if shot is None:
        reason = view.ended or view.awaits or "waiting for a first snapshot"
        yield Text.assemble((view.name, STRONG), "  ", reason, overflow="fold")
        return
    yield _head(view, shot)
    if columns >= WIDE_COLUMNS:
        half = columns // 2 - 2
        yield _beside(speed(view.speeds, shot, half), memory(shot, half))
        yield Text()
        yield _beside(processes(shot.processes, half), layers(shot, half))
    else:
        yield from (speed(view.speeds, shot, columns), memory(shot, columns), Text())
        yield from (processes(shot.processes, columns), Text(), layers(shot, columns))
    yield Text()
    yield strip(shot, columns)


def _head(view: View, shot: Snapshot) -> Text:
    if view.ended:
        state, style = view.ended, BAD
    elif shot.silent_s:
        state, style = f"coordinator silent for {shot.silent_s:.0f} s", BAD
    else:
        state, style = ("ready", "green") if shot.ready else ("starting", "yellow")
    return Text.assemble(
        (shot.model, STRONG),
        (f" {shot.quantization} {shot.mode}  ", ""),
        (state, style),
        (f"  up {_duration(shot.uptime_s)}  {view.name}", FAINT),
        overflow="ellipsis",
        no_wrap=True,
    )


def _beside(left: RenderableType, right: RenderableType) -> Table:
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row(left, right)
    return table


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes:.0f} min" if minutes < 120 else f"{hours:.0f} h"
