"""Damaged model files and packages: whatever the bytes, the only error that comes out is one for a person."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from neuronpipe.plans.convert import convert
from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.conversion import open_checkpoint
from neuronpipe.plans.convert.tokenizer_file import read_tokenizer
from neuronpipe.plans.package.manifest import identity
from neuronpipe.plans.package.parsing.parse import parse_manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import TINY, write_checkpoint
from tests.conformance.gguf_files import write_gguf
from tests.unit.test_sentencepiece_model import trained

RECIPE = replace(TINY, layers=1, neurons=32)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
# The fixtures are read and rebuilt by every example, never kept changed.
fuzzed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, a GGUF file and a package of the same model."""
    directory = tmp_path_factory.mktemp("files")
    source = write_checkpoint(directory / "source", RECIPE)
    write_gguf(directory / "model.gguf", RECIPE)
    write_gguf(directory / "powerinfer.gguf", RECIPE, powerinfer=True, metadata={"powerinfer.sparse_threshold": 0.5})
    (directory / "tokenizer").mkdir()
    (directory / "tokenizer" / "tokenizer.model").write_bytes(trained("normalizing", pieces=400))
    (directory / "tokenizer" / "plain.model").write_bytes(trained("as Llama's", pieces=400))
    convert(source, directory / "package", quantization="q4", gates="q3")
    return directory


def places(values: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside a JSON value."""
    children = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [path, *(place for key, value in children for place in places(value, (*path, key)))][0 if path else 1 :]


def replaced(values: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy of a JSON value with one place changed."""
    if not path:
        return change(values)
    copy = dict(values) if isinstance(values, dict) else list(values)
    copy[path[0]] = replaced(values[path[0]], path[1:], change)
    return copy


def mutated_json(data: st.DataObject, values: Any) -> Any:
    """One place of a JSON value replaced by anything, or by a number near the one that was there."""
    place = data.draw(st.sampled_from(places(values)))
    if data.draw(st.booleans()):
        return replaced(values, place, lambda old: data.draw(JSON))
    numbers = st.sampled_from((-1, 0, 1, 2, 3, 2**31, 2**32, 2**63, 2**64, 10**30, 0.5, -0.0))
    return replaced(
        values, place, lambda old: old + data.draw(st.integers(-4, 4)) if type(old) is int else data.draw(numbers)
    )


def mutated_bytes(data: st.DataObject, content: bytes, most: int) -> bytes:
    """Bytes changed, cut out or cut off within the first `most`."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(most, len(changed)) - 1))
        kind = data.draw(st.sampled_from(("set", "flip", "word", "delete", "insert", "cut")))
        if kind == "set":
            changed[place] = data.draw(st.integers(0, 255))
        elif kind == "flip":
            changed[place] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "word":
            changed[place : place + 8] = data.draw(
                st.sampled_from((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
            ).to_bytes(8, "little")
        elif kind == "delete":
            del changed[place : place + data.draw(st.integers(1, 16))]
        elif kind == "insert":
            changed[place:place] = data.draw(st.binary(min_size=1, max_size=16))
        elif data.draw(st.integers(0, 3)) == 0:
            del changed[place:]
        if not changed:
            break
    return bytes(changed)


def only_user_errors(attempt: Callable[[], object]) -> None:
    """Succeeding is fine (the damage may mean nothing), as is one line for a person; anything else fails the test."""
    try:
        attempt()
    except UserError as error:
        one_line = str(error).isprintable() and len(str(error)) < 1000
    else:
        one_line = True
    assert one_line


def open_and_close(path: Path) -> None:
    """Open a source, and read every header in it."""
    with open_checkpoint(path, Options(activation="relu")):
        pass


@contextlib.contextmanager
def content_of(path: Path, content: bytes) -> Any:
    """A file with other bytes for a while."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


@fuzzed
@given(data=st.data())
def test_manifests_with_a_valid_id(data: st.DataObject, files: Path) -> None:
    values = json.loads((files / "package" / "manifest.json").read_text())
    del values["id"]
    values = mutated_json(data, values)
    if isinstance(values, dict):
        values["id"] = identity(values)
    with content_of(files / "package" / "manifest.json", json.dumps(values).encode()):
        only_user_errors(lambda: Package.open(files / "package").fixed)


@fuzzed
@given(data=st.data())
def test_manifests_with_damaged_bytes_are_never_believed(data: st.DataObject, files: Path) -> None:
    before = (files / "package" / "manifest.json").read_bytes()
    content = mutated_bytes(data, before, len(before))
    try:
        manifest = parse_manifest(content, "manifest.json")
    except UserError:
        return
    assert manifest == parse_manifest(before, "manifest.json")  # only spaces can differ


@fuzzed
@given(data=st.data())
def test_configurations(data: st.DataObject, files: Path) -> None:
    path = files / "source" / "config.json"
    values = mutated_json(data, json.loads(path.read_text()))
    with content_of(path, json.dumps(values).encode()):
        only_user_errors(lambda: open_and_close(files / "source"))


@fuzzed
@given(data=st.data())
def test_safetensors_headers(data: st.DataObject, files: Path) -> None:
    path = files / "source" / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    if data.draw(st.booleans()):
        header = json.dumps(mutated_json(data, json.loads(content[8 : 8 + length]))).encode()
        content = len(header).to_bytes(8, "little") + header + content[8 + length :]
    else:
        content = mutated_bytes(data, content, 8 + length)
    with content_of(path, content):
        only_user_errors(lambda: open_and_close(files / "source"))


@pytest.mark.parametrize("name", ["model.gguf", "powerinfer.gguf"])
@fuzzed
@given(data=st.data())
def test_gguf_headers(data: st.DataObject, files: Path, name: str) -> None:
    path = files / name
    content = path.read_bytes()
    header_bytes = content.index(b"blk.0.attn_norm.weight") + 400
    with content_of(path, mutated_bytes(data, content, header_bytes)):
        only_user_errors(lambda: open_and_close(path))


@fuzzed
@given(data=st.data())
def test_sentencepiece_models(data: st.DataObject, files: Path) -> None:
    # A character map that is read takes two seconds of its own.
    name = data.draw(st.sampled_from(("plain.model",) * 9 + ("tokenizer.model",)))
    path = files / "tokenizer" / name
    content = path.read_bytes()
    with content_of(path, mutated_bytes(data, content, len(content))):
        only_user_errors(lambda: read_tokenizer(path, 400))


@fuzzed
@given(data=st.data())
def test_configurations_of_sentencepiece_models(data: st.DataObject, files: Path) -> None:
    values = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": True,
        "add_bos_token": True,
        "bos_token": {"content": "<s>"},
        "added_tokens_decoder": {"1": {"content": "<s>", "special": True}, "400": {"content": "x"}},
    }
    path = files / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps(mutated_json(data, values)))
    only_user_errors(lambda: read_tokenizer(path.with_name("tokenizer.model"), 401))
    path.unlink()


@settings(fuzzed, max_examples=25)
@given(data=st.data())
def test_damaged_weights_convert_or_are_refused_and_leave_nothing(data: st.DataObject, files: Path) -> None:
    path, target = files / "model.gguf", files / "made"
    with content_of(path, mutated_bytes(data, path.read_bytes(), path.stat().st_size)):
        only_user_errors(lambda: convert(path, target, quantization="q4", activation="relu", overwrite=True))
    assert sorted(each.name for each in files.iterdir() if each != target) == [
        "model.gguf", "package", "powerinfer.gguf", "source", "tokenizer",
    ]  # fmt: skip
