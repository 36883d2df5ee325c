"""What is set aside for texts and prompts is lent to slots: how much, who asks for it back, and in which order."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from neuronpipe.plans.cost.activation_rates import rates
from neuronpipe.plans.cost.token_time import expected
from neuronpipe.plans.device.process_limits import read_stalled_share
from neuronpipe.plans.package.layout import PAGE_BYTES
from neuronpipe.plans.plan.borrowed_memory import (
    SHORT_PROMPT_TOKENS,
    BorrowableMemory,
    usable_borrowed_slots,
    with_borrowed_slots,
)
from neuronpipe.plans.plan.document import Plan
from neuronpipe.plans.plan.memory_budget import peak_bytes
from neuronpipe.plans.plan.pinned_clusters import pins_within
from neuronpipe.plans.plan.segment_sizes import RunShape, fixed_layouts, open_clusters
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.protocol.messages.request import Generate
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.cache.memory_pressure import CALM_S, MARGIN_SHARE, RESTORE_S, STALLED_SHARE, STEP_S, Pressure
from neuronpipe.services.cache.slot_resizing import GIVE_UP_AFTER_S, Resizing
from neuronpipe.services.coordinator.scheduling.admission import Limits
from neuronpipe.services.coordinator.scheduling.events import (
    EpochChanged,
    MemoryReleased,
    MemoryReserved,
    ProcessReady,
    ReleaseMemory,
    ReserveMemory,
    Tick,
    TokensSampled,
)
from neuronpipe.services.coordinator.scheduling.kv_reservation import RELEASE_AFTER_S, Reservation
from neuronpipe.services.coordinator.scheduling.prefix_reuse import FORGET_AFTER_S
from neuronpipe.services.coordinator.scheduling.scheduler import Scheduler

from tests.unit.test_coordinator_core import (
    LETTERS,
    NO_GRAMMARS,
    NUMERICS,
    PROCESSES,
    SlowConstraints,
    finish,
    receive,
    sent,
)
from tests.unit.test_planner import device, manifest, predicted

MODEL = predicted(manifest(width=1024, neurons=4096, layers=8))
CHUNK = 256
LIMITS = Limits(
    mode="exact", end_tokens=frozenset(), plan_id="p", sequences=4, context_tokens=256,
    prefill_chunk_tokens=CHUNK, logit_rows=4, vocabulary=200,
)  # fmt: skip


def made(extra_bytes: int = 12 << 20, **wanted: Any) -> Plan:
    wish = PlanOptions(**{"sequences": 4, "prefill_chunk_tokens": CHUNK, **wanted})
    least = make_plan(MODEL, device(2), dataclasses.replace(wish, memory_bytes=16 << 30)).memory.least_bytes
    return make_plan(MODEL, device(2), dataclasses.replace(wish, memory_bytes=least + extra_bytes))


def lendable_of(one: Plan) -> BorrowableMemory:
    return BorrowableMemory.of(MODEL, one.compute, one.memory)


# ---- the plan ------------------------------------------------------------------------------------------------
@given(
    extra_bytes=st.integers(1 << 20, 64 << 20),
    mode=st.sampled_from(["exact", "predicted"]),
    tokens=st.lists(st.integers(0, 512), min_size=4, max_size=4),
    prompt=st.integers(0, CHUNK),
    has_grammars=st.booleans(),
)
def test_slots_and_what_is_reserved_never_take_more_than_the_plan(
    extra_bytes: int, mode: Any, tokens: list[int], prompt: int, has_grammars: bool
) -> None:
    one = made(extra_bytes, mode=mode)
    lendable, memory = lendable_of(one), one.memory
    tokens = [min(count, one.compute.context_tokens) for count in tokens]
    stage_tokens = lendable.stage_tokens(prompt) if prompt else 0
    reserved = lendable.reserved_bytes(tokens, stage_tokens, has_grammars=has_grammars)
    triggers, values = usable_borrowed_slots(memory, lendable, reserved)
    places = MODEL.slots(moved=memory.are_scales_moved)
    lent_bytes = triggers * places.trigger_bytes + values * places.value_bytes
    grammars_bytes = memory.vocabulary_bytes + memory.grammars_bytes
    assert lent_bytes + reserved <= memory.kv_bytes + memory.prefill_stage_bytes + grammars_bytes
    assert memory.trigger_slots + triggers <= MODEL.clusters >= memory.value_slots + values
    assert memory.total_bytes() <= memory.limit_bytes


def test_all_of_it_is_lent_while_there_is_no_text_and_none_of_it_when_all_are_full() -> None:
    one = made()
    lendable, memory = lendable_of(one), one.memory
    assert usable_borrowed_slots(memory, lendable, 0) == (memory.lent_trigger_slots, memory.lent_value_slots)
    full = lendable.reserved_bytes([one.compute.context_tokens] * 4, CHUNK, has_grammars=True)
    assert full == lendable.total_bytes - PAGE_BYTES, "all but the segment's header"
    assert usable_borrowed_slots(memory, lendable, full) == (0, 0)


def test_what_is_reserved_holds_the_pages_of_the_texts() -> None:
    one = made()
    shape = RunShape.of(one.compute)
    for tokens in (1, 17, 100, one.compute.context_tokens):
        for texts in (1, 4):
            pages = dataclasses.replace(shape, sequences=texts, context_tokens=tokens)
            used_bytes = fixed_layouts(MODEL, pages)["kv"].total_bytes
            reserved = lendable_of(one).reserved_bytes([tokens] * texts, 0)
            assert reserved >= min(used_bytes, one.memory.kv_bytes) - 4096, "but for the segment's first page"


def test_a_short_prompt_reserves_less_of_the_stage() -> None:
    lendable = lendable_of(made(128 << 20))
    assert lendable.chunk_tokens == CHUNK
    short, whole = (lendable.reserved_bytes([0] * 4, lendable.stage_tokens(n)) for n in (SHORT_PROMPT_TOKENS, CHUNK))
    assert 0 < short < whole == lendable.stage_bytes


@pytest.mark.parametrize("wish", [{"ffn_resident_share": 0.5}, {"without": frozenset(["cache"])}])
def test_nothing_is_lent_where_the_slots_were_asked_for(wish: dict[str, Any]) -> None:
    assert not made(**wish).memory.has_borrowed_slots


def test_values_go_first_where_every_token_reads_all_triggers() -> None:
    """A trigger without a slot pushes others out, in turn: as many as may be moving were read for every token."""
    one = made(48 << 20, mode="exact")
    lendable, memory = lendable_of(one), one.memory
    places = MODEL.slots(moved=memory.are_scales_moved)
    assert memory.trigger_slots < memory.trigger_slots + memory.lent_trigger_slots == MODEL.clusters
    share = memory.lent_value_slots * places.value_bytes / lendable.total_bytes
    triggers, values = usable_borrowed_slots(memory, lendable, int(0.9 * share * lendable.total_bytes))
    assert triggers == memory.lent_trigger_slots
    assert 0 < values < memory.lent_value_slots
    triggers, values = usable_borrowed_slots(memory, lendable, int((share + 0.1) * lendable.total_bytes))
    assert 0 < triggers < memory.lent_trigger_slots
    assert values == 0


def test_as_many_of_both_go_where_a_neuron_is_wanted_whole() -> None:
    one = made(mode="predicted")
    triggers, values = usable_borrowed_slots(one.memory, lendable_of(one), lendable_of(one).total_bytes // 3)
    assert 0 < triggers == values < one.memory.lent_value_slots


def test_speed_is_expected_with_the_slots_that_texts_leave() -> None:
    one = made(mode="predicted")
    few, many = (with_borrowed_slots(MODEL, one.compute, one.memory, tokens=tokens) for tokens in (400, 100))
    assert one.memory.value_slots < few.value_slots < many.value_slots
    without = dataclasses.replace(one.memory, lent_trigger_slots=0, lent_value_slots=0)
    rated = MODEL, rates(MODEL, "predicted", None), one.compute
    missed = [expected(*rated, memory, one.flash, None, None).miss_rate for memory in (many, one.memory, without)]
    assert missed[0] <= missed[1] < missed[2]


def test_a_run_is_expected_to_hold_what_it_was_given() -> None:
    one = made(mode="predicted")
    held = peak_bytes(MODEL, one, sequences=1, sequence_tokens=100, prompt_tokens=20)
    assert 0.99 * one.memory.total_bytes() <= held <= one.memory.total_bytes()


@example([0, 0, 0], 1, 2)
@given(st.lists(st.integers(0, 86), min_size=3, max_size=3), st.integers(0, 300), st.integers(0, 100))
def test_pins_leave_what_moves_its_slots(counts: list[int], slots: int, moving: int) -> None:
    kept = pins_within(tuple(counts), slots, moving, 258)
    if slots >= 258 or sum(counts) <= slots - moving:
        assert kept == tuple(counts)
    else:
        assert sum(kept) <= max(0, slots - moving)
        assert all(now <= then for now, then in zip(kept, counts, strict=True))


# ---- the coordinator -----------------------------------------------------------------------------------------
def decode(position: int, slot: int = 0) -> Step:
    return Step(
        step=1, epoch=0, participants=("decode.0",), first_blocks=(0,), end_blocks=(1,),
        sequences=(slot,), positions=(position,), tokens=(7,),
    )  # fmt: skip


def prompt(tokens: int, position: int = 0, slot: int = 0) -> Prefill:
    return Prefill(step=1, epoch=0, sequence=slot, position=position, tokens=(7,) * tokens, logits="last")


@pytest.fixture
def reservation() -> Reservation:
    return Reservation(lendable_of(made()), [0] * 4)


def test_a_step_waits_for_its_memory_and_further_ones_within_it_do_not(reservation: Reservation) -> None:
    assert not reservation.covers(prompt(20))
    (asked,) = reservation.ask(prompt(20))
    assert asked.reserved_bytes > 0
    assert asked.kv_tokens[0] >= 20
    assert not reservation.covers(prompt(20)), "the cache has not answered"
    assert not reservation.ask(prompt(20)), "it is not asked twice"
    reservation.reserved(asked.number)
    assert reservation.covers(prompt(20))
    assert reservation.covers(decode(asked.kv_tokens[0] - 1))
    assert not reservation.covers(decode(asked.kv_tokens[0]))
    assert not reservation.covers(decode(asked.kv_tokens[0] - 1), later=1)
    assert reservation.covers(decode(asked.kv_tokens[0] - 2), later=1)
    assert not reservation.covers(decode(0, slot=1))


def test_an_older_answer_does_not_count(reservation: Reservation) -> None:
    (first,) = reservation.ask(decode(0))
    reservation.reserved(first.number)
    (second,) = reservation.ask(decode(0, slot=1))
    reservation.reserved(first.number)
    assert not reservation.covers(decode(0, slot=1))
    (again,) = reservation.ask_again()  # the cache is another one
    assert (again.reserved_bytes, again.kv_tokens) == (second.reserved_bytes, second.kv_tokens)
    reservation.reserved(again.number)
    assert reservation.covers(decode(0, slot=1))
    assert not reservation.ask_again()


def test_memory_of_prompts_is_given_back_a_while_after_the_last_one(reservation: Reservation) -> None:
    (asked,) = reservation.ask(prompt(CHUNK))
    reservation.reserved(asked.number)
    reservation.sent(prompt(CHUNK), 10.0)
    assert not reservation.may_release(10.0 + RELEASE_AFTER_S / 2)
    assert reservation.may_release(10.0 + RELEASE_AFTER_S)
    released = reservation.release([CHUNK, 0, 0, 0])
    assert released.keep_tokens == asked.kv_tokens
    assert not reservation.covers(prompt(4, CHUNK)), "until the prefill worker has answered"
    assert reservation.covers(decode(CHUNK - 1)), "within what is kept"
    (less,) = reservation.released()
    assert less.reserved_bytes < asked.reserved_bytes
    reservation.reserved(less.number)
    assert not reservation.may_release(100.0)
    assert reservation.covers(decode(CHUNK - 1))
    assert not reservation.covers(prompt(4, CHUNK - 4))


def test_a_prefill_worker_that_dies_before_it_gave_back_is_asked_again(reservation: Reservation) -> None:
    (asked,) = reservation.ask(prompt(CHUNK))
    reservation.reserved(asked.number)
    reservation.release([8, 0, 0, 0])
    reservation.prefill_lost()
    assert reservation.covers(decode(CHUNK - 1)), "nobody has taken its memory"
    assert reservation.may_release(1000.0)
    assert not reservation.released(), "an answer that came late"


def test_grammars_have_memory_while_they_are_followed(reservation: Reservation) -> None:
    (step,) = reservation.ask(decode(0))
    assert not reservation.ask_grammars(), "the cache owes an answer"
    reservation.reserved(step.number)
    assert not reservation.covers_grammars
    (asked,) = reservation.ask_grammars()
    memory = made().memory
    assert asked.reserved_bytes - step.reserved_bytes == memory.vocabulary_bytes + memory.grammars_bytes
    assert not reservation.covers_grammars
    assert not reservation.covers(decode(0)), "the cache may be taking a slot that the step reads"
    (again,) = reservation.ask_again()  # the cache is another one
    assert again.reserved_bytes == asked.reserved_bytes
    reservation.reserved(again.number)
    assert reservation.covers_grammars
    assert reservation.covers(decode(0))
    (less,) = reservation.release_grammars()
    assert less.reserved_bytes == step.reserved_bytes
    assert not reservation.covers_grammars
    assert reservation.covers(decode(0)), "nobody waits for it"
    assert not reservation.release_grammars()


def test_grammars_of_a_run_that_lends_nothing_always_have_memory() -> None:
    one = Reservation(None, ())
    assert one.covers_grammars
    assert not one.release_grammars()


def test_the_scheduler_has_a_grammar_compiled_when_its_memory_is_there() -> None:
    constraints = SlowConstraints()
    scheduler = Scheduler(LIMITS, PROCESSES, LETTERS, constraints, Reservation(lendable_of(made()), [0] * 4))
    for process in PROCESSES:
        scheduler.handle(ProcessReady(process, NUMERICS.get(process[0], "")), 0.0)
    actions = receive(scheduler, Generate(request="r", prompt="hello", max_tokens=3, grammar="json"), 0.0)
    (asked,) = [action for action in actions if isinstance(action, ReserveMemory)]
    assert asked.reserved_bytes > 0
    assert not constraints.has_memory
    assert not scheduler.handle(MemoryReserved(asked.number), 0.1)
    assert constraints.has_memory
    assert not scheduler.wants_tick(0.1)
    constraints.answers[0].close()
    assert scheduler.wants_tick(0.2)
    (less,) = scheduler.handle(Tick(), 0.2)
    assert isinstance(less, ReserveMemory)
    assert less.reserved_bytes == 0
    assert not constraints.has_memory


def test_a_coordinator_that_starts_again_knows_what_texts_had() -> None:
    (asked,) = (one := Reservation(lendable_of(made()), [64, 0, 0, 0])).ask(decode(0, slot=1))
    assert asked.kv_tokens[0] == 64
    one.reserved(asked.number)
    assert one.may_release(1000.0), "the prefill worker may hold a stage"


def test_the_scheduler_sends_a_step_when_its_memory_is_there() -> None:
    scheduler = Scheduler(LIMITS, PROCESSES, LETTERS, NO_GRAMMARS, Reservation(lendable_of(made()), [0] * 4))
    for process in PROCESSES:
        scheduler.handle(ProcessReady(process, NUMERICS.get(process[0], "")), 0.0)
    actions = receive(scheduler, Generate(request="r", prompt="hello", max_tokens=3), 0.0)
    (asked,) = [action for action in actions if isinstance(action, ReserveMemory)]
    assert not sent(actions)
    assert not sent(scheduler.handle(EpochChanged(1, (("cache", 0),)), 0.1))
    (again,) = [one for one in scheduler.handle(ProcessReady(("cache", 0)), 0.2) if isinstance(one, ReserveMemory)]
    assert not sent(scheduler.handle(MemoryReserved(asked.number), 0.3))
    (step,) = sent(scheduler.handle(MemoryReserved(again.number), 0.4))
    assert isinstance(step, Prefill)
    assert step.epoch == 1
    finish(scheduler, step, 0.5)
    receive_cancel = scheduler.handle(Tick(), 0.6)
    assert not sent(receive_cancel)


def test_the_scheduler_gives_memory_back_between_steps_only() -> None:
    scheduler = Scheduler(LIMITS, PROCESSES, LETTERS, NO_GRAMMARS, Reservation(lendable_of(made()), [32, 0, 0, 0]))
    for process in PROCESSES:
        scheduler.handle(ProcessReady(process, NUMERICS.get(process[0], "")), 0.0)
    assert scheduler.wants_tick(RELEASE_AFTER_S)
    (released,) = scheduler.handle(Tick(), RELEASE_AFTER_S)
    assert released == ReleaseMemory((0, 0, 0, 0)), "no text is known to have anything there"
    (less,) = scheduler.handle(MemoryReleased(), RELEASE_AFTER_S)
    assert isinstance(less, ReserveMemory)
    assert less.reserved_bytes == 0


def test_keys_and_values_of_a_text_that_ended_long_ago_are_lent_when_another_prompt_was_computed() -> None:
    scheduler = Scheduler(LIMITS, PROCESSES, LETTERS, NO_GRAMMARS, Reservation(lendable_of(made()), [0] * 4))
    for process in PROCESSES:
        scheduler.handle(ProcessReady(process, NUMERICS.get(process[0], "")), 0.0)

    def generate(prompt: str, now: float) -> ReleaseMemory:
        """Generate one token, and return what the prefill worker is told to keep two seconds later."""
        actions = receive(scheduler, Generate(request=prompt, prompt=prompt, max_tokens=1), now)
        (reserve,) = [action for action in actions if isinstance(action, ReserveMemory)]
        (step,) = sent(scheduler.handle(MemoryReserved(reserve.number), now))
        finish(scheduler, step, now)
        scheduler.handle(TokensSampled((ord("x"),)), now)
        (release,) = scheduler.handle(Tick(), now + RELEASE_AFTER_S)
        assert isinstance(release, ReleaseMemory)
        (less,) = scheduler.handle(MemoryReleased(), now + RELEASE_AFTER_S)
        assert isinstance(less, ReserveMemory)
        scheduler.handle(MemoryReserved(less.number), now + RELEASE_AFTER_S)
        return release

    assert [bool(tokens) for tokens in generate("hello", 0.0).keep_tokens] == [True, False, False, False]
    assert [bool(tokens) for tokens in generate("world", 60.0).keep_tokens] == [True, True, False, False]
    late_s = 30.0 + FORGET_AFTER_S
    assert [bool(tokens) for tokens in generate("again", late_s).keep_tokens] == [False, True, True, False]


# ---- the cache -----------------------------------------------------------------------------------------------
def test_fewer_slots_are_ready_when_the_loader_has_given_their_memory_back() -> None:
    one = made()
    lendable = lendable_of(one)
    resizing = Resizing(MODEL, one.compute, one.memory)
    resizing.trimmed()
    all_slots = resizing.begin()
    resizing.reserve(7, lendable.total_bytes // 2)
    assert resizing.begin() < all_slots
    assert resizing.vacates
    resizing.trim_requested(1.0)
    assert resizing.is_trim_requested(1.1)
    resizing.restarted()
    assert not resizing.is_trim_requested(1.2), "another loader knows nothing of it"
    resizing.trim_requested(2.0)
    assert resizing.is_trim_requested(2.0 + GIVE_UP_AFTER_S)
    resizing.trimmed()
    assert (resizing.vacates, resizing.answer(), resizing.answer()) == (False, 7, None)
    resizing.reserve(8, 0)
    assert resizing.begin() == all_slots
    assert not resizing.vacates, "more of them are used at once"


def test_a_loader_that_does_not_answer_is_not_waited_for() -> None:
    one = made()
    resizing = Resizing(MODEL, one.compute, one.memory)
    assert resizing.vacates, "another cache may have left something"
    resizing.trim_requested(1.0)
    resizing.is_trim_requested(1.1 + GIVE_UP_AFTER_S)
    assert not resizing.vacates


@pytest.mark.parametrize("mode", ["exact", "predicted"])
@pytest.mark.parametrize("extra_bytes", [1 << 20, 12 << 20, 4 << 30])
def test_under_pressure_slots_go_down_to_what_a_step_holds_open(mode: Any, extra_bytes: int) -> None:
    one = made(extra_bytes, mode=mode)
    resizing = Resizing(MODEL, one.compute, one.memory)
    all_slots = resizing.begin()
    assert resizing.withhold(1 << 20)
    assert not resizing.withhold(1 << 20)
    fewer = resizing.begin()
    places = MODEL.slots(moved=one.memory.are_scales_moved)
    given_back = (all_slots[0] - fewer[0]) * places.trigger_bytes
    given_back += (all_slots[1] - fewer[1]) * places.value_bytes
    assert given_back >= min(1 << 20, 0 if fewer == (resizing.min_slots, resizing.min_slots) else 1 << 20)
    resizing.withhold(1 << 40)
    assert resizing.begin() == tuple(min(resizing.min_slots, slots) for slots in all_slots)
    assert resizing.min_slots >= 2 * open_clusters(MODEL, one.compute)
    resizing.withhold(0)
    assert resizing.begin() == all_slots


@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_under_pressure_everything_gives_values_back_first_in_exact_mode(mode: Any) -> None:
    one = made(4 << 30, mode=mode)
    resizing = Resizing(MODEL, one.compute, one.memory)
    resizing.withhold(4 << 20)
    triggers, values = resizing.begin()
    assert one.memory.trigger_slots == one.memory.value_slots == MODEL.clusters > values
    assert triggers == (MODEL.clusters if mode == "exact" else values)


# ---- when memory is short ------------------------------------------------------------------------------------
TOTAL = 1 << 30
MARGIN = int(MARGIN_SHARE * TOTAL)


def test_slots_give_back_step_by_step_while_memory_is_short_and_take_it_again_when_it_is_calm() -> None:
    pressure = Pressure(160 << 20)
    assert pressure.look(TOTAL, 10 * MARGIN, 0.0, 0.0) == 0
    assert pressure.look(TOTAL, MARGIN - 1, 0.0, 1.0) == 10 << 20
    assert pressure.look(TOTAL, MARGIN - 1, 0.0, 1.0 + STEP_S / 2) == 10 << 20, "what it gave back counts first"
    assert pressure.look(TOTAL, MARGIN - 1, 0.0, 1.0 + STEP_S) == 20 << 20
    assert pressure.look(TOTAL, TOTAL // 2, STALLED_SHARE, 2.0) == 20 << 20, "those who wait need other memory"
    assert pressure.look(TOTAL, 7 * MARGIN, STALLED_SHARE, 3.0) == 30 << 20, "tasks wait"
    assert pressure.look(TOTAL, 2 * MARGIN, 0.0, 20.0) == 30 << 20, "a step more would make it short again"
    assert pressure.look(TOTAL, 10 * MARGIN, 0.0, 20.0 + CALM_S / 2) == 30 << 20
    for n in range(1, 4):
        assert pressure.look(TOTAL, 10 * MARGIN, 0.0, 20.0 + CALM_S + n * RESTORE_S) == (30 - 10 * n) << 20
    assert pressure.look(TOTAL, 10 * MARGIN, 0.0, 100.0) == 0


def test_a_run_that_is_swapped_gives_back_however_much_is_available() -> None:
    pressure = Pressure(160 << 20)
    pressure.swapped(100)
    assert pressure.look(TOTAL, TOTAL, 0.0, 0.0) == 0
    pressure.swapped(8 << 20)
    assert pressure.look(TOTAL, TOTAL, 0.0, 1.0) == 10 << 20
    pressure.swapped(8 << 20)
    assert pressure.look(TOTAL, TOTAL, 0.0, 2.0) == 10 << 20, "it is swapped no further"


def test_no_more_than_all_slots_is_given_back() -> None:
    pressure = Pressure(16)
    for n in range(40):
        pressure.look(TOTAL, 0, 1.0, n * STEP_S)
    assert pressure.withheld_bytes == 16


def test_a_run_that_follows_leaves_a_tenth_of_all_memory_from_the_start() -> None:
    pressure = Pressure(TOTAL, follows=True)
    pressure.begin(TOTAL, TOTAL // 2, int(0.9 * TOTAL))
    assert pressure.withheld_bytes == pytest.approx(TOTAL * (0.9 - 0.4), abs=2)
    fixed = Pressure(TOTAL)
    fixed.begin(TOTAL, TOTAL // 2, int(0.9 * TOTAL))
    assert fixed.withheld_bytes == 0, "it was asked for"


@pytest.mark.parametrize(
    ("files", "share"),
    [
        ({"proc/pressure/memory": "some avg10=12.50 avg60=1.00 avg300=0.00 total=9\nfull avg10=1.00\n"}, 0.125),
        (
            {
                "proc/pressure/memory": "some avg10=90.00 avg60=1.00 avg300=0.00 total=9\n",
                "proc/self/cgroup": "0::/phone\n",
                "sys/fs/cgroup/phone/memory.pressure": "some avg10=3.00 avg60=0.00 avg300=0.00 total=1\n",
            },
            0.03,
        ),
        ({"proc/pressure/memory": "nonsense"}, 0.0),
        ({}, 0.0),
    ],
)
def test_what_the_kernel_says_of_waiting_for_memory(tmp_path: Path, files: dict[str, str], share: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_stalled_share(tmp_path) == pytest.approx(share)
