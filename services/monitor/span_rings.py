"""The span rings of a live run, read by a monitor through a read-only descriptor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from neuronpipe.native import ffi, lib
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.memory.layout import LINE_BYTES
from neuronpipe.protocol.memory.segments import Closing, Mapping, Segment
from neuronpipe.protocol.messages.client import ProcessStatus
from neuronpipe.protocol.run_directory import RunFile

SPANS = np.dtype(
    [("start_ns", "<u8"), ("end_ns", "<u8"), ("kind", "<u2"), ("layer", "<u2"), ("value", "<u4"), ("step", "<u8")]
)
"""The numpy type of one span in a ring of the trace segment: 32 bytes, with the fields of `Span`."""


class Span(NamedTuple):
    """One span of a process, with the fields of SPEC.md. Times are in ns of the monotonic clock."""

    start_ns: int
    end_ns: int
    kind: int
    layer: int
    value: int
    step: int


@frozen
class Row:
    """One process and its spans, in the order in which the spans ended.

    lost: number of earlier spans that were overwritten before they were read
    """

    role: str
    index: int
    pid: int
    spans: list[Span]
    lost: int

    @property
    def name(self) -> str:
        """Return the name of the process, such as `decode.0`."""
        return f"{self.role}.{self.index}"


class RunTrace(Closing):
    """The trace segment of a run. `take` and `take_arrays` return the spans since the last call of either.

    Both raise UserError if the trace is of another run.
    """

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
        """Open the trace of a run. Raises UserError if the run has ended or is of another version.

        processes: as in `Status`
        """
        with run_file.open_segment("trace") as segment:
            return cls(segment, processes)

    def take(self) -> list[Row]:
        return self.rows(self.take_arrays())

    def rows(self, arrays: Sequence[tuple[Any, int]]) -> list[Row]:
        return [
            Row(process.role, process.index, process.pid, [Span(*fields) for fields in spans.tolist()], lost)
            for process, (spans, lost) in zip(self._processes, arrays, strict=True)
        ]

    def take_arrays(self) -> list[tuple[Any, int]]:
        """Return for each process its new spans, an array [n] of SPANS, and how many were overwritten unread."""
        arrays = []
        for n, ring in enumerate(self._rings):
            first_span = ffi.new("uint64_t *", self._from[n])  # the native function advances it past overwritten spans
            count = lib.np_trace_take(ring, first_span, self._out)
            if count < 0:
                raise UserError("the trace went backwards; was the run ended and another one started?")
            lost = first_span[0] - self._from[n] if self._begun else 0
            self._from[n] = first_span[0] + count
            spans = np.frombuffer(ffi.buffer(self._out, count * SPANS.itemsize), SPANS) if count else np.empty(0, SPANS)
            arrays.append((spans.copy(), lost))
        self._begun = True
        return arrays

    def close(self) -> None:
        for buffer in self._buffers:
            ffi.release(buffer)
        self._mapping.close()
