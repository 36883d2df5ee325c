"""Opening and making packages: damage is found and named, and a package is there whole or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from neuronpipe.plans.convert import convert
from neuronpipe.plans.package import atomic_output as package_directory
from neuronpipe.plans.package import reader
from neuronpipe.plans.package.atomic_output import PartialDirectory
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.safetensors_header import TensorEntry, build_header, read_header
from neuronpipe.protocol.errors import UserError
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.conformance.checkpoints import TINY, write_checkpoint

DEAD_PROCESS = 2**22 + 1  # above the largest process number Linux gives


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint."""
    return write_checkpoint(tmp_path_factory.mktemp("source"), TINY)


@pytest.fixture
def package(source: Path, tmp_path: Path) -> Package:
    """A package of this test's own, to be damaged."""
    return convert(source, tmp_path / "package", quantization="q8")


def crc32c(data: bytes) -> int:
    """Bit by bit from the definition: reflected polynomial 0x82f63b78."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_checksums_cover_each_part_with_its_padding(package: Package) -> None:
    layout, bundles = package.manifest.layout, package.bundles_path.read_bytes()
    table = np.frombuffer(package.checksums(), "<u4").reshape(-1, 2)
    assert len(table) == package.manifest.clusters
    for word in (0, len(table) - 1):
        for column, part, size_bytes in (
            (0, "trigger", layout.trigger_part_bytes),
            (1, "value", layout.value_part_bytes),
        ):
            start = layout.offset_bytes(word, part)
            assert table[word, column] == crc32c(bundles[start : start + size_bytes])


def test_the_safetensors_library_reads_the_fixed_tensors(package: Package) -> None:
    with safe_open(package.fixed_path, "np") as tensors:
        assert set(tensors.keys()) == set(package.fixed)
        assert tensors.get_tensor("layers.1.qkv.quants").shape == (128, 64)
        assert tensors.get_tensor("output_norm").dtype == np.float32
    assert all(entry.start % 2 == 0 for entry in package.fixed.values())


def test_headers_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    values = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(5, dtype=np.float16)}
    save_file(values, tmp_path / "t.safetensors")
    data = (tmp_path / "t.safetensors").read_bytes()
    for name, entry in read_header(tmp_path / "t.safetensors").items():
        assert entry.shape == values[name].shape
        assert data[entry.start : entry.stop] == values[name].tobytes()


def rewrite_fixed(package: Package, order: Callable[[str, TensorEntry], tuple[int, str]], pad_bytes: int) -> None:
    """fixed.safetensors with its tensors in another order, its header `pad_bytes` longer than the writer makes it."""
    entries, data = package.fixed, package.fixed_path.read_bytes()
    names = sorted(entries, key=lambda name: order(name, entries[name]))
    header, _ = build_header({name: (entries[name].dtype, entries[name].shape) for name in names})
    text = header[8:] + b" " * pad_bytes
    tensors = b"".join(data[entries[name].start : entries[name].stop] for name in names)
    package.fixed_path.write_bytes(len(text).to_bytes(8, "little") + text + tensors)


def test_fixed_tensors_that_the_engine_could_not_read_in_place_are_refused(package: Package) -> None:
    rewrite_fixed(package, lambda name, entry: (entry.start, name), 0)
    assert Package(package.path, package.manifest).fixed == package.fixed
    rewrite_fixed(package, lambda name, entry: (entry.start, name), 2)
    with pytest.raises(UserError, match=r"fixed\.safetensors: header: the data start at byte \d+, no multiple of 64"):
        _ = Package(package.path, package.manifest).fixed


def test_a_fixed_tensor_that_is_not_aligned_to_its_elements_is_refused(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = dict(package.fixed)
    for name, moved in (("output_norm", 2), ("embedding.scales", 1)):
        entry = entries[name]
        shifted = entries | {name: replace(entry, start=entry.start + moved, stop=entry.stop + moved)}
        monkeypatch.setattr(reader, "read_header", lambda path, shifted=shifted: shifted)
        with pytest.raises(UserError, match=rf"{name}: F(32|16) at byte \d+ is not aligned"):
            _ = Package(package.path, package.manifest).fixed


@pytest.mark.parametrize("name", ["tokenizer.json", "fixed.safetensors", "checksums.bin"])
def test_one_changed_bit_is_found(name: str, package: Package) -> None:
    package.verify_fixed()
    data = bytearray((package.path / name).read_bytes())
    data[-1] ^= 1
    (package.path / name).write_bytes(data)
    with pytest.raises(UserError, match=f"{name}: does not match the manifest's sha256"):
        Package.open(package.path).verify_fixed()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "does not match the manifest's sha256"),
        (lambda data: data[:-8], "bytes, but the manifest says"),
        (lambda data: data[:-3], "bytes, but the manifest says"),
        (lambda data: data + bytes(8), "bytes, but the manifest says"),
        (lambda data: None, "cannot be read"),
    ],
)
def test_the_table_of_checksums_is_verified_by_every_loader_that_starts(
    damage: Callable[[bytes], bytes | None], complaint: str, package: Package
) -> None:
    table = package.path / "checksums.bin"
    changed = damage(package.checksums())
    table.unlink()
    if changed is not None:
        table.write_bytes(changed)
    with pytest.raises(UserError, match=rf"checksums\.bin: .*{complaint}"):
        package.checksums()


@pytest.mark.parametrize("name", ["tokenizer.json", "fixed.safetensors", "bundles.bin", "checksums.bin"])
def test_a_truncated_or_missing_file_is_found_at_once(name: str, package: Package) -> None:
    os.truncate(package.path / name, 10)
    with pytest.raises(UserError, match=f"{name}: 10 bytes, but the manifest says"):
        Package.open(package.path)
    (package.path / name).unlink()
    with pytest.raises(UserError, match=f"{name}: missing"):
        Package.open(package.path)


def test_what_is_no_package_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such package directory; make one with `neuronpipe convert`"):
        Package.open(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"no complete package; it is empty; make one with .* config.json"):
        Package.open(tmp_path)
    with pytest.raises(UserError, match="cannot be opened"):
        Package.open(tmp_path / ("x" * 300))


def test_an_existing_target_is_refused_unless_it_may_be_replaced(source: Path, package: Package) -> None:
    with pytest.raises(UserError, match="exists already"):
        convert(source, package.path, quantization="q4")
    assert Package.open(package.path).manifest.quantization == "q8"
    assert convert(source, package.path, quantization="q4", overwrite=True).manifest.quantization == "q4"
    assert [path.name for path in package.path.parent.iterdir()] == ["package"]


def test_a_directory_that_is_no_package_is_never_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("work")
    with pytest.raises(UserError, match="is no package, so it is not overwritten"):
        convert(source, tmp_path, quantization="q4", overwrite=True)
    assert (tmp_path / "precious").read_text() == "work"


def test_a_full_disk_is_seen_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"needs [0-9,]+ bytes, but 1,000 are free"):
        convert(source, tmp_path / "package", quantization="q4")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(source: Path, tmp_path: Path) -> None:
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from neuronpipe.plans.convert import convert\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try:\n    convert(Path(sys.argv[1]), Path(sys.argv[2]), quantization='q8')\n"
        "except ValueError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", script, source, tmp_path / "package"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "the package could not be written and was removed: File too large" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        assert any(path.name.startswith(".package.partial-") for path in tmp_path.iterdir())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "package", quantization="q4", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_what_killed_conversions_left_is_cleared_and_others_are_left_alone(source: Path, tmp_path: Path) -> None:
    leftover, running = tmp_path / f".package.partial-{DEAD_PROCESS}", tmp_path / f".package.partial-{os.getppid()}"
    for path in (leftover, running):
        path.mkdir()
        (path / "bundles.bin").write_text("half")
    convert(source, tmp_path / "package", quantization="q4")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([running.name, "package"])


def test_a_package_whose_replacement_never_came_is_restored(source: Path, package: Package) -> None:
    package.path.rename(package.path.with_name(f".package.old-{DEAD_PROCESS}"))
    with pytest.raises(UserError, match="exists already"):
        convert(source, package.path, quantization="q4")
    assert Package.open(package.path).manifest.id == package.manifest.id


def test_of_two_conversions_at_once_the_first_to_finish_wins(tmp_path: Path) -> None:
    with PartialDirectory(tmp_path / "package", overwrite=False) as mine:
        (mine.path / "manifest.json").write_text("mine")
        (tmp_path / "package").mkdir()
        (tmp_path / "package" / "manifest.json").write_text("theirs")
        with pytest.raises(UserError, match="exists already"):
            mine.publish()
    assert (tmp_path / "package" / "manifest.json").read_text() == "theirs"


def test_a_process_of_another_user_counts_as_alive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(process: int, signal: int) -> None:
        raise PermissionError

    (tmp_path / ".package.partial-77").mkdir()
    monkeypatch.setattr(package_directory.os, "kill", refuse)
    with PartialDirectory(tmp_path / "package", overwrite=False):
        assert (tmp_path / ".package.partial-77").is_dir()


def test_processes_of_a_run_are_forked_without_numpy() -> None:
    """What their parent has imported counts in each of them: 12 MB of a demo's least limit once."""
    script = (
        "import sys\nfrom neuronpipe.launch.verbs.measurements import bench, report\n"
        "from neuronpipe.launch.verbs.runs import run, up\n"
        "from neuronpipe.launch.supervisor.start import preload\npreload()\n"
        "assert 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_opening_a_package_needs_no_numpy(package: Package) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom neuronpipe.plans.package.reader import Package\n"
        "Package.open(Path(sys.argv[1])).fixed\nassert 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, package.path], check=True)
