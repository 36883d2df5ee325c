"""Which request is taken for the cause of deaths, and which are not."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from neuronpipe.launch.supervisor.deaths import RESTARTS, WITHIN_S, RestartBudget
from neuronpipe.protocol.layouts.run import LEDGER_ENTRY, SUSPECTS, board
from neuronpipe.protocol.messages.request import Generate, Score, Tokenize
from neuronpipe.services.coordinator.scheduling.events import EpochChanged, ProcessReady, StepLeft, Tell, TokensSampled
from neuronpipe.services.coordinator.scheduling.scheduler import Scheduler
from neuronpipe.services.runtime.quarantine import (
    CERTAIN,
    CRASH_WEIGHT,
    FORGET_AFTER_S,
    STEP_KILL_WEIGHT,
    Ledger,
    Quarantine,
    fingerprint,
    request_fingerprint,
)

from tests.unit.test_coordinator_core import finish, make_scheduler, receive, sent, told

KILLER, BYSTANDER, TWIN = 11, 22, 33
SLOTS = 4


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(memoryview(bytearray(8 * len(LEDGER_ENTRY) * (SLOTS + 1 + SUSPECTS))).cast("Q"))


def died(ledger: Ledger, *, killed: bool = False, now: float = 1.0) -> Quarantine:
    """The coordinator after one that died."""
    quarantine = Quarantine(ledger)
    quarantine.coordinator_died(killed=killed, now=now)
    return quarantine


def test_the_board_has_room_for_every_kv_slot() -> None:
    (field,) = [field for field in board(processes=3, sequences=SLOTS).fields if field.name == "ledger"]
    assert field.shape == (SLOTS + 1 + SUSPECTS, len(LEDGER_ENTRY))


def test_a_request_that_ends_the_coordinator_twice_at_its_arrival_is_refused(ledger: Ledger) -> None:
    quarantine = Quarantine(ledger)
    for _ in range(2):
        assert not quarantine.is_refused(KILLER, 1.0)
        quarantine.admits(KILLER)
        quarantine = died(ledger)
    assert quarantine.is_refused(KILLER, 1.0)
    assert [quarantine.take_refused(), quarantine.take_refused()] == [1, 0]
    assert died(ledger).is_refused(KILLER, 2.0), "another death does not make it forgotten"
    assert not quarantine.is_refused(KILLER, 1.0 + FORGET_AFTER_S), "the cause may have gone"


def test_one_that_was_further_on_at_the_second_death_is_not_suspected(ledger: Ledger) -> None:
    quarantine = Quarantine(ledger)
    for place in (200, 60):  # it had begun anew, and had not come as far
        quarantine.admits(KILLER)
        quarantine.computes(BYSTANDER, 0, place)
        quarantine = died(ledger)
    assert quarantine.is_refused(KILLER, 1.0)
    assert not quarantine.is_refused(BYSTANDER, 1.0)


def test_a_token_that_native_code_was_ahead_makes_no_other_place(ledger: Ledger) -> None:
    quarantine = Quarantine(ledger)
    for place in (50, 51):
        quarantine.computes(KILLER, 2, place)
        quarantine = died(ledger)
    assert quarantine.is_refused(KILLER, 1.0)


def test_requests_in_step_are_run_apart_and_the_third_death_has_one_suspect(ledger: Ledger) -> None:
    quarantine = Quarantine(ledger)
    for _ in range(2):
        quarantine.computes(KILLER, 0, 50)
        quarantine.computes(TWIN, 1, 50)
        quarantine = died(ledger)
    for name in (KILLER, TWIN):
        assert not quarantine.is_refused(name, 1.0)
        assert quarantine.runs_apart(name)
    quarantine.computes(TWIN, 1, 52)
    assert not quarantine.runs_apart(TWIN), "it has got past that place"
    quarantine.computes(KILLER, 0, 50)
    assert died(ledger).is_refused(KILLER, 1.0)


def test_sigkill_may_come_from_outside_and_has_to_come_a_third_time(ledger: Ledger) -> None:
    quarantine, refused = Quarantine(ledger), []
    for _ in range(3):
        quarantine.computes(KILLER, 0, 50)
        quarantine = died(ledger, killed=True)
        refused.append(quarantine.is_refused(KILLER, 1.0))
    assert refused == [False, False, True]


def test_what_has_ended_is_under_way_no_more(ledger: Ledger) -> None:
    quarantine = Quarantine(ledger)
    for _ in range(4):
        quarantine.computes(BYSTANDER, 0, 50)
        quarantine.ends(BYSTANDER, 0)
        quarantine.admits(BYSTANDER)
        quarantine.admits(0)
        quarantine = died(ledger)
    assert not quarantine.is_refused(BYSTANDER, 1.0)


def test_more_suspects_than_places_keep_the_latest(ledger: Ledger) -> None:
    quarantine = Quarantine(ledger)
    for number in range(1, 2 * SUSPECTS):
        quarantine.convict(number, float(number))
    after = Quarantine(ledger)
    assert after.is_refused(2 * SUSPECTS - 1, 2 * SUSPECTS)
    assert not after.is_refused(1, 2 * SUSPECTS)


def test_a_fingerprint_is_of_what_is_computed_not_of_names() -> None:
    asks = [Generate(request=name, prompt="x", owner=name) for name in "ab"]
    assert len(set(map(fingerprint, asks))) == 1
    sequences = [dataclasses.replace(asks[0], seed=seed) for seed in range(3)]
    assert len(set(map(fingerprint, sequences))) == 3, "each has a place of its own"
    assert len(set(map(request_fingerprint, sequences))) == 1
    differing = [
        Generate(request="a", prompt="x"),
        Generate(request="a", prompt="y"),
        Generate(request="a", prompt="x", temperature=0.5),
        Score(request="a", text="x"),
        Tokenize(request="a", text="x"),
    ]
    assert len(set(map(fingerprint, differing))) == len(differing)


# ---- steps ---------------------------------------------------------------------------------------------------
def run_until_decoding(scheduler: Scheduler, prompts: str) -> list[int]:
    """Requests for these one-letter prompts, until their first common decode step; returns its epoch and number."""
    actions = []
    for prompt in prompts:
        actions += receive(scheduler, Generate(request=prompt, prompt=prompt, max_tokens=9), 0.0)
    for _ in range(20):
        (step,) = sent(actions)
        if len(getattr(step, "sequences", ())) == len(prompts):
            return [step.epoch, step.step]
        finish(scheduler, step)
        actions = scheduler.handle(TokensSampled((ord("x"),) * len(getattr(step, "sequences", (0,)))), 1.0)
    raise AssertionError


def die_of_the_step(scheduler: Scheduler, step: list[int], *, killed: bool = False) -> list:  # type: ignore[type-arg]
    """One decode worker dies of the outstanding step, the other one leaves it; the dead one starts again. Returns what
    follows."""
    epoch, number = step
    actions = scheduler.handle(EpochChanged(epoch + 1, (("decode", 0),), killed), 1.0)
    actions += scheduler.handle(StepLeft(("decode", 1), number, epoch, False), 1.0)
    return actions + scheduler.handle(ProcessReady(("decode", 0), "cpu:avx2"), 1.0)


def test_a_request_whose_step_ends_workers_twice_is_refused_and_the_next_one_computed() -> None:
    scheduler = make_scheduler()
    step = run_until_decoding(scheduler, "a")
    receive(scheduler, Score(request="next", text="bc"), 1.0)
    die_of_the_step(scheduler, step)
    actions = die_of_the_step(scheduler, [step[0] + 1, step[1]])
    (refused,) = told(actions)
    assert (refused.request, refused.code) == ("a", "ended_a_process")  # type: ignore[attr-defined]
    assert sent(actions), "the others go on"
    again = [action.message for action in receive(scheduler, Generate(request="b", prompt="a", max_tokens=9), 2.0)]  # type: ignore[union-attr]
    assert [message.code for message in again] == ["ended_a_process"]  # type: ignore[union-attr]


@pytest.mark.parametrize("killed", [False, True])
def test_sequences_that_shared_a_deadly_step_are_computed_alone(killed: bool) -> None:
    scheduler = make_scheduler()
    epoch, number = run_until_decoding(scheduler, "ab")
    actions: list = []  # type: ignore[type-arg]
    for death in range(CERTAIN // (STEP_KILL_WEIGHT if killed else CRASH_WEIGHT)):
        actions = die_of_the_step(scheduler, [epoch + death, number], killed=killed)
        epoch_now = epoch + death + 1
    assert not told(actions)
    (alone,) = sent(actions)
    assert alone.tokens == (ord("x"),)
    slots = alone.sequences  # type: ignore[union-attr]
    assert len(slots) == 1
    finish(scheduler, alone)
    (other,) = sent(scheduler.handle(TokensSampled((ord("y"),)), 1.0))
    assert other.sequences != slots  # type: ignore[union-attr]
    assert len(other.sequences) == 1  # type: ignore[union-attr]
    actions = die_of_the_step(scheduler, [epoch_now, other.step])
    (refused,) = [action.message for action in actions if isinstance(action, Tell)]
    assert refused.code == "ended_a_process"  # type: ignore[union-attr]
    assert len(sent(actions)) == 1, "the sequence that is cleared goes on"


def test_the_deadly_one_of_several_sequences_is_found_and_with_it_the_request(ledger: Ledger) -> None:
    sequences = [Generate(request=str(seed), prompt="abc", seed=seed) for seed in range(4)]
    quarantine = Quarantine(ledger)
    names = list(map(fingerprint, sequences))
    for _ in range(2):  # in step with each other, with a bystander among them
        for slot, name in enumerate([*names[:3], BYSTANDER]):
            quarantine.computes(name, slot, 12 - slot)
        quarantine = died(ledger)
    for name, place in ((names[0], 20), (BYSTANDER, 20), (names[2], 10)):  # one after the other
        assert quarantine.runs_apart(name)
        quarantine.computes(name, 0, place)
    quarantine = died(ledger)
    assert quarantine.is_refused(names[2], 1.0)
    assert not quarantine.is_refused(BYSTANDER, 1.0)
    scheduler = make_scheduler(quarantine=quarantine)
    for ask in (sequences[2], sequences[3], dataclasses.replace(sequences[0], seed=99)):
        (refused,) = told(receive(scheduler, ask, 1.0))
        assert refused.code == "ended_a_process"


def test_kills_at_random_steps_refuse_nobody() -> None:
    """Each death finds another step under way."""
    scheduler = make_scheduler()
    epoch, number = run_until_decoding(scheduler, "a")
    for death in itertools.count():
        actions = die_of_the_step(scheduler, [epoch + death, number])
        assert not told(actions)
        (step,) = sent(actions)
        finish(scheduler, step)
        actions = scheduler.handle(TokensSampled((ord("x"),)), 1.0)
        if not sent(actions):
            break
        number = sent(actions)[0].step
    assert death > 5


# ---- the restart budget --------------------------------------------------------------------------------------
def test_deaths_of_a_request_that_was_found_are_forgotten_but_not_those_of_a_replacement() -> None:
    ours, replaced = ("coordinator", 0), ("decode", 0)
    budget = RestartBudget([ours, replaced])
    for death in range(RESTARTS):
        assert budget.count(ours, death) is None
        assert budget.count(replaced, death) is None
    budget.pardon(0, {replaced})
    budget.pardon(1, {replaced})
    assert budget.count(ours, RESTARTS) is None
    assert budget.count(replaced, RESTARTS) == RESTARTS + 1
    assert budget.count(replaced, RESTARTS + 2 * WITHIN_S) is None
