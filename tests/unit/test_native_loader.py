"""The flash reader and the loader's core through cffi, against a file that Python wrote."""

import errno
import random
import select
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.native import ffi, lib
from neuronpipe.plans.cost import read_sizes

PAGE = 4096
CLUSTERS = 20
PART_BYTES = (PAGE, 2 * PAGE)
PARTS = (lib.NP_REQUEST_TRIGGER, lib.NP_REQUEST_VALUE)
READING = ffi.new("np_loader_reading *", {"most_read_bytes": 3 * PAGE, "prefetch_depth": 8})
STRIDE = sum(PART_BYTES)
SLOTS = 16


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    """CLUSTERS clusters of random bytes."""
    path = tmp_path / "bundles.bin"
    path.write_bytes(random.Random(3).randbytes(CLUSTERS * STRIDE))
    return path


@pytest.fixture(params=["io_uring", "threads"])
def reader(request: pytest.FixtureRequest, bundles: Path) -> Iterator[Any]:
    """An open reader of each engine that this machine allows."""
    error = ffi.new("int *")
    opened = lib.np_reader_open(str(bundles).encode(), request.param.encode(), 8, error)
    if opened == ffi.NULL and request.param == "io_uring":
        pytest.skip(f"io_uring is not allowed here ({errno.errorcode[error[0]]})")
    assert opened != ffi.NULL
    yield opened
    lib.np_reader_close(opened)


def aligned(size_bytes: int) -> tuple[Any, Any]:
    """A page-aligned buffer and what keeps it alive."""
    owner = ffi.new("uint8_t[]", size_bytes + PAGE)
    return owner + -int(ffi.cast("uintptr_t", owner)) % PAGE, owner


class Loading:
    """A loader over `reader`, with its words and slots."""

    def __init__(self, reader: Any, bundles: Path) -> None:
        self.file = bundles.read_bytes()
        self.words = [ffi.new("uint32_t[]", CLUSTERS) for _ in PART_BYTES]
        self.slots, self._owners = zip(*(aligned(SLOTS * size) for size in PART_BYTES), strict=True)
        self.checksums = array(  # as in checksums.bin: of each cluster one after the other
            "I",
            [lib.np_crc32c(0, self.expected(n, i), size) for i in range(CLUSTERS) for n, size in enumerate(PART_BYTES)],
        )
        parts = ffi.new(
            "np_loader_part[2]",
            [
                {
                    "base_offset": 0, "stride_bytes": STRIDE, "part_offset": part * PAGE, "part_bytes": size,
                    "slot_bytes": size,
                    "slot_count": SLOTS, "slots": self.slots[part], "slots_file": -1, "words": self.words[part],
                    "cluster_count": CLUSTERS, "checksums": ffi.from_buffer("uint32_t[]", self.checksums) + part,
                    "checksum_stride": 2,
                }
                for part, size in enumerate(PART_BYTES)
            ],
        )  # fmt: skip
        self.arrivals = ffi.new("uint32_t *")
        self.core = lib.np_loader_create(reader, parts, READING, self.arrivals, 64)
        assert self.core != ffi.NULL

    def expected(self, part: int, cluster: int) -> bytes:
        start = cluster * STRIDE + part * PAGE
        return self.file[start : start + PART_BYTES[part]]

    def found(self, part: int, cluster: int) -> bytes:
        word = self.words[part][cluster]
        assert word & lib.NP_ENTRY_STATE_MASK == lib.NP_ENTRY_PRESENT
        size = PART_BYTES[part]
        return bytes(ffi.buffer(self.slots[part] + (word & lib.NP_ENTRY_SLOT_MASK) * size, size))

    def finish(self) -> Any:
        state = ffi.new("np_loader_state *")
        while True:
            lib.np_loader_turn(self.core, 1000)
            lib.np_loader_read_state(self.core, state)
            if state.in_flight == 0:
                return state


@pytest.fixture
def loading(reader: Any, bundles: Path) -> Iterator[Loading]:
    made = Loading(reader, bundles)
    yield made
    lib.np_loader_destroy(made.core)


def test_clusters_arrive_whole_and_are_announced(loading: Loading) -> None:
    for part in range(2):
        assert lib.np_loader_grant(loading.core, part, list(range(SLOTS)), SLOTS) == SLOTS
        assert lib.np_loader_request(loading.core, PARTS[part], [17, 4, 9, 4], 4, part, 0) == 4
    state = loading.finish()
    assert (state.reads, state.bytes, state.already_there) == (6, 3 * STRIDE, 2)
    assert loading.arrivals[0] > 0
    for part in range(2):
        for cluster in (17, 4, 9):
            assert loading.found(part, cluster) == loading.expected(part, cluster)


def test_damage_is_found(loading: Loading) -> None:
    loading.checksums[2 * 6 + 1] ^= 1
    lib.np_loader_grant(loading.core, 1, [3], 1)
    lib.np_loader_request(loading.core, PARTS[1], [6], 1, 0, 0)
    state = loading.finish()
    assert loading.words[1][6] == lib.NP_ENTRY_FAILED
    assert (state.checksum_failures, state.free_slots[1]) == (2, 1)  # it was read twice


def test_the_event_descriptor_tells_of_completions(loading: Loading, reader: Any) -> None:
    descriptor = lib.np_reader_event_fd(reader)
    lib.np_loader_grant(loading.core, 0, [0], 1)
    lib.np_loader_request(loading.core, PARTS[0], [2], 1, 0, 0)
    ended = lib.np_loader_turn(loading.core, 0)
    while not ended:
        assert select.select([descriptor], [], [], 20)[0]
        ended = lib.np_loader_turn(loading.core, 0)
    assert loading.found(0, 2) == loading.expected(0, 2)


def test_opening_says_what_is_wrong(tmp_path: Path) -> None:
    error = ffi.new("int *")
    assert lib.np_reader_open(str(tmp_path / "missing.bin").encode(), ffi.NULL, 8, error) == ffi.NULL
    assert error[0] == errno.ENOENT
    assert lib.np_reader_open(str(tmp_path).encode(), ffi.NULL, 8, error) == ffi.NULL
    assert error[0] == errno.EISDIR


def test_crc32c_is_castagnolis() -> None:
    assert lib.np_crc32c(0, b"123456789", 9) == 0xE3069283


def test_plans_count_pieces_as_large_as_the_loaders() -> None:
    assert read_sizes.PIECE_BYTES == lib.NP_PIECE_BYTES
