"""Reading a package leaves nothing in the page cache: a run at its least limit was a third over it with the pages of
the fixed tensors that it had read and would not read again."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.manifest import FIXED
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.uncached_read import BLOCK_BYTES, passing
from neuronpipe.protocol import layouts
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.memory.segments import Segment
from neuronpipe.services.loader.loader_service import load_fixed

_LIBC = ctypes.CDLL(None, use_errno=True)


def cached_bytes(path: Path) -> int:
    """Of a file, in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=2) as pages:
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        states = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
        assert _LIBC.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(pages)), states) == 0, ctypes.get_errno()
        return mmap.PAGESIZE * sum(state & 1 for state in states)


def written(path: Path) -> None:
    """On the disk, and not in the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if cached_bytes(path):
        pytest.skip("this file system keeps its files in memory")


@pytest.fixture
def package(tmp_path: Path) -> Package:
    shutil.copytree(DEMO, tmp_path / "package")
    for file in (tmp_path / "package").iterdir():
        written(file)
    return Package.open(tmp_path / "package")


def load(package: Package) -> bytes:
    """The fixed tensors as a loader loads them."""
    layout = layouts.fixed(file_bytes=package.manifest.files[FIXED].bytes, predictor_bytes=0)
    with Segment.create(layout) as segment:
        load_fixed(package, segment)
        assert segment.sealed
        with segment.map() as mapping:
            return bytes(mapping.view("file"))


@pytest.mark.parametrize(
    "read",
    [
        lambda package: Package.open(package.path),
        load,
        Package.tokenizer,
        Package.checksums,
        Package.chat_template,
        Package.verify_fixed,
        lambda package: package.fixed,
        lambda package: package.predictor,
    ],
)
def test_what_was_read_of_a_package_does_not_stay_in_the_page_cache(
    package: Package, read: Callable[[Package], object]
) -> None:
    try:
        read(package)
    except (KeyError, UserError):
        pytest.skip("the demo has no such file")
    assert {file.name: cached_bytes(file) for file in package.path.iterdir() if cached_bytes(file)} == {}


def test_a_loader_loads_what_the_file_says(package: Package) -> None:
    assert load(package) == package.fixed_path.read_bytes()


def test_while_a_file_is_read_the_page_cache_holds_little_more_than_is_read_ahead(tmp_path: Path) -> None:
    (file := tmp_path / "large").write_bytes(os.urandom(12 * BLOCK_BYTES + 1000))
    written(file)
    pieces, most_bytes = [], 0
    for piece in passing(file):
        pieces.append(bytes(piece))
        most_bytes = max(most_bytes, cached_bytes(file))
    assert b"".join(pieces) == file.read_bytes()
    assert most_bytes < 6 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "does not match the manifest's sha256: damaged"),
        (lambda data: data[:-9], "ended after {most} of {all} bytes"),
    ],
)
def test_fixed_tensors_that_changed_since_the_package_was_opened_are_not_loaded(
    package: Package, damage: Callable[[bytes], bytes], complaint: str
) -> None:
    data = package.fixed_path.read_bytes()
    package.fixed_path.write_bytes(damage(data))
    complaint = complaint.format(most=len(data) - 9, all=len(data))
    with pytest.raises(UserError, match=re.escape(f"fixed.safetensors: {complaint}")):
        load(package)


def test_fixed_tensors_are_read_once(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were read and hashed twice, the second time from the page cache."""
    opened: list[str] = []
    open_path = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *args, **named: opened.append(self.name) or open_path(self, *args, **named)
    )
    load(package)
    assert opened.count(FIXED) == 1
