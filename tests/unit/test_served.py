"""The server of tests and measurements: what it may say besides its address."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.http_client import served
from tests.pipeline import Shell

SERVER = """
import signal, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
print(%r, file=sys.stderr, flush=True)
print('{"address": "http://127.0.0.1:9", "run": "/nowhere"}', flush=True)
signal.pause()
"""


class PlayedShell(Shell):
    """Its only command is a server that says this."""

    said = ""

    def start(self, *words: object, **options: object):  # type: ignore[no-untyped-def, override]
        return super().start(program=(sys.executable, "-c", SERVER % self.said))


@pytest.fixture
def played(tmp_path: Path) -> PlayedShell:
    return PlayedShell(tmp_path)


def test_what_a_real_machine_has_a_server_say_ends_no_measurement(
    played: PlayedShell, capsys: pytest.CaptureFixture[str]
) -> None:
    played.said = "neuronpipe: measured flash again, since nothing had confirmed it"
    with served(played, notices=True) as server:
        assert server.port == 9
    assert capsys.readouterr().err == f"{played.said}\n"


@pytest.mark.parametrize(
    ("said", "notices"), [("Traceback (most recent call last):", True), ("neuronpipe: measured flash again", False)]
)
def test_anything_else_does(played: PlayedShell, said: str, notices: bool) -> None:
    played.said = said
    with pytest.raises(AssertionError, match=said.partition("(")[0]), served(played, notices=notices):
        pass
