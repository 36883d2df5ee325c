"""GGUF models in several files: all parts are read, whichever is named, and parts that do not belong together are
refused by name."""

from __future__ import annotations

import re
import shutil
import struct
from pathlib import Path

import pytest
from neuronpipe.plans.convert import convert
from neuronpipe.plans.gguf_part_names import Part, gguf_models, model_stem, part_of
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.pull.source_models import Origin, is_source
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import TINY
from tests.conformance.gguf_files import write_gguf

PARTS = 4


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in one file."""
    return write_gguf(tmp_path_factory.mktemp("one") / "tiny.gguf", TINY)


@pytest.fixture(scope="module")
def written(one_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same model in parts."""
    folder = tmp_path_factory.mktemp("parts")
    write_gguf(folder / "tiny.gguf", TINY, tensors_of_part=6)
    assert len(list(folder.iterdir())) == PARTS
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(written, tmp_path / "model")


def part(number: int) -> str:
    """The name of a part."""
    return f"tiny-{number:05}-of-{PARTS:05}.gguf"


def converted(source: Path, place: Path) -> Package:
    """The package of a source."""
    return convert(source, place, quantization="q8", activation="relu")


def refusal(source: Path) -> str:
    """What conversion says; it leaves nothing."""
    with pytest.raises(UserError) as caught:
        converted(source, source.parent / "package")
    assert not (source.parent / "package").exists()
    return str(caught.value)


@pytest.mark.parametrize("name", [part(1), part(3), part(PARTS), "."])
def test_any_part_and_the_folder_mean_the_whole_model(name: str, folder: Path, one_file: Path, tmp_path: Path) -> None:
    made, expected = converted(folder / name, tmp_path / "made"), converted(one_file, tmp_path / "expected")
    assert made.manifest.id == expected.manifest.id


def test_a_file_that_is_called_like_a_part_and_is_whole_is_read(one_file: Path, tmp_path: Path) -> None:
    path = shutil.copy(one_file, tmp_path / "tiny-00001-of-00001.gguf")
    assert converted(path, tmp_path / "made").manifest.model.layers == TINY.layers


def test_parts_of_one_model_beside_another_model_need_a_name(folder: Path, one_file: Path, tmp_path: Path) -> None:
    shutil.copy(one_file, folder / "other.gguf")
    assert f"convert one model: `neuronpipe convert {folder / 'other.gguf'}`" in refusal(folder)
    (folder / "other.gguf").rename(folder / "z.gguf")
    assert f"convert one model: `neuronpipe convert {folder / part(1)}`" in refusal(folder)
    converted(folder / part(2), tmp_path / "made")


@pytest.mark.parametrize("missing", [1, 3])
def test_a_missing_part_is_named(missing: int, folder: Path) -> None:
    (folder / part(missing)).unlink()
    expected = f"{folder / part(missing)}: cannot be read: No such file or directory; it is part {missing} of the 4"
    assert expected in refusal(folder / part(2))


def test_a_part_twice_is_named(folder: Path) -> None:
    shutil.copy(folder / part(2), folder / part(3))
    assert f"{folder / part(3)}: split.no: part 2 by the file's metadata, and 3 by its name" in refusal(folder)


def test_a_part_of_a_model_in_other_parts_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write_gguf(tmp_path / "other" / "tiny.gguf", TINY, tensors_of_part=8)
    shutil.copy(tmp_path / "other" / "tiny-00002-of-00003.gguf", folder / part(2))
    assert f"{folder / part(2)}: split.count: 3 parts, and 4 by the file's name" in refusal(folder)


def test_a_whole_model_in_place_of_a_part_is_named(folder: Path, one_file: Path) -> None:
    shutil.copy(one_file, folder / part(2))
    assert f"{folder / part(2)}: split.count: 0 parts, and 4 by the file's name" in refusal(folder)


def test_parts_that_together_lack_tensors_are_named(folder: Path) -> None:
    path = folder / part(1)
    data = path.read_bytes()
    at = data.index(b"split.tensors.count") + len("split.tensors.count") + 4
    (count,) = struct.unpack_from("<i", data, at)
    path.write_bytes(data[:at] + struct.pack("<i", count + 1) + data[at + 4 :])
    assert f"{path}: split.tensors.count: {count + 1} tensors, and the 4 parts have {count}" in refusal(folder)


def test_a_tensor_in_two_parts_is_named(folder: Path) -> None:
    path = folder / part(2)
    of_first, of_second = (
        sorted(set(re.findall(rb"blk\.\d\.\w+\.weight", (folder / part(number)).read_bytes()))) for number in (1, 2)
    )
    twice, renamed = next((a, b) for a in of_first for b in of_second if len(a) == len(b))
    path.write_bytes(path.read_bytes().replace(renamed, twice))
    assert f"{path}: {twice.decode()}: the tensor appears twice" in refusal(folder)


def test_a_part_that_was_renamed_says_what_to_call_it(folder: Path) -> None:
    (folder / part(2)).rename(folder / "second.gguf")
    assert "the file is part 2 of 4 of a model" in (said := refusal(folder / "second.gguf"))
    assert "call it NAME-00002-of-00004.gguf" in said


def test_a_truncated_part_is_named(folder: Path) -> None:
    path = folder / part(3)
    path.write_bytes(path.read_bytes()[:-100])
    assert refusal(folder).startswith(f"{path}: ")


def test_a_missing_part_is_named_to_those_who_keep_packages(folder: Path) -> None:
    (folder / part(2)).unlink()
    for named in (folder, folder / part(1), folder / part(2)):
        with pytest.raises(UserError, match=re.escape(f"{folder / part(2)}: cannot be read")) as caught:
            Origin.of(named)
        assert str(caught.value).endswith("; it is part 2 of the 4 that the model is in")


def test_every_part_is_the_same_model_to_those_who_keep_packages(folder: Path) -> None:
    assert is_source(folder)
    first, third, whole = (Origin.of(folder / name) for name in (part(1), part(3), "."))
    assert first == third
    assert first.fingerprint == whole.fingerprint
    (folder / part(2)).touch()
    assert Origin.of(folder / part(1)) != first


def test_names_of_parts() -> None:
    assert [model_stem(name) for name in ("a/b/m-00002-of-00003.gguf", "m.gguf", "m-1-of-3.gguf")] == [
        "m", "m", "m-1-of-3"
    ]  # fmt: skip
    assert [part_of(name) for name in ("m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "-00001-of-00001.gguf")] == [
        None, None, None
    ]  # fmt: skip
    models = gguf_models(["x/m-00001-of-00002.gguf", "x/m-00002-of-00002.gguf", "x/n.gguf", "readme.md"])
    assert list(models) == ["x/m.gguf", "x/n.gguf"]


def test_of_two_downloads_of_a_model_the_complete_one_is_taken() -> None:
    of_two, of_three = (Part("m", 1, count) for count in (2, 3))

    def count(*names: str) -> int:
        part = gguf_models(names)["m.gguf"]
        assert part is not None
        return part.count

    assert count(of_three.names[2], *of_two.names, of_three.names[0]) == 2
    assert count(*of_three.names, of_two.names[1]) == 3
    assert count(of_two.names[0], of_three.names[1]) == 3
    assert gguf_models([*of_two.names, "m.gguf"]) == {"m.gguf": None}
