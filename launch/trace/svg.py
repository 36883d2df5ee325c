"""Elements of SVG pictures: page, colours, font, text and lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree import ElementTree

INK, FAINT, GRID = "#222222", "#6b6b6b", "#e3e3e3"
FONT = "system-ui, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif"
Svg = ElementTree.Element


def new_page() -> Svg:
    """Return an empty white page; `finish_page` sets its size."""
    svg = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "font-family": FONT})
    ElementTree.SubElement(svg, "rect", {"fill": "#ffffff"})
    return svg


def finish_page(svg: Svg, width: int, height: int) -> str:
    for element in (svg, svg[0]):
        element.set("width", str(width))
        element.set("height", str(height))
    svg.set("viewBox", f"0 0 {width} {height}")
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def add_text(
    svg: Svg,
    x: float,
    y: float,
    text: str,
    *,
    size: int,
    fill: str = INK,
    anchor: str = "start",
    weight: str = "400",
) -> None:
    """Add one line of text.

    y: y of its baseline
    """
    attributes = {"x": f"{x:.1f}", "y": f"{y:.1f}", "font-size": str(size), "fill": fill}
    if anchor != "start":
        attributes["text-anchor"] = anchor
    if weight != "400":
        attributes["font-weight"] = weight
    ElementTree.SubElement(svg, "text", attributes).text = text


def add_line(
    svg: Svg, x0: float, y0: float, x1: float, y1: float, stroke: str, *, width: int = 1, dashes: str | None = None
) -> None:
    attributes = {"x1": f"{x0:.1f}", "y1": f"{y0:.1f}", "x2": f"{x1:.1f}", "y2": f"{y1:.1f}", "stroke": stroke}
    if width != 1:
        attributes["stroke-width"] = str(width)
    if dashes:
        attributes["stroke-dasharray"] = dashes
    ElementTree.SubElement(svg, "line", attributes)


def round_above(value: float, factors: Sequence[float]) -> float:
    """Return the next round number from `value` on: a factor, of which the last is 10, times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in factors if factor * power >= value)
