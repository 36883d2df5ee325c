"""The sections of the screen: speed, memory, layers, processes, and the last steps as a strip."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from neuronpipe.launch.client import show_warm_up
from neuronpipe.launch.formats import show_bytes
from neuronpipe.launch.watch.charts import (
    BAD,
    COLOURS,
    FAINT,
    NOTHING,
    REGIONS,
    STRONG,
    bar,
    fitted,
    key,
    listed,
    spark,
)
from neuronpipe.plans.number_format import show_number
from neuronpipe.plans.plan.document import BACKEND_ROLES
from neuronpipe.protocol.messages.snapshot import ProcessView, Region, Snapshot
from neuronpipe.services.monitor.span_groups import GROUPS
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

NAME_COLUMNS = 14
PROCESSES_COLOUR = "#a0a0a0"
NARROW_COLUMNS = 56  # below, cores and memory are left out, for the activities of processes
LETTERS = {group.letter: group.label for group in GROUPS if group.letter}
STATES = {"ready": "green", "busy": "green", "starting": "yellow", "draining": "yellow"}


def speed(speeds: Sequence[float], shot: Snapshot, columns: int) -> RenderableType:
    """Return the section on tokens and waiting.

    speeds: tokens per second at each of the last snapshots
    """
    room = columns - NAME_COLUMNS
    rows = _pairs()
    trend = spark(speeds[-max(8, room - 26) :])
    rows.add_row("tokens/s", Text.assemble((f"{show_number(shot.tokens_per_s)} ", STRONG), (trend, COLOURS["neurons"])))
    times = [f"{name} {value:,.1f}" for name, value in shot.tbt_ms.items()]
    rows.add_row("token time", listed([*times[:-1], f"{times[-1]} ms"] if times else ["-"], room))
    waiting = f", {shot.sequences_waiting} waiting" if shot.sequences_waiting else ""
    rows.add_row("sequences", f"{shot.sequences_active} of {shot.max_sequences}{waiting}")
    rows.add_row("prompts", f"{show_number(shot.prompt_tokens_per_s, 0)} tokens/s" if shot.prompt_tokens_per_s else "-")
    rows.add_row("so far", listed([f"{shot.tokens:,} tokens", f"in {shot.steps:,} steps"], room, " "))
    waits = (("flash", shot.flash_wait), ("each other", shot.participant_wait))
    shares = [f"{share:.0%} for {what}" for what, share in waits if share is not None]
    rows.add_row("workers wait", listed(shares or ["-"], room, ", "))
    if shot.deviations:
        rows.add_row("off the plan", Text(shot.deviations, BAD))
    return rows


def memory(shot: Snapshot, columns: int) -> RenderableType:
    room = columns - NAME_COLUMNS
    rows = _pairs()
    limit = max(1, shot.memory_limit_bytes)
    used = [(REGIONS[region.name], region.used_bytes / limit) for region in shot.regions if region.name in REGIONS]
    others_bytes = max(0, shot.memory_bytes - sum(region.used_bytes for region in shot.regions))
    rows.add_row("memory", bar([*used, (PROCESSES_COLOUR, others_bytes / limit)], max(10, room - 2)))
    total = f"{show_bytes(shot.memory_bytes)} of {show_bytes(limit)}"
    rows.add_row("", listed([total, f"peak {show_bytes(shot.memory_peak_bytes)}"], room, ", "))
    regions = [key(REGIONS.get(region.name, ""), region.name, _used(region)) for region in shot.regions]
    rows.add_row("", listed([*regions, key(PROCESSES_COLOUR, "processes", show_bytes(others_bytes))], room))
    hits = "-" if shot.hit_rate is None else f"{shot.hit_rate:.1%} hits"
    rows.add_row("cache", listed([hits, f"{shot.slots_free:,} of {shot.slots:,} slots free"], room, ", "))
    if shot.withheld_bytes:
        rows.add_row("", Text(f"memory is short: {show_bytes(shot.withheld_bytes)} given back", BAD))
    if shot.warm_up is not None and not shot.warm_up.done:
        share = shot.warm_up.loaded_bytes / max(1, shot.warm_up.total_bytes)
        rows.add_row("warm-up", bar([(COLOURS["reading flash"], share)], max(10, room - 2)))
        rows.add_row("", listed(show_warm_up(shot.warm_up).split(", "), room, ", "))
    rows.add_row("flash", _traffic(shot.flash_bytes_per_s, shot.flash_bytes_per_token, room))
    reads = f"{shot.flash_reads_per_s:,.0f} reads/s"
    queue = (f"{shot.flash_in_flight} in flight", f"{shot.flash_waiting} waiting")
    rows.add_row("", listed([reads, *queue], room, ", "))
    rows.add_row("memory reads", _traffic(shot.dram_bytes_per_s, shot.dram_bytes_per_token, room))
    return rows


def _used(region: Region) -> str:
    """Return the resident size of a region, and its reserved size if that is larger."""
    used = show_bytes(region.used_bytes)
    return used if region.used_bytes == region.total_bytes else f"{used} of {show_bytes(region.total_bytes)}"


def layers(shot: Snapshot, columns: int) -> RenderableType:
    """Return the section on layers: the share of neurons that fires, and the resident share."""
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
            figures = f" {mean:.0%}, most {top:.0%}" if name == "fired" else f" {mean:.0%}"
            rows.add_row(name, Text.assemble((spark(fitted(shares, room), top), colour), (figures, FAINT)))
    rows.add_row("", Text(f"by layer, 1 to {len(shot.resident)}", FAINT))
    return rows


def _pairs() -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False, show_edge=False)
    table.add_column(style=FAINT, no_wrap=True, width=NAME_COLUMNS - 1)
    table.add_column()
    return table


def _traffic(bytes_per_s: float, bytes_per_token: float | None, columns: int) -> Text:
    per_token = [] if bytes_per_token is None else [f"{show_bytes(bytes_per_token)} per token"]
    return listed([f"{show_bytes(bytes_per_s)}/s", *per_token], columns, ", ")


def processes(views: Sequence[ProcessView], columns: int) -> RenderableType:
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
    for process in views:
        core = "any" if process.core is None else str(process.core)
        size = "-" if process.memory_bytes is None else f"{process.memory_bytes / (1 << 20):,.1f}M"
        restarts = f" {process.restarts}x" if process.restarts else ""
        table.add_row(
            f"{process.role}.{process.index}",
            *([] if narrow else [core]),
            "-" if process.cpu is None else f"{process.cpu:.0%}",
            *([] if narrow else [size]),
            Text(process.state + restarts, STATES.get(process.state, BAD)),
            bar([(COLOURS[label], share) for label, share in process.doing.items() if label in COLOURS], wide),
        )
    work = [Text(f"{process.role}.{process.index}: {process.work}", FAINT) for process in views if process.work]
    roles_by_numerics: dict[str, dict[str, None]] = {}
    for process in views:
        if process.numerics and process.role in BACKEND_ROLES:
            numerics = f"{process.numerics}{process.backend and f' ({process.backend})'}"
            roles_by_numerics.setdefault(numerics, {})[process.role] = None
    lines = [f"{', '.join(roles)} {numerics}" for numerics, roles in roles_by_numerics.items()]
    return Group(table, *work, *([Text(f"numerics: {'; '.join(lines)}", FAINT)] if lines else []))


def strip(shot: Snapshot, columns: int) -> RenderableType:
    """Return the time line of the last steps: a row for each process, and the legend of colours."""
    if not shot.strip:
        return Text("no step was computed yet", FAINT)
    steps = shot.strip_steps
    which = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else steps[0] if steps else "prompt"
    lines = [Text(f"{'last steps':<{NAME_COLUMNS}}{which}, {shot.strip_ms:,.1f} ms", FAINT)]
    room = max(10, columns - NAME_COLUMNS)
    drawn_letters: set[str] = set()
    for row in shot.strip:
        line = Text(f"{row.name:<{NAME_COLUMNS}}")
        for letter in _resampled(row.cells, room):
            drawn_letters.add(letter)
            line.append("█" if letter in LETTERS else "·", COLOURS[LETTERS[letter]] if letter in LETTERS else NOTHING)
        lines.append(line)
    meanings = [key(COLOURS[label], label) for letter, label in LETTERS.items() if letter in drawn_letters]
    return Group(*lines, listed(meanings, columns, "   "))


def _resampled(cells: str, columns: int) -> str:
    """Return the most frequent letter of each interval; on a tie a letter is preferred to a dot."""
    cuts = [n * len(cells) // columns for n in range(columns + 1)]
    stretches = [cells[a : max(b, a + 1)] for a, b in itertools.pairwise(cuts)]
    return "".join(max(sorted(set(stretch), reverse=True), key=stretch.count) for stretch in stretches)
