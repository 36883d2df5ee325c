"""A snapshot on a terminal: figures, memory, processes, layers, and the last steps as a strip; 60 columns and more."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from neuronpipe.launch.sizes import show_bytes
from neuronpipe.protocol.messages.snapshot import ProcessView, Snapshot
from neuronpipe.services.monitor.groups import GROUPS
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

WIDE_COLUMNS = 100
NAME_COLUMNS = 14
HISTORY = 240
TICKS = " ▁▂▃▄▅▆▇█"
FAINT, STRONG, BAD = "bright_black", "bold", "bold red"
COLOURS = {group.label: group.colour for group in GROUPS} | {
    "waiting for members": "#606060",
    "evicting": "#b8a45c",
    "messages, sampling, text": "#a0a0a0",
}
"""As in pictures, but for a dark ground where those are for a light one."""
LETTERS = {group.letter: group.label for group in GROUPS if group.letter}
REGIONS = {"fixed": "#0072b2", "kv": "#56b4e9", "hot": "#009e73", "cold": "#e69f00"}
STATES = {"ready": "green", "busy": "green", "starting": "yellow", "draining": "yellow"}


@dataclass
class View:
    """One run on the screen. speeds: tokens per second at each of the last snapshots."""

    name: str
    snapshot: Snapshot | None = None
    ended: str | None = None
    speeds: list[float] = field(default_factory=list)

    def show(self, snapshot: Snapshot) -> None:
        """Take a new snapshot."""
        self.snapshot = snapshot
        self.speeds = [*self.speeds[1 - HISTORY :], snapshot.tokens_per_s]


def render(views: Sequence[View], columns: int, *, keys: bool = True) -> RenderableType:
    """All runs, one below the other. keys: say how to leave."""
    parts: list[RenderableType] = []
    for view in views:
        parts += [*_run(view, columns), Text()]
    return Group(*parts, Text("q leaves; the run goes on", FAINT) if keys else Text(end=""))


def _run(view: View, columns: int) -> Iterable[RenderableType]:
    shot = view.snapshot
    if shot is None:
        yield Text.assemble((view.name, STRONG), "  ", view.ended or "waiting for a first snapshot", overflow="fold")
        return
    yield _head(view, shot)
    left, right = _speed(view, shot, columns), _memory(shot, columns)
    if columns >= WIDE_COLUMNS:
        yield _beside(left, right)
        yield Text()
        yield _beside(_processes(shot.processes, columns // 2 - 2), _layers(shot, columns // 2 - 2))
    else:
        yield from (left, right, Text(), _processes(shot.processes, columns), Text(), _layers(shot, columns))
    yield Text()
    yield _strip(shot, columns)


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


def _speed(view: View, shot: Snapshot, columns: int) -> RenderableType:
    wide = columns // 2 - 2 if columns >= WIDE_COLUMNS else columns
    rows = _pairs()
    trend = _spark(view.speeds[-max(8, wide - 40) :])
    rows.add_row("tokens/s", Text.assemble((f"{shot.tokens_per_s:,.1f} ", STRONG), (trend, COLOURS["neurons"])))
    times = "  ".join(f"{name} {value:,.1f}" for name, value in shot.tbt_ms.items())
    rows.add_row("token time", f"{times} ms" if times else "-")
    waiting = f", {shot.sequences_waiting} waiting" if shot.sequences_waiting else ""
    rows.add_row("sequences", f"{shot.sequences_active} of {shot.sequences_most}{waiting}")
    rows.add_row("prompts", f"{shot.prompt_tokens_per_s:,.0f} tokens/s" if shot.prompt_tokens_per_s else "-")
    rows.add_row("so far", f"{shot.tokens:,} tokens in {shot.steps:,} steps")
    waits = (("flash", shot.flash_wait), ("each other", shot.member_wait))
    rows.add_row(
        "workers wait", ", ".join(f"{share:.0%} for {what}" for what, share in waits if share is not None) or "-"
    )
    return rows


def _memory(shot: Snapshot, columns: int) -> RenderableType:
    wide = columns // 2 - 2 if columns >= WIDE_COLUMNS else columns
    rows = _pairs()
    bar = max(10, wide - NAME_COLUMNS - 2)
    limit = max(1, shot.memory_limit_bytes)
    used = [(REGIONS[one.name], one.used_bytes / limit) for one in shot.regions if one.name in REGIONS]
    others = max(0, shot.memory_bytes - sum(one.used_bytes for one in shot.regions)) / limit
    rows.add_row("memory", _bar([*used, ("#a0a0a0", others)], bar))
    rows.add_row(
        "", f"{show_bytes(shot.memory_bytes)} of {show_bytes(limit)}, peak {show_bytes(shot.memory_peak_bytes)}"
    )
    names = [
        part
        for one in shot.regions
        for part in ((f"■ {one.name} ", REGIONS.get(one.name, "")), (f"{show_bytes(one.used_bytes)}  ", FAINT))
    ]
    rows.add_row("", Text.assemble(*names, ("■ processes", "#a0a0a0")))
    hits = "-" if shot.hit_rate is None else f"{shot.hit_rate:.1%} there"
    rows.add_row("cache", f"{hits}, {shot.slots_free:,} of {shot.slots:,} slots free")
    rows.add_row("flash", _traffic(shot.flash_bytes_per_s, shot.flash_bytes_per_token))
    rows.add_row(
        "", f"{shot.flash_reads_per_s:,.0f} reads/s, {shot.flash_in_flight} in flight, {shot.flash_waiting} waiting"
    )
    rows.add_row("memory reads", _traffic(shot.dram_bytes_per_s, shot.dram_bytes_per_token))
    return rows


def _processes(processes: Sequence[ProcessView], columns: int) -> RenderableType:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style=FAINT, show_edge=False)
    table.add_column("process", no_wrap=True, width=NAME_COLUMNS - 1)
    table.add_column("core", justify="right")
    table.add_column("cpu", justify="right", width=4)
    table.add_column("memory", justify="right", width=6)
    table.add_column("state", no_wrap=True)
    bar = max(6, columns - NAME_COLUMNS - 28)
    table.add_column("last second", width=bar)
    for one in processes:
        restarts = f" {one.restarts}x" if one.restarts else ""
        table.add_row(
            f"{one.role}.{one.index}",
            "any" if one.core is None else str(one.core),
            "-" if one.cpu is None else f"{one.cpu:.0%}",
            "-" if one.memory_bytes is None else f"{one.memory_bytes / (1 << 20):,.1f}M",
            Text(one.state + restarts, STATES.get(one.state, BAD)),
            _bar([(COLOURS[label], share) for label, share in one.doing.items() if label in COLOURS], bar),
        )
    return table


def _layers(shot: Snapshot, columns: int) -> RenderableType:
    rows = _pairs()
    room = max(8, columns - NAME_COLUMNS - 18)
    for name, shares, colour in (
        ("fired", shot.fired, COLOURS["neurons"]),
        ("resident", shot.resident, REGIONS["cold"]),
    ):
        if shares:
            # Few neurons fire: the highest layer fills the row, and is named.
            top = max(shares) if name == "fired" else 1.0
            mean = sum(shares) / len(shares)
            said = f" {mean:.0%}, most {top:.0%}" if name == "fired" else f" {mean:.0%}"
            rows.add_row(name, Text.assemble((_spark(_fit(shares, room), top), colour), (said, FAINT)))
    rows.add_row("", Text(f"by layer, 1 to {len(shot.resident)}", FAINT))
    return rows


def _strip(shot: Snapshot, columns: int) -> RenderableType:
    if not shot.strip:
        return Text("no step was computed yet", FAINT)
    steps = shot.strip_steps
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}" if steps else "prompt"
    lines = [Text.assemble((f"{'last steps':<{NAME_COLUMNS}}", FAINT), (f"{which}, {shot.strip_ms:,.1f} ms", FAINT))]
    room = max(10, columns - NAME_COLUMNS)
    seen: set[str] = set()
    for row in shot.strip:
        line = Text(f"{row.name:<{NAME_COLUMNS}}")
        for letter in _resampled(row.cells, room):
            seen.add(letter)
            line.append("█" if letter in LETTERS else "·", COLOURS[LETTERS[letter]] if letter in LETTERS else "#303030")
        lines.append(line)
    legend = Text()
    for letter, label in LETTERS.items():
        if letter in seen:
            legend.append("■ ", COLOURS[label]).append(label.replace(" ", "\u00a0") + "   ", FAINT)
    return Group(*lines, legend)


def _pairs() -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False, show_edge=False)
    table.add_column(style=FAINT, no_wrap=True, width=NAME_COLUMNS - 1)
    table.add_column()
    return table


def _beside(left: RenderableType, right: RenderableType) -> Table:
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row(left, right)
    return table


def _bar(parts: Sequence[tuple[str, float]], columns: int) -> Text:
    """Shares of a whole, side by side; what is left stays empty."""
    text, end = Text(no_wrap=True), 0.0
    for colour, share in parts:
        before, end = round(min(1.0, end) * columns), end + share
        text.append("█" * (round(min(1.0, end) * columns) - before), colour)
    return text.append("·" * (columns - len(text)), "#303030")


def _spark(values: Sequence[float], top: float | None = None) -> str:
    """A line of little columns; the highest value, or `top`, fills one."""
    top = max(values, default=0.0) if top is None else top
    if top <= 0:
        return ""
    return "".join(TICKS[min(8, -int(-8 * value // top))] for value in values)


def _fit(values: Sequence[float], columns: int) -> list[float]:
    """As many values as there are columns at most: means of neighbours."""
    if len(values) <= columns:
        return list(values)
    cuts = [round(n * len(values) / columns) for n in range(columns + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]


def _resampled(cells: str, columns: int) -> str:
    """The most frequent letter of each stretch; something rather than nothing where they are even."""
    cuts = [n * len(cells) // columns for n in range(columns + 1)]
    stretches = [cells[a : max(b, a + 1)] for a, b in itertools.pairwise(cuts)]
    return "".join(max(sorted(set(one), reverse=True), key=one.count) for one in stretches)


def _traffic(bytes_per_s: float, bytes_per_token: float | None) -> str:
    per_token = "" if bytes_per_token is None else f", {show_bytes(bytes_per_token)} per token"
    return f"{show_bytes(bytes_per_s)}/s{per_token}"


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes:.0f} min" if minutes < 120 else f"{hours:.0f} h"
