"""Progress is silent for short work, one line per tenth in a log, and a bar that goes away on a terminal."""

from __future__ import annotations

import io

import pytest
from neuronpipe.launch import progress as module
from neuronpipe.launch.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_short_work_says_nothing() -> None:
    stream = io.StringIO()
    with Progress("converting", "bytes", stream=stream) as progress:
        for done in range(101):
            progress(done, 100)
    assert stream.getvalue() == ""


def test_a_log_gets_one_line_per_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", -1.0)
    stream = io.StringIO()
    with Progress("converting", "tokens", stream=stream) as progress:
        for done in range(0, 1001):
            progress(done, 1000)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[2] == "neuronpipe: converting: 30 %, 300 of 1,000 tokens, 0 s"


def test_a_terminal_gets_a_bar_that_is_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.0)
    stream = Terminal()
    with Progress("converting", "bytes", stream=stream) as progress:
        progress(1 << 20, 4 << 20)
    assert "converting:" in stream.getvalue()
    assert stream.getvalue().split("\r")[-2].strip() == ""


def test_json_output_gets_lines_on_a_terminal_too() -> None:
    stream = Terminal()
    with Progress("converting", "bytes", plain=True, stream=stream) as progress:
        progress(1, 2)
    assert stream.getvalue() == ""


def test_work_of_no_size_is_done() -> None:
    with Progress("converting", "bytes", stream=io.StringIO()) as progress:
        progress(0, 0)
