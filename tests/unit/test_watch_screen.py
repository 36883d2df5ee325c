"""The screen of `watch` in few and in many columns and lines."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from neuronpipe.launch.watch.charts import listed
from neuronpipe.launch.watch.pager import LEAVES, Pager
from neuronpipe.launch.watch.screen import View, render
from neuronpipe.protocol.messages.client import WarmUp
from neuronpipe.protocol.messages.snapshot import ProcessView, Region, Snapshot, StripRow
from neuronpipe.services.monitor.span_groups import GROUPS
from rich.console import Console, Group
from rich.segment import Segment
from rich.text import Text

LABELS = [group.label for group in GROUPS if group.letter]
SHOT = Snapshot(
    run="r",
    model="turbosparse-mistral-7b",
    mode="predicted",
    quantization="q4",
    plan="p",
    at_s=0.0,
    ready=True,
    steps=12345,
    tokens=12340,
    max_sequences=4,
    tokens_per_s=1062.5,
    tbt_ms={"p50": 72.4, "p90": 84.9, "p99": 134.2},
    memory_bytes=2 << 30,
    memory_limit_bytes=4 << 30,
    regions=tuple(
        Region(name=name, total_bytes=1 << 30, used_bytes=1 << 29) for name in ("fixed", "kv", "hot", "cold")
    ),
    hit_rate=0.975,
    flash_bytes_per_token=12.5e6,
    dram_bytes_per_token=1.3e9,
    flash_wait=0.64,
    participant_wait=0.27,
    fired=(0.1, 0.2) * 16,
    resident=(0.5, 0.75) * 16,
    strip_ms=116.6,
    strip_steps=(12343, 12344, 12345),
    strip=tuple(
        StripRow(name=name, cells="".join(40 * group.letter for group in GROUPS))
        for name in ("coordinator.0", "decode.0")
    ),
    processes=tuple(
        ProcessView(role=role, index=0, pid=7, state="starting", core=0, doing={"neurons": 0.5, "attention": 0.25})
        for role in ("coordinator", "decode")
    ),
)


def shown(columns: int) -> list[str]:
    view = View("/run/user/1000/neuronpipe-0a1b2c3d")
    view.show(SHOT)
    console = Console(width=columns, file=io.StringIO(), record=True)
    console.print(render([view], columns))
    return console.export_text().splitlines()


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_lines_break_between_what_is_said_never_within(columns: int) -> None:
    lines = shown(columns)
    for said in (
        *(f"■ {label}" for label in LABELS),
        "■ fixed 512.0 MiB",
        "■ cold 512.0 MiB",
        "■ processes",
        "p99 134.2 ms",
        "27% for each other",
        "12343 to 12345, 116.6 ms",
        "last second",
    ):
        assert any(said in line for line in lines), said
    assert not any(line.rstrip().endswith("■") for line in lines)


def test_what_processes_take_is_shown_beside_the_regions() -> None:
    view = View("run")
    view.show(dataclasses.replace(SHOT, memory_bytes=(2 << 30) + (100 << 20)))
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render([view], 80))
    assert "■ processes 100.0 MiB" in console.export_text()


def test_terms_that_are_off_the_plan_are_shown_whole() -> None:
    view, console = View("run"), Console(width=40, file=io.StringIO(), record=True)
    sentence = "misses: planned 8.0%, measured 21%; kernels: planned 4.0 ms a token, measured 9.0 ms"
    view.show(dataclasses.replace(SHOT, deviations=sentence, withheld_bytes=64 << 20))
    console.print(render([view], 40))
    text = " ".join(console.export_text().split())
    assert f"off the plan {sentence}" in text
    assert "memory is short: 64.0 MiB given back" in text
    assert "off the plan" not in " ".join(shown(40))


def test_cores_and_memory_of_processes_make_way_for_what_they_do() -> None:
    (narrow,) = [line for line in shown(40) if line.startswith("process ")]
    (wide,) = [line for line in shown(60) if line.startswith("process ")]
    assert narrow.split() == ["process", "cpu", "state", "last", "second"]
    assert wide.split() == ["process", "core", "cpu", "memory", "state", "last", "second"]


def test_what_is_waited_for_stands_where_the_run_will_be() -> None:
    console = Console(width=40, file=io.StringIO(), record=True)
    console.print(render([View("tcp://192.0.2.7:7000", awaits="no watch server answers there")], 40))
    assert "tcp://192.0.2.7:7000  no watch server" in console.export_text()


@pytest.mark.parametrize("columns", [40, 120])
def test_warm_up_has_a_bar_until_it_is_done(columns: int) -> None:
    def lines(loaded_bytes: int) -> list[str]:
        view = View("/run/user/1000/neuronpipe-0a1b2c3d")
        warm_up = WarmUp(loaded_bytes=loaded_bytes, total_bytes=4 << 30, bytes_per_s=2e9, left_s=1.5)
        view.show(dataclasses.replace(SHOT, warm_up=warm_up))
        console = Console(width=columns, file=io.StringIO(), record=True)
        console.print(render([view], columns))
        return console.export_text().splitlines()

    shown = lines(2 << 30)
    (number,) = [number for number, line in enumerate(shown) if "warm-up" in line]
    half = shown[number].partition("warm-up")[2]
    assert abs(half.count("█") - half.count("·")) <= 1
    below = " ".join(shown[number + 1 : number + 4])
    for said in ("50 %,", "2.00 GiB of 4.00 GiB,", "1.86 GiB/s,", "2 s left"):
        assert said in below
    assert not any("warm-up" in line for line in lines(4 << 30))


def test_a_list_takes_as_many_lines_as_it_needs() -> None:
    assert listed(["12345", "123", "1"], 10, ", ").plain == "12345,\n123, 1"
    assert listed(["12345", "123", "1"], 11, ", ").plain == "12345, 123,\n1"
    assert listed(["123456789012", "1"], 10).plain == "123456789012\n1"
    assert listed([], 10).plain == ""


def test_a_page_higher_than_the_terminal_is_moved_by_arrows_and_stops_at_its_ends() -> None:
    console = Console(width=40, color_system=None)
    page = console.render_lines(Group(*(Text(f"line {number}") for number in range(30))), pad=False)
    pager = Pager()

    def seen(*pressed: str) -> list[str]:
        for key in pressed:
            pager.move(key)
        with console.capture() as capture:
            console.print(pager.visible(page, 10))
        return [line.rstrip() for line in capture.get().splitlines()]

    assert seen() == [*(f"line {number}" for number in range(9)), "q leaves, the run goes on; ↑ 0 ↓ 21"]
    assert seen("\x1b[B", "j")[0] == "line 2"
    assert seen(" ")[0] == "line 11"
    assert seen(" ", " ")[-2] == "line 29"
    assert not pager.move("j")
    assert seen("k")[0] == "line 20"
    assert seen("b", "b", "b")[0] == "line 0"
    assert not pager.move("\x1b[A")


def test_a_page_with_room_says_nothing_of_moving_and_one_that_became_shorter_is_seen_to_its_end() -> None:
    console = Console(width=40, color_system=None)
    pager, high = Pager(), [[Segment(str(number))] for number in range(30)]
    pager.visible(high, 10)
    pager.move(" ")
    pager.move(" ")
    with console.capture() as capture:
        console.print(pager.visible(high[:5], 10))
    assert capture.get().split() == ["0", "1", "2", "3", "4", *LEAVES.split()]


def test_who_computes_which_blocks_is_said_and_who_is_gone() -> None:
    place: dict[str, Any] = {"index": 0, "core": None, "doing": {}}
    seen = (
        ProcessView(role="decode", pid=7, state="ready", numerics="cpu:avx2", work="all 15 blocks", **place),
        ProcessView(
            role="accelerator", pid=0, state="gone", restarts=6, work="decode workers compute its blocks", **place
        ),
        ProcessView(role="prefill", pid=8, state="ready", numerics="htp-v73", backend="onnx:qnn", **place),
    )
    view = View("/run/user/1000/neuronpipe-0a1b2c3d")
    view.show(dataclasses.replace(SHOT, processes=seen))
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render([view], 80))
    text = console.export_text()
    for said in (
        "gone 6x",
        "accelerator.0: decode workers compute its blocks",
        "decode.0: all 15 blocks",
        "numerics: decode cpu:avx2; prefill htp-v73 (onnx:qnn)",
    ):
        assert said in text
