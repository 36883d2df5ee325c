"""Which stretch of time a picture shows: a few whole tokens at the end, and closer a few layers of the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neuronpipe.launch.trace.rings import Row, Span
from neuronpipe.protocol.spans import KINDS

NUMBER = {kind.name: kind.number for kind in KINDS}
MOST_STEPS = 3
CLOSE_LAYERS = 2
CLOSE_MARGIN = 0.15  # of the layers' time, on either side
LEAST_NS = 1000


@dataclass(frozen=True)
class Window:
    """A stretch of time, in ns of the monotonic clock."""

    from_ns: int
    to_ns: int

    @property
    def ns(self) -> int:
        """Its length."""
        return max(LEAST_NS, self.to_ns - self.from_ns)

    def shows(self, span: Span) -> bool:
        """Whether any of the span falls into it."""
        return span.end_ns > self.from_ns and span.start_ns < self.to_ns


def last_steps(rows: Sequence[Row]) -> Window:
    """The last steps whose spans all rings still hold: from the sending of the first to the end of the last. The last
    one alone when they do not hold even that; everything when no step was handed out."""
    kept_ns = max((row.spans[0].start_ns for row in rows if row.role == "decode" and row.spans), default=0)
    sent = {span.step: span for row in rows for span in row.spans if span.kind == NUMBER["send"]}
    ended = {span.step: span for row in rows for span in row.spans if span.kind in (NUMBER["await"], NUMBER["tell"])}
    steps = sorted(sent.keys() & ended.keys())
    if not steps:
        spans = [span for row in rows for span in row.spans]
        return Window(min((s.start_ns for s in spans), default=0), max((s.end_ns for s in spans), default=LEAST_NS))
    whole = [step for step in steps if sent[step].start_ns >= kept_ns] or steps[-1:]
    shown = whole[-MOST_STEPS:]
    return Window(sent[shown[0]].start_ns, ended[shown[-1]].end_ns)


def middle_layers(rows: Sequence[Row], window: Window) -> Window | None:
    """A few layers in the middle of the window's last step, as the first decode worker computed them; None where its
    spans do not tell."""
    for row in rows:
        step = max((span.step for span in row.spans if row.role == "decode" and window.shows(span)), default=0)
        spans = [span for span in row.spans if span.step == step and span.kind == NUMBER["neurons"]]
        layers = sorted({span.layer for span in spans})
        if step and len(layers) > CLOSE_LAYERS + 1:
            middle = len(layers) // 2
            before, last = layers[middle - 1], layers[middle - 1 + CLOSE_LAYERS]
            from_ns = max(span.end_ns for span in spans if span.layer == before)
            to_ns = max(span.end_ns for span in spans if span.layer == last)
            margin = int(CLOSE_MARGIN * (to_ns - from_ns))
            return Window(from_ns - margin, to_ns + margin)
    return None
