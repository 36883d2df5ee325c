"""What a picture and a trace file make of spans."""

from __future__ import annotations

import io
import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from neuronpipe.launch.trace.chrome import write_chrome
from neuronpipe.launch.trace.picture import LEFT, RIGHT, WIDTH, draw, middle_layers, write_picture
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.memory.spans import KINDS
from neuronpipe.services.monitor.span_groups import GROUPS, NUMBER
from neuronpipe.services.monitor.span_rings import Row, Span
from neuronpipe.services.monitor.time_window import TimeWindow, last_steps

SVG = "{http://www.w3.org/2000/svg}"
MS = 1_000_000


def a_run(steps: int = 5, layers: int = 6) -> list[Row]:
    """A millisecond per layer: half of it neurons, while the loader reads two things at once."""
    coordinator, worker, loader = [], [], []
    at = 1000 * MS
    for step in range(1, steps + 1):
        coordinator.append(Span(at, at + MS // 10, NUMBER["send"], 0, 1, step))
        begin = at
        for layer in range(layers):
            worker.append(Span(at, at + MS // 2, NUMBER["qkv"], layer, 0, step))
            worker.append(Span(at + MS // 2, at + MS, NUMBER["neurons"], layer, 9, step))
            loader.append(Span(at + 10, at + MS // 2, NUMBER["read"], 0, 4096, 0))
            loader.append(Span(at + 20, at + MS // 2 + 10, NUMBER["read"], 0, 4096, 0))
            at += MS
        worker.append(Span(begin, at, NUMBER["step"], 0, 1, step))
        coordinator.append(Span(begin, at, NUMBER["await"], 0, 1, step))
        coordinator.append(Span(at, at + 100, NUMBER["tell"], 0, 1, step))
        at += MS
    return [
        Row("loader", 0, 13, loader, 0),
        Row("cache", 0, 14, [], 0),
        Row("coordinator", 0, 11, coordinator, 0),
        Row("decode", 0, 12, worker, 0),
    ]


def test_every_kind_of_span_has_a_colour() -> None:
    assert sorted(kind for group in GROUPS for kind in group.kinds) == sorted(kind.name for kind in KINDS)
    assert len({group.colour for group in GROUPS}) == len(GROUPS)


def test_the_last_three_steps_are_shown_whole() -> None:
    rows = a_run()
    assert last_steps(rows) == TimeWindow(1000 * MS + 2 * 7 * MS, 1000 * MS + 5 * 7 * MS - MS + 100)


def test_a_step_that_was_overwritten_in_part_is_not_shown() -> None:
    rows = a_run()
    worker = rows[3]
    cut = Row("decode", 0, 12, [span for span in worker.spans if span.step > 4 or span.layer > 3], 0)
    kept = Row("decode", 0, 12, [span for span in cut.spans if span.step >= 4], 0)
    assert last_steps([*rows[:3], kept]).from_ns == 1000 * MS + 4 * 7 * MS


def test_the_closer_look_is_at_layers_in_the_middle() -> None:
    rows = a_run()
    close = middle_layers(rows, last_steps(rows))
    assert close is not None
    last = 1000 * MS + 4 * 7 * MS
    assert (close.from_ns + close.to_ns) // 2 == last + 4 * MS
    assert close.ns == pytest.approx(2 * MS * 1.3)


def test_a_picture_is_well_formed_and_reading_stands_under_computing() -> None:
    svg = ElementTree.fromstring(draw(a_run(), "a <model> & more"))
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert "a <model> & more" in texts
    names = [text for text in texts if text in ("coordinator.0", "decode.0", "loader.0", "cache.0")]
    assert names == ["coordinator.0", "decode.0", "loader.0"] * 2  # the cache did nothing
    for rect in list(svg.iter(f"{SVG}rect"))[1:]:
        x, width = float(rect.attrib["x"]), float(rect.attrib["width"])
        assert LEFT - 0.01 <= x <= x + width
        assert rect.find(f"{SVG}title") is None or x + width <= WIDTH - RIGHT + 0.6


def test_a_process_that_did_nothing_in_the_layers_shown_has_an_empty_row_there() -> None:
    rows = a_run()
    rows[1].spans.append(Span(1030 * MS, 1030 * MS + 5, NUMBER["evict"], 0, 3, 0))
    svg = ElementTree.fromstring(draw(rows, "t"))
    assert [text.text for text in svg.iter(f"{SVG}text")].count("cache.0") == 2


def test_a_step_that_was_only_sent_is_not_counted_as_shown() -> None:
    rows = a_run()
    coordinator = rows[2].spans
    told = coordinator[-1]
    coordinator[-1] = told._replace(end_ns=told.start_ns + MS // 2)  # clients are told while the next one is computed
    coordinator.append(Span(told.start_ns + 10, told.start_ns + 20, NUMBER["send"], 0, 1, 6))
    texts = [text.text for text in ElementTree.fromstring(draw(rows, "t")).iter(f"{SVG}text")]
    assert "the last 3 steps, 20.5 ms" in texts
    assert [text for text in texts if re.match(r"step \d", text or "")] == ["step 3", "step 4", "step 5"]


def test_numbers_of_steps_do_not_stand_on_each_other() -> None:
    fast = Span(0, 10, NUMBER["send"], 0, 1, 1), Span(10, 20, NUMBER["await"], 0, 1, 1)
    slow = Span(20, 30, NUMBER["send"], 0, 1, 2), Span(30, 9000, NUMBER["await"], 0, 1, 2)
    svg = ElementTree.fromstring(draw([Row("coordinator", 0, 1, [*fast, *slow], 0)], "t"))
    assert [text.text for text in svg.iter(f"{SVG}text") if re.match(r"step \d", text.text or "")] == ["step 2"]


def test_reads_that_overlap_lie_side_by_side() -> None:
    svg = ElementTree.fromstring(draw(a_run(), "t"))
    reads = [r for r in svg.iter(f"{SVG}rect") if (t := r.find(f"{SVG}title")) is not None and "read" in (t.text or "")]
    assert len({(rect.attrib["y"], rect.attrib["height"]) for rect in reads}) == 4  # two lanes, in each of two panels


def test_spans_of_a_kind_that_is_not_known_are_drawn_and_written() -> None:
    rows = [Row("decode", 0, 1, [Span(5000, 9000, 999, 0, 0, 0)], 0)]
    ElementTree.fromstring(draw(rows, "t"))
    file = io.StringIO()
    write_chrome(file, rows)
    assert "kind 999" in file.getvalue()


def test_a_picture_of_nothing_is_a_picture() -> None:
    ElementTree.fromstring(draw([Row("decode", 0, 1, [], 0)], "t"))


def test_another_kind_of_file_than_svg_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"p.png: pictures are SVG"):
        write_picture(tmp_path / "p.png", a_run(), "t")


def test_trace_events_name_processes_and_count_microseconds() -> None:
    file = io.StringIO()
    write_chrome(file, a_run())
    events = json.loads(file.getvalue())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {11: "coordinator.0", 12: "decode.0", 13: "loader.0", 14: "cache.0"}
    assert all(event["tid"] == event["pid"] for event in events)  # the one thread of each
    spans = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in spans) == 0
    neurons = next(event for event in spans if event["name"] == "neurons")
    assert (neurons["ts"], neurons["dur"]) == (500.0, 500.0)
    assert neurons["args"] == {"step": 1, "layer": 0, "neurons fired": 9}
    for pid in named:
        ends = [event["ts"] + event["dur"] for event in spans if event["pid"] == pid and event["name"] == "qkv"]
        assert all(a <= b for a, b in pairwise(ends))
