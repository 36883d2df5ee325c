"""The settings file: what is not typed every time, checked as if it was, and named where it is wrong."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from neuronpipe.launch.arguments.command_line import parse
from neuronpipe.launch.arguments.plan_arguments import plan_options
from neuronpipe.launch.arguments.settings import settings_file
from neuronpipe.launch.cli import main
from neuronpipe.launch.doctor.checks import checks
from neuronpipe.launch.planning import DEMO
from neuronpipe.protocol.errors import UserError


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("NEURONPIPE_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    place = tmp_path / "neuronpipe" / "config.toml"
    place.parent.mkdir()
    return place


def parsed(*words: str) -> argparse.Namespace:
    return parse(list(words))


def test_what_is_not_typed_comes_from_the_file(file: Path) -> None:
    file.write_text('[run]\nmemory = "1GiB"\ntemperature = 0.25\nraw = true\nstop = ["a", "b"]\npackage = "nowhere"\n')
    asked = parsed("run", "-p", "x")
    assert (asked.memory, asked.temperature, asked.raw, asked.stop) == (1 << 30, 0.25, True, ["a", "b"])
    assert asked.package == Path("nowhere")
    typed = parsed("run", str(DEMO), "-p", "x", "--memory", "2GiB", "--temperature", "1", "--stop", "c")
    assert (typed.memory, typed.temperature, typed.stop, typed.package) == (2 << 30, 1.0, ["a", "b", "c"], DEMO)
    other = parsed("chat")
    assert (other.memory, other.package) == (None, DEMO)


def test_a_setting_gives_way_to_a_plan_that_is_named(file: Path) -> None:
    file.write_text('[run]\nmemory = "1GiB"\nbackend = ["decode=cpu"]\n')
    assert plan_options(parsed("run", "-p", "x", "--plan", "plan.json")).typed == ("--plan",)
    with pytest.raises(UserError, match="--memory and --plan"):
        plan_options(parsed("run", "-p", "x", "--plan", "plan.json", "--memory", "1GiB"))
    with pytest.raises(UserError, match="--backend and --plan"):
        plan_options(parsed("run", "-p", "x", "--plan", "plan.json", "--backend", "prefill=cpu"))
    file.write_text('[run]\nplan = "plan.json"\n')
    with pytest.raises(UserError, match="--memory and --plan"):
        plan_options(parsed("run", "-p", "x", "--memory", "1GiB"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[run]\nmemroy = 1\n", "[run] memroy: there is no such option; did you mean memory?"),
        ("[run]\nmemory = 'much'\n", "[run] memory: 'much' is not a size"),
        ("[run]\nmode = 'fast'\n", "[run] mode: invalid choice: 'fast'"),
        ("[run]\nraw = 1\n", "[run] raw: 1: expected true or false"),
        ("[run]\nmemory = [1]\n", "[run] memory: [1]: expected a text or a number"),
        ("[run]\nmemory = true\n", "[run] memory: True: expected a text or a number"),
        ("[run]\nhelp = true\n", "[run] help: there is no such option"),
        ("[serv]\nport = 1\n", "[serv] is not a verb; did you mean [serve]?"),
        ("memory = 1\n", "[memory] is not a verb: a section is named after a verb, e.g. [run]"),
        ("run = 1\n", "run: belongs in the section of a verb"),
        ("[run\n", "is not TOML: "),
        (
            "[run]\nmemory = 'ä'\n".encode("latin1"),
            "line 2, byte 11: 0xe4 is not UTF-8; save the file as UTF-8 in an editor",
        ),
        ("[run]\n".encode("utf-16"), "line 1, byte 1: 0xff is not UTF-8"),
    ],
)
def test_a_mistake_is_one_line_that_names_file_and_key(
    file: Path, capsys: pytest.CaptureFixture[str], content: str | bytes, said: str
) -> None:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["run", "-p", "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"neuronpipe: {file}: {said}")


def test_a_byte_order_mark_is_no_mistake(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf[run]\nmemory = '1GiB'\n")
    assert parsed("run", "-p", "x").memory == 1 << 30


def test_help_ends_with_the_settings(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text('[run]\nffn-resident = "50%"\n')
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert capsys.readouterr().out.endswith(f"\nfrom {file}:\n  --ffn-resident 50%\n")


def test_the_doctor_looks_at_the_settings_of_all_verbs(file: Path, tmp_path: Path) -> None:
    file.write_text("[serve]\nport = 9\n[run]\nmemory = 5000000000\n")
    assert [check.found for check in checks(tmp_path) if check.name == "settings"] == [
        f"{file}: serve: port; run: memory"
    ]
    file.write_text("[serve]\nport = 'nine'\n")
    (found,) = [check for check in checks(tmp_path) if check.name == "settings"]
    assert found.state == "fail"
    assert "[serve] port: invalid int value: 'nine'" in found.found


def test_where_the_file_is(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_file() == file
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/one")
    assert settings_file() == Path("/home/one/.config/neuronpipe/config.toml")
    monkeypatch.setenv("NEURONPIPE_CONFIG", "/etc/other.toml")
    assert settings_file() == Path("/etc/other.toml")
    monkeypatch.setenv("NEURONPIPE_CONFIG", "")
    assert settings_file() is None
