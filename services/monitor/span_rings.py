"""Reading the rings of a live run from outside: as any monitor may, through a read-only descriptor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from neuronpipe.native import ffi, lib
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.layout import LINE_BYTES
from neuronpipe.protocol.messages.client import ProcessStatus
from neuronpipe.protocol.run_directory import RunFile
from neuronpipe.protocol.segments import Closing, Mapping, Segment

SPANS = np.dtype(
    [("start_ns", "<u8"), ("end_ns", "<u8"), ("kind", "<u2"), ("layer", "<u2"), ("value", "<u4"), ("step", "<u8")]
)
"""One span, as it lies in memory."""


class Span(NamedTuple):
    """One span of a process, by the names of the specification. Times in ns of the monotonic clock."""

    start_ns: int
    end_ns: int
    kind: int
    layer: int
    value: int
    step: int


@frozen
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


class RunTrace(Closing):
    """The trace segment of a run. `take` and `take_arrays` give what was put since either was asked last; at first, all
    that is there."""

    def __init__(self, segment: Segment, processes: Sequence[ProcessStatus]) -> None:
        self._mapping: Mapping = segment.map()
        self._processes = processes
        field = segment.layout["spans"]
        rings, self._capacity, _ = field.shape
        if len(processes) != rings:
            raise UserError(f"the run has {len(processes)} processes and {rings} rings; is it of this version?")
        counters = ffi.from_buffer("uint64_t[]", self._mapping.view("next"))
        spans = ffi.from_buffer("np_span[]", self._mapping.view("spans"))
        stride = LINE_BYTES // 8
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
    def open(cls, run_file: RunFile, processes: Sequence[ProcessStatus]) -> RunTrace:
        """The trace of the run that this file names; processes: as in `Status`. Raises UserError when the run is of
        another version, or gone."""
        with run_file.open_segment("trace") as segment:
            return cls(segment, processes)

    def take(self) -> list[Row]:
        """A row for each process."""
        return self.rows(self.take_arrays())

    def rows(self, taken: Sequence[tuple[Any, int]]) -> list[Row]:
        """The same of what `take_arrays` gave."""
        return [
            Row(process.role, process.index, process.pid, [Span(*one) for one in spans.tolist()], lost)
            for process, (spans, lost) in zip(self._processes, taken, strict=True)
        ]

    def take_arrays(self) -> list[tuple[Any, int]]:
        """For each process its spans, [n] of SPANS, and how many were overwritten unseen."""
        taken = []
        for n, ring in enumerate(self._rings):
            asked = ffi.new("uint64_t *", self._from[n])
            count = lib.np_trace_take(ring, asked, self._out)
            if count < 0:
                raise UserError("the trace went backwards; was the run ended and another one started?")
            lost = asked[0] - self._from[n] if self._begun else 0
            self._from[n] = asked[0] + count
            spans = np.frombuffer(ffi.buffer(self._out, count * SPANS.itemsize), SPANS) if count else np.empty(0, SPANS)
            taken.append((spans.copy(), lost))
        self._begun = True
        return taken

    def close(self) -> None:
        """Let go of the segment."""
        for buffer in self._buffers:
            ffi.release(buffer)
        self._mapping.close()
