"""The files of the prompt cache: what bytes they have, what is refused, and that the folder keeps its budget."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import random
import resource
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some
from neuronpipe.native import lib
from neuronpipe.plans.models.attention_sizes import CachedVectors
from neuronpipe.protocol import layouts
from neuronpipe.services.loader import prefix_chunk
from neuronpipe.services.loader.prefix_chunk import (
    CHUNK_TOKENS,
    BadChunk,
    Description,
    Origin,
    checksum,
    read_chunk,
    write_chunk,
)
from neuronpipe.services.loader.prefix_folder import PrefixFolder
from neuronpipe.services.loader.slot_regions import SlotRegions

ORIGIN = Origin(package="p", numerics="cpu:avx2 exact", engine="e", regions="r")
TOKENS = tuple(range(7, 7 + CHUNK_TOKENS))
KEY = next(ORIGIN.keys(TOKENS))
PIECES = [b"keys" * 1000, b"", b"values" * 3000]
BYTES = sum(map(len, PIECES))


def described(**changes: object) -> Description:
    fields = {
        **dataclasses.asdict(ORIGIN),
        "key": KEY,
        "first": 0,
        "tokens": TOKENS,
        "content_bytes": BYTES,
        "crc32c": checksum([memoryview(piece) for piece in PIECES]),
    }
    return Description(**{**fields, **changes})  # type: ignore[arg-type]


def write(path: Path, description: Description | None = None) -> None:
    with path.open("wb") as file:
        write_chunk(file.fileno(), description or described(), [memoryview(piece) for piece in PIECES])


def read(path: Path, key: str = KEY, tokens: tuple[int, ...] = TOKENS) -> bytes:
    content = bytearray(BYTES)
    view = memoryview(content)
    with path.open("rb") as file:
        read_chunk(file.fileno(), key, tokens, [view[:4000], view[4000:]])
    return bytes(content)


# ---- which bytes ---------------------------------------------------------------------------------------------
def test_the_pieces_of_all_slots_and_tokens_cover_the_segment_once() -> None:
    vectors = [CachedVectors(4, 5), CachedVectors(0, 5), CachedVectors(2, 7)]  # of layers that differ
    layout = layouts.kv(position_words=34, sequences=2, context_tokens=10)
    regions, field = SlotRegions.of(layout, vectors), layout["kv"]
    covered = sorted(
        piece for slot in range(2) for first in (0, 4, 8) for piece in regions.ranges(slot, first, min(first + 4, 10))
    )
    ends = [offset + size for offset, size in covered]
    assert [offset for offset, _ in covered] == [field.offset_bytes, *ends[:-1]]
    assert ends[-1] == field.offset_bytes + field.total_bytes


def test_tokens_have_as_many_bytes_in_every_run_of_a_package() -> None:
    narrow = SlotRegions.of(layouts.kv(position_words=96, sequences=1, context_tokens=64), [CachedVectors(4, 8)] * 3)
    wide = SlotRegions.of(layouts.kv(position_words=96, sequences=5, context_tokens=999), [CachedVectors(4, 8)] * 3)
    assert narrow.signature == wide.signature
    assert [size for _, size in narrow.ranges(0, 3, 9)] == [size for _, size in wide.ranges(4, 900, 906)]
    assert narrow.total_bytes(6) == 3 * 4 * 6 * 8 * 2


@pytest.mark.parametrize(("slot", "first", "end"), [(2, 0, 1), (-1, 0, 1), (0, 5, 11), (0, 6, 5)])
def test_tokens_outside_the_segment_have_no_bytes(slot: int, first: int, end: int) -> None:
    layout = layouts.kv(position_words=1, sequences=2, context_tokens=10)
    regions = SlotRegions.of(layout, [CachedVectors(1, 1)])
    with pytest.raises(ValueError, match="outside"):
        regions.ranges(slot, first, end)


# ---- keys ----------------------------------------------------------------------------------------------------
@given(some.integers(0, 5), some.integers(0, CHUNK_TOKENS - 1), some.integers(0, 300))
def test_prefixes_share_the_keys_of_whole_common_chunks(chunks: int, rest: int, changed: int) -> None:
    tokens = [n % 11 for n in range(chunks * CHUNK_TOKENS + rest)]
    keys = list(ORIGIN.keys(tokens))
    assert len(set(keys)) == len(keys) == chunks
    assert list(ORIGIN.keys([*tokens, *range(100)]))[:chunks] == keys
    if changed < len(tokens):
        tokens[changed] += 1
        common = changed // CHUNK_TOKENS
        others = list(ORIGIN.keys(tokens))
        assert others[:common] == keys[:common]
        assert not set(others[common:]) & set(keys)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Origin)])
def test_whatever_else_the_bits_depend_on_changes_every_key(field: str) -> None:
    other = dataclasses.replace(ORIGIN, **{field: "another"})
    assert not set(other.keys(TOKENS * 3)) & set(ORIGIN.keys(TOKENS * 3))


# ---- a file --------------------------------------------------------------------------------------------------
def test_a_chunk_is_read_as_it_was_written_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "chunk")
    assert read(tmp_path / "chunk") == b"".join(PIECES)
    monkeypatch.setattr(prefix_chunk, "MAX_PIECES", 1)
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: pwritev(fd, [parts[0][:777]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:1111]], at))
    write(tmp_path / "slowly")
    assert (tmp_path / "slowly").read_bytes() == (tmp_path / "chunk").read_bytes()
    assert read(tmp_path / "slowly") == b"".join(PIECES)


def test_no_damaged_byte_and_no_other_length_is_accepted(tmp_path: Path) -> None:
    path, rng = tmp_path / "chunk", random.Random(5)
    write(path)
    whole = path.read_bytes()
    used = len(described().to_bytes().rstrip(b"\0"))
    places = [*range(24), *rng.sample(range(used), 40), *rng.sample(range(len(whole) - BYTES, len(whole)), 40)]
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :])
        with pytest.raises(BadChunk):
            read(path)
    for size in (0, 7, 19, 300, used, len(whole) - BYTES, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(BadChunk):
            read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(BadChunk):
        read(path)


def test_a_file_of_another_version_or_prefix_is_no_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chunk"
    write(path)
    with pytest.raises(BadChunk, match="another prefix"):
        read(path, tokens=(*TOKENS[:-1], 3))
    with pytest.raises(BadChunk, match="another prefix"):
        read(path, key="0" * 40)
    monkeypatch.setattr(prefix_chunk, "VERSION", 2)
    with pytest.raises(BadChunk, match="its version is 1, this program reads 2"):
        read(path)


# ---- the folder ----------------------------------------------------------------------------------------------
def key_of(number: int) -> str:
    return f"{number:040x}"


def keys_in(folder: PrefixFolder) -> list[str]:
    return sorted(path.stem for path in folder.path.glob("*.prefix"))


def add(folder: PrefixFolder, number: int, size: int = 1000) -> bool:
    return folder.add(key_of(number), size, lambda fd: os.write(fd, bytes(size)) and None)


@pytest.fixture
def folder(tmp_path: Path) -> PrefixFolder:
    folder = PrefixFolder(tmp_path / "cache" / "prompts", 10_000)
    assert folder.prepare()
    return folder


def test_only_the_user_may_enter_the_folder_and_read_a_file(folder: PrefixFolder) -> None:
    add(folder, 1)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (file,) = folder.path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    folder.path.chmod(0o755)
    assert folder.prepare()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_a_link_is_no_folder_and_no_file(
    tmp_path: Path, folder: PrefixFolder, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "link").symlink_to(folder.path)
    assert not PrefixFolder(tmp_path / "link", 10_000).prepare()
    assert len(caplog.records) == 1
    (folder.path / f"{key_of(1)}.prefix").symlink_to("/etc/passwd")
    with folder.opened(key_of(1)) as fd:
        assert fd is None


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "hard link of another user", "folder"])
def test_what_is_no_file_of_the_user_is_no_hit_costs_one_line_and_is_replaced(
    tmp_path: Path, folder: PrefixFolder, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    path, target = folder.path / f"{key_of(1)}.prefix", tmp_path / "target"
    target.write_bytes(b"of somebody else")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "hard link of another user":
        if os.geteuid() != 0:
            pytest.skip("only root may give a file away")
        os.chown(target, 12345, 12345)
        path.hardlink_to(target)
    else:
        path.symlink_to(target if kind == "link" else tmp_path / "nowhere")
    for _ in range(2):
        assert not folder.has(key_of(1))
        with folder.opened(key_of(1)) as fd:
            assert kind == "folder" or fd is None
    assert [record.getMessage().count("no file of this user") for record in caplog.records] == [1]
    assert add(folder, 1) == (kind != "folder")
    assert folder.has(key_of(1)) == (kind != "folder")
    assert target.read_bytes() == b"of somebody else"


def test_a_folder_with_the_name_of_a_chunk_ends_no_eviction(
    folder: PrefixFolder, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder.path / f"{key_of(99)}.prefix"
    path.mkdir()
    os.utime(path, (1, 1))  # the least recently used
    for number in range(30):
        assert add(folder, number)
    assert folder.prepare()
    assert sum(file.stat().st_size for file in folder.path.glob("*.prefix") if file.is_file()) <= folder.budget_bytes
    assert not caplog.records


def test_runs_that_add_evict_read_and_start_at_once_read_only_whole_files(folder: PrefixFolder) -> None:
    script = """
import os, random, sys
from pathlib import Path
from neuronpipe.services.loader.prefix_folder import PrefixFolder
folder, draw = PrefixFolder(Path(sys.argv[1]), 10_000), random.Random(int(sys.argv[2]))
for _ in range(1500):
    number, move = draw.randrange(40), draw.random()
    key = f"{number:040x}"
    if move < 0.01:
        assert folder.prepare()
    elif move < 0.5:
        folder.has(key) or folder.add(key, 900, lambda fd: [os.write(fd, bytes([number]) * 300) for _ in range(3)])
    else:
        with folder.opened(key) as fd:
            assert fd is None or os.pread(fd, 2000, 0) == bytes([number]) * 900
        folder.used([key])
"""
    runs = [
        subprocess.Popen([sys.executable, "-c", script, folder.path, str(seed)], stderr=subprocess.PIPE, text=True)
        for seed in range(3)
    ]
    for run in runs:
        _, errors = run.communicate(timeout=60)
        assert (run.returncode, errors) == (0, ""), "a save that another run's start disturbed costs a line"
    assert folder.prepare()
    assert all(path.stat().st_size == 900 for path in folder.path.iterdir())
    assert sum(path.stat().st_size for path in folder.path.iterdir()) <= folder.budget_bytes


@given(some.integers(0, 1 << 32), some.data())
def test_a_header_with_a_right_checksum_and_any_content_is_refused(text_bytes: int, data: some.DataObject) -> None:
    """Counts beyond every bound, and JSON that is deep, huge or of other types."""
    numbers = some.one_of(some.integers(), some.sampled_from([-1, 1 << 63, 10**400]))
    known = some.dictionaries(
        some.sampled_from(sorted(described().__dict__)), numbers | some.lists(numbers, max_size=3)
    )
    document = dataclasses.asdict(described(key="0" * 40)) | data.draw(known)
    texts = [json.dumps(document), "[" * 60_000, '{"tokens":' + "[" * 60_000, "{}", '{"first": ' + "9" * 5000 + "}"]
    text = data.draw(some.sampled_from(texts)).encode()
    count = data.draw(some.sampled_from([len(text), text_bytes % (1 << 32)]))
    head = prefix_chunk._HEAD.pack(prefix_chunk.MAGIC, prefix_chunk.VERSION, count, lib.np_crc32c(0, text, len(text)))
    with tempfile.TemporaryFile() as file:
        file.write(head + text)
        file.truncate(1 << 40)  # sparse
        with pytest.raises(BadChunk):
            read_chunk(file.fileno(), KEY, TOKENS, [memoryview(bytearray(BYTES))])


def test_the_least_recently_used_files_go_and_a_prefix_loses_its_end_first(folder: PrefixFolder) -> None:
    for number in range(9):
        assert add(folder, number)
    folder.used([key_of(number) for number in range(4)])
    add(folder, 20, 6000)
    assert keys_in(folder) == [key_of(number) for number in (0, 1, 2, 20)]
    assert sum(path.stat().st_size for path in folder.path.iterdir()) <= folder.budget_bytes


def test_two_runs_keep_one_budget(folder: PrefixFolder) -> None:
    other = PrefixFolder(folder.path, folder.budget_bytes)
    assert other.prepare()
    for number in range(40):
        assert add((folder, other)[number % 2], number, 900)
        # Each adds at most a twentieth, or one file, before it counts what the other has added.
        assert sum(path.stat().st_size for path in folder.path.iterdir()) <= folder.budget_bytes + 900
    assert folder.prepare()
    assert sum(path.stat().st_size for path in folder.path.iterdir()) <= folder.budget_bytes


def test_a_smaller_budget_is_kept_from_the_start(folder: PrefixFolder) -> None:
    for number in range(9):
        add(folder, number)
    smaller = PrefixFolder(folder.path, 3_500)
    assert smaller.prepare()
    assert len(keys_in(smaller)) == 3
    assert not add(smaller, 30, 4000), "more than the whole budget"


def test_files_of_others_in_the_folder_stay(folder: PrefixFolder) -> None:
    (folder.path / "notes.txt").write_bytes(bytes(50_000))
    (folder.path / "mine.prefix").write_bytes(bytes(50_000))
    for number in range(30):
        add(folder, number)
    assert folder.prepare()
    assert {"notes.txt", "mine.prefix"} <= set(os.listdir(folder.path))


def test_what_a_killed_process_was_writing_is_removed_and_what_a_live_one_writes_stays(folder: PrefixFolder) -> None:
    dead, live = (folder.path / f"{key_of(number)}.77.part" for number in (1, 2))
    dead.write_bytes(b"half")
    with live.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert folder.prepare()
        assert os.listdir(folder.path) == [live.name]


@pytest.fixture
def small_files() -> Iterator[None]:
    """As on a full disk, a write ends in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_a_disk_that_fills_up_costs_one_line_and_leaves_no_part(
    folder: PrefixFolder, caplog: pytest.LogCaptureFixture
) -> None:
    def write(fd: int) -> None:
        while True:
            os.write(fd, bytes(400))

    for number in range(3):
        assert not folder.add(key_of(number), 1000, write)
    assert os.listdir(folder.path) == []
    assert len(caplog.records) == 1
    assert add(folder, 5, 400)


def test_nothing_is_saved_to_a_disk_with_little_room(
    folder: PrefixFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        assert add(folder, number)
    monkeypatch.setattr("neuronpipe.services.loader.prefix_folder.MIN_FREE_BYTES", 1 << 60)
    assert not add(folder, 4)
    assert not add(folder, 5)
    assert len(caplog.records) == 1


def test_a_file_that_is_of_no_use_is_removed_with_one_line(
    folder: PrefixFolder, caplog: pytest.LogCaptureFixture
) -> None:
    add(folder, 1)
    with caplog.at_level(logging.WARNING):
        folder.discard(key_of(1), "its checksum is wrong")
    (record,) = caplog.records
    assert key_of(1) in record.getMessage()
    assert os.listdir(folder.path) == []
