"""The watchdog ends processes that do not answer, and none that is only slow: its core, told what is seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from neuronpipe.launch.supervisor.watchdog import (
    HANG_S,
    IDLE_LOOK_S,
    LOOK_S,
    MAX_GAP_S,
    STEP_HANG_S,
    STOPPED_S,
    Observation,
    Overdue,
    Watchdog,
    observe,
)
from neuronpipe.services.runtime.pulse import Pulse, event_loop, shared_words, unwatched

from tests.pipeline import eventually

PID = 4711


def observation(state: str = "S", cpu_s: float = 0.0, word: int = 1, **more: float) -> Observation:
    return Observation(state, cpu_s, works=word % 2 == 1, progress=(word,), **more)


def first_overdue_s(observations: list[Observation], every_s: float = LOOK_S) -> tuple[float, Overdue] | None:
    """When the process of these observations is overdue first, seconds after the first one; None if never."""
    watchdog = Watchdog()
    for number, seen in enumerate(observations):
        if overdue := watchdog.look({PID: seen}, 100 + every_s * number):
            return every_s * number, overdue[0]
    return None


def test_a_stopped_process_is_killed_after_its_deadline_and_one_that_goes_on_is_not() -> None:
    found = first_overdue_s([observation("S", word=2)] + 20 * [observation("T", word=2)])
    assert found is not None
    assert found[0] == STOPPED_S + LOOK_S
    assert not found[1].aborts
    short = int(STOPPED_S) * [observation("T")]
    assert first_overdue_s(5 * [*short, observation("S", word=2)]) is None


def test_a_process_that_sleeps_at_its_work_is_aborted_and_then_killed() -> None:
    watchdog = Watchdog()
    looks = [watchdog.look({PID: observation("S")}, float(second)) for second in range(int(HANG_S) + 2)]
    assert looks[: int(HANG_S)] == [[]] * int(HANG_S)
    assert [[one.aborts for one in overdue] for overdue in looks[int(HANG_S) :]] == [[True], [False]]


def test_a_process_that_spins_is_overdue_by_its_own_clock_alone() -> None:
    """On a loaded machine it gets a tenth of a core: that takes ten times as long."""
    alone = first_overdue_s([observation("R", cpu_s=float(n)) for n in range(200)])
    loaded = first_overdue_s([observation("R", cpu_s=n / 10) for n in range(200)])
    assert alone is not None
    assert loaded is not None
    assert 9 * alone[0] < loaded[0] < 11 * alone[0]
    assert first_overdue_s(200 * [observation("D")]) is None, "who waits for the disk does not hang"


def test_a_machine_that_was_suspended_is_no_reason_to_kill() -> None:
    """Hours pass between two looks: no more counts than between two looks that were only late."""
    assert MAX_GAP_S < STOPPED_S
    assert first_overdue_s([observation("T"), observation("T")], every_s=36000.0) is None
    assert first_overdue_s([observation("S"), observation("S")], every_s=36000.0) is None


def test_a_process_that_waits_or_gets_on_or_is_debugged_is_never_overdue() -> None:
    assert first_overdue_s(200 * [observation("S", word=2)]) is None
    assert first_overdue_s([observation("S", word=2 * n + 1) for n in range(200)]) is None
    assert first_overdue_s(200 * [observation("t")]) is None


def test_a_worker_has_longer_for_a_step_than_others_for_a_turn() -> None:
    found = first_overdue_s(200 * [observation("S", patience_s=STEP_HANG_S)])
    assert found is not None
    assert found[0] == STEP_HANG_S


def test_it_looks_rarely_while_nobody_works_and_sees_again_what_was_replaced() -> None:
    watchdog = Watchdog()
    watchdog.look({PID: observation(word=2)}, 50.0)
    assert watchdog.due_at == 50 + IDLE_LOOK_S
    watchdog.look({PID: observation(word=3)}, 51.0)
    assert watchdog.due_at == 51 + LOOK_S
    for second in range(52, 60):
        watchdog.look({PID + second % 2: observation()}, float(second))  # the pid of a new process has no history
    assert watchdog.look({PID: observation()}, 60.0) == []


def test_what_is_seen_of_a_process_is_its_state_and_its_processor_time() -> None:
    with subprocess.Popen((sys.executable, "-c", "input()"), stdin=subprocess.PIPE) as child:
        assert eventually(lambda: observe(child.pid, 1).state == "S")
        assert observe(child.pid, 1).cpu_s > 0
        os.kill(child.pid, signal.SIGSTOP)
        assert eventually(lambda: observe(child.pid, 1).state == "T")
        child.kill()
    assert observe(child.pid, 1) == Observation("", 0.0, works=False, progress=())


def test_a_pulse_is_odd_at_work_even_while_waiting_and_never_the_same_twice() -> None:
    words = shared_words(2)
    pulse, seen = Pulse(words, 1), []
    for _ in range(3):
        pulse.works()
        seen.append(words[1])
        pulse.waits()
        seen.append(words[1])
    pulse.waits()
    assert seen == [1, 2, 3, 4, 5, 6]
    assert list(words) == [0, 6]
    unwatched().works()


def test_an_event_loop_shows_when_it_works() -> None:
    words = shared_words(1)
    loop = event_loop(Pulse(words, 0))
    seen: list[int] = []
    try:
        for _ in range(2):
            loop.call_soon(lambda: seen.append(words[0]))
            loop.call_soon(loop.stop)
            loop.run_forever()
    finally:
        loop.close()
    assert [word % 2 for word in seen] == [1, 1]
    assert seen[0] != seen[1]
