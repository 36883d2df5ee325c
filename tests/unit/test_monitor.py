"""What a monitor makes of what it sees: rates, shares, regions; pure, with times and spans made up here."""

from __future__ import annotations

import os
from array import array
from typing import Any

import numpy as np
import pytest
from neuronpipe.protocol import layouts
from neuronpipe.protocol.memory.layout import LINE_WORDS
from neuronpipe.protocol.memory.residency import LOADING, PINNED, PRESENT
from neuronpipe.protocol.memory.segments import Segment
from neuronpipe.protocol.messages.client import ProcessStatus, Status
from neuronpipe.protocol.messages.event import StepEvent
from neuronpipe.protocol.messages.lifecycle import Beat
from neuronpipe.protocol.messages.snapshot import Snapshot
from neuronpipe.protocol.run_directory import RunFile, RunSummary, SegmentHandle, started
from neuronpipe.services.monitor.process_usage import Processes
from neuronpipe.services.monitor.resident_regions import Regions, Residency
from neuronpipe.services.monitor.snapshots import MAX_EVENTS, Monitor
from neuronpipe.services.monitor.span_activity import CELLS, Activity
from neuronpipe.services.monitor.span_groups import NUMBER
from neuronpipe.services.monitor.span_rings import SPANS

SUMMARY = RunSummary(
    model="m",
    mode="exact",
    quantization="q8",
    processes="coordinator.0 loader.0 decode.0",
    layers=2,
    neurons=10,
    clusters=4,
    participants=2,
    trigger_slots=5,
    value_slots=3,
    trigger_slot_bytes=100,
    value_slot_bytes=200,
    fixed_bytes=1000,
    kv_bytes=500,
    step_bytes=1000,
    row_bytes=10,
    position_bytes=4,
    context_tokens=64,
)
STRIP: Any = (0.0, (), ())


def monitor() -> Monitor:
    return Monitor("r", "p", SUMMARY)


def shot(watched: Monitor, now_s: float) -> Snapshot:
    return watched.snapshot(now_s, 0.0, (), (), STRIP)


def step(number: int, **fields: Any) -> StepEvent:
    return StepEvent(**{"step": number, "batch": 1, "ms": 9.0, "misses": 0, "read_bytes": 0, "tokens": 1, **fields})


def steps(number: int, *gaps_ms: float, **fields: Any) -> StepEvent:
    count = len(gaps_ms)
    return step(number, batch=count, tokens=count, tbt_ms=sum(gaps_ms), steps=count, gaps_ms=gaps_ms, **fields)


def spans(*rows: tuple[int, int, str, int, int, int]) -> Any:
    return np.array([(a, b, NUMBER[kind], layer, value, step) for a, b, kind, layer, value, step in rows], SPANS)


def in_us(spans: Any) -> Any:
    spans["start_ns"] *= 1000
    spans["end_ns"] *= 1000
    return spans


def test_speed_is_that_of_the_steps_and_does_not_count_the_rest_between_texts() -> None:
    watched = monitor()
    watched.take_event(steps(3, 10.0, 10.0, 10.0), 1.0)
    watched.take_event(steps(9, *6 * [10.0]), 1.0)
    watched.take_event(step(10, prefill=True, batch=64, ms=32.0, tokens=1), 1.0)
    seen = shot(watched, 3.0)
    assert seen.tokens_per_s == 100
    assert seen.prompt_tokens_per_s == 2000
    assert seen.tbt_ms == {"p50": 10.0, "p90": 10.0, "p99": 10.0}


def test_one_slow_token_shows_among_the_fast_ones_of_its_event() -> None:
    watched = monitor()
    watched.take_event(steps(25, *24 * [1.0], 12.0), 1.0)
    assert shot(watched, 1.0).tbt_ms == {"p50": 1.0, "p90": 1.0, "p99": 12.0}


def test_a_run_at_rest_has_no_speed_and_keeps_the_figures_of_its_last_text() -> None:
    watched = monitor()
    watched.take_event(steps(1, 10.0, looked_up=10, misses=1, flash_ms=3.0, read_bytes=70), 1.0)
    seen = shot(watched, 60.0)
    assert (seen.tokens_per_s, seen.dram_bytes_per_s) == (0, 0)
    assert (seen.hit_rate, seen.flash_bytes_per_token) == (0.9, 70)
    assert seen.flash_wait == pytest.approx(1 / 3, abs=1e-3)


def test_memory_traffic_counts_a_row_once_in_a_step() -> None:
    watched = monitor()
    watched.take_event(step(1, rows=7, positions=5), 1.0)
    assert shot(watched, 1.0).dram_bytes_per_token == 1000 + 70 + 20
    watched = monitor()
    watched.take_event(step(1, rows=1000, positions=0), 1.0)  # as several tokens of a step count them
    assert shot(watched, 1.0).dram_bytes_per_token == 1000 + 3 * 2 * 10 * 10
    watched = monitor()
    watched.take_event(steps(2, 1.0, 1.0, rows=1000, positions=0), 1.0)
    assert shot(watched, 1.0).dram_bytes_per_token == 1000 + 3 * 2 * 10 * 10


def test_flash_rates_survive_a_loader_that_counts_from_zero_again() -> None:
    watched = monitor()
    for now_s, size, reads in ((0.0, 0, 0), (1.0, 1000, 10), (2.0, 50, 1), (3.0, 150, 2)):
        watched.take_flash(size, reads, now_s)
    seen = shot(watched, 3.0)
    assert (seen.flash_bytes_per_s, seen.flash_reads_per_s) == (100, 1)


def test_what_is_kept_of_events_is_bounded() -> None:
    watched = monitor()
    for number in range(2 * MAX_EVENTS):
        watched.take_event(step(number), 1.0)
    assert len(watched._events) == MAX_EVENTS


def test_a_coordinator_that_does_not_answer_is_silent() -> None:
    watched = monitor()
    process = ProcessStatus(role="decode", index=0, pid=1, state="ready")
    status = Status(
        run="r",
        ready=True,
        plan="p",
        mode="exact",
        processes=(process,),
        memory_bytes=1,
        memory_peak_bytes=2,
        memory_limit_bytes=3,
        sequences_active=0,
        max_sequences=4,
        sequences_waiting=0,
        steps=5,
        tokens=6,
        uptime_s=7.0,
    )
    watched.take_status(status, 10.0)
    assert shot(watched, 10.5).silent_s == 0
    seen = shot(watched, 14.0)
    assert (seen.silent_s, seen.ready, seen.tokens) == (4.0, True, 6)


def test_regions_and_the_queue() -> None:
    watched = monitor()
    there = Residency(slots=(5, 3), pinned=(2, 1), cold=(1, 1), loading=(1, 0), by_layer=(0.5, 0.25), queued_requests=3)
    watched.take_residency(there, {"fixed": 1000, "kv": 200}, 0)
    counters = {"in_flight": 4, "trigger_waiting": 2, "value_waiting": 1}
    watched.take_event(Beat(role="loader", index=0, state="ready", counters=counters), 1.0)
    seen = shot(watched, 1.0)
    assert {one.name: (one.used_bytes, one.total_bytes) for one in seen.regions} == {
        "fixed": (1000, 1000),
        "kv": (200, 500),
        "hot": (400, 400),
        "cold": (300, 700),
    }
    assert (seen.slots, seen.slots_free) == (8, 2)
    assert (seen.flash_in_flight, seen.flash_waiting) == (4, 6)


def test_a_region_shows_what_is_in_memory_beside_what_is_reserved() -> None:
    watched = monitor()
    there = Residency(slots=(6, 5), pinned=(0, 0), cold=(6, 4), loading=(0, 0), by_layer=(1.0, 1.0), queued_requests=0)
    watched.take_residency(there, {"fixed": 4096, "kv": 0}, 0)  # segments end with a page
    watched.take_memory({"current_bytes": 3000, "peak_bytes": 3500, "limit_bytes": 4000})
    seen = shot(watched, 1.0)
    sizes = {one.name: (one.used_bytes, one.total_bytes) for one in seen.regions}
    assert (sizes["fixed"], sizes["kv"], sizes["cold"]) == ((1000, 1000), (0, 500), (1400, 1600))
    assert sum(one.used_bytes for one in seen.regions) <= seen.memory_bytes == 3000
    assert (seen.memory_peak_bytes, seen.memory_limit_bytes) == (3500, 4000)


def test_words_are_counted_by_state_and_layer() -> None:
    layout = layouts.residency(clusters=8, ffns=1, participants=2)
    with Segment.create(layout) as segment, segment.map(writable=True) as mapping:
        triggers, values = mapping.view("trigger_entries"), mapping.view("value_entries")
        triggers[0], triggers[1], triggers[4] = PRESENT | PINNED | 1, PRESENT | 2, LOADING | 3
        values[7] = PRESENT
        mapping.view("slots")[:2] = array("I", [5, 3])
        mapping.view("request_tails")[LINE_WORDS] = 9
        mapping.view("request_heads")[LINE_WORDS] = 4
        handle = SegmentHandle(fd=segment.fd, total_bytes=layout.total_bytes, layout=layout.text)
        run_file = RunFile(
            protocol="1.0",
            run="r",
            supervisor_pid=os.getpid(),
            supervisor_started=started(os.getpid()),
            endpoints={},
            segments={"residency": handle},
            private={},
            plan="p",
        )
        with Regions(run_file, SUMMARY) as regions:
            counted = regions.count()
        triggers.release()
        values.release()
    assert counted == Residency((5, 3), (1, 0), (1, 1), (1, 0), (0.25, 0.125), 5)


def seen_activity() -> Activity:
    """Two decode steps of a worker that waits inside its neurons, and a third one under way; times in us."""
    activity = Activity(SUMMARY.processes.split(), 100)
    coordinator = spans(
        (0, 5, "send", 0, 1, 1),
        (5, 100, "await", 0, 1, 1),
        (100, 110, "send", 0, 1, 2),
        (110, 200, "await", 0, 1, 2),
        (200, 210, "send", 0, 1, 3),
    )
    worker = spans(
        (10, 30, "attend", 0, 0, 1),
        (30, 100, "neurons", 1, 4, 1),
        (110, 130, "attend", 0, 0, 2),
        (140, 180, "flash", 1, 1, 2),
        (130, 200, "neurons", 1, 6, 2),
        (210, 220, "neurons", 0, 9, 3),
    )
    loader = spans((145, 175, "read", 0, 64, 0))
    activity.add([(in_us(one), 0) for one in (coordinator, loader, worker)])
    return activity


def test_the_strip_shows_the_last_whole_steps_and_waiting_inside_work() -> None:
    window, steps, rows = seen_activity().strip()
    assert (window.from_ns, window.to_ns, steps) == (100_000, 200_000, (2,))  # the first one's beginning is lost
    cells = {row.name: row.cells for row in rows}
    assert {name: len(row) for name, row in cells.items()} == dict.fromkeys(
        ("coordinator.0", "loader.0", "decode.0"), CELLS
    )
    at = {name: {us: row[(us - 100) * CELLS // 100] for us in (105, 115, 135, 160, 190)} for name, row in cells.items()}
    assert at["decode.0"] == {105: ".", 115: "a", 135: "n", 160: "f", 190: "n"}
    assert at["loader.0"][160] == "r"
    assert at["loader.0"][190] == "."
    assert at["coordinator.0"][105] == "c"


def test_neurons_that_fired_are_counted_over_whole_steps() -> None:
    assert seen_activity().fired(2, 10) == (0.0, 0.6)


def test_what_a_process_does_is_shares_of_the_last_second() -> None:
    activity = Activity(["decode.0"], 100)
    ms = 1_000_000
    activity.add([(spans((0, 1, "step", 0, 0, 1), (3000 * ms, 3250 * ms, "attend", 0, 0, 2)), 0)])
    assert activity.doing(3500 * ms) == [{"attention": 0.25}]
    assert activity.doing(9000 * ms) == [{}]


def test_spans_behind_a_gap_take_the_place_of_the_older_ones() -> None:
    activity = Activity(["decode.0"], 3)
    activity.add([(spans((0, 1, "attend", 0, 0, 1), (1, 2, "attend", 0, 0, 1)), 0)])
    activity.add([(spans((9, 10, "attend", 0, 0, 5)), 7)])
    assert activity._spans[0]["step"].tolist() == [5]
    activity.add([(spans(*((n, n + 1, "attend", 0, 0, n) for n in range(10, 20))), 0)])
    assert activity._spans[0]["step"].tolist() == [17, 18, 19]


def test_processor_time_and_memory_of_this_very_process() -> None:
    seen = Processes()
    own = os.getpid()
    seen.sample([own, 0], 100.0)
    assert seen.cpu(own) is None
    before = sum(os.times()[:2])
    while sum(os.times()[:2]) - before < 0.1:
        pass
    seen.sample([own], 101.0)
    assert 0.08 <= (seen.cpu(own) or 0) <= 1.0
    assert (seen.memory_bytes(own) or 0) > 1 << 20
    seen.sample([], 102.0)
    assert seen.cpu(own) is None
    assert seen.memory_bytes(own) is None
