"""When processes of a run look around by themselves: while it is used, and hardly otherwise."""

from __future__ import annotations

from pathlib import Path

from neuronpipe.launch.supervisor.memory_watch import open_stall_trigger
from neuronpipe.services.cache.memory_pressure import Pressure
from neuronpipe.services.coordinator.sleep import BEAT_S, IDLE_S, LINGER_S, TELL_SUPERVISOR_S, Wakefulness

MIB = 1 << 20


def test_a_coordinator_that_was_never_used_sleeps_long_and_asks_for_nothing() -> None:
    idle = Wakefulness()
    assert idle.patience_s(5.0) == IDLE_S
    assert not idle.asks_for_beats(5.0)
    assert not idle.tells_supervisor(5.0)


def test_while_the_run_is_used_and_a_while_after_beats_are_asked_for_at_their_pace() -> None:
    used = Wakefulness()
    used.used(10.0)
    times = [10.0 + n * BEAT_S / 2 for n in range(int(2 * (LINGER_S + 1) / BEAT_S))]
    asked = [now for now in times if used.asks_for_beats(now)]
    assert asked == [10.0 + n * BEAT_S for n in range(int(LINGER_S / BEAT_S))]
    assert used.patience_s(10.0 + LINGER_S) == IDLE_S


def test_the_supervisor_is_told_now_and_then_while_the_run_is_used() -> None:
    used = Wakefulness()
    used.used(0.0, 2.5 * TELL_SUPERVISOR_S)
    told = [now for now in (0.0, 0.5, 1.0, 1.9, 2.0, 2.4, 3.0, 9.0) if used.tells_supervisor(now * TELL_SUPERVISOR_S)]
    assert told == [0.0, 1.0, 2.0]


def test_memory_is_looked_at_again_soon_only_while_what_is_withheld_may_change() -> None:
    pressure = Pressure(160 * MIB)
    total, plenty, short = 1000 * MIB, 900 * MIB, 10 * MIB
    pressure.look(total, plenty, 0.0, 0.0)
    assert not pressure.is_changing
    pressure.look(total, short, 0.0, 10.0)
    assert pressure.is_changing
    now = 10.0
    while pressure.withheld_bytes < 160 * MIB:
        now += 1.0
        pressure.look(total, short, 0.0, now)
    pressure.look(total, short, 0.0, now + 1)
    assert not pressure.is_changing  # there is no more to give
    pressure.look(total, plenty, 0.0, now + 2)
    assert pressure.is_changing  # soon slots take it again


def test_a_file_that_takes_no_trigger_is_passed_over(tmp_path: Path) -> None:
    folder, absent = tmp_path, tmp_path / "absent"
    assert open_stall_trigger((absent, folder)) is None
