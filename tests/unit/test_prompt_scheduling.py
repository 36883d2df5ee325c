"""What the scheduler saves to the prompt cache, what it restores, and that no KV slot is ever wrong."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from neuronpipe.protocol.messages.client import Finished, Refused
from neuronpipe.protocol.messages.loader import Hasten, Restore, Save
from neuronpipe.protocol.messages.request import Cancel, Generate
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.coordinator.scheduling.events import (
    Action,
    Ending,
    EpochChanged,
    MemoryReserved,
    PrefixRestored,
    PrefixSaved,
    ProcessReady,
    ReserveMemory,
    SampleTokens,
    SendStep,
    StepLeft,
    Tell,
    Tick,
    TokensSampled,
    UsePromptCache,
)
from neuronpipe.services.coordinator.scheduling.kv_reservation import Reservation
from neuronpipe.services.coordinator.scheduling.prompt_cache import LOADER, MIN_TOKENS
from neuronpipe.services.coordinator.scheduling.scheduler import Scheduler

from tests.unit.test_coordinator_core import (
    NUMERICS,
    PREFILL_NUMERICS,
    finish,
    make_scheduler,
    participants_of,
    receive,
    sent,
    told,
)
from tests.unit.test_lending import lendable_of, made

CHUNK = 64
LONG = "abcdefgh" * 20  # 160 tokens
Messages = list[Save | Restore | Hasten]


def to_loader(actions: list[Action]) -> Messages:
    return [action.message for action in actions if isinstance(action, UsePromptCache)]


def unpacked(tokens: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(tokens) // 4}I", tokens)


def cached_scheduler(reservation: Reservation | None = None, **limits: int) -> Scheduler:
    """A scheduler whose loader has a prompt cache."""
    changes: dict[str, Any] = {"context_tokens": 1000, "prefill_chunk_tokens": 512, **limits}
    scheduler = make_scheduler(reservation=reservation, **changes)
    scheduler.handle(ProcessReady(LOADER, "", True), 0.0)
    return scheduler


def go_on(scheduler: Scheduler, actions: list[Action]) -> list[Action]:
    """Compute steps until there are none; returns all actions. Restores are answered: nothing is there."""
    everything, pending = list(actions), list(actions)
    while pending:
        match pending.pop(0):
            case SendStep(message=message):
                answers = finish(scheduler, message)
            case SampleTokens(rows=rows):
                answers = scheduler.handle(TokensSampled(tuple(120 for _ in rows)), 1.0)
            case UsePromptCache(message=Restore(number=number)):
                answers = scheduler.handle(PrefixRestored(number, 0), 1.0)
            case _:
                answers = []
        pending += answers
        everything += answers
    return everything


def ask(scheduler: Scheduler, name: str, prompt: str = LONG, **options: object) -> list[Action]:
    fields = {"max_tokens": 2, **options}
    return receive(scheduler, Generate(request=name, prompt=prompt, **fields), 0.0)  # type: ignore[arg-type]


def test_a_prompt_is_looked_up_before_it_is_computed_and_saved_once_it_is() -> None:
    scheduler = cached_scheduler()
    actions = ask(scheduler, "1")
    (restore,) = to_loader(actions)
    assert isinstance(restore, Restore)
    assert (unpacked(restore.tokens), restore.first, restore.min_tokens) == (tuple(map(ord, LONG)), 0, MIN_TOKENS)
    assert restore.numerics == PREFILL_NUMERICS
    assert not sent(actions), "the prompt waits"
    everything = go_on(scheduler, actions)
    saves = [message for message in to_loader(everything) if isinstance(message, Save)]
    assert [len(unpacked(save.tokens)) for save in saves] == [160, 161], "after the prompt, and at the end"
    assert {save.sequence for save in saves} == {restore.sequence}


def test_what_was_restored_is_not_computed_and_counts_as_cached() -> None:
    scheduler = cached_scheduler()
    (restore,) = to_loader(ask(scheduler, "1"))
    assert isinstance(restore, Restore)
    actions = scheduler.handle(PrefixRestored(restore.number, 128), 0.1)
    (prefill,) = sent(actions)
    assert isinstance(prefill, Prefill)
    assert (prefill.position, len(prefill.tokens), prefill.copy_from) == (128, 32, None)
    (finished,) = [message for message in told(go_on(scheduler, actions)) if isinstance(message, Finished)]
    assert finished.cached_tokens == 128 == scheduler.requests.cached_tokens


def test_the_last_token_of_a_prompt_is_computed_for_its_logits() -> None:
    scheduler = cached_scheduler()
    (restore,) = to_loader(ask(scheduler, "1", LONG[:128]))
    (prefill,) = sent(scheduler.handle(PrefixRestored(restore.number, 128), 0.1))
    assert isinstance(prefill, Prefill)
    assert (prefill.position, len(prefill.tokens), prefill.logits) == (127, 1, "last")


@pytest.mark.parametrize("options", [{"share_prefix": False}, {"prompt": LONG[:MIN_TOKENS]}])
def test_a_request_that_shares_nothing_or_is_short_is_not_looked_up(options: dict[str, object]) -> None:
    scheduler = cached_scheduler()
    messages = to_loader(go_on(scheduler, ask(scheduler, "1", **options)))  # type: ignore[arg-type]
    assert not any(isinstance(message, Restore) for message in messages)
    if "prompt" not in options:
        assert not messages, "nor is it saved"


def test_a_loader_without_a_prompt_cache_is_not_asked() -> None:
    scheduler = make_scheduler(context_tokens=1000)
    assert not to_loader(go_on(scheduler, ask(scheduler, "1")))


def test_what_is_in_memory_is_not_restored() -> None:
    scheduler = cached_scheduler()
    go_on(scheduler, ask(scheduler, "1"))
    assert not any(isinstance(message, Restore) for message in to_loader(ask(scheduler, "2")))


def test_other_sequences_are_generated_while_one_is_restored_and_no_prompt_is_computed() -> None:
    scheduler = cached_scheduler(sequences=3)
    actions = ask(scheduler, "1", "ab", max_tokens=50)
    for _ in range(2):
        (message,) = sent(actions)
        finish(scheduler, message)
        actions = scheduler.handle(TokensSampled((120,)), 0.1)
    (step,) = sent(actions)
    ask(scheduler, "2", LONG)
    ask(scheduler, "3", "xyz")
    finish(scheduler, step)
    actions = scheduler.handle(TokensSampled((120,)), 0.1)
    (restore,) = to_loader(actions)
    for _ in range(4):
        (step,) = sent(actions)
        assert isinstance(step, Step)
        finish(scheduler, step)
        actions = scheduler.handle(TokensSampled((120,)), 0.1)
    scheduler.handle(PrefixRestored(restore.number, 64), 0.2)
    (step,) = sent(actions)
    finish(scheduler, step)
    (prefill,) = sent(scheduler.handle(TokensSampled((120,)), 0.2))
    assert isinstance(prefill, Prefill)
    assert (prefill.sequence, prefill.position) == (restore.sequence, 64)  # type: ignore[union-attr]


def test_a_slot_is_not_overwritten_while_it_is_saved_and_the_save_is_hastened() -> None:
    scheduler = cached_scheduler(sequences=1)
    saves = [m for m in to_loader(go_on(scheduler, ask(scheduler, "1"))) if isinstance(m, Save)]
    actions = ask(scheduler, "2", "other")
    assert to_loader(actions) == [Hasten(number=saves[-1].number)]
    assert scheduler.awaited_processes == {LOADER: "Save"}
    assert not to_loader(scheduler.handle(Tick(), 0.1)), "once"
    assert not sent(scheduler.handle(PrefixSaved(saves[0].number), 0.2))
    (prefill,) = sent(scheduler.handle(PrefixSaved(saves[1].number), 0.3))
    assert isinstance(prefill, Prefill)
    assert prefill.tokens == tuple(map(ord, "other"))
    assert not scheduler.awaited_processes


def test_a_request_that_goes_on_takes_the_slot_while_it_is_saved() -> None:
    scheduler = cached_scheduler(sequences=1)
    go_on(scheduler, ask(scheduler, "1"))
    (prefill,) = sent(ask(scheduler, "2", LONG + "xx and more"))  # of two x one was computed
    assert isinstance(prefill, Prefill)
    assert prefill.position == len(LONG) + 1


def test_a_lost_loader_frees_what_it_was_saving_and_what_it_was_restoring_is_computed() -> None:
    scheduler = cached_scheduler(sequences=1)
    go_on(scheduler, ask(scheduler, "1"))
    assert not sent(ask(scheduler, "2", "b" * 100))
    scheduler.handle(EpochChanged(1, (LOADER,)), 0.2)
    actions = scheduler.handle(ProcessReady(LOADER, "", True), 0.3)
    (restore,) = to_loader(actions)
    assert scheduler.awaited_processes == {LOADER: "Restore"}
    scheduler.handle(EpochChanged(2, (LOADER,)), 0.4)
    (prefill,) = sent(scheduler.handle(ProcessReady(LOADER, "", True), 0.5))
    assert isinstance(prefill, Prefill)
    assert prefill.position == 0
    scheduler.handle(PrefixRestored(restore.number, 64), 0.6)  # late
    assert not scheduler.awaited_processes


def test_a_cancelled_request_keeps_its_slot_until_it_is_restored() -> None:
    scheduler = cached_scheduler(sequences=1)
    (restore,) = to_loader(ask(scheduler, "1"))
    assert not told(receive(scheduler, Cancel(request="1"), 0.1))
    assert not sent(ask(scheduler, "2", "other"))
    actions = scheduler.handle(PrefixRestored(restore.number, 128), 0.2)
    assert [message.reason for message in told(actions) if isinstance(message, Finished)] == ["cancelled"]
    (save,) = to_loader(actions)[:1]
    assert isinstance(save, Save)
    assert len(unpacked(save.tokens)) == 128


def test_the_end_of_the_run_saves_what_was_computed() -> None:
    scheduler = cached_scheduler()
    actions = ask(scheduler, "1", max_tokens=500)
    actions = scheduler.handle(PrefixRestored(to_loader(actions)[0].number, 0), 0.0)
    finish(scheduler, sent(actions)[0])
    scheduler.handle(TokensSampled((120,)), 0.1)
    actions = scheduler.handle(Ending(), 0.2)
    assert [message.code for message in told(actions) if isinstance(message, Refused)] == ["draining"]
    assert [len(unpacked(message.tokens)) for message in to_loader(actions) if isinstance(message, Save)] == [160]


def test_a_slot_is_restored_when_its_memory_is_reserved() -> None:
    reservation = Reservation(lendable_of(made()), [0] * 4)
    scheduler = cached_scheduler(reservation, sequences=4, context_tokens=256)
    actions = ask(scheduler, "1")
    assert not to_loader(actions)
    (reserve,) = [action for action in actions if isinstance(action, ReserveMemory)]
    assert max(reserve.kv_tokens) >= len(LONG)
    assert not sent(scheduler.handle(Tick(), 0.1))
    (restore,) = to_loader(scheduler.handle(MemoryReserved(reserve.number), 0.2))
    actions = scheduler.handle(PrefixRestored(restore.number, 128), 0.3)
    (reserve,) = [action for action in actions if isinstance(action, ReserveMemory)]  # for the rest of the prompt
    (prefill,) = sent(scheduler.handle(MemoryReserved(reserve.number), 0.4))
    assert isinstance(prefill, Prefill)
    assert prefill.position == 128


# ---- a model of the memory -----------------------------------------------------------------------------------
class World:
    """A run whose KV slots hold, in place of keys and values, the number of the prefix that would give them.

    Workers and the loader do their parts at random times. Each checks that what it reads belongs to its tokens.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.scheduler = cached_scheduler(sequences=3, context_tokens=400, prefill_chunk_tokens=50)
        self.numbers: dict[tuple[int, int], int] = {}  # of the prefix before, token: of the prefix
        self.latest: dict[int, tuple[tuple[int, ...], list[int]]] = {}  # prefixes of what was last written to a slot
        self.slots: list[list[int | None]] = [[None] * 400 for _ in range(3)]
        self.disk: set[tuple[int, ...]] = set()
        self.texts = [[self.rng.randrange(1, 4) for _ in range(300)] for _ in range(3)]
        self.step: Step | Prefill | None = None
        self.samples: SampleTokens | None = None
        self.loader: list[Save | Restore] = []  # under way
        self.progress: dict[int, int] = {}  # chunks, by the number of a save or restore
        self.requests, self.ended = 0, 0
        self.cached = 0
        self.dead: str = ""
        self.epoch = 0

    def prefixes(self, tokens: Sequence[int], last: int = 0) -> list[int]:
        """The number of the prefix that ends at each token. Different prefixes have different numbers.

        last: the number of the prefix before these tokens
        """
        numbers = self.numbers
        return [last := numbers.setdefault((last, token), len(numbers) + 1) for token in tokens]

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendStep(message=message):
                    assert self.step is None
                    self.step = message
                case SampleTokens():
                    self.samples = action
                case UsePromptCache(message=Hasten(number=number)):
                    late = [save for save in self.loader if isinstance(save, Save) and save.number <= number]
                    self.loader = [message for message in self.loader if message not in late]
                    for save in late:
                        self.take(self.scheduler.handle(PrefixSaved(save.number), 0.0))
                case UsePromptCache(message=message):
                    assert isinstance(message, Save | Restore)
                    self.loader.append(message)
                case Tell(message=Finished(cached_tokens=cached)):
                    self.ended += 1
                    self.cached += cached

    def handle(self, event: object) -> None:
        self.take(self.scheduler.handle(event, 0.0))  # type: ignore[arg-type]

    # what may happen
    def arrive(self) -> None:
        text = self.rng.choice(self.texts)
        prompt = text[: self.rng.randrange(1, 300)] + [self.rng.randrange(1, 4) for _ in range(self.rng.choice((0, 3)))]
        self.requests += 1
        request = Generate(
            request=f"{self.requests}",
            tokens=tuple(prompt),
            max_tokens=self.rng.randrange(1, 90),
            share_prefix=self.rng.random() < 0.9,
        )
        self.take(receive(self.scheduler, request, 0.0))

    def cancel(self) -> None:
        self.take(receive(self.scheduler, Cancel(request=f"{self.requests - self.rng.randrange(4)}"), 0.0))

    def compute(self) -> None:
        if self.samples is not None:
            rows, self.samples = self.samples.rows, None
            self.handle(TokensSampled(tuple(self.rng.randrange(1, 4) for _ in rows)))
            return
        step, self.step = self.step, None
        if step is None:
            self.handle(Tick())
        elif isinstance(step, Prefill):
            if step.copy_from is not None:
                self.slots[step.sequence][: step.position] = self.slots[step.copy_from][: step.position]
            for at, token in enumerate(step.tokens, step.position):
                self.write(step.sequence, at, token)
            self.handle(StepLeft(("prefill", 0), step.step, step.epoch, True))
        else:
            for slot, at, token in zip(step.sequences, step.positions, step.tokens, strict=True):
                self.write(slot, at, token)
            for process in participants_of(step):
                self.handle(StepLeft(process, step.step, step.epoch, True))

    def write(self, slot: int, at: int, token: int) -> None:
        sequence = next(one for one in self.scheduler.requests.active if one.slot == slot)
        tokens = (*sequence.tokens[:at], token)
        known, numbers = self.latest.get(slot, ((), []))
        if tokens[: len(known)] == known:  # usually all but the last one
            last = numbers[-1] if numbers else 0
            numbers = numbers + self.prefixes(tokens[len(known) :], last)
        else:
            numbers = self.prefixes(tokens)
        self.latest[slot] = tokens, numbers
        *before, written = numbers
        assert len(before) == at
        assert self.slots[slot][:at] == before, "keys of other tokens, or of another sequence"
        self.slots[slot][at] = written

    def serve(self) -> None:
        """The loader does one chunk of a random message."""
        if not self.loader:
            return
        message = self.rng.choice(self.loader)
        tokens = unpacked(message.tokens)
        number = self.progress.get(message.number, getattr(message, "first", 0) // CHUNK)
        self.progress[message.number] = number + 1
        end = (number + 1) * CHUNK
        chunk, goes_on = tokens[:end], end <= len(tokens)
        places = range(end - CHUNK, end)
        if isinstance(message, Save) and goes_on:
            content = [self.slots[message.sequence][at] for at in places]
            assert content == self.prefixes(chunk)[-CHUNK:], "a slot changed while it was saved"
            self.disk.add(chunk)
        elif isinstance(message, Restore) and goes_on and chunk in self.disk and self.rng.random() < 0.97:
            for at, number_of in zip(places, self.prefixes(chunk)[-CHUNK:], strict=True):
                self.slots[message.sequence][at] = number_of
        else:
            goes_on = False
        if not goes_on:
            self.loader.remove(message)
            done = number * CHUNK
            is_save = isinstance(message, Save)
            self.handle(PrefixSaved(message.number) if is_save else PrefixRestored(message.number, done))

    def die(self) -> None:
        """A process dies at any moment, or comes back."""
        role, self.dead = self.dead, ""
        if role:
            numerics = NUMERICS.get(role, "")
            self.handle(ProcessReady((role, 0), numerics, role == "loader"))
            return
        self.dead = self.rng.choice(("loader", "prefill", "cache"))
        if self.dead == "loader":
            for message in self.loader:  # what it was writing to slots
                if isinstance(message, Restore):
                    first = message.first // CHUNK * CHUNK
                    end = min(399, len(message.tokens) // 4)
                    self.slots[message.sequence][max(first, message.first) : end] = [None] * max(
                        0, end - max(first, message.first)
                    )
            self.loader.clear()
        step, self.step = self.step, None
        self.samples = None if step is not None else self.samples
        self.epoch += 1
        self.handle(EpochChanged(self.epoch, ((self.dead, 0),)))
        if step is not None:
            processes = [("prefill", 0)] if isinstance(step, Prefill) else participants_of(step)
            for process in processes:
                if process[0] != self.dead:
                    self.handle(StepLeft(process, step.step, step.epoch, False))


@pytest.mark.parametrize("block", [0, 1, *(pytest.param(block, marks=pytest.mark.nightly) for block in range(2, 8))])
def test_no_slot_is_ever_wrong_whatever_comes_in_between(block: int) -> None:
    for seed in range(block * 5, block * 5 + 5):
        world = World(seed)
        moves: list[Callable[[], None]] = [world.arrive, world.cancel, world.die, world.compute, world.serve]
        for _ in range(1500):
            (move,) = world.rng.choices(moves, (2, 0.4, 0.3, 30, 15))
            move()
        if world.dead:
            world.die()
        for _ in range(20_000):
            if not world.scheduler.requests.active and not world.scheduler.requests.waiting and not world.loader:
                break
            world.rng.choice((world.compute, world.serve))()
        assert not world.scheduler.requests.active
        assert not world.scheduler.requests.waiting, "nobody waits for ever"
        assert world.ended > 5
        assert world.cached > 0
