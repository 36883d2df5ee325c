"""What strangers chose, names of files and of models, reaches a terminal as text and never as a command to it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from neuronpipe.launch.cli import main
from neuronpipe.launch.formats import shell_line
from neuronpipe.plans.package.manifest import identity

from tests.conformance.checkpoints import TINY
from tests.conformance.gguf_files import write_gguf

HOSTILE = "m\x1b[31m\x07\u202e'\\.gguf"
CLEAR = "\x1b[2J"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in a file whose name, like the one that it gives itself, a terminal would obey."""
    monkeypatch.setenv("NEURONPIPE_DATA", str(tmp_path / "data"))
    return write_gguf(tmp_path / HOSTILE, TINY, name=CLEAR, metadata={"llama.hidden_activation": "relu"})


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command shows, which has nothing but text and ends of lines."""
    main(list(words))
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert text.replace("\n", "").isprintable()
    assert "Traceback" not in text
    return text


def test_names_of_files_and_models_are_shown_as_text(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert r"m\x1b[31m\x07\u202e" in shown(capsys, "convert", str(source))
    listed = shown(capsys, "list")
    assert r"m\x1b[31m\x07\u202e" in listed
    (name,) = os.listdir(tmp_path / "data" / "packages")
    assert "relu" in shown(capsys, "inspect", name)
    shown(capsys, "rm", str(source))
    shown(capsys, "convert", str(source), "-o", str(tmp_path / f"{CLEAR}package"))
    shown(capsys, "inspect", str(tmp_path / f"{CLEAR}package"))
    shown(capsys, "convert", str(source), "--name", CLEAR)
    source.write_bytes(source.read_bytes()[:-40])
    assert "truncated" in shown(capsys, "convert", str(source), "-o", str(tmp_path / "other"))


@pytest.mark.parametrize("field", ["name", "source.name", "source.architecture", "source.weights"])
def test_a_package_whose_manifest_holds_commands_for_a_terminal_is_refused(
    field: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(capsys, "convert", str(source), "-o", str(tmp_path / "package"))
    manifest = tmp_path / "package" / "manifest.json"
    values = json.loads(manifest.read_text())
    *parents, last = field.split(".")
    record = values[parents[0]] if parents else values
    record[last] = {CLEAR: 1} if last == "weights" else CLEAR
    values["id"] = identity({name: value for name, value in values.items() if name != "id"})
    manifest.write_text(json.dumps(values))
    assert field in shown(capsys, "inspect", str(tmp_path / "package"))


def test_a_command_that_is_shown_can_be_pasted_whatever_its_words_are() -> None:
    words = ["plain", "with blank", "it's", HOSTILE, "a\nb", "\udcff", "\xe9\x85"]
    line = shell_line(words)
    assert line.isprintable()
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], stdout=subprocess.PIPE, check=True)
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in words]
