"""Completion and the manual page know every word there is, since they are made from the parsers."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from neuronpipe.launch.arguments.verbs import ALIASES, TWO_WORD_VERBS, VERBS, verb_parser
from neuronpipe.launch.cli import main
from neuronpipe.launch.verbs.command.completion import SHELLS
from neuronpipe.launch.verbs.command.man import page

OPTIONS = {option for verb in VERBS for option in verb_parser(verb).options if option.startswith("--")}


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """What `completion` prints for the shell of the test."""
    assert main(["completion", request.param]) == 0
    file = tmp_path / f"completion.{request.param}"
    file.write_text(capsys.readouterr().out)
    return file


@pytest.mark.parametrize("script", SHELLS, indirect=True)
def test_every_verb_and_option_is_completed(script: Path) -> None:
    words = set(re.findall(r"[\w-]+", script.read_text().replace("-l ", "--")))
    assert {*VERBS, *ALIASES, *OPTIONS} - words == set()


@pytest.mark.parametrize("script", ["bash"], indirect=True)
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["st"], ["status", "stop"]),
        (["run", "--mod"], ["--mode"]),
        (["stop", "--r"], ["--run"]),
        (["run", "--mode", ""], ["exact", "predicted", "thresholded"]),
        (["run", "--mode", "pr"], ["predicted"]),
        (["profile", "d"], ["device", "diff"]),
        (["help", "stat"], ["status"]),
        (["show", "tiny"], ["tiny-model"]),
        (["run", "tiny"], ["tiny-model"]),
        (["run", "--plan", "READ"], ["README.md"]),
    ],
)
def test_bash_offers_what_fits(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str], offered: list[str]
) -> None:
    (tmp_path / "packages" / "tiny-model").mkdir(parents=True)
    monkeypatch.setenv("NEURONPIPE_DATA", str(tmp_path))
    (tmp_path / "README.md").touch()
    monkeypatch.chdir(tmp_path)
    ask = """source "$1"; shift; COMP_WORDS=(neuronpipe "$@"); COMP_CWORD=$#
        _shtab_neuronpipe neuronpipe "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
        printf "%s\\n" "${COMPREPLY[@]}" """
    ran = subprocess.run(["bash", "-c", ask, "bash", str(script), *typed], capture_output=True, text=True, check=True)
    assert (ran.stdout.split(), ran.stderr) == (offered, "")


@needs("fish")
@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish_offers_what_fits(script: Path) -> None:
    ask = f"source {script}; complete -C 'neuronpipe run --mode '"
    ran = subprocess.run(["fish", "-c", ask], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in ran.stdout.splitlines()] == ["exact", "predicted", "thresholded"]


@needs("zsh")
@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh_reads_it(script: Path) -> None:
    ran = subprocess.run(["zsh", "-f", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_manual_has_every_verb_and_option() -> None:
    shown = page().replace("\\-", "-")
    assert all(f'.SS "neuronpipe {verb}"' in shown for verb in (*VERBS, *TWO_WORD_VERBS))
    assert {option for option in OPTIONS if f"\\fB{option}\\fR" not in shown} - {"--help"} == set()
    assert not re.search(r"(?m)^['.](?!TH|SH|SS|TP|PP|B |I |nh|ad)", shown)


@needs("groff")
def test_the_manual_is_sound_roff() -> None:
    ran = subprocess.run(["groff", "-man", "-ww", "-Tascii"], input=page(), capture_output=True, text=True, check=True)
    assert ran.stderr == ""


def test_the_package_is_a_command_as_well() -> None:
    ran = subprocess.run([sys.executable, "-m", "neuronpipe", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("neuronpipe ")
