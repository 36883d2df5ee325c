"""Write spans as trace events, the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing read.

Format: "Trace Event Format", complete events (`ph` X) with times in microseconds, metadata events (`ph` M) with names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from neuronpipe.protocol.memory.spans import KINDS
from neuronpipe.services.monitor.span_rings import Row

_KINDS = {kind.number: kind for kind in KINDS}


def write_chrome(file: TextIO, rows: Sequence[Row]) -> None:
    """Write one JSON object. Times are relative to the earliest span."""
    origin_ns = min((span.start_ns for row in rows for span in row.spans), default=0)
    events = [event for number, row in enumerate(rows) for event in _events(row, number, origin_ns)]
    json.dump({"traceEvents": events, "displayTimeUnit": "ns"}, file)


def _events(row: Row, number: int, origin_ns: int) -> Iterable[dict[str, Any]]:
    pid = row.pid or -number - 1  # a process that is being restarted has none
    for name, value in (
        ("process_name", {"name": row.name}),
        ("process_sort_index", {"sort_index": number}),
        ("thread_name", {"name": row.role}),
    ):
        yield {"ph": "M", "name": name, "pid": pid, "tid": pid, "args": value}
    for span in row.spans:
        kind = _KINDS.get(span.kind)
        arguments: dict[str, Any] = {"step": span.step, "layer": span.layer}
        if kind is not None and kind.value:
            arguments[kind.value] = span.value
        yield {
            "ph": "X",
            "name": kind.name if kind else f"kind {span.kind}",
            "cat": row.role,
            "pid": pid,
            "tid": pid,
            "ts": (span.start_ns - origin_ns) / 1000,
            "dur": (span.end_ns - span.start_ns) / 1000,
            "args": arguments,
        }
