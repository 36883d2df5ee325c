"""Memory files mapped for huge pages: the same bytes, and no view of them outlives its memory."""

import os
from collections.abc import Iterator

import pytest
from neuronpipe.native.huge_mapping import HugeMapping, collapse
from neuronpipe.protocol import layouts
from neuronpipe.protocol.memory.segments import Segment, create_memory_file

SIZE_BYTES = (5 << 20) + 123


@pytest.fixture
def file() -> Iterator[int]:
    file = create_memory_file("test")
    os.ftruncate(file, SIZE_BYTES)
    yield file
    os.close(file)


def test_a_file_keeps_its_bytes_when_its_pages_become_huge(file: int) -> None:
    content = os.urandom(SIZE_BYTES)
    os.pwrite(file, content, 0)
    mapping, reader = HugeMapping(file, SIZE_BYTES, writable=True), HugeMapping(file, SIZE_BYTES, writable=False)
    collapse(mapping.content[1:])
    assert mapping.content == content == reader.content
    mapping.content[SIZE_BYTES - 1] ^= 1
    assert reader.content[SIZE_BYTES - 1] == content[-1] ^ 1
    with pytest.raises(TypeError):
        reader.content[0] = 1
    mapping.close()
    assert reader.content[:-1] == content[:-1]


def test_memory_that_a_view_still_uses_is_not_unmapped(file: int) -> None:
    os.pwrite(file, b"kept", 3 << 20)
    mapping = HugeMapping(file, SIZE_BYTES, writable=True)
    piece = mapping.content[3 << 20 :][:4]
    with pytest.raises(BufferError, match="in use"):
        mapping.close()
    assert piece == b"kept"


def test_a_segment_in_huge_pages_is_closed_like_any_other() -> None:
    layout = layouts.residency(clusters=300_000, ffns=1, participants=3)
    with Segment.create(layout) as segment:
        with segment.map(writable=True, mapper=HugeMapping) as mapping:
            mapping.view("value_entries")[299_999] = 7
        mapping = segment.map(mapper=HugeMapping)
        entries = mapping.view("value_entries")
        assert entries[299_999] == 7
        held = memoryview(entries)
        with pytest.raises(BufferError, match="segment residency: still in use"):
            mapping.close()
        assert held[299_999] == 7
        held.release()
        mapping.close()
        segment.seal()


@pytest.mark.parametrize("size_bytes", [0, 1 << 63])
def test_a_size_that_cannot_be_mapped_is_an_error_of_the_system(file: int, size_bytes: int) -> None:
    with pytest.raises(OSError, match=r"\w"):
        HugeMapping(file, size_bytes, writable=False)


def test_a_descriptor_that_is_closed_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        HugeMapping(9999, SIZE_BYTES, writable=False)
    collapse(memoryview(bytearray()))
