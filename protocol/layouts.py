"""Where everything lies in the shared segments: pure calculation, no memory is touched.

A layout is a list of fields, each an array that starts at a multiple of 64 bytes, after the header page. Each field
says who writes it, who reads it, and what orders the write before the read; SPEC.md prints this table.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from neuronpipe.protocol.spans import SPAN_BYTES

PAGE_BYTES = 4096
LINE_BYTES = 64
LINE_WORDS = LINE_BYTES // 4
TYPE_BYTES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "f32": 4}

BOARD_WORDS = ("pid", "incarnation")
"""The words of a process's line on the board, in this order; pid is 0 while there is no such process."""

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
)
"""The 64-bit words of the board's flash line, in this order: what the loader did since it was started."""

REQUEST_ENTRIES = 16384
"""Entries of a member's ring of requests: what a whole layer of a 7B model misses. A power of two."""


TRACE_SPANS = 4096
"""Spans of a ring: a dozen tokens of a 7B model. A power of two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One array. `dimensions` names the lengths in `shape`; the last one is contiguous. Little-endian."""

    name: str
    type: str
    dimensions: tuple[str, ...]
    shape: tuple[int, ...]
    offset_bytes: int
    total_bytes: int
    written_by: str
    read_by: str
    ordering: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All fields of one segment. `kind` tells segments apart in their headers."""

    name: str
    kind: int
    fields: tuple[Field, ...]
    total_bytes: int

    def __getitem__(self, name: str) -> Field:
        """The field of that name. Raises KeyError."""
        for candidate in self.fields:
            if candidate.name == name:
                return candidate
        raise KeyError(f"{self.name}: no field {name}")

    @property
    def fingerprint(self) -> int:
        """CRC-32 of `text`: two processes that computed the same layout agree on it."""
        return zlib.crc32(self.text.encode())

    @property
    def text(self) -> str:
        """One line for each field: name, type, shape, offset; in the order of the fields."""
        return "".join(
            f"{one.name} {one.type} {'x'.join(str(length) for length in one.shape)} {one.offset_bytes}\n"
            for one in self.fields
        )


@dataclass(slots=True)
class Fields:
    """Lays out fields one after the other. `lengths` gives the dimensions that are known by name."""

    name: str
    kind: int
    lengths: dict[str, int]
    _fields: list[Field] = field(default_factory=list)
    _end_bytes: int = PAGE_BYTES

    def add(self, name: str, type: str, *dimensions: str | int, by: str, to: str, ordering: str) -> None:
        """Put the next field on the next line."""
        shape = tuple(length if isinstance(length, int) else self.lengths[length] for length in dimensions)
        if min(shape) < 0:
            raise ValueError(f"{self.name}.{name}: shape {shape} is negative")
        if any(other.name == name for other in self._fields):
            raise ValueError(f"{self.name}.{name}: laid out twice")
        offset_bytes = -(-self._end_bytes // LINE_BYTES) * LINE_BYTES
        total_bytes = TYPE_BYTES[type]
        for length in shape:
            total_bytes *= length
        self._fields.append(
            Field(
                name=name,
                type=type,
                dimensions=tuple(str(dimension) for dimension in dimensions),
                shape=shape,
                offset_bytes=offset_bytes,
                total_bytes=total_bytes,
                written_by=by,
                read_by=to,
                ordering=ordering,
            )
        )
        self._end_bytes = offset_bytes + total_bytes

    def layout(self) -> Layout:
        """The finished layout, a whole number of pages long."""
        total_bytes = -(-self._end_bytes // PAGE_BYTES) * PAGE_BYTES
        return Layout(name=self.name, kind=self.kind, fields=tuple(self._fields), total_bytes=total_bytes)


def fixed(*, file_bytes: int, predictor_bytes: int) -> Layout:
    """The fixed tensors: the package's fixed.safetensors, byte for byte, and its predictor.safetensors in predicted
    mode (else of no bytes); sealed once they are loaded."""
    fields = Fields("fixed", 1, {"file_bytes": file_bytes, "predictor_bytes": predictor_bytes})
    ordering = "written and sealed before `loaded` is set"
    fields.add("file", "u8", "file_bytes", by="loader", to="all", ordering=ordering)
    fields.add("predictor", "u8", "predictor_bytes", by="loader", to="decode, prefill", ordering=ordering)
    return fields.layout()


def slots(*, gate_slots: int, gate_slot_bytes: int, rest_slots: int, rest_slot_bytes: int) -> Layout:
    """Neuron slots: what is resident of bundles.bin, of each part the bytes that are used, in whole cache lines."""
    fields = Fields(
        "slots",
        2,
        {
            "gate_slots": gate_slots,
            "gate_slot_bytes": gate_slot_bytes,
            "rest_slots": rest_slots,
            "rest_slot_bytes": rest_slot_bytes,
        },
    )
    for part in ("gate", "rest"):
        fields.add(
            f"{part}_slots",
            "u8",
            f"{part}_slots",
            f"{part}_slot_bytes",
            by="loader",
            to="decode, prefill",
            ordering="the residency word becomes present (release) after the bytes are there",
        )
    return fields.layout()


def residency(*, words: int, members: int, entries: int = REQUEST_ENTRIES) -> Layout:
    """Which cluster is where, and which are wanted. words: layers * experts * clusters, for each part; members: workers
    with a window and a ring of requests, decode workers first, then prefill workers; entries: of a ring, a power of
    two."""
    fields = Fields("residency", 3, {"words": words, "members": members, "entries": entries})
    fields.add(
        "arrivals",
        "u32",
        LINE_WORDS,
        by="loader",
        to="decode, prefill",
        ordering="word 0 grows after words became present or failed (acquire-release), then its sleepers are woken",
    )
    fields.add(
        "loaded",
        "u32",
        LINE_WORDS,
        by="loader",
        to="decode, prefill",
        ordering="word 0 becomes 1 (release) once the fixed tensors are sealed, then its sleepers are woken",
    )
    fields.add(
        "generation",
        "u32",
        LINE_WORDS,
        by="cache",
        to="loader, monitor",
        ordering="word 0 is the generation of the last Reset, stored (release) before it is sent",
    )
    for part in ("gate", "rest"):
        fields.add(
            f"{part}_words",
            "u32",
            "words",
            by="loader, cache; decode and prefill the reference bit",
            to="decode, prefill, loader, cache",
            ordering="atomic; the table of states says who may change what",
        )
    fields.add(
        "windows",
        "u64",
        2,
        "members",
        by="each member its own, of either part",
        to="cache",
        ordering="sequentially consistent, with a full fence after the store, before the words are looked up",
    )
    fields.add(
        "request_tails",
        "u32",
        "members",
        LINE_WORDS,
        by="each member its own",
        to="loader",
        ordering="word 0 counts entries ever put; sequentially consistent, between the entries and a look at `asleep`",
    )
    fields.add(
        "request_heads",
        "u32",
        "members",
        LINE_WORDS,
        by="loader",
        to="each member its own",
        ordering="word 0 counts entries ever taken; release, after they were read",
    )
    fields.add(
        "requests",
        "u32",
        "members",
        "entries",
        by="each member its own, from its tail on",
        to="loader",
        ordering="the tail is advanced after the entries are there, the head after they were read",
    )
    fields.add(
        "asleep",
        "u32",
        LINE_WORDS,
        by="loader 1 before it sleeps, 0 after; a member 0 when it rings",
        to="decode, prefill",
        ordering="word 0, sequentially consistent; the loader looks at every tail between setting it and sleeping",
    )
    return fields.layout()


def kv(*, layers: int, sequences: int, key_heads: int, context_tokens: int, head_width: int) -> Layout:
    """Keys and values, as fp16: of each layer, sequence and key head first all keys, then all values."""
    fields = Fields(
        "kv",
        4,
        {
            "layers": layers,
            "sequences": sequences,
            "key_heads": key_heads,
            "context_tokens": context_tokens,
            "head_width": head_width,
        },
    )
    fields.add(
        "kv",
        "u16",
        "layers",
        "sequences",
        "key_heads",
        2,
        "context_tokens",
        "head_width",
        by="decode and prefill: the positions of the step they compute; prefill: those before, for a copy_from",
        to="decode, prefill",
        ordering="within a step the barrier, between steps StepDone and Prefilled",
    )
    return fields.layout()


def exchange(
    *,
    tokens: int,
    width: int,
    query_width: int,
    neurons: int,
    blocks: int,
    rank: int,
    claims: int,
    logit_rows: int,
    vocabulary: int,
) -> Layout:
    """What the decode workers compute together. tokens: most in one decode step; query_width: query_heads *
    head_width; neurons: of a layer's blocks, padding included; rank: of the predictor, 0 in exact mode; claims:
    counters of the work that members take piece by piece; logit_rows: most tokens of one step, of either kind, whose
    logits are wanted."""
    fields = Fields(
        "exchange",
        5,
        {
            "tokens": tokens,
            "width": width,
            "query_width": query_width,
            "neurons": neurons,
            "blocks": blocks,
            "rank": rank,
            "claims": claims,
            "mask_bytes": -(-tokens // 8) if rank else 0,
            "logit_rows": logit_rows,
            "vocabulary": vocabulary,
        },
    )
    fields.add(
        "epoch",
        "u32",
        LINE_WORDS,
        by="supervisor, coordinator",
        to="decode, prefill",
        ordering="word 0, acquire-release; after it changed, the sleepers on barriers and arrivals are woken",
    )
    fields.add(
        "barriers",
        "u32",
        1,
        LINE_WORDS,
        by="decode",
        to="decode",
        ordering="words 0 arrived, 1 phase, 2 waiters; acquire-release; reset by the coordinator before an attempt",
    )
    for name, dimensions in (
        ("residual", ("tokens", "width")),
        ("queries", ("tokens", "query_width")),
        ("attention", ("tokens", "query_width")),
        ("hidden", ("tokens", "neurons")),
        ("partials", ("tokens", "blocks", "width")),
        ("ranks", ("tokens", "rank")),
    ):
        fields.add(
            name,
            "f32",
            *dimensions,
            by="decode: own ranges",
            to="decode",
            ordering="the barrier between the stages of a layer",
        )
    fields.add(
        "predicted",
        "u8",
        "neurons",
        "mask_bytes",
        by="decode: the blocks that each took",
        to="decode",
        ordering="the barrier between the stages of a layer; bit t%8 of byte t/8 is token t",
    )
    fields.add(
        "claims",
        "u32",
        "claims",
        by="coordinator zeroes them before a step; decode",
        to="decode",
        ordering="relaxed fetch-and-add: barriers lie between a piece of work, what it reads and who reads it",
    )
    fields.add(
        "logits",
        "f32",
        "logit_rows",
        "vocabulary",
        by="decode: own columns; prefill: all",
        to="coordinator; the client of a Score",
        ordering="StepDone, Prefilled and Scored come after the rows are written; a client gives them back by Next",
    )
    return fields.layout()


def board(*, processes: int) -> Layout:
    """Who lives, what the run takes and what flash gave, to be read without asking anybody. One line for each process,
    in the order of the plan's seats."""
    fields = Fields("board", 6, {"processes": processes})
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
        LINE_WORDS // 2,
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
        ordering="1: a successor of this process waits for its seat; single words, no order among them",
    )
    fields.add(
        "seated",
        "u32",
        "processes",
        by="coordinator",
        to="supervisor, monitor",
        ordering="incarnation + 1 of the last process here that said Ready; single words, no order among them",
    )
    return fields.layout()


def trace(*, rings: int, spans: int = TRACE_SPANS) -> Layout:
    """What every process did of late: one ring for each process, in the order of the board's lines. spans: of a ring, a
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


def trace_rings(total_bytes: int, spans: int = TRACE_SPANS) -> int:
    """How many rings a trace segment of this size has, its spans being as many as usual."""
    return (total_bytes - PAGE_BYTES) // (LINE_BYTES + SPAN_BYTES * spans)


def examples() -> tuple[Layout, ...]:
    """Every layout with small lengths, for the specification and for tests."""
    return (
        fixed(file_bytes=100, predictor_bytes=50),
        slots(gate_slots=3, gate_slot_bytes=2816, rest_slots=2, rest_slot_bytes=8192),
        residency(words=10, members=3),
        kv(layers=2, sequences=2, key_heads=1, context_tokens=8, head_width=4),
        exchange(
            tokens=2,
            width=32,
            query_width=32,
            neurons=64,
            blocks=2,
            rank=32,
            claims=17,
            logit_rows=3,
            vocabulary=50,
        ),
        board(processes=6),
        trace(rings=6, spans=8),
    )
