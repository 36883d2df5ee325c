"""A GGUF file or a Hugging Face folder where a package belongs: a package is made of it once, and found again."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from neuronpipe.launch.cli import main
from neuronpipe.plans.convert import conversion
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.pull import source_models as sources
from neuronpipe.plans.pull.package_library import Unfinished, begin, package_names, pull_names, pulls_folder

from tests.conformance.checkpoints import TINY, write_checkpoint
from tests.conformance.gguf_files import write_gguf


class Said(NamedTuple):
    """What a command came to, in this process."""

    code: int
    out: str
    errors: str


class Store:
    """A data folder of nobody else, and a model in a file."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.data, self.gguf, self._capfd = folder / "data", folder / "my möwe.gguf", capfd
        write_gguf(self.gguf, TINY)

    def call(self, *words: str | Path) -> Said:
        """Run a command in this process."""
        code = main([str(word) for word in words])
        captured = self._capfd.readouterr()
        assert "Traceback" not in captured.err
        return Said(code, captured.out, captured.err)

    def inspected(self, path: str | Path) -> str:
        """The package that a path or a name leads to."""
        done = self.call("inspect", path, "--json")
        assert done.code == 0, done.errors
        return str(json.loads(done.out)["path"])

    def refused(self, path: Path) -> str:
        """The one line with which it is refused."""
        done = self.call("inspect", path)
        assert done.code == 2, done
        assert done.out == ""
        return done.errors.splitlines()[-1]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Store:
    monkeypatch.setenv("NEURONPIPE_DATA", str(tmp_path / "data"))
    return Store(tmp_path, capfd)


def test_a_file_is_converted_once_and_called_by_its_name(store: Store) -> None:
    first = store.call("inspect", store.gguf, "--json")
    assert f"{store.gguf}: converting it, once" in first.errors
    package = json.loads(first.out)["path"]
    assert "converting" not in store.call("inspect", store.gguf).errors
    assert store.inspected("my-m-we") == store.inspected(store.gguf) == package
    (listed,) = json.loads(store.call("list", "--json").out)["packages"]
    assert (listed["name"], listed["source"]) == ("my-m-we", str(store.gguf))
    assert store.call("rm", "my-m-we").code == 0
    assert package_names() == []
    assert "converting it, once" in store.call("inspect", store.gguf).errors


def test_a_folder_is_as_good_as_a_file_and_another_of_its_name_has_another(store: Store, tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path / "a" / "Model", TINY)
    other = write_checkpoint(tmp_path / "b" / "Model", replace(TINY, layers=1))
    assert Path(store.inspected(one)).name == "Model"
    assert Path(store.inspected(other)).name == "Model-2"
    link = tmp_path / "link"
    link.symlink_to(one)
    assert Path(store.inspected(link)).name == "Model"


def test_a_changed_model_replaces_its_package(store: Store) -> None:
    before = Package.open(Path(store.inspected(store.gguf))).manifest.model.layers
    write_gguf(store.gguf, replace(TINY, layers=before + 1))
    done = store.call("inspect", store.gguf, "--json")
    assert "the model has changed: converting it again" in done.errors
    assert Package.open(Path(json.loads(done.out)["path"])).manifest.model.layers == before + 1
    assert package_names() == ["my-m-we"]


def test_convert_makes_the_package_that_the_model_stands_for(store: Store) -> None:
    done = store.call("convert", store.gguf, "--quantization", "f16", "--json")
    assert done.code == 0, done.errors
    said = json.loads(done.out)
    assert (said["name"], said["quantization"]) == ("my-m-we", "f16")
    assert store.inspected(store.gguf) == said["package"]
    taken = store.call("convert", store.gguf)
    assert (taken.code, "my-m-we: is there already" in taken.errors) == (2, True)
    other = store.call("convert", store.gguf, "--name", "other")
    assert "neuronpipe run other -p TEXT" in other.out
    assert package_names() == ["my-m-we", "other"]
    again = store.call("convert", store.gguf, "--overwrite", "--json")
    assert json.loads(again.out)["quantization"] == "q4k"
    assert package_names() == ["my-m-we", "other"]
    assert "is no name for a package" in store.call("convert", store.gguf, "--name", "a/b").errors


def test_a_changed_model_does_not_replace_what_convert_was_asked_for(store: Store) -> None:
    assert store.call("convert", store.gguf, "--quantization", "f16").code == 0
    write_gguf(store.gguf, replace(TINY, layers=TINY.layers + 1))
    said = store.refused(store.gguf)
    command = f"neuronpipe convert '{store.gguf}' --quantization f16 --overwrite"
    assert said.endswith(f"has changed since `convert` made my-m-we of it; make that anew with `{command}`")
    folder = pulls_folder() / "my-m-we"
    folder.mkdir(parents=True)
    begin(folder, Unfinished(str(store.gguf), "", tuple(shlex.split(command)[1:])))  # as a kill leaves it
    assert store.refused(store.gguf) == said
    assert pull_names() == ["my-m-we"]
    assert store.call(*shlex.split(command)[1:]).code == 0
    assert pull_names() == []
    manifest = Package.open(Path(store.inspected(store.gguf))).manifest
    assert (manifest.quantization, manifest.model.layers) == ("f16", TINY.layers + 1)


def test_convert_keeps_an_interrupted_pull_of_that_name(store: Store) -> None:
    folder = pulls_folder() / "mine"
    folder.mkdir(parents=True)
    begin(folder, Unfinished("org/model", "c0ffee", ("pull", "org/model", "--name", "mine")))
    said = store.call("convert", store.gguf, "--name", "mine")
    assert (said.code, "an interrupted command makes a package of org/model" in said.errors) == (2, True)
    assert pull_names() == ["mine"]


def test_what_ends_a_conversion_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion.Conversion, "write", interrupted)
    done = store.call("inspect", store.gguf)
    assert done.code == 2
    assert "the process that converts was ended" in done.errors
    assert (package_names(), pull_names()) == ([], [])
    assert not list(pulls_folder().iterdir())


def test_a_killed_conversion_is_taken_up_by_the_next_command(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(conversion.Conversion, "write", lambda *_, **__: os.kill(os.getpid(), 9))
        assert "the process that converts was ended" in store.refused(store.gguf)
    (unfinished,) = json.loads(store.call("list", "--json").out)["unfinished"]
    assert unfinished["command"] == ["inspect", str(store.gguf)]
    assert Path(store.inspected(store.gguf)).name == "my-m-we"
    assert pull_names() == []


def test_a_full_disk_is_noticed_before_anything_is_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(store.data.parent)
    monkeypatch.setattr(sources.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    said = store.refused(store.gguf)
    assert re.search(rf"{re.escape(str(store.gguf))}: a package of it takes \d+\.\d KiB, and 1", said)
    assert "make room for" in said
    assert (package_names(), pull_names()) == ([], [])


def test_a_second_command_waits_for_the_package_of_the_first(store: Store) -> None:
    folder = store.data / "pulls" / "my-m-we"
    folder.mkdir(parents=True)
    held = (folder / "lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)

    def leave() -> None:
        time.sleep(0.6)
        shutil.rmtree(folder)
        held.close()

    leaving = threading.Thread(target=leave)
    leaving.start()
    began = time.monotonic()
    assert Path(store.inspected(store.gguf)).name == "my-m-we"
    assert time.monotonic() - began > 0.5
    leaving.join()


def test_what_is_no_whole_model_is_named_with_what_to_do(store: Store, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", TINY)
    assert "convert its directory" in store.refused(folder / "model.safetensors")
    (folder / "config.json").unlink()
    assert f"{folder}: no package, which has manifest.json, and no Hugging Face model" in store.refused(folder)
    text = tmp_path / "notes.gguf"
    text.write_text("no model")
    assert str(text) in store.refused(text)
    assert (package_names(), pull_names()) == ([], [])
