"""The command that serves several packages: it starts and ends runs as its gateway asks. Both are played."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from neuronpipe.launch.serving import host
from neuronpipe.launch.serving.host import Host
from neuronpipe.launch.serving.offers import Offer
from neuronpipe.services.runtime.listener import bind


class PlayedRun:
    """A run that ends when its report is written, whoever told it to."""

    def __init__(self) -> None:
        self.report, self.theirs = os.pipe()
        self.directory = SimpleNamespace(path=Path("/run"))
        self.told = 0

    def begin_to_stop(self) -> None:
        self.told += 1

    def failed(self) -> str:
        return os.read(self.report, 1 << 10).decode() or "the run has ended"


class Link:
    """The gateway's end: lines of JSON."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._lines = link, link.makefile("r")

    def say(self, **message: str) -> None:
        self._link.sendall(json.dumps(message).encode() + b"\n")

    def heard(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self._lines.readline())
        return said


Play = Callable[[Callable[[Link, dict[str, PlayedRun]], None]], list[str]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Play:
    """play(gateway): serve two packages with this gateway, which runs in a child, until it ends; what was said."""
    runs = {"a": PlayedRun(), "b": PlayedRun()}
    monkeypatch.setattr(host, "close_descriptors", lambda unwanted: None)  # the played gateway ends the played runs

    @contextmanager
    def started_run(name: str, *_: object, **__: object) -> Iterator[PlayedRun]:
        yield runs[name]

    def serve(gateway: Callable[[Link, dict[str, PlayedRun]], None]) -> list[str]:
        command = os.getpid()

        def serve_hosted(_: object, __: object, link: socket.socket, ___: object) -> None:
            try:
                gateway(Link(link), runs)
            finally:
                os.kill(command, signal.SIGINT)
                signal.pause()

        monkeypatch.setattr(host, "started_run", started_run)
        monkeypatch.setattr(host, "serve_hosted", serve_hosted)
        offers = {name: Offer(cast(Any, name), cast(Any, None), cast(Any, None)) for name in runs}
        said: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            Host(offers, cast(Any, None), bind("127.0.0.1", 0, None), said.append).serve(lambda: None)
        assert "Traceback" not in capfd.readouterr().err
        return said

    return serve


def test_a_run_that_takes_long_to_end_does_not_hold_up_another(play: Play) -> None:
    def gateway(link: Link, runs: dict[str, PlayedRun]) -> None:
        link.say(start="a")
        assert link.heard()["started"] == "a"
        link.say(end="a")
        link.say(start="b")
        assert link.heard()["started"] == "b"
        os.write(runs["a"].theirs, b"\n")
        assert link.heard() == {"ended": "a", "why": "it was ended", "again_in_s": 0.0}

    assert play(gateway) == ["a is started: /run", "b is started: /run", "a has ended: its memory is free"]


def test_a_run_that_ends_while_it_is_told_to_is_told_of_once(play: Play) -> None:
    def gateway(link: Link, runs: dict[str, PlayedRun]) -> None:
        link.say(start="a")
        assert link.heard()["started"] == "a"
        os.write(runs["a"].theirs, b"out of luck\n")
        link.say(end="a")
        ended = link.heard()
        assert ended["ended"] == "a"
        link.say(start="b")
        assert link.heard()["started"] == "b"

    said = play(gateway)
    assert [line for line in said if line.startswith("a ")][1:] in (
        ["a has ended: its memory is free"],
        ["a has ended: out of luck\n; the next request starts it again, in 1 s at the earliest"],
    )


def test_a_signal_that_is_ignored_ends_nothing(play: Play) -> None:
    def gateway(link: Link, runs: dict[str, PlayedRun]) -> None:
        os.kill(os.getppid(), signal.SIGHUP)
        link.say(start="a")
        assert link.heard()["started"] == "a"

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert play(gateway) == ["a is started: /run"]
    finally:
        signal.signal(signal.SIGHUP, before)
