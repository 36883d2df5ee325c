"""Segments: shared between processes, checked on attaching, closed to writers when they should be."""

import gc
import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest
from neuronpipe.protocol import layouts
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.memory import segments
from neuronpipe.protocol.memory.layout import Layout
from neuronpipe.protocol.memory.segments import Segment

LAYOUT = layouts.residency(clusters=1000, ffns=1, participants=3)


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(LAYOUT) as segment:
        yield segment


def test_what_one_process_writes_another_reads(segment: Segment) -> None:
    program = (
        "from neuronpipe.protocol import layouts\n"
        "from neuronpipe.protocol.memory.segments import Segment\n"
        f"segment = Segment.attach(layouts.residency(clusters=1000, ffns=1, participants=3), {segment.fd})\n"
        "with segment.map(writable=True) as mapping:\n"
        "    mapping.view('value_entries')[999] = 7\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, pass_fds=[segment.fd])
    with segment.map() as mapping:
        assert mapping.view("value_entries")[999] == 7
        assert len(mapping.view("value_entries")) == 1000


def test_a_segment_is_opened_through_the_process_that_holds_it(segment: Segment) -> None:
    program = (
        "import sys\n"
        "from neuronpipe.protocol import layouts\n"
        "from neuronpipe.protocol.memory.segments import Segment\n"
        "layout = layouts.residency(clusters=1000, ffns=1, participants=3)\n"
        f"segment = Segment.open(layout, {os.getpid()}, {segment.fd})\n"
        "with segment.map() as mapping:\n"
        "    print(mapping.view('arrivals')[0])\n"
    )
    with segment.map(writable=True) as mapping:
        mapping.view("arrivals")[0] = 42
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "42\n"


def test_a_segment_of_a_process_that_is_gone_is_a_persons_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(UserError, match=r"segment residency: /proc/\d+/fd/3: .*is the run still live"):
        Segment.open(LAYOUT, process.pid, 3)


def test_a_read_only_descriptor_cannot_be_mapped_for_writing(segment: Segment) -> None:
    with segment.read_only() as reader:
        with pytest.raises(PermissionError):
            reader.map(writable=True)
        with reader.map() as mapping, pytest.raises(TypeError):
            mapping.view("arrivals")[0] = 1


def test_a_sealed_segment_can_be_read_and_never_written_again(segment: Segment) -> None:
    with segment.map() as reading:
        with segment.map(writable=True) as mapping:
            mapping.view("arrivals")[0] = 5
            with pytest.raises(RuntimeError, match="segment residency: cannot be sealed while it is mapped"):
                segment.seal()
        assert not segment.sealed
        segment.seal()
        assert segment.sealed
        with pytest.raises(PermissionError):
            segment.map(writable=True)
        with pytest.raises(PermissionError):
            os.pwrite(segment.fd, b"x", 8192)
        assert reading.view("arrivals")[0] == 5
    with segment.map() as mapping:
        assert mapping.view("arrivals")[0] == 5


def test_a_segment_cannot_change_its_size(segment: Segment) -> None:
    for size in (0, LAYOUT.total_bytes * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)


@pytest.mark.parametrize(
    ("layout", "complaint"),
    [
        (layouts.residency(clusters=1001, ffns=1, participants=3), "layout: found"),
        (
            layouts.residency(clusters=9000, ffns=1, participants=3),
            f"total bytes: found {LAYOUT.total_bytes}, expected",
        ),
        (layouts.board(processes=4, sequences=2), "kind: found 3, expected 6"),
    ],
)
def test_a_segment_of_another_layout_is_refused(segment: Segment, layout: Layout, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Segment.attach(layout, segment.fd)


def test_a_segment_of_another_generation_is_refused() -> None:
    with Segment.create(LAYOUT, generation=3) as segment:
        assert Segment.attach(LAYOUT, segment.fd).generation == 3
        with pytest.raises(UserError, match="generation: found 3, expected 4"):
            Segment.attach(LAYOUT, segment.fd, generation=4)


def test_a_descriptor_of_something_else_is_refused() -> None:
    fd = os.memfd_create("other")
    try:
        for content in (b"", b"x" * 8192):
            os.pwrite(fd, content, 0)
            with pytest.raises(UserError, match="is no segment"):
                Segment.attach(LAYOUT, fd)
    finally:
        os.close(fd)


def test_a_truncated_copy_is_refused(segment: Segment) -> None:
    fd = os.memfd_create("copy")
    try:
        os.write(fd, os.pread(segment.fd, 4096, 0))
        with pytest.raises(UserError, match="size of the file: found 4096"):
            Segment.attach(LAYOUT, fd)
    finally:
        os.close(fd)


def test_more_memory_than_there_may_be_is_a_persons_error() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UserError, match=r"segment residency: cannot make .*plan with a smaller memory limit"):
            Segment.create(LAYOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_view_in_use_keeps_the_segment_mapped(segment: Segment) -> None:
    mapping = segment.map()
    outer = memoryview(mapping.view("arrivals"))
    with pytest.raises(BufferError, match="segment residency: still in use"):
        mapping.close()
    outer.release()
    mapping.close()
    with pytest.raises(ValueError, match="released"):
        len(memoryview(outer))


def test_nothing_is_left_open() -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    with Segment.create(LAYOUT) as segment, segment.read_only() as reader, reader.map() as mapping:
        mapping.view("arrivals")
    assert set(os.listdir("/proc/self/fd")) == before


def test_memory_files_are_made_without_the_help_of_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with Segment.create(LAYOUT) as segment:
        assert not os.get_inheritable(segment.fd)
        segment.seal()
        assert segment.sealed
    monkeypatch.setattr(segments, "_MEMFD_CREATE", {})
    with pytest.raises(UserError, match="no memfd_create known"):
        Segment.create(LAYOUT)
