"""The span ring of this process in the trace segment, for Python and for the native code that it calls.

A ring has one writer: only one thread of a process may add spans.
"""

from __future__ import annotations

from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.protocol.memory.layout import LINE_WORDS
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.runtime.run_memory import RunMemory


class Trace:
    """The ring of one writer.

    native: its `np_trace *`, which is valid as long as this object
    """

    def __init__(self, memory: RunMemory, ring: int) -> None:
        mapping = memory.mappings["trace"]
        _, capacity, words = mapping.layout["spans"].shape
        counters, spans = mapping.view("next"), mapping.view("spans")
        line, size = LINE_WORDS // 2, capacity * words
        self._keep = (
            ffi.from_buffer("uint64_t[]", counters[ring * line : ring * line + 1]),
            ffi.from_buffer("np_span[]", spans[ring * size : (ring + 1) * size]),
        )
        self.native: Any = ffi.new("np_trace *", {"next": self._keep[0], "spans": self._keep[1], "capacity": capacity})

    @classmethod
    def of(cls, job: Job, memory: RunMemory) -> Trace:
        return cls(memory, job.plan.compute.processes.index(job.process))

    def put(self, kind: int, start_ns: int, *, value: int = 0, step: int = 0, end_ns: int | None = None) -> int:
        """Add a span that ends at end_ns, by default now. Return its end, at which the next span may start.

        Times are in nanoseconds of the clock `now`.
        """
        end_ns = now() if end_ns is None else end_ns
        lib.np_trace_add(self.native, kind, 0, value, step, start_ns, end_ns)
        return end_ns


def now() -> int:
    """Return the time of the clock of spans, in nanoseconds."""
    return int(lib.np_trace_now())
