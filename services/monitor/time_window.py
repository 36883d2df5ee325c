"""The time window that is displayed: a few complete steps at the end."""

from __future__ import annotations

from collections.abc import Sequence

from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.monitor.span_groups import NUMBER
from neuronpipe.services.monitor.span_rings import Row, Span

MAX_STEPS = 3
MIN_NS = 1000


@frozen
class TimeWindow:
    """A period, in ns of the monotonic clock."""

    from_ns: int
    to_ns: int

    @property
    def ns(self) -> int:
        """Return the length in ns, at least MIN_NS."""
        return max(MIN_NS, self.to_ns - self.from_ns)

    def shows(self, span: Span) -> bool:
        return span.end_ns > self.from_ns and span.start_ns < self.to_ns


def last_steps(rows: Sequence[Row], max_steps: int = MAX_STEPS) -> TimeWindow:
    """Return the window of the last steps whose spans are all present, from the first send to the last end.

    If all steps lack spans it is the window of the last step; without steps, that of all spans.

    max_steps: number of steps in the window
    """
    stored_from_ns = max((row.spans[0].start_ns for row in rows if row.role == "decode" and row.spans), default=0)
    sent = {span.step: span for row in rows for span in row.spans if span.kind == NUMBER["send"]}
    ended = {span.step: span for row in rows for span in row.spans if span.kind in (NUMBER["await"], NUMBER["tell"])}
    steps = sorted(sent.keys() & ended.keys())
    if not steps:
        spans = [span for row in rows for span in row.spans]
        return TimeWindow(min((s.start_ns for s in spans), default=0), max((s.end_ns for s in spans), default=MIN_NS))
    whole = [step for step in steps if sent[step].start_ns >= stored_from_ns] or steps[-1:]
    last = whole[-max_steps:]
    return TimeWindow(sent[last[0]].start_ns, ended[last[-1]].end_ns)
