"""The loader's prompt cache over a segment in this process: what it saves, restores and drops, and when it answers."""

from __future__ import annotations

import itertools
import os
import select
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from neuronpipe.plans.models.attention_sizes import CachedVectors
from neuronpipe.protocol import layouts
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.loader import Hasten, Restore, Save
from neuronpipe.protocol.messages.outcome import Restored, Saved
from neuronpipe.services.loader import prompt_cache
from neuronpipe.services.loader.prefix_chunk import CHUNK_TOKENS, Origin
from neuronpipe.services.loader.prefix_folder import PrefixFolder
from neuronpipe.services.loader.prompt_cache import PromptCache, full_numerics
from neuronpipe.services.loader.slot_regions import SlotRegions

CONTEXT, WIDTH, VECTORS, LAYERS, SLOTS = 400, 4, 2, 3, 2
NUMERICS = "cpu:avx2"
PATIENCE_S = 10.0


class Fixture:
    """A prompt cache and the memory of its KV slots, where each token's bytes follow from all tokens before it."""

    def __init__(self, folder: Path, budget_bytes: int = 1 << 20, context: int = CONTEXT) -> None:
        elements = LAYERS * VECTORS * WIDTH
        layout = layouts.kv(position_words=elements, sequences=SLOTS, context_tokens=context)
        self.regions = SlotRegions.of(layout, [CachedVectors(VECTORS, WIDTH)] * LAYERS)
        self.memory = bytearray(layout.total_bytes)
        self.folder = PrefixFolder(folder, budget_bytes)
        assert self.folder.prepare()
        self.cache = PromptCache(
            self.folder,
            self.regions,
            memoryview(self.memory),
            lambda numerics: Origin(package="p", numerics=numerics, engine="e", regions=self.regions.signature),
        )

    def compute(self, slot: int, tokens: list[int]) -> None:
        state = 1
        for position, token in enumerate(tokens):
            state = (state * 31 + token) % 65_521
            for number, (offset, size) in enumerate(self.regions.ranges(slot, position, position + 1)):
                self.memory[offset : offset + size] = struct.pack("<H", (state + number) % 65_536) * (size // 2)

    def content(self, slot: int, tokens: int) -> bytes:
        ranges = self.regions.ranges(slot, 0, tokens)
        return b"".join(bytes(self.memory[offset : offset + size]) for offset, size in ranges)

    def answer(self) -> Message:
        assert select.select([self.cache.wake], [], [], PATIENCE_S)[0]
        (answer,) = self.cache.answers()
        return answer

    def save(self, number: int, slot: int, tokens: list[int], numerics: str = NUMERICS) -> Message:
        self.cache.submit(Save(number=number, sequence=slot, numerics=numerics, tokens=packed(tokens)))
        return self.answer()

    def restore(self, number: int, slot: int, tokens: list[int], **fields: object) -> Message:
        fields = {"numerics": NUMERICS, **fields}
        self.cache.submit(Restore(number=number, sequence=slot, tokens=packed(tokens), **fields))  # type: ignore[arg-type]
        return self.answer()

    def files(self) -> list[Path]:
        return sorted(self.folder.path.iterdir())


def packed(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


TOKENS = [7 * n % 101 for n in range(4 * CHUNK_TOKENS + 9)]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Fixture]]:
    """Makes prompt caches over one folder; they are closed after the test."""
    fixtures: list[Fixture] = []

    def make(**options: int) -> Fixture:
        fixtures.append(Fixture(tmp_path / "prompts", **options))
        return fixtures[-1]

    yield make
    for fixture in fixtures:
        fixture.cache.close()


@pytest.fixture
def saved(made: Callable[..., Fixture]) -> Fixture:
    """A prompt cache that has four chunks of TOKENS, from slot 0."""
    fixture = made()
    fixture.compute(0, TOKENS)
    assert fixture.save(1, 0, TOKENS) == Saved(number=1)
    return fixture


def test_another_process_restores_the_same_bytes_into_another_slot_and_context(
    saved: Fixture, made: Callable[..., Fixture]
) -> None:
    later = made(context=512)
    assert later.restore(1, 1, TOKENS) == Restored(number=1, tokens=4 * CHUNK_TOKENS)
    assert later.content(1, 4 * CHUNK_TOKENS) == saved.content(0, 4 * CHUNK_TOKENS)
    assert not any(later.content(0, 512)), "no other slot is touched"


def test_a_longer_prefix_adds_only_its_new_chunks(saved: Fixture) -> None:
    before = {path: path.stat().st_ino for path in saved.files()}
    longer = [*TOKENS, *range(20)]
    saved.compute(1, longer)
    saved.save(2, 1, longer)
    assert {path: path.stat().st_ino for path in saved.files() if path in before} == before
    assert len(saved.files()) == len(before) == 4, "a part of a chunk is not saved"
    longer += range(50)
    saved.compute(1, longer)
    saved.save(3, 1, longer)
    assert len(saved.files()) == 5


def test_a_restore_begins_where_the_slot_ends_and_not_below_the_minimum(saved: Fixture) -> None:
    assert saved.restore(2, 1, TOKENS, first=4 * CHUNK_TOKENS) == Restored(number=2)
    assert saved.restore(3, 1, TOKENS, min_tokens=4 * CHUNK_TOKENS + 1) == Restored(number=3)
    assert not any(saved.content(1, CONTEXT))
    first = CHUNK_TOKENS + 5
    saved.compute(1, TOKENS[:first])
    assert saved.restore(4, 1, TOKENS, first=first) == Restored(number=4, tokens=4 * CHUNK_TOKENS)
    assert saved.content(1, 4 * CHUNK_TOKENS) == saved.content(0, 4 * CHUNK_TOKENS)


def test_what_the_slot_has_is_never_written_even_if_the_file_is_damaged(saved: Fixture) -> None:
    first = CHUNK_TOKENS + 20
    saved.compute(1, TOKENS[:first])
    before = saved.content(1, first)
    assert saved.restore(2, 1, TOKENS, first=first) == Restored(number=2, tokens=4 * CHUNK_TOKENS)
    assert saved.content(1, 4 * CHUNK_TOKENS) == saved.content(0, 4 * CHUNK_TOKENS)
    path = saved.folder.path / f"{list(saved.cache._origin(NUMERICS).keys(TOKENS))[1]}.prefix"
    content = bytearray(path.read_bytes())
    content[4096:] = bytes(reversed(content[4096:]))
    path.write_bytes(content)
    assert saved.restore(3, 1, TOKENS, first=first) == Restored(number=3)
    assert saved.content(1, first) == before


def test_other_tokens_and_other_numerics_are_no_hit(saved: Fixture) -> None:
    assert saved.restore(2, 1, TOKENS, numerics="cpu:scalar") == Restored(number=2)
    changed = [*TOKENS[:100], 999, *TOKENS[101:]]
    assert saved.restore(3, 1, changed) == Restored(number=3, tokens=CHUNK_TOKENS)


@pytest.mark.parametrize("damage", ["byte", "short", "empty", "foreign"])
def test_a_damaged_chunk_ends_the_prefix_and_is_removed_with_one_line(
    saved: Fixture, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = list(saved.cache._origin(NUMERICS).keys(TOKENS))[2]
    path = saved.folder.path / f"{key}.prefix"
    whole = path.read_bytes()
    content = {"byte": whole[:-9] + b"\x55" + whole[-8:], "short": whole[:-50], "empty": b"", "foreign": b"x" * 9000}
    path.write_bytes(content[damage])
    assert saved.restore(2, 1, TOKENS) == Restored(number=2, tokens=2 * CHUNK_TOKENS)
    assert saved.content(1, 2 * CHUNK_TOKENS) == saved.content(0, 2 * CHUNK_TOKENS)
    assert [record.getMessage().count(key) for record in caplog.records] == [1]
    assert not path.exists()
    saved.save(3, 0, TOKENS)
    assert path.read_bytes() == whole


def test_a_prefix_that_exceeds_the_budget_keeps_its_beginning(made: Callable[..., Fixture]) -> None:
    one_chunk = 2 * 4096 + LAYERS * VECTORS * CHUNK_TOKENS * WIDTH * 2
    fixture = made(budget_bytes=3 * one_chunk)
    fixture.compute(0, TOKENS)
    fixture.save(1, 0, TOKENS)
    assert sum(path.stat().st_size for path in fixture.files()) <= 3 * one_chunk
    assert fixture.restore(2, 1, TOKENS) == Restored(number=2, tokens=2 * CHUNK_TOKENS)
    others = [token + 1 for token in TOKENS]
    fixture.compute(0, others)
    fixture.save(3, 0, others)
    assert fixture.restore(4, 1, others) == Restored(number=4, tokens=2 * CHUNK_TOKENS)
    assert sum(path.stat().st_size for path in fixture.files()) <= 3 * one_chunk


def test_a_full_disk_ends_a_save_and_what_was_saved_is_a_hit(
    made: Callable[..., Fixture], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fixture, counts = made(), itertools.count()

    def write(*arguments: object) -> None:
        if next(counts) == 2:
            raise OSError(28, "No space left on device")
        original(*arguments)  # type: ignore[arg-type]

    original = prompt_cache.write_chunk
    monkeypatch.setattr(prompt_cache, "write_chunk", write)
    fixture.compute(0, TOKENS)
    assert fixture.save(1, 0, TOKENS) == Saved(number=1)
    assert [record.getMessage().count("No space left") for record in caplog.records] == [1]
    assert fixture.restore(2, 1, TOKENS) == Restored(number=2, tokens=2 * CHUNK_TOKENS)
    assert all(path.suffix == ".prefix" for path in fixture.files())


class Gate:
    """Lets a test stop a thread at each chunk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.reached, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        original = getattr(prompt_cache, name)

        def gated(*arguments: object) -> None:
            self.reached.release()
            assert self.go_on.acquire(timeout=PATIENCE_S)
            original(*arguments)

        monkeypatch.setattr(prompt_cache, name, gated)


@pytest.mark.parametrize(("name", "message"), [("write_chunk", Save), ("read_chunk", Restore)])
def test_an_interrupt_returns_when_no_thread_touches_a_slot_and_nothing_is_answered(
    saved: Fixture, monkeypatch: pytest.MonkeyPatch, name: str, message: type[Save] | type[Restore]
) -> None:
    gate = Gate(monkeypatch, name)
    tokens = [token + (message is Save) for token in TOKENS]
    saved.cache.submit(message(number=2, sequence=1, numerics=NUMERICS, tokens=packed(tokens)))
    assert gate.reached.acquire(timeout=PATIENCE_S)
    interrupting = threading.Thread(target=saved.cache.interrupt)
    interrupting.start()
    interrupting.join(0.1)
    assert interrupting.is_alive(), "the chunk under way is not done"
    gate.go_on.release()
    interrupting.join(PATIENCE_S)
    assert not interrupting.is_alive()
    assert not gate.reached.acquire(timeout=0.1), "no further chunk"
    assert not saved.cache.answers()
    for _ in range(9):
        gate.go_on.release()
    assert saved.restore(1, 1, TOKENS) == Restored(number=1, tokens=4 * CHUNK_TOKENS), "the next coordinator's"


def test_a_hastened_save_ends_with_the_chunk_under_way(
    made: Callable[..., Fixture], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_cache, "HASTENED_S", 0.0)
    fixture, gate = made(), Gate(monkeypatch, "write_chunk")
    fixture.compute(0, TOKENS)
    fixture.cache.submit(Save(number=1, sequence=0, numerics=NUMERICS, tokens=packed(TOKENS)))
    assert gate.reached.acquire(timeout=PATIENCE_S)
    fixture.cache.submit(Hasten(number=1))
    gate.go_on.release()
    assert fixture.answer() == Saved(number=1)
    assert len(fixture.files()) == 1
    for _ in range(9):
        gate.go_on.release()
    fixture.save(2, 0, TOKENS)
    assert len(fixture.files()) == 4


def test_an_unexpected_error_is_answered(saved: Fixture) -> None:
    """Nobody may wait for ever: a slot that does not exist is a bug of the sender."""
    assert saved.restore(2, 9, TOKENS) == Restored(number=2)
    assert saved.save(3, 9, [3] * 64) == Saved(number=3)


def test_numerics_of_devices_depend_on_the_plan() -> None:
    assert full_numerics("cpu:avx2", "exact", "a") == full_numerics("cpu:avx2", "exact", "b")
    assert full_numerics("cpu:avx2", "exact", "a") != full_numerics("cpu:avx2", "predicted", "a")
    assert full_numerics("hexagon-v73+cpu:neon", "exact", "a") != full_numerics("hexagon-v73+cpu:neon", "exact", "b")


def test_no_descriptor_stays_open(saved: Fixture) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(2, 6):
        saved.restore(number, 1, TOKENS)
    assert len(os.listdir("/proc/self/fd")) == before
