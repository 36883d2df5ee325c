"""Figures of a run as rows of a name and what is said: speed, memory, layers."""

from __future__ import annotations

from collections.abc import Sequence

from neuronpipe.launch.sizes import show_bytes
from neuronpipe.launch.warm_up import show_warm_up
from neuronpipe.launch.watch.marks import COLOURS, FAINT, REGIONS, STRONG, bar, fitted, key, listed, spark
from neuronpipe.plans.figures import show_number
from neuronpipe.protocol.messages.snapshot import Snapshot
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

NAME_COLUMNS = 14
OTHERS = "#a0a0a0"


def speed(speeds: Sequence[float], shot: Snapshot, columns: int) -> RenderableType:
    """Tokens, and what they wait for. speeds: tokens per second at each of the last snapshots."""
    room = columns - NAME_COLUMNS
    rows = _pairs()
    trend = spark(speeds[-max(8, room - 26) :])
    rows.add_row("tokens/s", Text.assemble((f"{show_number(shot.tokens_per_s)} ", STRONG), (trend, COLOURS["neurons"])))
    times = [f"{name} {value:,.1f}" for name, value in shot.tbt_ms.items()]
    rows.add_row("token time", listed([*times[:-1], f"{times[-1]} ms"] if times else ["-"], room))
    waiting = f", {shot.sequences_waiting} waiting" if shot.sequences_waiting else ""
    rows.add_row("sequences", f"{shot.sequences_active} of {shot.sequences_most}{waiting}")
    rows.add_row("prompts", f"{show_number(shot.prompt_tokens_per_s, 0)} tokens/s" if shot.prompt_tokens_per_s else "-")
    rows.add_row("so far", listed([f"{shot.tokens:,} tokens", f"in {shot.steps:,} steps"], room, " "))
    waits = (("flash", shot.flash_wait), ("each other", shot.participant_wait))
    shares = [f"{share:.0%} for {what}" for what, share in waits if share is not None]
    rows.add_row("workers wait", listed(shares or ["-"], room, ", "))
    return rows


def memory(shot: Snapshot, columns: int) -> RenderableType:
    """What is in memory, and what comes from flash."""
    room = columns - NAME_COLUMNS
    rows = _pairs()
    limit = max(1, shot.memory_limit_bytes)
    used = [(REGIONS[one.name], one.used_bytes / limit) for one in shot.regions if one.name in REGIONS]
    others = max(0, shot.memory_bytes - sum(one.used_bytes for one in shot.regions)) / limit
    rows.add_row("memory", bar([*used, (OTHERS, others)], max(10, room - 2)))
    total = f"{show_bytes(shot.memory_bytes)} of {show_bytes(limit)}"
    rows.add_row("", listed([total, f"peak {show_bytes(shot.memory_peak_bytes)}"], room, ", "))
    regions = [key(REGIONS.get(one.name, ""), one.name, show_bytes(one.used_bytes)) for one in shot.regions]
    rows.add_row("", listed([*regions, key(OTHERS, "processes")], room))
    hits = "-" if shot.hit_rate is None else f"{shot.hit_rate:.1%} there"
    rows.add_row("cache", listed([hits, f"{shot.slots_free:,} of {shot.slots:,} slots free"], room, ", "))
    if shot.warm_up is not None and not shot.warm_up.done:
        rows.add_row("warm-up", Text(show_warm_up(shot.warm_up), COLOURS["flash"]))
    rows.add_row("flash", _traffic(shot.flash_bytes_per_s, shot.flash_bytes_per_token, room))
    reads = f"{shot.flash_reads_per_s:,.0f} reads/s"
    queue = (f"{shot.flash_in_flight} in flight", f"{shot.flash_waiting} waiting")
    rows.add_row("", listed([reads, *queue], room, ", "))
    rows.add_row("memory reads", _traffic(shot.dram_bytes_per_s, shot.dram_bytes_per_token, room))
    return rows


def layers(shot: Snapshot, columns: int) -> RenderableType:
    """Of each layer, which share of its neurons fires, and how much of it is in memory."""
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
            rows.add_row(name, Text.assemble((spark(fitted(shares, room), top), colour), (said, FAINT)))
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
