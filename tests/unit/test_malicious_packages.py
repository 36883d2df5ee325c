"""A package, a checkpoint or a predictor made by an attacker: it runs no code, reads nothing outside itself, tells a
terminal nothing, and takes no memory and no time by a number in a header."""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.generation.terminal import for_terminal
from neuronpipe.plans.convert import convert
from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.conversion import open_checkpoint
from neuronpipe.plans.package import safetensors_header
from neuronpipe.plans.package.manifest import identity
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.safetensors_header import build_header, read_header
from neuronpipe.plans.package.tokenizer import Panic, open_tokenizer
from neuronpipe.plans.predictor.imported_predictor import open_imported
from neuronpipe.plans.strict_json import parse_json
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer

from tests.conformance.checkpoints import TINY, write_checkpoint

FILES = ("tokenizer.json", "fixed.safetensors", "bundles.bin", "checksums.bin")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    source = write_checkpoint(tmp_path / "source", replace(TINY, layers=1, neurons=32))
    convert(source, tmp_path / "package", quantization="q4")
    return tmp_path / "package"


def rewritten(package: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The package with another manifest, under an id that fits it."""
    file = package / "manifest.json"
    values = json.loads(file.read_text())
    del values["id"]
    change(values)
    file.write_text(json.dumps(values | {"id": identity(values)}))
    return package


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_a_link_is_refused(package: Path, tmp_path: Path, name: str) -> None:
    secret = (package / name).rename(tmp_path / "secret")
    (package / name).symlink_to(secret)
    with pytest.raises(UserError, match=f"{name}: is a link, which may lead outside the package"):
        Package.open(package)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_a_pipe_is_not_waited_for(package: Path, name: str) -> None:
    (package / name).unlink()
    os.mkfifo(package / name)
    with pytest.raises(UserError, match=name):
        Package.open(package)


def test_other_files_cannot_be_named(package: Path) -> None:
    def elsewhere(values: dict[str, Any]) -> None:
        values["files"]["../../etc/passwd"] = values["files"]["bundles.bin"]

    with pytest.raises(UserError, match=r"files\.\.\./\.\./etc/passwd: unknown field"):
        Package.open(rewritten(package, elsewhere))


@pytest.mark.parametrize("field", ["name", "source"])
def test_a_name_that_a_terminal_would_obey_is_refused(package: Path, field: str) -> None:
    def rename(values: dict[str, Any]) -> None:
        (values if field == "name" else values["source"])["name"] = "\x1b]0;owned\x07"

    with pytest.raises(UserError, match="name: expected at most 1000 printable characters") as caught:
        Package.open(rewritten(package, rename))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["\x1b]0;owned\x07", "\ud800", "a\nb"])
def test_a_workloads_name_that_cannot_be_printed_is_refused(package: Path, name: str) -> None:
    def rename(values: dict[str, Any]) -> None:
        values["workload"] = {"seed": 1, "presets": {name: {"first_token": 0, "tokens": 3}}}

    with pytest.raises(UserError, match=r"workload\.presets\..*: expected a printable name") as caught:
        Package.open(rewritten(package, rename))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("template", ["a \ud800", [{"name": "default", "template": "a \ud800"}]])
def test_half_a_character_in_a_template_is_refused(template: Any, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", TINY)
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(UserError, match=r"chat_template.*: expected a string, found 'a \\ud800'"):
        convert(source, tmp_path / "made", quantization="q4")
    assert not (tmp_path / "made").exists()


def test_a_text_that_a_terminal_would_obey_is_not_printed() -> None:
    assert for_terminal("a\tb\n\x1b[2J\x9b1m\r\x07\u00e9") == "a\tb\n\ufffd[2J\ufffd1m\ufffd\ufffd\u00e9"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_kinds", [{"layers": 4096, "window_tokens": 0}]),
        ("vocabulary", 1 << 24),
        ("neurons", 1 << 22),
        ("width", 1 << 20),
        ("key_heads", 4096),
        ("head_width", 4096),
    ],
)
def test_a_shape_larger_than_the_files_is_refused_at_once(package: Path, field: str, value: Any) -> None:
    def grow(values: dict[str, Any]) -> None:
        values["model"][field] = value

    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(UserError):
        _ = Package.open(rewritten(package, grow)).fixed
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_a_tokenizer_too_large_to_read_is_refused_by_its_size(package: Path) -> None:
    os.truncate(package / "tokenizer.json", 1 << 40)  # sparse: it takes no disk

    def grow(values: dict[str, Any]) -> None:
        values["files"]["tokenizer.json"]["bytes"] = 1 << 40

    with pytest.raises(UserError, match=r"files\.tokenizer\.json\.bytes: 1099511627776 is outside"):
        Package.open(rewritten(package, grow))


def test_a_checkpoints_index_cannot_lead_outside(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", TINY)
    (source / "model.safetensors").rename(tmp_path / "model.safetensors")
    tensors = read_header(tmp_path / "model.safetensors")
    for place in ("../model.safetensors", str(tmp_path / "model.safetensors"), ".."):
        index = {"weight_map": dict.fromkeys(tensors, place)}
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match=r"is not the name of a file beside it|cannot be read"):
            open_checkpoint(source, Options(activation="relu"))


class Bomb:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("name", ["predictor.pt", "predictor.pth", "predictor.bin", "predictor.safetensors"])
def test_a_pickled_predictor_is_never_loaded(package: Path, tmp_path: Path, name: str) -> None:
    trace = tmp_path / "the bomb went off"
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(trace)))
    with pytest.raises(UserError, match=name):
        open_imported(tmp_path / name, Package.open(package).manifest)
    assert not trace.exists()


def test_a_pickled_table_of_frequencies_is_never_loaded(tmp_path: Path) -> None:
    trace = tmp_path / "the bomb went off"
    source = write_checkpoint(tmp_path / "source", TINY)
    (tmp_path / "frequencies.npy").write_bytes(pickle.dumps(Bomb(trace)))
    with pytest.raises(UserError, match=r"frequencies\.npy"):
        convert(source, tmp_path / "made", quantization="q4", frequencies=tmp_path / "frequencies.npy")
    assert not trace.exists()


@pytest.mark.parametrize(
    "header",
    ["{'descr': '<f4', 'shape': (1, ", "{'descr': '<f4', 'fortran_or\\9999 False, 'shape': (1, 1, 32)}", "9" * 9999],
)
def test_a_damaged_table_of_frequencies_is_one_line(
    header: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    source = write_checkpoint(tmp_path / "source", TINY)
    text = header.encode() + b"\n"
    (tmp_path / "f.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
    with pytest.raises(UserError, match=r"f\.npy: not a \.npy file of firing shares") as caught:
        convert(source, tmp_path / "made", quantization="q4", frequencies=tmp_path / "f.npy")
    assert len(str(caught.value)) < len(str(tmp_path)) + 200
    assert not recwarn.list


def header_file(path: Path, header: bytes) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return path


def test_a_header_of_many_tensors_and_one_twice_is_refused_in_linear_time(tmp_path: Path) -> None:
    names = [f'"{n}":0' for n in range(200_000)]
    began = time.process_time()
    with pytest.raises(UserError, match="the field '199999' appears twice"):
        read_header(header_file(tmp_path / "x.safetensors", ("{" + ",".join([*names, names[-1]]) + "}").encode()))
    assert time.process_time() - began < 5


def test_a_header_of_more_tensors_than_any_model_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_header, "MAX_TENSORS", 3)
    header, _ = build_header(dict.fromkeys("abcd", ("F16", (2, 2))))
    (path := tmp_path / "x.safetensors").write_bytes(header + bytes(64))
    with pytest.raises(UserError, match="header: 4 tensors are more than the 3"):
        read_header(path)


def test_json_of_many_small_values_is_refused_before_it_takes_memory() -> None:
    with pytest.raises(UserError, match="x: has more than the 4194304 values"):
        parse_json(b'{"a":[' + b"[]," * (1 << 21) + b"0]}", "x")


@pytest.mark.parametrize("content", ["[" * 1_000_000, "9" * 1_000_000, '{"a":' * 100_000, "1e999999999"])
def test_json_that_is_deep_or_long_is_refused(content: str) -> None:
    with pytest.raises(UserError, match="x: "):
        parse_json(content.encode(), "x")


def tokenizer_with(package: Path, **fields: Any) -> bytes:
    return json.dumps(json.loads((package / "tokenizer.json").read_text()) | fields).encode()


TRUNCATION = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 1 << 40},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "x",
}


@pytest.mark.parametrize(
    "fields", [{"truncation": TRUNCATION}, {"truncation": TRUNCATION | {"stride": 9}}, {"padding": PADDING}]
)
def test_a_text_is_neither_cut_nor_filled_up_by_its_tokenizer(package: Path, fields: dict[str, Any]) -> None:
    """Cut in silence it would be another prompt; some lengths make the library panic, others take all memory."""
    text = "the rain in spain"
    plain = FileTokenizer((package / "tokenizer.json").read_bytes()).encode(text)
    assert len(plain) > 2
    assert FileTokenizer(tokenizer_with(package, **fields)).encode(text) == plain


def test_a_panic_of_the_library_is_an_error(monkeypatch: pytest.MonkeyPatch, package: Path) -> None:
    class PanicException(BaseException):
        pass

    class Library:
        def encode(self, text: str, **options: bool) -> None:
            raise PanicException("`stride` must be\nstrictly less")

    file_tokenizer = FileTokenizer((package / "tokenizer.json").read_bytes())
    monkeypatch.setattr(file_tokenizer.tokens, "_splitter", Library())
    with pytest.raises(Panic, match="stride"):
        file_tokenizer.encode("a text")


@pytest.mark.parametrize(
    "content", ["{}", "[]", "\x00", '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}']
)
def test_a_file_that_is_no_tokenizer_is_one_line(content: str) -> None:
    with pytest.raises(UserError, match="x: not a tokenizer") as caught:
        open_tokenizer(content.encode(), "x")
    assert "\n" not in str(caught.value)
