"""Who keeps a run waiting, and when that is said and done something about; told what is seen of its processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from neuronpipe.launch.supervisor.overdue import OVERDUE_TIMES, OVERDUE_WITHIN_S, Overdue
from neuronpipe.services.coordinator.scheduling.events import ProcessKey
from neuronpipe.services.coordinator.scheduling.overdue_processes import (
    GIVE_UP_S,
    LOOK_S,
    REPLACE_S,
    SAY_S,
    Delays,
    Observation,
    reasons_to_wait,
    with_dropped,
    write_reasons,
)
from neuronpipe.services.runtime.implementations import Implementation, Implementations
from neuronpipe.services.runtime.run_memory import RunMemory

LOADER, CACHE, DECODE, PREFILL = ("loader", 0), ("cache", 0), ("decode", 0), ("prefill", 0)
FOREIGN = Implementation("argv:./theirs", "/")
Processes = dict[ProcessKey, Observation]


def processes(**more: Observation) -> Processes:
    """A run that is ready and does nothing, but for these."""
    names = {"loader": LOADER, "cache": CACHE, "decode": DECODE, "prefill": PREFILL}
    return {key: more.get(name, Observation("ready", pid=n + 1)) for n, (name, key) in enumerate(names.items())}


def standing(seen: Callable[[float], Processes], seconds: float, reads: Callable[[float], int] = lambda s: 0) -> Delays:
    """What is known after so many seconds."""
    delays = Delays()
    for look in range(int(seconds / LOOK_S) + 1):
        delays.look(seen(look * LOOK_S), reads(look * LOOK_S), 100 + look * LOOK_S)
    return delays


def test_a_loader_that_does_not_greet_is_named_after_five_seconds_and_given_up_after_thirty() -> None:
    """Decode and prefill workers wait for it before they greet: only the loader is meant."""
    absent = Observation("absent", pid=9)
    seen = processes(loader=absent, decode=absent, prefill=absent, cache=Observation("greeted", pid=2))
    assert standing(lambda s: seen, SAY_S - LOOK_S).delay.notes() == {}
    assert standing(lambda s: seen, 6).delay.notes() == {LOADER: "has not sent Hello for 6 s"}
    assert standing(lambda s: seen, GIVE_UP_S - LOOK_S).delay.overdue() == {}
    assert standing(lambda s: seen, GIVE_UP_S).delay.overdue() == {LOADER: "has not sent Hello for 30 s"}


def test_a_cache_that_grants_no_slots_is_named_and_not_those_who_wait_for_it() -> None:
    hungry = {"trigger_waiting": 40.0, "trigger_free": 0.0, "in_flight": 0.0}
    seen = processes(loader=Observation("ready", pid=1, counters=hungry), prefill=Observation("ready", "step 1", pid=4))
    reason = "has granted loader.0 no slots for the trigger parts it is to read"
    assert standing(lambda s: seen, 6).delay.notes() == {CACHE: f"{reason} for 6 s"}
    assert standing(lambda s: seen, REPLACE_S).delay.overdue() == {CACHE: f"{reason} for 10 s"}


def test_whoever_owes_an_answer_is_named() -> None:
    assert reasons_to_wait(processes()) == {}
    assert reasons_to_wait(processes(decode=Observation("ready", "step 7"))) == {DECODE: "has not answered step 7"}
    assert reasons_to_wait(processes(cache=Observation("ready", "Reserve"))) == {CACHE: "has not answered Reserve"}
    full = Observation("ready", counters={"value_waiting": 3.0, "value_free": 9.0})
    owing = processes(loader=full, decode=Observation("ready", "step 7"))
    assert reasons_to_wait(owing) == {LOADER: "has not read the value parts that the step needs"}
    unready = processes(cache=Observation("greeted"))
    assert reasons_to_wait(unready) == {CACHE: "has sent Hello and is not ready"}


def test_a_run_that_works_is_not_late_however_long_it_takes() -> None:
    """A large model is loaded, a long prompt computed, a slow flash read: somebody does something."""

    def loads(s: float) -> Processes:
        return processes(loader=Observation("absent", pid=1, cpu_s=s / 10), cache=Observation("greeted", pid=2))

    def computes(s: float) -> Processes:
        return processes(prefill=Observation("ready", "step 1", pid=4, cpu_s=s))

    def reads_flash(s: float) -> Processes:
        busy = {"trigger_waiting": 5.0, "in_flight": 2.0}
        return processes(
            loader=Observation("ready", pid=1, counters=busy), prefill=Observation("ready", "step 1", pid=4)
        )

    def steps(s: float) -> Processes:
        return processes(decode=Observation("ready", f"step {s}", pid=3))

    for seen in (loads, computes, reads_flash, steps):
        assert standing(seen, 100).delay.notes() == {}, seen
    stands = processes(prefill=Observation("ready", "step 1", pid=4))
    assert standing(lambda s: stands, 100, reads=lambda s: int(10 * s)).delay.notes() == {}


def test_a_suspended_machine_makes_nobody_late() -> None:
    delays, seen = Delays(), processes(decode=Observation("ready", "step 7", pid=3))
    for look in range(4):
        delays.look(seen, 0, 36000.0 * look)
    assert delays.delay.notes() == {}


def test_signs_of_life_alone_are_no_work() -> None:
    seen = standing(lambda s: processes(cache=Observation("greeted", pid=2, cpu_s=0.002 * s)), 6).delay
    assert seen.notes() == {CACHE: "has sent Hello and is not ready for 6 s"}


class PlayedMemory:
    """The two fields of the board."""

    def __init__(self) -> None:
        self.fields = {name: memoryview(bytearray(16)).cast("I") for name in ("overdue", "ready")}

    def view(self, segment: str, field: str) -> memoryview:
        return self.fields[field]


KEYS: list[ProcessKey] = [LOADER, CACHE, DECODE, PREFILL]
OURS = {key: Implementations().of(*key) for key in KEYS}
INCARNATIONS = dict.fromkeys(KEYS, 2)


def supervised(folder: Path) -> tuple[Overdue, PlayedMemory]:
    memory = PlayedMemory()
    return Overdue({key: line for line, key in enumerate(KEYS)}, cast(RunMemory, memory), folder), memory


def test_the_supervisor_suspects_what_is_not_ours_and_reads_the_reasons(tmp_path: Path) -> None:
    overdue, memory = supervised(tmp_path)
    write_reasons(tmp_path, {LOADER: "has not sent Hello for 30 s"}, {LOADER: "4 frames, expected 2"})
    reason = "has not sent Hello for 30 s; its last message was dropped: 4 frames, expected 2"
    words = memory.fields["overdue"]
    assert overdue.take(INCARNATIONS, OURS, ()) == {}
    words[0] = words[1] = 3
    assert overdue.take(INCARNATIONS, OURS, ()).keys() == {LOADER, CACHE}
    assert overdue.take(INCARNATIONS, OURS, ()) == {}, "it is taken once"
    words[0] = words[1] = 3
    assert overdue.take(INCARNATIONS, OURS | {LOADER: FOREIGN}, ()) == {LOADER: reason}
    words[0] = 2
    assert overdue.take(INCARNATIONS, OURS, ()) == {}, "the word is of an earlier incarnation"
    words[0] = 3
    assert overdue.take(INCARNATIONS, OURS, {LOADER: "starting"}) == {}, "it is being replaced"
    assert with_dropped("late", None) == "late"


def test_whoever_keeps_the_run_waiting_again_and_again_or_was_never_ready_is_given_up(tmp_path: Path) -> None:
    overdue, memory = supervised(tmp_path)
    assert overdue.is_hopeless(LOADER, 0.0)
    memory.fields["ready"][:] = memoryview(bytes(16)).cast("I")
    for line in range(4):
        memory.fields["ready"][line] = 1
    assert [overdue.is_hopeless(CACHE, float(second)) for second in range(OVERDUE_TIMES)] == [False, False, True]
    rarely = [overdue.is_hopeless(DECODE, second * OVERDUE_WITHIN_S) for second in range(10)]
    assert rarely == [False] * 10


def test_a_refused_request_was_the_cause_and_not_our_process(tmp_path: Path) -> None:
    overdue, memory = supervised(tmp_path)
    for line in range(4):
        memory.fields["ready"][line] = 1
    for key in (DECODE, PREFILL):
        assert [overdue.is_hopeless(key, 1.0), overdue.is_hopeless(key, 2.0)] == [False, False]
    overdue.pardon(0, OURS)
    overdue.pardon(1, OURS | {PREFILL: FOREIGN})
    assert not overdue.is_hopeless(DECODE, 3.0)
    assert overdue.is_hopeless(PREFILL, 3.0)
