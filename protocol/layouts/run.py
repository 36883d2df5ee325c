"""Segments of the run itself: the board, which says who lives, and the rings of the trace."""

from __future__ import annotations

from neuronpipe.protocol.layout import LINE_WORDS, Fields, Layout

BOARD_WORDS = ("pid", "incarnation", "restarts", "gone", "signal")
"""The words of a process's line on the board, in this order; pid is 0 while there is no such process. incarnation: how
many incarnations came before; restarts: how many of them were lost, and did not make way for another; gone: 1 when it
is not started again, and the run goes on without it; signal: the number of the signal that ended the incarnation
before, 0 where that exited, or was killed because memory ended."""

LEDGER_ENTRY = ("fingerprint", "place", "weight", "last_death_s")
"""The 64-bit words of an entry of the ledger, in this order. fingerprint: of the request, 0 where there is none; place:
0 while it is admitted, else 1 + the tokens whose keys and values are there. The other two are of suspects: how much
the deaths at that place count, and the second of the monotonic clock at which the last one was noticed."""

SUSPECTS = 64
"""Requests that the ledger remembers for having been under way when a process died."""

BOARD_MEMORY = ("current_bytes", "peak_bytes", "limit_bytes")
"""The 64-bit words of the board's memory line, in this order."""

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
"""The 64-bit words of the board's flash lines, in this order: what the loader did since it was started; what the cache
has asked it to warm up since the last reset, what of that has not arrived, and for how long something had not; 0 where
the loader does not tell."""

BOARD_MISSES = ("steps", "wanted", "missed")
"""The 64-bit words of the board's misses line, in this order: sums over the decode steps since the coordinator was
started, of cluster parts as plans count them."""

TRACE_SPANS = 4096
"""Spans of a ring: a dozen tokens of a 7B model. A power of two."""


def board(*, processes: int, sequences: int) -> Layout:
    """Which processes live, the run's memory, and figures of flash, to be read without a message. One line for each
    process, in the order of the plan. sequences: KV slots."""
    entries = sequences + 1 + SUSPECTS
    fields = Fields("board", 6, {"processes": processes, "sequences": sequences, "entries": entries})
    fields.add(
        "processes",
        "u32",
        "processes",
        LINE_WORDS,
        by="supervisor",
        to="coordinator, monitor",
        ordering="incarnation before the fork; both, of a lost process, before the epoch is advanced (release)",
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
        ordering="1: this process is to end, for a successor or with the run; single words, no order among them",
    )
    fields.add(
        "ready",
        "u32",
        "processes",
        by="coordinator",
        to="supervisor, monitor",
        ordering="incarnation + 1 of the last process here that sent Ready; single words, no order among them",
    )
    fields.add(
        "texts",
        "u32",
        LINE_WORDS,
        by="coordinator",
        to="cache",
        ordering="word 0 is how many texts the last Step had, stored before it is sent; the cache looks now and then",
    )
    fields.add(
        "reserved",
        "u64",
        LINE_WORDS // 2,
        by="coordinator",
        to="cache, monitor",
        ordering="word 0 is what the last `Reserve` said, stored before it is sent",
    )
    fields.add(
        "withheld",
        "u64",
        LINE_WORDS // 2,
        by="supervisor",
        to="cache, monitor",
        ordering="word 0 is how many bytes slots are to give back to the system; the cache looks now and then",
    )
    fields.add(
        "kv_tokens",
        "u32",
        "sequences",
        by="coordinator",
        to="the coordinator after it",
        ordering="tokens of each KV slot that have memory, stored before `Reserve` is sent; single words",
    )
    fields.add(
        "ledger",
        "u64",
        "entries",
        len(LEDGER_ENTRY),
        by="coordinator",
        to="the coordinator after it",
        ordering="an entry for the request in each KV slot, one for the request that is being admitted, then suspects; "
        "stored before the step is sent, the fingerprint last",
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
        ordering="single words, no order among them; the cache looks when the loader reports",
    )
    fields.add(
        "overdue",
        "u32",
        "processes",
        by="coordinator",
        to="supervisor",
        ordering="incarnation + 1 of the last process here that kept the run waiting for too long, stored after the "
        "reason is in the run directory's `overdue`; single words, no order among them",
    )
    return fields.layout()


def trace(*, rings: int, spans: int = TRACE_SPANS) -> Layout:
    """What every process did lately: one ring for each process, in the order of the board's lines. spans: of a ring, a
    power of two; of 32 bytes each, in four words: see the fields of a span."""
    fields = Fields("trace", 7, {"rings": rings, "spans": spans})
    fields.add(
        "next",
        "u64",
        "rings",
        LINE_WORDS // 2,
        by="each process its own",
        to="monitor",
        ordering="word 0 counts spans ever put; stored (release) after the span, before the bytes of the next one",
    )
    fields.add(
        "spans",
        "u64",
        "rings",
        "spans",
        4,
        by="each process its own",
        to="monitor",
        ordering="span n lies at n modulo spans; whole when, after it was read, n < next < n + spans",
    )
    return fields.layout()
