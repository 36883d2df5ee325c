"""Curves of a device profile as one SVG.

Kernels and memory by workers, an accelerator's kernels by sequences, flash by size, depth and range. Colours are from
Okabe and Ito's palette, which people with any common kind of colour vision can distinguish. A bar at a point is the
spread of its repetitions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from neuronpipe.launch.formats import show_bytes
from neuronpipe.launch.trace.svg import FAINT, GRID, Svg, add_line, add_text, finish_page, new_page, round_above
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.measured_points import SEQUENTIAL_PIECE_BYTES
from neuronpipe.plans.device.profile import DeviceProfile, FlashProfile
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.protocol.frozen import frozen

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222")
COLUMNS, PANEL_WIDTH, PANEL_HEIGHT, MARGIN, HEAD = 3, 440, 330, 24, 66
FOUR_ROUND_PARTS = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)
HIGH_SPREAD = 0.25  # bars of a larger spread are cut
LEFT, TOP, BOTTOM = 56, 50, 84  # within a panel: for the axis, the title, the labels and the legend


@frozen
class Line:
    """A curve: its name in the legend, and figures by position."""

    name: str
    points: tuple[tuple[float, Figure], ...]


@frozen
class Panel:
    """Curves over one axis.

    about: description of the axes
    scale: divides figures, to show them in the unit of the axis
    labels: marked positions of the horizontal axis
    log: whether the horizontal axis is logarithmic
    highest: top of the vertical axis, for panels that are compared; 0: the highest figure
    """

    title: str
    about: str
    scale: float
    lines: tuple[Line, ...]
    labels: tuple[tuple[float, str], ...]
    log: bool
    highest: float = 0.0


def write_picture(file: Path, profile: DeviceProfile) -> None:
    """Draw the profile into a file. Raises UserError if it cannot be written."""
    with whole_file(file) as place:
        place.write_text(draw(profile), encoding="utf-8")


def draw(profile: DeviceProfile) -> str:
    panels = [*_memory(profile), *_decode(profile), *_prefill(profile), *_accelerator(profile)]
    if profile.flash is not None:
        panels += _flash(profile.flash)
    rows = -(-len(panels) // COLUMNS)
    width, height = 2 * MARGIN + COLUMNS * PANEL_WIDTH, HEAD + rows * PANEL_HEIGHT + MARGIN
    svg = new_page()
    title = f"device {profile.device_id}: {profile.architecture}, {profile.instruction_set}"
    add_text(svg, MARGIN, 32, title, size=19, weight="600")
    engine = f"; flash by {profile.flash.engine}" if profile.flash else ""
    direct = "" if profile.flash is None or profile.flash.direct else ", without direct I/O: the page cache's figures"
    busy = f"other programs had {profile.busy:.0%} of the machine"
    add_text(svg, MARGIN, 52, f"{profile.decode_workers} decode workers{engine}{direct}; {busy}", size=13, fill=FAINT)
    for number, panel in enumerate(panels):
        _panel(svg, panel, MARGIN + number % COLUMNS * PANEL_WIDTH, HEAD + number // COLUMNS * PANEL_HEIGHT)
    return finish_page(svg, width, height)


def _memory(profile: DeviceProfile) -> Iterator[Panel]:
    sizes = sorted({point.piece_bytes for point in profile.dram}, reverse=True)
    lines = tuple(
        Line(
            "end to end" if size == SEQUENTIAL_PIECE_BYTES else f"pieces of {size} bytes",
            tuple((p.workers, p.bytes_per_s) for p in profile.dram if p.piece_bytes == size),
        )
        for size in sizes
    )
    if lines:
        workers = tuple((float(count), str(count)) for count in sorted({point.workers for point in profile.dram}))
        yield Panel("memory", "GB/s by workers", 1e9, lines, workers, log=False)


def _decode(profile: DeviceProfile) -> Iterator[Panel]:
    """Yield the kernels of each quantization at the widest rows, by the share of neurons, of all workers."""
    for quantization in dict.fromkeys(point.quantization for point in profile.decode):
        max_workers = max(point.workers for point in profile.decode)
        points = [p for p in profile.decode if p.quantization == quantization and p.workers == max_workers]
        if not points:
            continue
        weights = max(point.row_weights for point in points)
        fastest = profile.cores[0].kind
        points = [p for p in points if p.row_weights == weights and p.core in (None, fastest)]
        lines = tuple(
            Line(kind.replace("_", " "), tuple(sorted((p.share, p.bytes_per_s) for p in points if p.kind == kind)))
            for kind in dict.fromkeys(point.kind for point in points)
        )
        shares = tuple((share, f"{share:.0%}") for share in sorted({point.share for point in points}))
        title = f"decode, {quantization} rows of {weights}, {max_workers} workers"
        yield Panel(title, "GB/s of weights, by the share of neurons whose rows are read", 1e9, lines, shares, log=True)


def _prefill(profile: DeviceProfile) -> Iterator[Panel]:
    if not profile.panels:
        return
    max_workers = max(point.workers for point in profile.panels)
    points = [point for point in profile.panels if point.workers == max_workers]
    lines = tuple(
        Line(
            f"{quantization} {weights}",
            tuple(
                (float(p.tokens), p.token_weights_per_s)
                for p in points
                if (p.quantization, p.row_weights) == (quantization, weights)
            ),
        )
        for quantization, weights in dict.fromkeys((p.quantization, p.row_weights) for p in points)
    )
    tokens = tuple((float(count), str(count)) for count in sorted({point.tokens for point in points}))
    about = "10⁹ tokens × weights a second, by tokens"
    yield Panel(f"prefill, rows of triggers, {max_workers} workers", about, 1e9, lines, tokens, log=True)


def _accelerator(profile: DeviceProfile) -> Iterator[Panel]:
    """Yield the kernels on offloaded blocks of each quantization at the widest rows, by sequences."""
    offloaded = profile.accelerator.held if profile.accelerator else ()
    for quantization in dict.fromkeys(point.quantization for point in offloaded):
        weights = max(point.row_weights for point in offloaded if point.quantization == quantization)
        points = [p for p in offloaded if (p.quantization, p.row_weights) == (quantization, weights)]
        lines = tuple(
            Line(
                f"{kind}, {share:.0%}",
                tuple(sorted((float(p.texts), p.bytes_per_s) for p in points if (p.kind, p.share) == (kind, share))),
            )
            for kind, share in dict.fromkeys((point.kind, point.share) for point in points)
        )
        texts = tuple((float(count), str(count)) for count in sorted({point.texts for point in points}))
        title = f"accelerator, {quantization} rows of {weights}"
        yield Panel(title, "GB/s of weights, by sequences, by neurons that fire", 1e9, lines, texts, log=False)


def _flash(flash: FlashProfile) -> Iterator[Panel]:
    reads = [read for read in flash.reads if read.core is None]
    sizes = tuple((float(size), _short(size)) for size in sorted({read.request_bytes for read in reads}))
    highest = max(read.bytes_per_s.median * (1 + min(HIGH_SPREAD, read.bytes_per_s.spread)) for read in reads)
    for range_bytes, sequential in dict.fromkeys((read.range_bytes, read.sequential) for read in reads):
        range_reads = [read for read in reads if (read.range_bytes, read.sequential) == (range_bytes, sequential)]
        lines = tuple(
            Line(
                f"{depth} under way",
                tuple((float(r.request_bytes), r.bytes_per_s) for r in range_reads if r.depth == depth),
            )
            for depth in sorted({read.depth for read in range_reads})
        )
        where = "whole file" if range_bytes == flash.file_bytes else "first"
        order = "sequential" if sequential else "random"
        title = f"flash, {order}, {where} {show_bytes(range_bytes).replace('.0 ', ' ')}"
        yield Panel(title, "MB/s, by size of the reads", 1e6, lines, sizes, log=True, highest=highest)


def _short(size_bytes: int) -> str:
    return f"{size_bytes >> 10}K" if size_bytes < 1 << 20 else f"{size_bytes >> 20}M"


def _panel(svg: Svg, panel: Panel, x: float, y: float) -> None:
    inner_width, inner_height = PANEL_WIDTH - LEFT - MARGIN, PANEL_HEIGHT - TOP - BOTTOM
    left, bottom = x + LEFT, y + TOP + inner_height
    figures = [figure for line in panel.lines for _, figure in line.points]
    tops = [figure.median * (1 + min(HIGH_SPREAD, figure.spread)) for figure in figures]
    highest = round_above((panel.highest or max(tops)) / panel.scale, FOUR_ROUND_PARTS)
    places = [_place(position, log=panel.log) for position, _ in panel.labels]
    minimum, width = min(places), (max(places) - min(places)) or 1.0

    def at(position: float, value: float) -> tuple[float, float]:
        across = (_place(position, log=panel.log) - minimum) / width if len(places) > 1 else 0.5
        return left + across * inner_width, bottom - min(1.0, value / panel.scale / highest) * inner_height

    add_text(svg, x + LEFT - 30, y + 16, panel.title, size=14, weight="600")
    add_text(svg, x + LEFT - 30, y + 33, panel.about, size=11, fill=FAINT)
    for tick in range(5):
        level = bottom - tick / 4 * inner_height
        add_line(svg, left, level, left + inner_width, level, GRID)
        add_text(svg, left - 8, level + 4, f"{highest * tick / 4:g}", size=11, fill=FAINT, anchor="end")
    for position, label in panel.labels:
        add_text(svg, at(position, 0)[0], bottom + 16, label, size=11, fill=FAINT, anchor="middle")
    for number, line in enumerate(panel.lines):
        _curve(
            svg,
            [
                (at(position, f.median), at(position, f.median * (1 + min(HIGH_SPREAD, f.spread))))
                for position, f in line.points
            ],
            number,
        )
    _legend(svg, [line.name for line in panel.lines], left, bottom + 36, left + inner_width)


def _curve(svg: Svg, points: Sequence[tuple[tuple[float, float], tuple[float, float]]], number: int) -> None:
    colour = COLOURS[number % len(COLOURS)]
    path = " ".join(f"{px:.1f},{py:.1f}" for (px, py), _ in points)
    ElementTree.SubElement(svg, "polyline", {"points": path, "fill": "none", "stroke": colour, "stroke-width": "2"})
    for (px, py), (_, top) in points:
        add_line(svg, px, top, px, 2 * py - top, colour)
        ElementTree.SubElement(svg, "circle", {"cx": f"{px:.1f}", "cy": f"{py:.1f}", "r": "3", "fill": colour})


def _legend(svg: Svg, names: Sequence[str], x: float, y: float, end: float) -> None:
    """Draw names in the colours of their curves, in as many rows as needed."""
    place = x
    for number, name in enumerate(names):
        width = 22 + 6.3 * len(name)
        if place + width > end and place > x:
            place, y = x, y + 16
        add_line(svg, place, y - 4, place + 12, y - 4, COLOURS[number % len(COLOURS)], width=3)
        add_text(svg, place + 16, y, name, size=11)
        place += width + 6


def _place(position: float, *, log: bool) -> float:
    return math.log(position) if log else position
