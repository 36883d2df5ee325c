"""Keys of a terminal, as they come: several at once, in pieces, and none any more."""

from __future__ import annotations

import os
import pty
import threading
from collections.abc import Iterator

import pytest
from neuronpipe.launch.watch.pager import CLOSED, Keyboard

from tests.pipeline import SLOWER

DOWN = "\x1b[B"
PATIENCE_S = 5 * SLOWER


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, Keyboard]]:
    master, slave = pty.openpty()
    with os.fdopen(slave) as standard_input:
        monkeypatch.setattr("sys.stdin", standard_input)
        with Keyboard() as keyboard:
            yield master, keyboard
    os.close(master)


def test_keys_that_come_together_are_told_apart(terminal: tuple[int, Keyboard]) -> None:
    master, keyboard = terminal
    os.write(master, f"{DOWN}{DOWN}jé\x1b[5~q".encode())
    assert [keyboard.pressed(PATIENCE_S) for _ in range(6)] == [DOWN, DOWN, "j", "é", "\x1b[5~", "q"]
    assert keyboard.pressed(0.0) == ""


def test_an_arrow_in_two_pieces_is_no_escape(terminal: tuple[int, Keyboard], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.launch.watch.pager.KEY_TAIL_S", PATIENCE_S)
    master, keyboard = terminal
    os.write(master, b"\x1b")
    rest = threading.Timer(0.02, os.write, (master, b"[B"))
    rest.start()
    assert keyboard.pressed(PATIENCE_S) == DOWN
    rest.join()


def test_escape_alone_is_a_key(terminal: tuple[int, Keyboard]) -> None:
    master, keyboard = terminal
    os.write(master, b"\x1b")
    assert keyboard.pressed(PATIENCE_S) == "\x1b"


def test_a_terminal_that_has_gone_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave) as standard_input:
        monkeypatch.setattr("sys.stdin", standard_input)
        with Keyboard() as keyboard:
            os.close(master)
            assert keyboard.pressed(PATIENCE_S) == CLOSED
