"""PowerInfer's activation_N.pt files: counts come over by number, and a pickle never runs anything."""

from __future__ import annotations

import pickle
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from neuronpipe.launch.cli import main
from neuronpipe.plans.activity.powerinfer_statistics import MAX_STORAGE_BYTES, import_activity, read_counts
from neuronpipe.plans.activity.reorder import reorder
from neuronpipe.plans.activity.stored_profile import add_profile
from neuronpipe.plans.package.activity_profile import ALWAYS
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray

from tests.conformance.specs import SPECS, write_package

STORAGES = {"<f4": b"FloatStorage", "<f8": b"DoubleStorage", "<i8": b"LongStorage", "<i4": b"IntStorage"}


def number(value: int) -> bytes:
    return b"J" + value.to_bytes(4, "little", signed=True)


def pickled(storage: bytes, values: int, *, offset: int = 0, shape: int | None = None, stride: int = 1) -> bytes:
    """data.pkl as torch 2 writes it for a tensor of one dimension."""
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00((X\x07\x00\x00\x00storageq\x01ctorch\n" + storage
        + b"\nq\x02X\x01\x00\x00\x000q\x03X\x03\x00\x00\x00cpuq\x04" + number(values) + b"tq\x05Q" + number(offset)
        + number(values if shape is None else shape) + b"\x85q\x06" + number(stride)
        + b"\x85q\x07\x89ccollections\nOrderedDict\nq\x08)Rq\ttq\nRq\x0b."
    )  # fmt: skip


def write_pt(path: Path, values: NDArray[np.generic], data_pkl: bytes | None = None, *, packed: bool = False) -> Path:
    if data_pkl is None:
        data_pkl = pickled(STORAGES[values.dtype.newbyteorder("<").str], len(values))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for name, data in {"data.pkl": data_pkl, "byteorder": b"little", "data/0": values.tobytes()}.items():
            archive.writestr(f"activation/{name}", data)
    return path


class Runs:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return exec, ("raise SystemExit('it ran')",)


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return write_package(tmp_path / "p", SPECS["many neurons"], "q8")


@pytest.fixture
def folder(package: Package, tmp_path: Path) -> Path:
    (tmp_path / "activation").mkdir()
    for layer in range(package.manifest.model.layers):
        write_pt(tmp_path / "activation" / f"activation_{layer}.pt", counts(package, layer))
    return tmp_path / "activation"


def counts(package: Package, layer: int) -> NDArray[np.int64]:
    return np.random.default_rng(layer).integers(0, 400, package.manifest.model.neurons)


@pytest.mark.parametrize("dtype", STORAGES)
def test_counts_of_every_kind_of_number_are_read(dtype: str, tmp_path: Path) -> None:
    values = np.array([3, 1, 4, 1, 5], dtype)
    assert read_counts(write_pt(tmp_path / "a.pt", values), 5).tolist() == [3, 1, 4, 1, 5]
    tail = pickled(STORAGES[dtype], 5, offset=2, shape=3)
    assert read_counts(write_pt(tmp_path / "a.pt", values, tail), 3).tolist() == [4, 1, 5]


def test_frequencies_are_counts_by_tokens_and_the_package_can_be_reordered_by_them(
    package: Package, folder: Path
) -> None:
    made = add_profile(package, import_activity(package, folder, 1000))
    (profile,) = made.manifest.profiles
    assert (profile.source, profile.tokens, profile.text, profile.misses) == ("powerinfer", 1000, "activation", None)
    for layer in range(made.manifest.model.layers):
        share = counts(package, layer) / 1000
        assert profile.wanted_by_layer[layer] == pytest.approx(share.mean(), abs=1e-5)
        for batch in (1, 3):
            stored = np.frombuffer(made.activity.neurons("exact", batch, layer, 0), "<u2") / ALWAYS
            np.testing.assert_allclose(stored, 1 - (1 - share) ** batch, atol=1e-5)
    ordered = reorder(made, lambda done, all_: None)
    first = ordered.activity.neurons("exact", 1, 0, 0)[0] / ALWAYS
    assert first == pytest.approx(counts(package, 0).max() / 1000, abs=1e-4)
    with pytest.raises(UserError, match="stored by frequency"):
        import_activity(ordered, folder, 1000)


def test_without_a_number_of_tokens_the_greatest_count_is_taken_and_said(
    package: Package, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(package.path), "--import-activity", str(folder)]) == 0
    said = capsys.readouterr()
    assert "counts are taken to be of 399 tokens, the greatest of them" in said.err
    assert "Wanted neurons, counts of PowerInfer, 399 tokens of activation" in said.out


HOSTILE: dict[str, tuple[bytes, str]] = {
    "a call": (pickle.dumps(Runs()), r"data\.pkl: names builtins\.exec"),
    "a call of torch": (b"\x80\x02ctorch\nload\n(X\x01\x00\x00\x00atR.", r"data\.pkl: names torch\.load"),
    "no tensor": (pickle.dumps({"a": 1}), r"data\.pkl: expected one tensor"),
    "half a pickle": (pickled(b"FloatStorage", 4)[:40], r"data\.pkl: "),
    "another storage": (pickled(b"BFloat16Storage", 4), r"data\.pkl: names torch\.BFloat16Storage"),
    "a storage that is not there": (pickled(b"FloatStorage", 9, shape=4), r"data/0: missing, or not 9 values long"),
    "every second value": (pickled(b"FloatStorage", 4, stride=2), r"stride"),
    "beyond its end": (pickled(b"FloatStorage", 4, offset=1), r"stride"),
    "before its beginning": (pickled(b"FloatStorage", 4, offset=-1), r"data\.pkl: expected one tensor"),
    "of other neurons": (pickled(b"FloatStorage", 4, shape=3), r"shape: \[3\], but a layer of the package has 4"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pickle_that_is_not_one_tensor_is_refused_and_runs_nothing(name: str, tmp_path: Path) -> None:
    data, wanted = HOSTILE[name]
    with pytest.raises(UserError, match=rf"a\.pt: {wanted}"):
        read_counts(write_pt(tmp_path / "a.pt", np.ones(4, "<f4"), data), 4)


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"PK\x03\x04 and no more", pickle.dumps([1, 2])):
        (tmp_path / "a.pt").write_bytes(data)
        with pytest.raises(UserError, match=r"a\.pt: is no file of torch\.save"):
            read_counts(tmp_path / "a.pt", 4)
    with pytest.raises(UserError, match=r"a\.pt: activation/data.pkl: is packed"):
        read_counts(write_pt(tmp_path / "a.pt", np.ones(4, "<f4"), packed=True), 4)
    for values in (np.array([1, np.nan, 3, 4], "<f4"), np.array([1, -2, 3, 4], "<f4")):
        with pytest.raises(UserError, match=r"a\.pt: data/0: has counts that are negative or no finite numbers"):
            read_counts(write_pt(tmp_path / "a.pt", values), 4)


def test_a_pickle_cannot_make_the_reader_take_memory(tmp_path: Path) -> None:
    """A memo index is four bytes, and the memo a list as long as the largest one: gigabytes for a few bytes."""
    for huge in (b"\x80\x02Nr" + (1 << 28).to_bytes(4, "little") + b".", b"\x80\x02Np268435456\n."):
        write_pt(tmp_path / "a.pt", np.ones(4, "<f4"), huge)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(UserError, match=r"a\.pt: data\.pkl: its memo has place 268435456"):
            read_counts(tmp_path / "a.pt", 4)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_storage_that_is_larger_than_any_models_counts_is_not_read(tmp_path: Path) -> None:
    values = MAX_STORAGE_BYTES // 4 + 1
    file = write_pt(tmp_path / "a.pt", np.ones(4, "<f4"), pickled(b"FloatStorage", values, shape=4))
    patched_sizes(file, b"activation/data/0", values * 4, values * 4)
    with pytest.raises(UserError, match=r"a\.pt: data/0: .* bytes, at most"):
        read_counts(file, 4)


def test_a_storage_that_ends_before_it_should_is_refused(tmp_path: Path) -> None:
    """The archive says one length for the file and another one for what is stored of it."""
    file = write_pt(tmp_path / "a.pt", np.ones(4, "<f4"), pickled(b"FloatStorage", 8))
    patched_sizes(file, b"activation/data/0", 16, 32)
    with pytest.raises(UserError, match=r"a\.pt: activation/data/0: is packed, or"):
        read_counts(file, 8)


def patched_sizes(file: Path, member: bytes, packed: int, whole: int) -> None:
    """Have the archive's directory say other lengths of a member."""
    data = bytearray(file.read_bytes())
    at = data.rindex(member) - 46  # its entry in the central directory
    assert data[at : at + 4] == b"PK\x01\x02"
    data[at + 20 : at + 28] = packed.to_bytes(4, "little") + whole.to_bytes(4, "little")
    file.write_bytes(data)


def test_folders_that_do_not_fit_the_model_are_refused(package: Package, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"activation_\d\.pt: has a count of 399, more than --import-tokens 10"):
        import_activity(package, folder, 10)
    write_pt(folder / "activation_2.pt", np.ones(1500, "<f4"))
    with pytest.raises(UserError, match=r"has activation_2\.pt, but the model has 2 layers only"):
        import_activity(package, folder, None)
    (folder / "activation_2.pt").unlink()
    (folder / "activation_1.pt").unlink()
    with pytest.raises(UserError, match=r"activation_1\.pt: cannot be read"):
        import_activity(package, folder, None)
    with pytest.raises(UserError, match="no such folder"):
        import_activity(package, tmp_path / "nowhere", None)
    mixture = write_package(tmp_path / "m", SPECS["turbosparse"], "q8")
    with pytest.raises(UserError, match="is a mixture"):
        import_activity(mixture, folder, None)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--activity", "--rank", "64"), "--activity and --rank"),
        (("--activity", "--import-activity", "x"), "measure or import"),
        (("--import-tokens", "5"), "--import-activity; give that too"),
        (("--reorder", "--text", "x"), "--reorder and --text"),
        (("--mode", "exact"), "--mode: applies to the run of --activity"),
        (("--activity", "--tokens", "3"), "--tokens 3: between 64 and"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    words: tuple[str, ...], wanted: str, package: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(package.path), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert wanted in line
