"""`serve --install` and `--uninstall`, in a home of their own, with systemd's programs played by scripts."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.cli import main
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.serving import installation
from neuronpipe.launch.serving.login_service import KEEP_ALIVE, MARK, login_service, server_words
from neuronpipe.protocol.errors import UserError

KEY = "0123456789abcdef$%"


class Home:
    """A home folder, and the commands that were run from it."""

    def __init__(self, path: Path) -> None:
        self.path, self._log = path, path / "commands"
        self.unit = path / ".config/systemd/user/neuronpipe.service"

    def play(self, *programs: str, code: int = 0) -> None:
        """Put programs into the path that note how they are called."""
        for program in programs:
            script = self.path / "bin" / program
            script.parent.mkdir(exist_ok=True)
            script.write_text(
                f'#!/bin/sh\necho "{program} $*" >>{self._log}\n[ {code} = 0 ] || echo no bus >&2\nexit {code}\n'
            )
            script.chmod(0o755)

    @property
    def commands(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for name in ("XDG_CONFIG_HOME", "TERMUX_VERSION", "NEURONPIPE_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    made = Home(tmp_path)
    made.play("systemctl", "loginctl")
    return made


def test_a_unit_is_shown_written_and_started_and_all_of_it_is_taken_back(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(DEMO), "--port", "8123", "--install"]) == 0
    shown, text = capsys.readouterr().out, home.unit.read_text()
    assert all(line in shown for line in text.splitlines())
    assert f'ExecStart="{sys.executable}" "-m" "neuronpipe.launch" "serve" "{DEMO}" "--port" "8123"' in text
    assert f"WorkingDirectory={Path.cwd()}\n" in text
    assert stat.S_IMODE(home.unit.stat().st_mode) == 0o600
    assert [command.rpartition(" ")[0] for command in home.commands] == [
        "systemctl --user",
        "systemctl --user enable",
        "systemctl --user restart",
        "loginctl enable-linger",
    ]
    assert main(["serve", "--uninstall"]) == 0
    assert home.commands[-2:] == ["systemctl --user disable --now neuronpipe.service", "systemctl --user daemon-reload"]
    assert not home.unit.exists()
    assert [path.name for path in home.unit.parent.iterdir()] == []
    assert main(["serve", "--uninstall"]) == 2
    assert "no server was installed" in capsys.readouterr().err


def test_a_second_installation_says_that_it_replaces_the_first(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", str(DEMO), "--install"])
    capsys.readouterr()
    assert main(["serve", str(DEMO), "--install", "--keep-alive", "forever", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replaced"]
    assert '"--keep-alive" "forever"' in home.unit.read_text()
    assert '"5m"' not in home.unit.read_text()


@pytest.mark.parametrize("verb", [["--uninstall"], [str(DEMO), "--install"]])
def test_a_file_of_another_program_stays_as_it_is(
    home: Home, verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    home.unit.parent.mkdir(parents=True)
    home.unit.write_text("[Service]\n")
    assert main(["serve", *verb]) == 2
    assert "did not write it; move it away first" in capsys.readouterr().err
    assert (home.unit.read_text(), home.commands) == ("[Service]\n", [])


def test_a_command_that_fails_is_reported_with_what_does_not_work(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    home.play("systemctl", code=1)
    (home.path / "bin/loginctl").unlink()
    assert main(["serve", str(DEMO), "--install", "--json"]) == 0
    failures = json.loads(capsys.readouterr().out)["failures"]
    assert "the server does not start at login: no bus" in failures
    assert "the server ends at logout: there is no loginctl" in failures


def test_a_key_is_in_the_file_and_neither_shown_nor_among_the_words_of_the_process(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--key", KEY], [f"--key={KEY}"]):
        assert main(["serve", str(DEMO), "--host", "0.0.0.0", *words, "--install"]) == 0
        assert KEY not in capsys.readouterr().out
        assert 'Environment="NEURONPIPE_KEY=0123456789abcdef$%%"\n' in home.unit.read_text()
        assert "--key" not in home.unit.read_text().split()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "name the packages to serve"),
        (["/no/such/package"], "/no/such/package"),
        ([str(DEMO), "--host", "0.0.0.0"], "a key is needed"),
        ([str(DEMO), "--uninstall"], "not allowed with"),
    ],
)
def test_what_the_server_would_refuse_is_refused_before_anything_is_written(
    home: Home, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main(["serve", *words, "--install"])
    except SystemExit as usage:
        code = usage.code
    assert code == 2
    assert why in capsys.readouterr().err
    assert not home.unit.exists()


def test_a_system_without_a_way_to_start_it_is_told_so(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    with pytest.raises(UserError, match="expected systemd, or Termux"):
        login_service({}, home.path, "me", ["neuronpipe"], home.path, None)


def test_on_a_phone_a_script_takes_the_wake_lock_and_starts_the_server(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERMUX_VERSION", "0.118")
    monkeypatch.setenv("PREFIX", "/usr")
    monkeypatch.setattr(installation, "PROGRAM", ("/bin/sh", "-c", 'echo "$NEURONPIPE_KEY $*"', "sh"))
    assert main(["serve", str(DEMO), "--install", "--key", KEY]) == 0
    script = home.path / ".termux/boot/neuronpipe"
    assert script.read_text().startswith(f"#!/usr/bin/sh\n{MARK}\n")
    assert stat.S_IMODE(script.stat().st_mode) == 0o700
    assert "Termux:Boot" in capsys.readouterr().out
    home.play("termux-wake-lock")
    subprocess.run(["/bin/sh", script], check=True)
    assert home.commands == ["termux-wake-lock "]
    assert (home.path / ".neuronpipe-serve.log").read_text() == f"{KEY} serve {DEMO} --keep-alive 5m\n"
    assert main(["serve", "--uninstall"]) == 0
    assert not script.exists()


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["serve", "m", "--install"], ["serve", "m", *KEEP_ALIVE]),
        (["serve", "m", "--inst", "--port=1"], ["serve", "m", "--port=1", *KEEP_ALIVE]),
        (["serve", "m", "--install", "--keep-alive=1h"], ["serve", "m", "--keep-alive=1h"]),
        (["serve", "m", "--plan", "p.json", "--install"], ["serve", "m", "--plan", "p.json"]),
        (["serve", "m", "--key", "a", "--install"], ["serve", "m", *KEEP_ALIVE]),
    ],
)
def test_the_server_starts_with_the_options_that_were_typed(words: list[str], kept: list[str]) -> None:
    assert server_words(words) == kept


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "neuronpipe.launch", "serve", 'a "model" of 100%', "--name=$HOME\\x", "ü"]
    service = login_service({"XDG_RUNTIME_DIR": "/run"}, tmp_path, "me", program, tmp_path, KEY)
    unit = tmp_path / service.path.name
    unit.write_text(service.text)
    result = subprocess.run(
        ["systemd-analyze", "verify", "--user", unit],
        env={"XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
