"""`--help` fits one screen; `--help-all` has every option."""

from __future__ import annotations

import pytest
from neuronpipe.launch.arguments.verbs import VERBS, verb_module, verb_parser
from neuronpipe.launch.cli import main

MAX_LINES = 40
EXPERIMENTS = ("--without", "--baseline", "--hints", "--backend")
SHORT = [verb for verb in VERBS if hasattr(verb_module(verb), "COMMON_OPTIONS")]


@pytest.mark.parametrize("verb", SHORT)
def test_the_help_of_a_verb_with_many_options_fits_a_screen(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short = verb_parser(verb).format_help()
    assert len(short.splitlines()) <= MAX_LINES
    assert "--help-all" in short
    assert not any(option in short for option in EXPERIMENTS)


@pytest.mark.parametrize("verb", SHORT)
def test_what_the_short_help_shows_exists(verb: str) -> None:
    assert {*verb_module(verb).COMMON_OPTIONS} <= {action.dest for action in verb_parser(verb)._actions}


@pytest.mark.parametrize("words", [("run", "--help-all"), ("help", "run", "--all")])
def test_all_options_can_be_shown(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) if words[0] == "run" else pytest.MonkeyPatch.context():
        assert main(list(words)) == 0
    shown = capsys.readouterr().out
    assert all(option in shown for option in verb_parser("run").options)


def test_the_verbs_fit_a_screen_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 50
    assert all(any(line.startswith(f"  {verb}") for line in lines) for verb in VERBS)
