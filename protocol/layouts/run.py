"""Segments of the run itself: the board, which shows the state of its processes, and the rings of the trace."""

from __future__ import annotations

from typing import Final

from neuronpipe.protocol.memory.layout import LINE_WORDS, Fields, Layout

BOARD_WORDS = ("pid", "incarnation", "restarts", "gone", "signal")
"""Words of a process's line on the board, in order. pid: 0 while there is no process; incarnation: how many
incarnations came before; restarts: how many of them were lost, without those that were replaced; gone: 1 if the process
is not started again and the run goes on without it; signal: number of the signal that ended the last incarnation, 0 if
it exited or was killed for lack of memory."""

LEDGER_ENTRY = ("fingerprint", "place", "weight", "last_death_s")
"""64-bit words of an entry of the ledger, in order. fingerprint: hash of the request, 0 if there is none; place: 0
while the request is being admitted, else 1 + the number of tokens whose keys and values are computed. Only for
suspects, weight: how much the deaths of processes at that place count; last_death_s: time of the last death, by the
monotonic clock."""

SUSPECTS = 64
"""Number of requests that the ledger remembers because they were under way when a process died."""

BOARD_MEMORY = ("current_bytes", "peak_bytes", "limit_bytes")
"""64-bit words of the board's memory line."""

BOARD_FLASH = (
    "reads",
    "bytes",
    "checksum_failures",
    "io_errors",
    "refused",
    "dropped",
    "gap_bytes",
    "waited_for_slot",
    "warm_up_bytes",
    "warm_up_left_bytes",
    "warm_up_ns",
)
"""64-bit words of the board's flash line, in order: figures of the loader since it was started. The last three are
about the warm-up since the last reset: bytes of the clusters that the cache wants, bytes of those not loaded yet, and
its duration; 0 if the loader does not report them."""

BOARD_MISSES = ("steps", "wanted", "missed")
"""64-bit words of the board's misses line, in order: numbers of decode steps since the coordinator was started, and of
the cluster parts that they needed and missed."""

PROFILE_STATES: Final = ("", "waiting", "measuring", "measured", "failed")
"""States of the device profile that a run measures by itself while it is idle. "": it measures none."""
BOARD_TERMS = (
    "tokens",
    "positions",
    "total_ns",
    "compute_ns",
    "barrier_ns",
    "wait_ns",
    "read_bytes",
    "lookups",
    "missed",
    "neurons",
    "fired",
    "active",
)
"""64-bit words of the board's terms lines, in order: sums over the decode steps of one token after the warm-up, as the
fields of `RunTerms` (plans/history/run_terms.py)."""

TRACE_SPANS = 4096
"""Number of spans of a ring, a power of two: enough for a dozen tokens of a 7B model."""


def board(*, processes: int, sequences: int) -> Layout:
    """The state of the run's processes, its memory, and figures of flash, readable without a message. There is one line
    for each process, in the order of the plan. sequences: number of KV slots."""
    entries = sequences + 1 + SUSPECTS
    fields = Fields("board", 6, {"processes": processes, "sequences": sequences, "entries": entries})
    fields.add(
        "processes",
        "u32",
        "processes",
        LINE_WORDS,
        by="supervisor",
        to="coordinator, monitor",
        ordering="incarnation is stored before the fork; both words of a lost process before the epoch is advanced "
        "(release)",
    )
    fields.add(
        "memory",
        "u64",
        LINE_WORDS // 2,
        by="supervisor",
        to="coordinator, monitor",
        ordering="single words, no order among them",
    )
    fields.add(
        "flash",
        "u64",
        LINE_WORDS,
        by="loader",
        to="coordinator, monitor",
        ordering="single words, no order among them",
    )
    fields.add(
        "leaving",
        "u32",
        "processes",
        by="supervisor",
        to="coordinator",
        ordering="1: this process is to end, for a replacement or with the run; single words, no order among them",
    )
    fields.add(
        "ready",
        "u32",
        "processes",
        by="coordinator",
        to="supervisor, monitor",
        ordering="incarnation + 1 of the last process of this line that sent Ready; single words, no order among them",
    )
    fields.add(
        "texts",
        "u32",
        LINE_WORDS,
        by="coordinator",
        to="cache, supervisor",
        ordering="word 0 is how many sequences the last Step had, stored before it is sent; the cache polls it; word 1 "
        "counts the requests of clients, stored before the supervisor is told",
    )
    fields.add(
        "reserved",
        "u64",
        LINE_WORDS // 2,
        by="coordinator",
        to="cache, monitor",
        ordering="word 0 is `reserved_bytes` of the last `Reserve`, stored before it is sent",
    )
    fields.add(
        "withheld",
        "u64",
        LINE_WORDS // 2,
        by="supervisor",
        to="cache, monitor",
        ordering="word 0 is how many bytes of slots are to be returned to the system; the cache polls it",
    )
    fields.add(
        "kv_tokens",
        "u32",
        "sequences",
        by="coordinator",
        to="the next coordinator",
        ordering="tokens of each KV slot that have memory, stored before `Reserve` is sent; single words",
    )
    fields.add(
        "ledger",
        "u64",
        "entries",
        len(LEDGER_ENTRY),
        by="coordinator",
        to="the next coordinator",
        ordering="one entry for the request in each KV slot, one for the request that is being admitted, then the "
        "suspects; stored before the step is sent, the fingerprint last",
    )
    fields.add(
        "quarantined",
        "u64",
        LINE_WORDS // 2,
        by="coordinator",
        to="supervisor",
        ordering="word 0 counts requests that were refused because they ended processes; the supervisor looks when a "
        "process has died",
    )
    fields.add(
        "misses",
        "u64",
        LINE_WORDS // 2,
        by="coordinator",
        to="cache, monitor",
        ordering="single words, no order among them; the cache reads them when the loader reports",
    )
    fields.add(
        "terms",
        "u64",
        LINE_WORDS,
        by="coordinator",
        to="supervisor, monitor, the next coordinator",
        ordering="single words, no order among them",
    )
    fields.add(
        "overdue",
        "u32",
        "processes",
        by="coordinator",
        to="supervisor",
        ordering="incarnation + 1 of the last process of this line that kept the run waiting for too long, stored "
        "after the reason is in the run directory's `overdue`; single words, no order among them",
    )
    fields.add(
        "device_profile",
        "u32",
        LINE_WORDS,
        by="supervisor",
        to="coordinator, monitor",
        ordering="word 0 is the state of the profile that is measured while the run is idle; 2: it is being measured, "
        "and the coordinator reports the next request at once",
    )
    return fields.layout()


def trace(*, rings: int, spans: int = TRACE_SPANS) -> Layout:
    """The recent spans of every process: one ring for each process, in the order of the board's lines. spans: spans of
    a ring, a power of two. A span has 32 bytes in four words; see the fields of a span."""
    fields = Fields("trace", 7, {"rings": rings, "spans": spans})
    fields.add(
        "next",
        "u64",
        "rings",
        LINE_WORDS // 2,
        by="each process its own",
        to="monitor",
        ordering="word 0 counts the spans written so far; stored (release) after the span, before the bytes of the "
        "next one",
    )
    fields.add(
        "spans",
        "u64",
        "rings",
        "spans",
        4,
        by="each process its own",
        to="monitor",
        ordering="span n lies at n modulo spans; a copy is valid if n < next < n + spans after it was read",
    )
    return fields.layout()
