"""Progress is silent for short work, one line per tenth in a log, and a bar that goes away on a terminal."""

from __future__ import annotations

import io
import os
import select
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from neuronpipe.launch import progress as module
from neuronpipe.launch.progress import Elapsed, Progress

WIPED = "\x1b[1A\x1b[2K"  # the line above, which is then where the cursor is


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(module, "_silent_since_s", None)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_short_work_says_nothing() -> None:
    stream = io.StringIO()
    with Progress("converting", "bytes", stream=stream) as progress:
        for done in range(101):
            progress(done, 100)
    assert stream.getvalue() == ""


def test_a_log_gets_a_line_at_first_and_one_per_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", -1.0)
    stream = io.StringIO()
    with Progress("converting", "tokens", stream=stream) as progress:
        for done in range(0, 1001):
            progress(done, 1000)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "neuronpipe: converting: 0 %, 0 of 1,000 tokens, 0 s"
    assert lines[3] == "neuronpipe: converting: 30 %, 300 of 1,000 tokens, 0 s"


def test_bytes_come_with_their_speed_and_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before it began to look says nothing about the speed."""
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    for columns, stream in (("200", io.StringIO()), ("200", Terminal()), ("40", Terminal())):
        monkeypatch.setenv("COLUMNS", columns)
        with Progress("warming up", "bytes", stream=stream) as progress:
            assert not progress.was_shown
            for second in range(9):
                now += 1.0
                progress((2 + second) << 30, 12 << 30)
            assert progress.was_shown
            said = stream.getvalue()
        if not stream.isatty():
            assert "\x1b" not in said
            assert (
                said.splitlines()[-1]
                == "neuronpipe: warming up: 83 %, 10.00 GiB of 12.00 GiB, 1.00 GiB/s, 2 s left, 9 s"
            )
        elif columns == "200":
            assert " 1.00 GiB/s, 2 s left " in said
        else:
            assert "10.0/12.0 GiB" in said
            assert "GiB/s" not in said


def test_a_terminal_gets_a_bar_that_is_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.0)
    stream = Terminal()
    with Progress("converting", "bytes", stream=stream) as progress:
        progress(1 << 20, 4 << 20)
    assert "converting:" in stream.getvalue()
    assert "1.0/4.0 MiB" in stream.getvalue()
    assert stream.getvalue().endswith(WIPED)


def test_json_output_gets_lines_on_a_terminal_too() -> None:
    stream = Terminal()
    with Progress("converting", "bytes", plain=True, stream=stream) as progress:
        progress(1, 2)
    assert stream.getvalue() == ""


def test_work_of_no_size_is_done() -> None:
    with Progress("converting", "bytes", stream=io.StringIO()) as progress:
        progress(0, 0)


def test_a_log_hears_of_slow_work_before_its_first_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    stream = io.StringIO()
    with Progress("profiling", "tokens", plain=True, stream=stream) as progress:
        for second in range(60):
            now = float(second)
            progress(second, 1000)
    assert stream.getvalue().splitlines() == [
        f"neuronpipe: profiling: {second // 10} %, {second} of 1,000 tokens, {second} s" for second in (3, 19, 35, 51)
    ]


def test_a_steady_progress_says_that_time_passes_while_the_work_does_not_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.0)
    monkeypatch.setattr(module, "TICK_S", 0.001)
    for stream in (io.StringIO(), Terminal()):
        with Progress("making", "bytes", steady=True, stream=stream):
            deadline = time.monotonic() + 10
            while "making: " not in stream.getvalue() and time.monotonic() < deadline:
                time.sleep(0.001)
        assert "making: " in stream.getvalue()


def test_a_terminal_that_does_not_tell_its_width_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.0)
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    ours, theirs = os.openpty()  # of no size
    with (
        os.fdopen(ours, "rb", buffering=0) as screen,
        os.fdopen(theirs, "w") as stream,
        Progress("making", "bytes", stream=stream) as progress,
    ):
        progress(1 << 20, 4 << 20)
        stream.flush()
        said = b""
        while b"making: " not in said:  # a terminal hands over what is there
            assert select.select([screen], [], [], 10)[0], said
            said += screen.read(4096)


def test_a_line_for_stdout_takes_the_place_of_the_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.0)
    stream = Terminal()
    with Progress("trying", "checks", stream=stream) as progress:
        progress(1, 4)
        progress.print("ok")
        assert stream.getvalue().endswith(WIPED)
        progress(2, 4)
        assert "2/4" in stream.getvalue()
    assert capsys.readouterr().out == "ok\n"


def test_a_terminal_that_cannot_wipe_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", -1.0)
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Progress("converting", "tokens", stream=stream) as progress:
        for done in range(3):
            progress(done, 2)
    assert stream.getvalue().splitlines() == [
        "neuronpipe: converting: 0 %, 0 of 2 tokens, 0 s",
        "neuronpipe: converting: 50 %, 1 of 2 tokens, 0 s",
        "neuronpipe: converting: 100 %, 2 of 2 tokens, 0 s",
    ]


def test_a_bar_is_drawn_ten_times_a_second_however_often_work_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", -1.0)
    stream = Terminal()
    began = time.monotonic()
    with Progress("converting", "tokens", stream=stream) as progress:
        for done in range(10_000):
            progress(done, 10_000)
    assert stream.getvalue().count("converting:") <= 3 + 10 * (time.monotonic() - began)


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize(("unit", "total"), [("bytes", 47 << 30), ("tokens", 1_234_567)])
def test_a_bar_takes_one_line(monkeypatch: pytest.MonkeyPatch, columns: int, unit: Any, total: int) -> None:
    monkeypatch.setattr(module, "SILENT_S", -1.0)
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    with Progress("testing", unit, stream=stream) as progress:
        progress(total // 2, total)
        shown = stream.getvalue()
    assert "\n" not in shown
    assert " 50%" in shown
    assert "…" not in shown


def test_a_command_is_silent_for_two_seconds_not_each_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(module, "_silent_since_s", now)
    stream = io.StringIO()
    now = 101.5  # planned
    with Elapsed(stream=stream) as elapsed:
        now = 101.9
        elapsed.say("starting")
        assert stream.getvalue() == ""
    with Progress("scoring", "tokens", stream=stream) as progress:
        now = 103.5
        progress(0, 40)
    with Progress("writing", "tokens", stream=stream) as progress:
        now = 105.0
        progress(1, 4)
    with Elapsed(stream=stream) as elapsed:
        elapsed.say("ending")
    now = 110.0
    module.note_output()
    with Elapsed(stream=stream) as elapsed:
        now = 111.9
        elapsed.say("starting")
        now = 112.0
        elapsed.say("starting")
    assert stream.getvalue().splitlines() == [
        "neuronpipe: scoring: 0 %, 0 of 40 tokens, 4 s",
        "neuronpipe: starting, 2 s",
    ]


def test_a_command_begins_with_its_process() -> None:
    script = """
import sys, time
from neuronpipe.launch import progress as module
time.sleep(0.6)
module.begin_command()
module.SILENT_S = 0.5
with module.Progress("planning", "checks") as progress:
    progress(1, 4)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stderr
    assert said.startswith("neuronpipe: planning: 25 %, 1 of 4 checks")


def test_a_terminal_hears_of_work_before_what_draws_the_bar_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", -1.0)
    stream, said = Terminal(), list[str]()
    draw = module._bar
    monkeypatch.setattr(module, "_bar", lambda *given: (said.append(stream.getvalue()), draw(*given))[1])
    with Progress("making", "bytes", stream=stream) as progress:
        progress(1 << 20, 4 << 20)
    assert said == [f"{module.WIPE}making ..."]
    assert stream.getvalue().removeprefix(said[0]).startswith(module.WIPE)


def test_who_waits_shows_that_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    stream, terminal = io.StringIO(), Terminal()
    with Progress("trying", "checks", stream=stream) as log, Progress("trying", "checks", stream=terminal) as bar:
        now = 104.0
        module.refresh()  # nobody knows of this work yet
        assert (stream.getvalue(), terminal.getvalue()) == ("", "")
        log(1, 4)
        bar(1, 4)
        for now in (104.5, 105.0, 110.0, 119.5):
            drawn = len(terminal.getvalue())
            module.refresh()
            assert (len(terminal.getvalue()) > drawn) == (now != 104.5)
        assert "0:00:10" in terminal.getvalue()
    now = 200.0
    module.refresh()
    assert stream.getvalue().splitlines() == [
        f"neuronpipe: trying: 25 %, 1 of 4 checks, {second} s" for second in (4, 20)
    ]


def test_a_part_that_computes_has_a_thread_show_it_and_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.0)
    monkeypatch.setattr(module, "TICK_S", 0.001)
    monkeypatch.setattr(module, "REFRESH_S", 0.001)
    stream, threads = Terminal(), threading.active_count()
    with Progress("measuring", "figures", stream=stream) as progress:
        progress(1, 4)
        before = len(stream.getvalue())
        with module.refreshing():
            deadline = time.monotonic() + 10
            while len(stream.getvalue()) == before and time.monotonic() < deadline:
                time.sleep(0.001)
        assert len(stream.getvalue()) > before
        assert threading.active_count() == threads
