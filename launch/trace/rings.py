"""Reading the rings of a live run from outside: as any monitor may, through a read-only descriptor."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

from neuronpipe.native import ffi, lib
from neuronpipe.protocol import layouts
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.client import Status
from neuronpipe.protocol.run_directory import RunFile
from neuronpipe.protocol.segments import Mapping, Segment


class Span(NamedTuple):
    """One span of a process, by the names of the specification. Times in ns of the monotonic clock."""

    start_ns: int
    end_ns: int
    kind: int
    layer: int
    value: int
    step: int


@dataclass(frozen=True)
class Row:
    """One process and its spans, in the order in which they ended. lost: spans that were overwritten unseen."""

    role: str
    index: int
    pid: int
    spans: list[Span]
    lost: int

    @property
    def name(self) -> str:
        """As processes are called everywhere: `decode.0`."""
        return f"{self.role}.{self.index}"


class RunTrace:
    """The trace segment of a run. `take` gives what was put since it was asked last; at first, all that is there."""

    def __init__(self, segment: Segment, status: Status) -> None:
        self._mapping: Mapping = segment.map()
        self._processes = status.processes
        field = segment.layout["spans"]
        rings, self._capacity, _ = field.shape
        if len(status.processes) != rings:
            raise UserError(f"the run has {len(status.processes)} processes and {rings} rings; is it of this version?")
        counters = ffi.from_buffer("uint64_t[]", self._mapping.view("next"))
        spans = ffi.from_buffer("np_span[]", self._mapping.view("spans"))
        stride = layouts.LINE_BYTES // 8
        self._rings: list[Any] = [
            ffi.new(
                "np_trace *",
                {"next": counters + n * stride, "spans": spans + n * self._capacity, "capacity": self._capacity},
            )
            for n in range(rings)
        ]
        self._buffers = [counters, spans]
        self._from = [0] * rings
        self._begun = False
        self._out = ffi.new("np_span[]", self._capacity)

    @classmethod
    def open(cls, run_file: RunFile, status: Status) -> RunTrace:
        """The trace of the run that this file names. Raises UserError when the run is of another version, or gone."""
        handle = run_file.segments.get("trace")
        if handle is None:
            raise UserError("this run keeps no trace; is it of this version?")
        layout = layouts.trace(rings=layouts.trace_rings(handle.total_bytes))
        with Segment.open(layout, run_file.supervisor_pid, handle.fd) as segment:
            return cls(segment, status)

    def take(self) -> list[Row]:
        """A row for each process."""
        rows = []
        for n, (ring, process) in enumerate(zip(self._rings, self._processes, strict=True)):
            asked = ffi.new("uint64_t *", self._from[n])
            count = lib.np_trace_take(ring, asked, self._out)
            if count < 0:
                raise UserError("the trace went backwards; was the run ended and another one started?")
            spans = [
                Span(one.start_ns, one.end_ns, one.kind, one.layer, one.value, one.step) for one in self._out[0:count]
            ]
            lost = asked[0] - self._from[n] if self._begun else 0
            self._from[n] = asked[0] + count
            rows.append(Row(process.role, process.index, process.pid, spans, lost))
        self._begun = True
        return rows

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for buffer in self._buffers:
            ffi.release(buffer)
        self._mapping.close()
