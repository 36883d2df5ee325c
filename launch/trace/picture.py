"""Draw a trace as SVG: time runs to the right, each process has a row.

The colours are from Okabe and Ito's palette, which people with the common kinds of colour blindness can distinguish.
Waiting is pale, so that dark areas are work. Pictures are SVG, written with the standard library: text stays sharp and
can be searched, and there is no dependency.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from neuronpipe.launch.trace.svg import FAINT, GRID, INK, Svg, add_line, add_text, finish_page, new_page, round_above
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.memory.spans import KINDS
from neuronpipe.services.monitor.span_groups import GROUP_OF, GROUPS, NUMBER
from neuronpipe.services.monitor.span_rings import Row, Span
from neuronpipe.services.monitor.time_window import TimeWindow, last_steps

WIDTH, LEFT, RIGHT, MARGIN = 1370, 130, 240, 24
EDGE = 0.8
ROW, GAP, HEAD, FOOT = 34, 8, 46, 34  # heights: a row, the space between rows, above and below the rows of a panel
MAX_LANES = 4  # for overlapping reads of one process


_NAME = {kind.number: kind.name for kind in KINDS}
_ORDER = ("coordinator", "decode", "prefill", "loader", "cache")
CLOSE_LAYERS = 2
CLOSE_MARGIN = 0.15  # of the layers' time, on either side


def write_picture(file: Path, rows: Sequence[Row], title: str) -> None:
    """Draw the last tokens. Raises UserError if the file's name does not end in .svg, or if it cannot be written."""
    if file.suffix != ".svg":
        raise UserError(f"{file}: pictures are SVG; give a name that ends in .svg")
    with whole_file(file) as place:
        place.write_text(draw(rows, title), encoding="utf-8")


def draw(rows: Sequence[Row], title: str) -> str:
    """Return the picture as the text of an SVG file."""
    window = last_steps(rows)
    visible = sorted(
        (row for row in rows if any(window.shows(span) for span in row.spans)),
        key=lambda row: (_ORDER.index(row.role) if row.role in _ORDER else len(_ORDER), row.index),
    )
    svg = new_page()
    add_text(svg, MARGIN, 34, title, size=19, weight="600")
    y = 52
    y = _panel(svg, visible, window, y, _steps_title(visible, window))
    close = middle_layers(visible, window)
    if close is not None:
        layers = "the middle layers of the last step in decode.0"
        y = _panel(svg, visible, close, y, f"a closer look: {layers}, {close.ns / 1e6:.2f} ms")
    y = _legend(svg, visible, window, y + 4)
    return finish_page(svg, WIDTH, y)


def _steps_title(rows: Sequence[Row], window: TimeWindow) -> str:
    count = len(_steps(rows, window))
    extent = f"the last {count} steps" if count > 1 else "the last step" if count else "no whole step"
    return f"{extent}, {window.ns / 1e6:.1f} ms"


def _steps(rows: Sequence[Row], window: TimeWindow) -> list[Span]:
    """Return the `send` span of each step that lies within the window up to its last answer."""
    spans = [span for row in rows for span in row.spans]
    answered = {s.step for s in spans if s.kind == NUMBER["await"] and s.end_ns <= window.to_ns}
    return sorted(s for s in spans if s.kind == NUMBER["send"] and s.start_ns >= window.from_ns and s.step in answered)


def _panel(svg: Svg, rows: Sequence[Row], window: TimeWindow, y: int, title: str) -> int:
    """Draw a window of time; return the y coordinate below it."""
    scale = (WIDTH - LEFT - RIGHT) / window.ns
    top, bottom = y + HEAD, y + HEAD + len(rows) * (ROW + GAP)
    add_text(svg, LEFT, y + 18, title, size=14, fill=FAINT)
    for ns, label in _ticks(window.ns):
        x = LEFT + ns * scale
        add_line(svg, x, top - 4, x, bottom, GRID)
        add_text(svg, x, bottom + 15, label, size=11, fill=FAINT, anchor="middle")
    for n, row in enumerate(rows):
        row_y = top + n * (ROW + GAP)
        add_text(svg, LEFT - 12, row_y + ROW / 2 + 5, row.name, size=14, anchor="end")
        placed = list(_lanes([span for span in row.spans if window.shows(span)]))
        for (span, lane, lanes), after in itertools.zip_longest(placed, placed[1:]):
            is_uncovered = after is None or after[0].start_ns >= span.end_ns
            _span(
                svg, span, window, scale, row_y + lane * ROW / lanes, ROW / lanes, has_name=is_uncovered and lanes == 1
            )
        _shares(svg, row, window, row_y)
    _step_marks(svg, rows, window, scale, top, bottom)
    return bottom + FOOT


def _lanes(spans: Sequence[Span]) -> Iterator[tuple[Span, int, int]]:
    """Yield each span, its lane and the number of lanes, in drawing order.

    Whole steps come first and cover all lanes. Reads that overlap lie side by side. A wait within a piece of work is
    drawn over it.
    """
    wholes = [span for span in spans if _is_whole(span)]
    parts = sorted((span for span in spans if not _is_whole(span)), key=lambda span: (span.start_ns, -span.end_ns))
    free_at: list[int] = []
    placed = []
    for span in parts:
        if span.kind != NUMBER["read"]:
            placed.append((span, 0))
            continue
        lane = next((n for n, end_ns in enumerate(free_at) if end_ns <= span.start_ns), len(free_at))
        if lane == len(free_at) and lane < MAX_LANES:
            free_at.append(span.end_ns)
        lane = min(lane, MAX_LANES - 1)
        free_at[lane] = max(free_at[lane], span.end_ns)
        placed.append((span, lane))
    yield from ((span, 0, 1) for span in wholes)
    yield from ((span, lane, len(free_at) if span.kind == NUMBER["read"] else 1) for span, lane in placed)


def _is_whole(span: Span) -> bool:
    return span.kind in (NUMBER["step"], NUMBER["await"])


def _span(svg: Svg, span: Span, window: TimeWindow, scale: float, y: float, height: float, *, has_name: bool) -> None:
    group = GROUP_OF.get(span.kind)
    from_ns, to_ns = max(span.start_ns, window.from_ns), min(span.end_ns, window.to_ns)
    x, width = LEFT + (from_ns - window.from_ns) * scale, (to_ns - from_ns) * scale
    edge = EDGE if width > 8 * EDGE else 0.0  # the gap between wide neighbours
    rect = ElementTree.SubElement(
        svg,
        "rect",
        {
            "x": f"{x:.2f}",
            "y": f"{y:.1f}",
            "width": f"{max(0.5, width - edge):.2f}",
            "height": f"{height - (EDGE if height < ROW else 0):.1f}",
            "fill": group.colour if group else INK,
        },
    )
    name = _NAME.get(span.kind, str(span.kind))
    if has_name and not _is_whole(span) and width > 16 + 6.6 * len(name):
        ink = "#ffffff" if group is None or group.dark else INK
        add_text(svg, x + width / 2, y + ROW / 2 + 4, name, size=11, fill=ink, anchor="middle")
    tip = ElementTree.SubElement(rect, "title")
    tip.text = (
        f"{name}, layer {span.layer}, step {span.step}: "
        f"{(span.end_ns - span.start_ns) / 1000:.1f} us, value {span.value}"
    )


def _shares(svg: Svg, row: Row, window: TimeWindow, y: float) -> None:
    """Write to the right of a row the share of time that it worked and waited. Waiting lies within work."""
    spans = [span for span in row.spans if window.shows(span) and not _is_whole(span) and span.kind in GROUP_OF]
    waiting = [span for span in spans if not GROUP_OF[span.kind].works]
    works_ns = _covered_ns(spans, window) - _covered_ns(waiting, window)
    lines = [f"{'reading' if row.role == 'loader' else 'working'} {_percent(works_ns / window.ns)}"]
    waits = []
    for kind, name in ((NUMBER["flash"], "flash"), (NUMBER["barrier"], "participants")):
        ns = _covered_ns([span for span in waiting if span.kind == kind], window)
        waits += [f"{name} {_percent(ns / window.ns)}"] * (ns > 0)
    lines += ["waits: " + ", ".join(waits)] * bool(waits)
    for n, text in enumerate(lines):
        add_text(
            svg, WIDTH - RIGHT + 12, y + ROW / 2 + (5 if len(lines) == 1 else 14 * n - 2), text, size=12, fill=FAINT
        )


def _covered_ns(spans: Sequence[Span], window: TimeWindow) -> int:
    """Return the time that at least one of the spans covers."""
    total = 0
    reached = window.from_ns
    for span in sorted(spans):
        start, end = max(span.start_ns, reached), min(span.end_ns, window.to_ns)
        if end > start:
            total += end - start
            reached = end
    return total


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _step_marks(svg: Svg, rows: Sequence[Row], window: TimeWindow, scale: float, top: int, bottom: int) -> None:
    """Draw a line through all rows where a step is sent, and the step's number if there is room."""
    step_starts = [(LEFT + (span.start_ns - window.from_ns) * scale, span.step) for span in _steps(rows, window)]
    for (x, step), (after, _) in itertools.zip_longest(step_starts, step_starts[1:], fillvalue=(math.inf, 0)):
        add_line(svg, x, top - 10, x, bottom, FAINT, dashes="3 3")
        name = f"step {step}"
        if after - x > 8 + 6.2 * len(name):
            add_text(svg, x + 4, top - 6, name, size=11, fill=FAINT)


def _legend(svg: Svg, rows: Sequence[Row], window: TimeWindow, y: int) -> int:
    labels = {GROUP_OF[s.kind].label for row in rows for s in row.spans if window.shows(s) and s.kind in GROUP_OF}
    x = float(LEFT)
    for group in GROUPS:
        if group.label not in labels:
            continue
        width = 22 + 7.4 * len(group.label) + 18
        if x + width > WIDTH - MARGIN:
            x, y = float(LEFT), y + 24
        frame = {"stroke": "#b8c0ca"} if group.label == "step under way" else {}
        ElementTree.SubElement(
            svg,
            "rect",
            {"x": f"{x:.1f}", "y": str(y), "width": "14", "height": "14", "fill": group.colour, **frame},
        )
        add_text(svg, x + 21, y + 12, group.label, size=13)
        x += width
    return y + 14 + MARGIN


def _ticks(length_ns: int) -> Iterator[tuple[int, str]]:
    """Yield six to twelve round times within the window, with labels."""
    step = int(round_above(length_ns / 9, (1, 2, 5, 10)))
    unit, ns_per_unit = ("ms", 1e6) if step >= 100_000 else ("us", 1e3)
    for ns in range(0, length_ns + 1, max(1, step)):
        yield ns, f"{ns / ns_per_unit:g} {unit}"


def middle_layers(rows: Sequence[Row], window: TimeWindow) -> TimeWindow | None:
    """Return the window of a few middle layers of the last step in the first decode worker; None without its spans."""
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
            return TimeWindow(from_ns - margin, to_ns + margin)
    return None
