"""Recurrent states in their slots: whatever is shared, cancelled or killed, no text goes on from a wrong one."""

from __future__ import annotations

import dataclasses
import random
import struct
import zlib
from collections import Counter
from typing import Any

import pytest
from neuronpipe.plans.lab.shapes.models import model_named
from neuronpipe.plans.lab.shapes.pulled_manifest import manifest_of_pulled_shape
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.plans.planner.validation import validate
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.client import Finished, Refused
from neuronpipe.protocol.messages.loader import Hasten, Restore, Save
from neuronpipe.protocol.messages.request import Cancel, Generate
from neuronpipe.protocol.messages.worker import DRAFTED as TO_DRAFT
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.coordinator.scheduling import drafts, prompt_cache, requests, steps
from neuronpipe.services.coordinator.scheduling.events import (
    EpochChanged,
    PrefixRestored,
    PrefixSaved,
    ProcessReady,
    SampleTokens,
    SendStep,
    StepFailed,
    StepLeft,
    Tell,
    TokensSampled,
    UsePromptCache,
)
from neuronpipe.services.coordinator.scheduling.prefix_reuse import FORGET_AFTER_S
from neuronpipe.services.coordinator.scheduling.recurrent_states import NO_STATE, States

from tests.unit.test_coordinator_core import NUMERICS, make_scheduler, participants_of, receive
from tests.unit.test_planner import device

SEQUENCES, SNAPSHOTS, DRAFTED, CONTEXT = 3, 2, 3, 48
CPU = "cpu:avx2"
LOADER = ("loader", 0)
BLOCKS, SEEDS = 20, 600  # of short runs: 12,000
HAPPENS = (
    "shared",
    "forked",
    "cancelled",
    "evicted",
    "forgotten",
    "restored",
    "killed",
    "loader killed",
    "drafted",
    "accepted",
)
GARBAGE = -1  # what a loader that was killed has written of a prompt


def next_token(tokens: tuple[int, ...], seed: int) -> int:
    """What a model says after these tokens: any other text, and any other seed, would go on otherwise.

    Most texts repeat themselves for a while.
    """
    draw = zlib.crc32(bytes((*tokens, seed)))
    return tokens[-3] if draw % 8 and len(tokens) > 2 else 97 + draw // 8 % 3


def expected_text(prompt: str, max_tokens: int, seed: int) -> str:
    tokens = tuple(map(ord, prompt))
    for _ in range(max_tokens):
        tokens = (*tokens, next_token(tokens, seed))
    return "".join(map(chr, tokens[len(prompt) :]))


class Machine:
    """A run whose memory is simulated: a state is the tokens that it has seen, and a KV slot the tokens it stores.

    happened: how often something of HAPPENS took place
    right: how often the draft layer predicts the right token
    damaged: how often a step of the draft layer fails
    stop: strings that end a text
    """

    def __init__(
        self,
        seed: int,
        sequences: int = SEQUENCES,
        snapshots: int = SNAPSHOTS,
        prefill_chunk_tokens: int = 4,
        draft_tokens: int = DRAFTED,
        draft_layers: int = 0,
        right: float = 0.8,
        damaged: float = 0.0,
        stop: tuple[str, ...] = (),
    ) -> None:
        self.random, self.has_layer = random.Random(seed), draft_layers > 0
        self.right, self.damaged, self.stop = right, damaged, stop
        self.state_slots, self.own_states = 2 * sequences + draft_tokens + snapshots, 2 * sequences
        self.scheduler = make_scheduler(
            sequences=sequences,
            context_tokens=CONTEXT,
            logit_rows=max(sequences, 1 + draft_tokens),
            draft_tokens=draft_tokens,
            draft_layers=draft_layers,
            state_slots=self.state_slots,
            prefill_chunk_tokens=prefill_chunk_tokens,
        )
        self.states: list[tuple[int, ...] | None] = [None] * self.state_slots
        self.kv: list[list[int]] = [[] for _ in range(sequences)]
        self.waiting: list[SendStep] = []
        self.sampling: list[SampleTokens] = []
        self.rows: list[tuple[int, ...]] = []
        self.drafted: tuple[int, ...] = ()
        self.requests: dict[str, tuple[str, int, int]] = {}
        self.conversations: list[str] = []  # that have just had an answer
        self.happened = Counter[str]()
        self.finished, self.cached, self.restored, self.now, self.epoch = 0, 0, 0, 0.0, 0
        self.disk: set[tuple[int, ...]] = set()  # prefixes whose keys, values and state the prompt cache has
        self.loading: list[Save | Restore] = []
        self.scheduler.handle(ProcessReady(LOADER, "", True), 0.0)
        for worker in [("decode", 0), ("decode", 1), ("prefill", 0)] if self.has_layer else ():
            self.scheduler.handle(ProcessReady(worker, NUMERICS[worker[0]], drafts=True), 0.0)

    def take(self, actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, SendStep):
                self.waiting.append(action)
            elif isinstance(action, SampleTokens):
                self.sampling.append(action)
            elif isinstance(action, Tell):
                self.hear(action.message)
            elif isinstance(action, UsePromptCache) and not isinstance(action.message, Hasten):
                self.loading.append(action.message)

    def hear(self, message: object) -> None:
        """A client gets a message, perhaps the last one of its request."""
        if isinstance(message, Refused):
            del self.requests[message.request]
            assert message.code in ("cancelled", "ended_a_process"), message
            self.happened["cancelled"] += message.code == "cancelled"
        elif isinstance(message, Finished):
            prompt, *rest = self.requests.pop(message.request)
            expected = expected_text(prompt, *rest)
            self.conversations = [*self.conversations, prompt + message.text][-4:]
            assert expected.startswith(message.text)
            assert message.text == expected or message.reason in ("cancelled", "stop")
            self.finished += 1
            self.cached += message.cached_tokens
            self.happened["cancelled"] += message.reason == "cancelled"
            self.happened["drafted"] += message.drafted_tokens
            self.happened["accepted"] += message.accepted_tokens
            self.happened["shared"] += message.cached_tokens > 0

    def step(self, source: int, target: int, slot: int, position: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Compute the tokens of one sequence and return all tokens that its state has seen."""
        assert source != target
        before = () if source == NO_STATE else self.states[source]
        assert before is not None, "a state that was never written"
        assert len(before) == position
        assert list(before) == self.kv[slot][:position], "the state is that of another text"
        lost = self.kv[slot][position : position + len(tokens)] != list(tokens)[: len(self.kv[slot]) - position]
        self.happened["evicted"] += lost or (target >= self.own_states and self.states[target] is not None)
        self.kv[slot] = [*self.kv[slot][:position], *tokens]
        self.states[target] = (*before, *tokens)
        return (*before, *tokens)

    def compute(self, message: Step | Prefill) -> None:
        if isinstance(message, Prefill):
            if message.copy_from is not None:
                arrived = {one.slot: one.arrived_at for one in self.scheduler.requests.active}
                self.happened["forked"] += arrived.get(message.copy_from) == arrived[message.sequence]
                self.kv[message.sequence][: message.position] = self.kv[message.copy_from][: message.position]
            assert message.state_to is not None
            done = 0
            for count, source, target in message.state_runs:
                place = (source, target, message.sequence, message.position + done)
                seen = self.step(*place, message.tokens[done : done + count])
                done += count
            self.rows = [seen]
            return
        assert len({*message.states_to} - {*message.states_from[:1]}) == len(message.tokens)
        if len({*message.sequences}) == len(message.tokens):
            assert not {*message.states_from} & {*message.states_to}
        active = {one.state for one in self.scheduler.requests.active}
        assert not active & {*message.states_to}, "another sequence goes on from this state"
        tokens = self.draft(message) if message.is_drafted else message.tokens
        each = zip(message.states_from, message.states_to, message.sequences, message.positions, tokens, strict=True)
        self.rows = [self.step(*one, (token,)) for *one, token in each]

    def draft(self, message: Step) -> tuple[int, ...]:
        """Return the step's tokens with those that the draft layer predicts, of which most are right. Its state is that
        of the same text."""
        (slot, *_), (source, *_) = message.sequences, message.states_from
        before = self.states[source]
        assert before, "the first token has no state before it"
        text, drafted = [*before, message.tokens[0]], list[int]()
        (sequence,) = [one for one in self.scheduler.requests.active if one.slot == slot]
        for token in message.tokens[1:]:
            assert token == TO_DRAFT
            right = next_token((*text, *drafted), sequence.ask.seed)
            drafted.append(right if self.random.random() < self.right else 97 + self.random.randrange(3))
        self.drafted = tuple(drafted)
        self.happened["drafted by the layer"] += len(drafted)
        return message.tokens[0], *drafted

    def event(self) -> None:
        """One random event of a run."""
        self.now += 0.01
        choice = self.random.random()
        if self.loading and self.random.random() < 0.3:
            self.load(self.loading.pop(0))
        elif choice < 0.12 and len(self.requests) < 6:
            self.ask()
        elif choice < 0.3 and not self.scheduler.busy:
            self.idle()
        elif choice < 0.15 and self.requests:
            name = self.random.choice([*self.requests])
            self.take(receive(self.scheduler, Cancel(request=name), self.now))
        else:
            self.proceed()

    def proceed(self) -> None:
        """The next event of the requests that there are."""
        if self.sampling:
            rows = self.sampling.pop(0).rows
            tokens = tuple(next_token(self.rows[row.row], row.ask.seed) for row in rows)
            self.take(self.scheduler.handle(TokensSampled(tokens), self.now))
        elif self.waiting:
            self.run(self.waiting.pop(0).message)

    def idle(self) -> None:
        """So much time passes that the content of free slots is forgotten."""
        free = self.scheduler.requests._free
        before = sum(free.tokens().values())
        self.now += FORGET_AFTER_S
        self.scheduler.requests.used_tokens(self.now)
        self.happened["forgotten"] += sum(free.tokens().values()) < before

    def load(self, message: Save | Restore) -> None:
        """The loader answers: what it saves is what lies in the slots now, however late that is."""
        tokens = struct.unpack(f"<{len(message.tokens) // 4}I", message.tokens)
        if isinstance(message, Save):
            for slot, count in zip(message.state_slots, message.state_tokens, strict=True):
                assert self.kv[message.sequence][:count] == list(tokens[:count])
                assert self.states[slot] == tokens[:count], "a state changed while it was being saved"
                self.disk.add(tokens[:count])
            self.take(self.scheduler.handle(PrefixSaved(message.number), self.now))
            return
        stored = [prefix for prefix in self.disk if prefix == tokens[: len(prefix)]]
        best = max(stored, key=len, default=())
        if len(best) < message.min_tokens:
            best = ()
        if best:
            assert message.state_to is not None
            self.states[message.state_to], self.restored = best, self.restored + len(best)
            self.happened["restored"] += 1
            self.kv[message.sequence][: len(best)] = best
        self.take(self.scheduler.handle(PrefixRestored(message.number, len(best)), self.now))

    def ask(self) -> None:
        """A request that often begins as an earlier one, or goes on from an earlier answer; some fork."""
        earlier = list((self.requests or {"": ("", 0, 0)}).values())
        begin = self.random.choice([*(prompt for prompt, *_ in earlier), "abcabc", "abcabcabcabc", "cba"])
        if self.random.random() < 0.5:
            begin = (begin + expected_text(begin, self.random.randint(1, 4), 0))[:24] if begin else "a"
        begin = begin[: self.random.randint(1, 24)]
        if self.conversations and self.random.random() < 0.4:
            begin = self.random.choice(self.conversations)[:28]
        prompt = begin + "".join(self.random.choices("abc", k=self.random.randint(1, 5)))
        max_tokens = self.random.choice((1, 2, 3, 5, 14))
        for seed in range(self.random.choice((1, 1, 1, 2, 3))):
            name = f"r{self.now}.{seed}"
            self.requests[name] = prompt, max_tokens, seed
            generate = Generate(
                request=name, prompt=prompt, max_tokens=max_tokens, seed=seed, share_prefix=True, stop=self.stop
            )
            self.take(receive(self.scheduler, generate, self.now))

    def run(self, message: Step | Prefill) -> None:
        self.compute(message)
        workers = [("prefill", 0)] if isinstance(message, Prefill) else participants_of(message)
        if self.random.random() < 0.15:  # a process is killed when all of it is written, and the others leave
            victim = self.random.choice([*workers, LOADER])
            self.epoch += 1
            self.take(self.scheduler.handle(EpochChanged(self.epoch, (victim,)), self.now))
            for worker in workers:
                if worker != victim:
                    self.take(self.scheduler.handle(StepLeft(worker, message.step, message.epoch, False), self.now))
            self.happened["killed"] += 1
            if victim == LOADER:
                self.lose_loader()
            ready = ProcessReady(victim, NUMERICS.get(victim[0], ""), True, self.has_layer and victim != LOADER)
            self.take(self.scheduler.handle(ready, self.now))
            return
        if isinstance(message, Step) and message.is_drafted and self.random.random() < self.damaged:
            self.damage_layer(message)
            return
        for worker in workers:
            left = StepLeft(worker, message.step, message.epoch, True, drafted=self.drafted)
            self.take(self.scheduler.handle(left, self.now))

    def damage_layer(self, message: Step) -> None:
        """A cluster of the draft layer is damaged: one participant has failed, and others fail too or leave."""
        assert not self.happened["layer damaged"], "a damaged layer was used again"
        self.happened["layer damaged"] += 1
        self.epoch += 1
        for number, worker in enumerate(participants_of(message)):
            attempt = worker, message.step, message.epoch
            fails = number == 0 or self.random.random() < 0.5
            self.take(
                self.scheduler.handle(
                    StepFailed(*attempt, "a cluster") if fails else StepLeft(*attempt, False), self.now
                )
            )
            if number == 0:
                self.take(self.scheduler.handle(EpochChanged(self.epoch, ()), self.now))

    def lose_loader(self) -> None:
        """What the loader was restoring is neither old nor new; what it was saving does not come to the disk."""
        self.happened["loader killed"] += bool(self.loading)
        for message in self.loading:
            if isinstance(message, Restore):
                assert message.state_to is not None
                self.states[message.state_to] = (GARBAGE,)
                self.kv[message.sequence][message.first :] = [GARBAGE]
        self.loading.clear()

    def end(self) -> None:
        """All requests end without further ones."""
        for _ in range(4000):
            if not self.requests:
                return
            self.now += 0.01
            self.load(self.loading.pop(0)) if self.loading else self.proceed()
        raise AssertionError(f"these requests do not end: {self.requests}")


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short prompts be kept on disk, and short texts be drafted."""
    for module in (prompt_cache, requests):
        monkeypatch.setattr(module, "MIN_TOKENS", 3)
    monkeypatch.setattr(drafts, "ACCEPTANCE_RATE", 0.7)


@pytest.mark.parametrize("draft_layers", [0, 1])
@pytest.mark.parametrize("seed", range(10))
def test_no_sequence_goes_on_from_a_state_of_another_text(
    seed: int, draft_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch)
    machine = Machine(seed, draft_layers=draft_layers)
    for _ in range(4000):
        machine.event()
    machine.end()
    assert machine.finished > 100
    assert machine.cached > 100, "nothing was shared: the test tests nothing"
    assert machine.restored > 10, "nothing was restored"
    assert machine.happened["accepted"] > 20, "nothing was drafted"
    assert (machine.happened["drafted by the layer"] > 20) == bool(draft_layers)


def test_a_damaged_draft_layer_refuses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)
    machine = Machine(0, draft_layers=1, damaged=0.1)
    for _ in range(1000):
        machine.event()
    machine.end()
    assert machine.happened["layer damaged"] == 1
    assert machine.finished > 20


def test_drafts_behind_a_texts_end_are_not_counted_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)
    machine = Machine(1, draft_layers=1, right=1.0, stop=("b",))
    for _ in range(4000):
        machine.event()
    acceptance = machine.scheduler._builder.step_times.acceptance
    assert machine.happened["drafted by the layer"] > 20
    assert acceptance.share > 0.99, acceptance.share


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_short_run_goes_on_from_a_state_of_another_text(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short runs, each with its own seed, and numbers of slots and chunk sizes of its own."""
    shorten(monkeypatch)
    happened = Counter[str]()
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        draw = random.Random(seed)
        monkeypatch.setattr(steps, "STATE_INTERVAL_TOKENS", draw.choice((3, 4, 64)))
        slots = draw.randint(1, 4), draw.randint(1, 4)
        machine = Machine(seed, *slots, draw.choice((3, 4, 8)), draw.randint(0, 3), draw.randint(0, 1), damaged=0.03)
        try:
            for _ in range(draw.randint(60, 200)):
                machine.event()
            machine.end()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        happened += machine.happened
    assert [kind for kind in HAPPENS if happened[kind] < SEEDS // 10] == [], happened


def test_a_snapshot_that_is_read_stays_and_the_least_recently_used_goes() -> None:
    states = States(1, 4)
    assert states.snapshot_target([]) == 2
    states.written(2, [1, 2], CPU)
    assert states.snapshot_target([]) == 3
    states.written(3, [1, 2, 3], CPU)
    assert states.longest([1, 2, 9], 3, CPU) == (2, (1, 2), CPU)  # it is used now
    assert states.longest([1, 2, 9], 1, CPU) is None
    assert states.longest([1, 2, 9], 3, "onnx") is None
    assert states.snapshot_target([3]) == 2
    assert states.snapshot_target([2, 3]) is None
    assert not states.holds(2, [1, 2], CPU)
    assert states.holds(3, [1, 2, 3], CPU)


def test_a_step_never_writes_the_slot_that_it_reads() -> None:
    states = States(2, 6)
    assert [states.target(1, source) for source in (NO_STATE, 2, 3, 5)] == [2, 3, 2, 2]
    assert not States(2, 0).are_used


def test_a_step_with_drafts_ends_in_a_slot_of_its_sequence() -> None:
    states = States(2, 9, 3)
    assert states.draft_targets(1, 2, [2, 5]) == [4, 6, 3]
    assert states.draft_targets(1, 4, [4]) == [3, 5, 6, 2], "both slots of the sequence are free"


def test_a_state_of_drafts_is_reused_until_the_next_drafts_take_its_slot() -> None:
    states = States(1, 6, 3)
    states.written(3, [1, 2, 3], CPU)
    assert states.holds(3, [1, 2, 3], CPU)
    assert states.snapshot_target([]) == 5, "a prompt takes no slot of drafts"
    states.overwritten([3])
    assert not states.holds(3, [1, 2, 3], CPU)


@pytest.mark.parametrize(("gib", "drafted", "slots"), [(4, 0, 2 + 4), (6, 3, 2 + 3 + 3), (16, 3, 2 + 3 + 8)])
def test_drafts_take_their_states_from_the_share_of_snapshots(gib: int, drafted: int, slots: int) -> None:
    """A state of this model has 55 MiB, and a sixteenth of the memory is for states besides two of the sequence."""
    manifest = manifest_of_pulled_shape(model_named("granite-4-h-tiny"))
    here, options = device(memory_bytes=gib << 30), PlanOptions(context_tokens=1024)
    plan = make_plan(manifest, here, options)
    assert (plan.compute.draft_tokens, plan.compute.state_slots) == (drafted, slots)
    without = make_plan(manifest, here, dataclasses.replace(options, without=frozenset({"drafts"})))
    assert (without.compute.draft_tokens, without.memory.slots_bytes) == (0, plan.memory.slots_bytes)
    compute = dataclasses.replace(plan.compute, state_slots=2)
    if drafted:
        with pytest.raises(UserError, match=r"compute\.state_slots"):
            validate(dataclasses.replace(plan, compute=compute), manifest, "p")


def prefill(**fields: Any) -> Prefill:
    return Prefill(**{"step": 1, "epoch": 0, "sequence": 0, "position": 0, "logits": "last", **fields})


def test_a_chunk_may_write_states_within_it() -> None:
    chunk = prefill(tokens=(7,) * 9, state_to=1, snapshot_tokens=(4, 8), snapshot_slots=(5, 6))
    assert chunk.state_runs == [(4, NO_STATE, 5), (4, 5, 6), (1, 6, 1)]
    assert prefill(tokens=(7, 7), state_from=0, state_to=1, position=3).state_runs == [(2, 0, 1)]
    assert prefill(tokens=(7, 7)).state_runs == []


@pytest.mark.parametrize(
    ("tokens", "slots"),
    [
        ((4,), ()),
        ((9,), (5,)),
        ((0,), (5,)),
        ((4, 3), (5, 6)),
        ((4, 4), (5, 6)),
        ((4,), (1,)),
        ((4, 5), (6, 6)),
        ((4,), (-1,)),
    ],
)
def test_snapshots_that_contradict_their_chunk_are_refused(tokens: tuple[int, ...], slots: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="snapshot_"):
        prefill(tokens=(7,) * 9, state_to=1, snapshot_tokens=tokens, snapshot_slots=slots)
    with pytest.raises(ValueError, match="snapshot_"):
        prefill(tokens=(7,) * 9, snapshot_tokens=(4,), snapshot_slots=(5,))


def test_the_same_prompt_again_computes_its_last_token_only() -> None:
    """The state before it is written within the last chunk; a prompt shorter than a chunk had none."""
    machine = Machine(0)
    for expected in (0, 10):
        machine.now += 1
        machine.requests["r"] = "abcabcabcab", 1, 0
        generate = Generate(request="r", prompt="abcabcabcab", max_tokens=1, share_prefix=True)
        machine.take(receive(machine.scheduler, generate, machine.now))
        before = machine.cached
        while "r" in machine.requests:
            machine.load(machine.loading.pop(0)) if machine.loading else machine.proceed()
        assert machine.cached - before == expected
