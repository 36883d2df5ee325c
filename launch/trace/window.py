"""Closer than the last steps: a few layers of the last one."""

from __future__ import annotations

from collections.abc import Sequence

from neuronpipe.services.monitor.groups import NUMBER
from neuronpipe.services.monitor.rings import Row
from neuronpipe.services.monitor.window import Window

CLOSE_LAYERS = 2
CLOSE_MARGIN = 0.15  # of the layers' time, on either side


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
