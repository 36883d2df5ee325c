"""What the processes of a run do: a table of the last second, and the last steps as a strip."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from neuronpipe.launch.watch.figures import NAME_COLUMNS
from neuronpipe.launch.watch.marks import BAD, COLOURS, FAINT, NOTHING, bar, key, listed
from neuronpipe.protocol.messages.snapshot import ProcessView, Snapshot
from neuronpipe.services.monitor.groups import GROUPS
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

NARROW_COLUMNS = 56  # below, cores and memory make way for what the processes do
LETTERS = {group.letter: group.label for group in GROUPS if group.letter}
STATES = {"ready": "green", "busy": "green", "starting": "yellow", "draining": "yellow"}


def processes(seen: Sequence[ProcessView], columns: int) -> RenderableType:
    """A row for each."""
    narrow = columns < NARROW_COLUMNS
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style=FAINT, show_edge=False)
    table.add_column("process", no_wrap=True, width=NAME_COLUMNS - 1)
    if not narrow:
        table.add_column("core", justify="right")
    table.add_column("cpu", justify="right", width=4)
    if not narrow:
        table.add_column("memory", justify="right", width=6)
    table.add_column("state", no_wrap=True)
    wide = max(11, columns - NAME_COLUMNS - (15 if narrow else 28))
    table.add_column("last second", no_wrap=True, width=wide)
    for one in seen:
        core = "any" if one.core is None else str(one.core)
        own = "-" if one.memory_bytes is None else f"{one.memory_bytes / (1 << 20):,.1f}M"
        restarts = f" {one.restarts}x" if one.restarts else ""
        table.add_row(
            f"{one.role}.{one.index}",
            *([] if narrow else [core]),
            "-" if one.cpu is None else f"{one.cpu:.0%}",
            *([] if narrow else [own]),
            Text(one.state + restarts, STATES.get(one.state, BAD)),
            bar([(COLOURS[label], share) for label, share in one.doing.items() if label in COLOURS], wide),
        )
    return table


def strip(shot: Snapshot, columns: int) -> RenderableType:
    """A row for each process, time to the right, and what the colours mean."""
    if not shot.strip:
        return Text("no step was computed yet", FAINT)
    steps = shot.strip_steps
    which = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else steps[0] if steps else "prompt"
    lines = [Text(f"{'last steps':<{NAME_COLUMNS}}{which}, {shot.strip_ms:,.1f} ms", FAINT)]
    room = max(10, columns - NAME_COLUMNS)
    seen: set[str] = set()
    for row in shot.strip:
        line = Text(f"{row.name:<{NAME_COLUMNS}}")
        for letter in _resampled(row.cells, room):
            seen.add(letter)
            line.append("█" if letter in LETTERS else "·", COLOURS[LETTERS[letter]] if letter in LETTERS else NOTHING)
        lines.append(line)
    meanings = [key(COLOURS[label], label) for letter, label in LETTERS.items() if letter in seen]
    return Group(*lines, listed(meanings, columns, "   "))


def _resampled(cells: str, columns: int) -> str:
    """The most frequent letter of each stretch; something rather than nothing where they are even."""
    cuts = [n * len(cells) // columns for n in range(columns + 1)]
    stretches = [cells[a : max(b, a + 1)] for a, b in itertools.pairwise(cuts)]
    return "".join(max(sorted(set(one), reverse=True), key=one.count) for one in stretches)
