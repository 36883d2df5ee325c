"""Pulling from a hub that does what networks do: breaks off, sends wrong bytes, refuses, knows no ranges."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from neuronpipe.launch.cli import main
from neuronpipe.launch.verbs.packages import pull as pull_verb
from neuronpipe.plans.convert import conversion as conversion_module
from neuronpipe.plans.convert import convert
from neuronpipe.plans.package.atomic_output import disk_usage_bytes
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.pull import downloads as arrival
from neuronpipe.plans.pull import hub as hub_module

from tests.conformance.checkpoints import TINY, Recipe, tensors, write_checkpoint, write_safetensors
from tests.conformance.gguf_files import write_gguf
from tests.hub_mirror import Mirror, hub_mirror

SHARDS = 4
RECIPE = replace(TINY, layers=8, neurons=96)


class Done(NamedTuple):
    """What a command came to, in this process."""

    code: int
    out: str
    errors: str


class Hub:
    """A mirror with one repository, and commands that know it."""

    def __init__(self, mirror: Mirror, data: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.mirror, self.data, self.source, self._capsys = mirror, data, source, capsys

    def call(self, *words: str) -> Done:
        """Run a command; it says whatever it has to say in one line at most, besides what it takes."""
        code = main(list(words))
        captured = self._capsys.readouterr()
        assert "Traceback" not in captured.err
        return Done(code, captured.out, captured.err)

    def pull(self, *words: str) -> dict[str, Any]:
        """A pull that succeeds."""
        done = self.call("pull", *(words or ("org/model",)), "--json")
        assert done.code == 0, done.errors
        return dict(json.loads(done.out))

    def refused(self, *words: str) -> str:
        """What a pull says that fails."""
        done = self.call("pull", *(words or ("org/model",)))
        assert done.code == 2, done
        assert done.out == ""
        return done.errors.splitlines()[-1]

    def listed(self) -> dict[str, Any]:
        """What `list` shows."""
        return dict(json.loads(self.call("list", "--json").out))

    def left(self) -> list[str]:
        """Files in the data folder that belong to no package."""
        return sorted(
            path.relative_to(self.data).as_posix()
            for path in self.data.rglob("*")
            if path.is_file() and path.parent.parent != self.data / "packages"
        )

    @property
    def shards(self) -> list[str]:
        """The names of the repository's files of weights."""
        return sorted(path.name for path in self.source.glob("*.safetensors"))


def write_shards(folder: Path, recipe: Recipe, count: int) -> Path:
    """A checkpoint whose shards follow the layers, as checkpoints have them; the last one has some of one before."""
    write_checkpoint(folder, recipe)
    (folder / "model.safetensors").unlink()
    stored = {name: ("F16", array.shape, array.astype(np.float16).tobytes()) for name, array in tensors(recipe)}
    names = list(stored)
    places = {name: f"model-{1 + n * count // len(names):05}-of-{count:05}.safetensors" for n, name in enumerate(names)}
    for file in sorted(set(places.values())):
        write_safetensors(folder / file, {name: stored[name] for name in names if places[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in shards."""
    return write_shards(tmp_path_factory.mktemp("source") / "model", RECIPE, SHARDS)


@pytest.fixture
def hub(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Hub]:
    """The hub that has it as org/model."""
    with hub_mirror() as mirror:
        mirror.add("org/model", source)
        monkeypatch.setenv("HF_ENDPOINT", mirror.address)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("NEURONPIPE_DATA", str(tmp_path / "data"))
        monkeypatch.chdir(tmp_path)
        yield Hub(mirror, tmp_path / "data", source, capsys)


def same_package(made: Package, source: Path, place: Path, **options: Any) -> None:
    """The package is what converting the whole source makes, but for what it says of its source."""
    expected = convert(source, place, **options)
    for name, entry in expected.manifest.files.items():
        assert (made.path / name).read_bytes() == (expected.path / name).read_bytes(), name
        assert made.manifest.files[name] == entry
    assert made.manifest.quantization_error == expected.manifest.quantization_error


def test_a_repository_becomes_a_package_of_its_name(hub: Hub, tmp_path: Path) -> None:
    pulled = hub.pull()
    assert pulled["name"] == "model"
    assert pulled["commit"] == hub.mirror.commit("org/model", None)
    package = Package.open(hub.data / "packages" / "model")
    same_package(package, hub.source, tmp_path / "expected")
    assert package.manifest.source.name == f"org/model@{pulled['commit'][:12]}"
    assert hub.left() == []
    (listed,) = hub.listed()["packages"]
    assert (listed["name"], listed["id"], listed["quantization"]) == ("model", package.manifest.id, "q4k")
    assert json.loads(hub.call("inspect", "model", "--json").out)["id"] == package.manifest.id
    assert [hub.mirror.sent_bytes(name) for name in hub.shards] == [
        (hub.source / name).stat().st_size for name in hub.shards
    ]


def test_no_file_but_data_is_asked_for(hub: Hub, tmp_path: Path) -> None:
    source = shutil.copytree(hub.source, tmp_path / "source")
    for name in ("modeling_custom.py", "pytorch_model.bin", "setup.py"):
        (source / name).write_text("raise SystemExit('run')")
    hub.mirror.add("org/model", source)
    hub.pull()
    assert {name for name, _, _ in hub.mirror.sent} == {
        "config.json", "tokenizer.json", "model.safetensors.index.json", *hub.shards
    }  # fmt: skip


def test_shards_go_when_they_are_converted_and_the_need_that_was_said_holds(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, least, before = 0, 1 << 60, conversion_module.PackageWriter.sync

    def measured(writer: conversion_module.PackageWriter) -> None:
        nonlocal most, least
        before(writer)
        most = max(most, disk_usage_bytes(hub.data))
        least = min(least, len(list((hub.data / "pulls" / "model" / "source").glob("*.safetensors"))))

    monkeypatch.setattr(conversion_module.PackageWriter, "sync", measured)
    pulled = hub.pull()
    blocks = 4096 * 20  # what files take more than their length
    assert most <= pulled["disk_bytes"] + blocks
    sizes = [(hub.source / name).stat().st_size for name in hub.shards]
    assert pulled["downloaded_bytes"] == sum(sizes)
    assert pulled["disk_bytes"] < pulled["bytes"] + sum(sizes), "no better than package and source at once"
    assert least < SHARDS


def test_the_next_shard_comes_while_one_is_converted(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.mirror.hold[hub.shards[1]] = 10
    came: list[bool] = []

    def measured(writer: conversion_module.PackageWriter) -> None:
        came.append(hub.mirror.held.wait(10))
        hub.mirror.let_go.set()

    monkeypatch.setattr(conversion_module.PackageWriter, "sync", measured)
    hub.pull()
    assert came[0], "the second one was not asked for before the first was converted"


def test_a_connection_that_breaks_off_goes_on(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = hub.shards
    monkeypatch.setattr(hub_module, "PAUSE_S", 0.01)
    hub.mirror.break_off = {first: [5000, 30000], second: [1]}
    hub.pull()
    same_package(Package.open(hub.data / "packages" / "model"), hub.source, tmp_path / "expected")
    assert [(start, count) for name, start, count in hub.mirror.sent if name == first][:2] == [(0, 5000), (5000, 30000)]
    assert hub.mirror.sent_bytes(first) == (hub.source / first).stat().st_size


@pytest.mark.parametrize("broken", range(SHARDS))
def test_an_interrupted_pull_goes_on_and_fetches_nothing_twice(broken: int, hub: Hub, tmp_path: Path) -> None:
    name = hub.shards[broken]
    hub.mirror.refuse[name] = 503
    assert f"{name}: {hub.mirror.address} answered 503; try again, the same command goes on from here" in hub.refused()
    listed = hub.listed()
    assert listed["packages"] == []
    (unfinished,) = listed["unfinished"]
    assert (unfinished["name"], unfinished["under_way"]) == ("model", False)
    assert unfinished["command"] == ["pull", "org/model", "--name", "model"]
    assert "`neuronpipe pull org/model --name model` continues" in hub.call("list").out
    assert "its pull was interrupted" in hub.call("inspect", "model").errors
    hub.mirror.refuse.clear()
    hub.mirror.repositories["org/model"]["f" * 40] = {"README.md": b"the branch has gone on"}
    pulled = hub.pull(*unfinished["command"][1:])
    assert pulled["commit"] != "f" * 40
    same_package(Package.open(hub.data / "packages" / "model"), hub.source, tmp_path / "expected")
    assert [hub.mirror.sent_bytes(name) for name in hub.shards] == [
        (hub.source / name).stat().st_size for name in hub.shards
    ]
    assert hub.left() == []


def test_half_a_shard_is_not_fetched_again(hub: Hub) -> None:
    name = hub.shards[1]
    hub.mirror.refuse[name] = 503
    hub.refused()
    part = hub.data / "pulls" / "model" / "source" / f"{name}.part"
    part.write_bytes((hub.source / name).read_bytes()[:20000])
    hub.mirror.refuse.clear()
    hub.pull()
    assert (name, 20000, (hub.source / name).stat().st_size - 20000) in hub.mirror.sent


def test_half_a_shard_that_was_damaged_here_comes_again(hub: Hub, tmp_path: Path) -> None:
    name = hub.shards[1]
    hub.mirror.refuse[name] = 503
    hub.refused()
    part = hub.data / "pulls" / "model" / "source" / f"{name}.part"
    part.write_bytes(b"\0" * 20000)
    hub.mirror.refuse.clear()
    hub.pull()
    same_package(Package.open(hub.data / "packages" / "model"), hub.source, tmp_path / "expected")


@pytest.mark.parametrize("name", ["model-00002-of-00004.safetensors", "config.json", "tokenizer.json"])
def test_bytes_that_are_not_the_hubs_are_not_converted(name: str, hub: Hub) -> None:
    hub.mirror.damage.add(name)
    assert f"org/model: {name}: came with another checksum than the hub gives" in hub.refused()
    assert hub.listed()["packages"] == []
    assert not list(hub.data.rglob(f"{name}*")), "what is wrong was kept"
    hub.mirror.damage.clear()
    hub.pull()


def test_what_cannot_be_checked_is_not_downloaded(hub: Hub) -> None:
    hub.mirror.gives_checksums = False
    assert "gives no checksum of it" in hub.refused()
    assert hub.left() == []


def test_checksums_of_gits_newer_object_format_are_compared(hub: Hub) -> None:
    """Ids of 64 digits were accepted and compared with a SHA-1, so that no file agreed."""
    hub.mirror.git_hash = "sha256"
    hub.pull()


def test_a_mirror_without_ranges_serves(hub: Hub, tmp_path: Path) -> None:
    hub.mirror.knows_ranges = False
    hub.mirror.break_off = {hub.shards[0]: [1 << 30, 5000]}  # the first one is asked for its header
    hub.pull()
    same_package(Package.open(hub.data / "packages" / "model"), hub.source, tmp_path / "expected")


def test_a_revision_is_pulled_as_it_was(hub: Hub, tmp_path: Path) -> None:
    old = hub.mirror.commit("org/model", None)
    newer = write_shards(tmp_path / "newer", replace(RECIPE, seed=9), 2)
    hub.mirror.add("org/model", newer)
    pulled = hub.pull(f"org/model@{old}", "--name", "old")
    assert pulled["commit"] == old
    same_package(Package.open(hub.data / "packages" / "old"), hub.source, tmp_path / "expected")
    assert "has no revision 'v9'" in hub.refused("org/model@v9")


def test_a_gguf_file_is_pulled(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    file = write_gguf(folder / "tiny.Q8_0.gguf", TINY)
    hub.mirror.add("org/model-GGUF", folder)
    assert "name it: `neuronpipe pull org/model-GGUF:tiny.Q8_0.gguf`" in hub.refused("org/model-GGUF")
    assert "it has tiny.Q8_0.gguf" in hub.refused("org/model-GGUF:other.gguf")
    asked = ("org/model-GGUF:tiny.Q8_0.gguf", "--activation", "relu")
    hub.mirror.refuse[file.name] = 503
    assert "tiny.Q8_0.gguf: http://127.0.0.1" in hub.refused(*asked)
    part = hub.data / "pulls" / "tiny.Q8_0" / "source" / f"{file.name}.part"
    part.write_bytes(file.read_bytes()[:30000])
    hub.mirror.refuse.clear()
    pulled = hub.pull(*asked)
    assert hub.mirror.sent == [(file.name, 30000, file.stat().st_size - 30000)]
    package = Package.open(hub.data / "packages" / "tiny.Q8_0")
    same_package(package, file, tmp_path / "expected", activation="relu")
    assert package.manifest.source.name == f"org/model-GGUF@{pulled['commit'][:12]}:tiny.Q8_0.gguf"
    assert hub.left() == []


@pytest.mark.parametrize("named", ["big-00002-of-00004.gguf", "big.gguf"])
def test_a_gguf_model_in_parts_is_pulled_part_by_part(
    named: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gguf"
    (folder / "Q8").mkdir(parents=True)
    first = write_gguf(folder / "Q8" / "big.gguf", RECIPE, "Q8_0", tensors_of_part=20)
    sizes = [path.stat().st_size for path in sorted((folder / "Q8").iterdir())]
    assert len(sizes) == 4
    hub.mirror.add("org/parts", folder)
    assert "it has Q8/big.gguf in 4 parts" in hub.refused("org/parts:other.gguf")
    most, before = 0, conversion_module.PackageWriter.sync

    def measured(writer: conversion_module.PackageWriter) -> None:
        nonlocal most
        before(writer)
        most = max(most, disk_usage_bytes(hub.data))

    monkeypatch.setattr(conversion_module.PackageWriter, "sync", measured)
    pulled = hub.pull(f"org/parts:Q8/{named}", "--activation", "relu", "--quantization", "q4")
    assert pulled["name"] == "big"
    assert pulled["downloaded_bytes"] == sum(sizes)
    assert most <= pulled["disk_bytes"] + 4096 * 20
    assert pulled["disk_bytes"] < pulled["bytes"] + sum(sizes), "no better than package and source at once"
    same_package(
        Package.open(hub.data / "packages" / "big"), first, tmp_path / "expected", activation="relu", quantization="q4"
    )
    assert hub.left() == []


def test_a_part_that_the_repository_lacks_is_named_before_anything_comes(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    write_gguf(folder / "big.gguf", RECIPE, "Q8_0", tensors_of_part=20)
    (folder / "big-00003-of-00004.gguf").unlink()
    hub.mirror.add("org/parts", folder)
    said = hub.refused("org/parts:big.gguf", "--activation", "relu")
    assert "org/parts: big-00003-of-00004.gguf: the repository has no such file; it is part 3 of the 4" in said
    assert hub.left() == []


def test_a_header_without_end_is_not_read_to_its_end(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    text = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 20)  # a key of a mebibyte
    (folder / "endless.gguf").write_bytes(text + b"x" * (1 << 21))
    hub.mirror.add("org/endless", folder)
    monkeypatch.setattr(arrival, "HEADER_BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(arrival, "MAX_HEADER_BYTES", 1 << 18)
    assert "endless.gguf: its header is longer than 262144 bytes" in hub.refused("org/endless:endless.gguf")
    assert hub.left() == []


def test_what_is_no_model_of_ours_is_refused_before_its_weights_come(hub: Hub, tmp_path: Path) -> None:
    source = shutil.copytree(hub.source, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    for change, message in (
        ({"architectures": ["FooForCausalLM"]}, "'FooForCausalLM'] is not supported"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"intermediate_size": 97}, "has shape [96, 64], but the configuration needs [97, 64]"),
    ):
        (source / "config.json").write_text(json.dumps(config | change))
        hub.mirror.add("org/model", source)
        hub.mirror.sent.clear()
        said = hub.refused()
        assert said.startswith("neuronpipe: org/model: ")
        assert message in said
        assert not {name for name, _, _ in hub.mirror.sent} & set(hub.shards)
        assert hub.left() == []


def test_a_shard_that_the_repository_lacks_is_named(hub: Hub, tmp_path: Path) -> None:
    source = shutil.copytree(hub.source, tmp_path / "source")
    (source / hub.shards[2]).unlink()
    hub.mirror.add("org/model", source)
    assert f"org/model: {hub.shards[2]}: the repository has no such file" in hub.refused()
    assert hub.left() == []


def test_no_room_on_disk_is_said_before_the_download(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = hub.pull("org/model", "--name", "first")
    hub.mirror.sent.clear()
    free = needed["bytes"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, free))
    said = hub.refused()
    for figure in ("to download in 4 files", "of disk at a time", "are free in", "make room for", "NEURONPIPE_DATA"):
        assert figure in said
    assert not {name for name, _, _ in hub.mirror.sent} & set(hub.shards)
    assert hub.left() == []


def test_a_disk_that_fills_up_keeps_what_has_come(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before, full = os.fsync, [False] * 6 + [True]

    def fails(descriptor: int) -> None:
        if full and full.pop(0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        before(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    said = hub.refused()
    assert "No space left on device" in said
    assert hub.listed()["packages"] == []
    assert hub.listed()["unfinished"] != []
    hub.pull()
    same_package(Package.open(hub.data / "packages" / "model"), hub.source, tmp_path / "expected")


def test_a_data_folder_that_cannot_be_written_is_named(hub: Hub) -> None:
    hub.data.write_text("a file")
    assert f"{hub.data}/pulls/model: cannot make a directory there" in hub.refused()


def test_without_room_for_two_shards_one_comes_after_the_other(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = hub.pull("org/model", "--name", "roomy")["disk_bytes"]
    free = roomy - 40_000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, free))
    assert hub.pull()["disk_bytes"] < free


def test_a_large_download_needs_a_yes(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_verb, "ASK_ABOVE_BYTES", 1000)
    assert "add --yes to download that much" in hub.refused()
    assert hub.left() == []

    class Terminal:
        def __init__(self, answer: str) -> None:
            self.answer = answer

        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return self.answer

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for answer in ("\n", "n\n", ""):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert hub.refused().endswith("nothing was downloaded")
        assert hub.left() == []
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    hub.pull()
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    hub.pull("org/model", "--name", "again", "--yes")


def test_a_name_that_is_taken_is_not_overwritten_unasked(hub: Hub) -> None:
    hub.pull()
    assert "model: is there already" in hub.refused()
    first = Package.open(hub.data / "packages" / "model").manifest.id
    hub.pull("org/model", "--quantization", "q8", "--overwrite")
    assert Package.open(hub.data / "packages" / "model").manifest.id != first


def test_an_interrupted_pull_keeps_its_name(hub: Hub, tmp_path: Path) -> None:
    hub.mirror.refuse[hub.shards[3]] = 503
    hub.refused()
    hub.mirror.add("other/model", write_checkpoint(tmp_path / "other", TINY))
    assert "an interrupted pull of org/model has that name" in hub.refused("other/model")
    done = hub.call("rm", "model", "--json")
    assert json.loads(done.out)["removed"] == ["model"]
    assert json.loads(done.out)["freed_bytes"] > 100_000
    assert hub.left() == []
    assert hub.pull("other/model")["repository"] == "other/model"


def test_packages_are_removed_by_name(hub: Hub) -> None:
    for name in ("one", "two", "three"):
        hub.pull("org/model", "--name", name)
    done = hub.call("rm", "one", "four")
    assert done.code == 2
    assert "did you mean" not in done.errors
    assert "there are one, three, two" in done.errors
    assert [package["name"] for package in hub.listed()["packages"]] == ["one", "three", "two"]
    assert hub.call("rm", "one", "two").code == 0
    assert [package["name"] for package in hub.listed()["packages"]] == ["three"]
    assert "remove a path with the shell's rm" in hub.call("rm", str(hub.data)).errors
    assert hub.left() == []


def test_a_damaged_package_is_listed_as_such(hub: Hub) -> None:
    hub.pull()
    (hub.data / "packages" / "model" / "bundles.bin").write_bytes(b"")
    (listed,) = hub.listed()["packages"]
    assert "truncated or replaced" in listed["error"]
    assert "damaged" in hub.call("list").out
    assert hub.call("rm", "model").code == 0


@pytest.mark.parametrize(
    ("repository", "message"),
    [("org/nothing", "there is no such repository at http://127"), ("org/gated", "asks you to accept its terms")],
)
def test_a_repository_that_is_not_to_be_had_is_named(repository: str, message: str, hub: Hub) -> None:
    hub.mirror.gated.add("org/gated")
    said = hub.refused(repository)
    assert said.startswith(f"neuronpipe: {repository}: ")
    assert message in said
    assert hub.left() == []


def test_no_hub_at_all(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refused = hub.refused()
    assert "org/model: no connection to http://127.0.0.1:9: " in refused
    assert "name a mirror in HF_ENDPOINT" in refused
    monkeypatch.setenv("HF_ENDPOINT", "hub.example")
    assert "HF_ENDPOINT: 'hub.example' is no address" in hub.refused()
    assert hub.left() == []


def test_without_huggingface_hub_it_says_how_to_get_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "-m pip install huggingface_hub`" in hub.refused()
