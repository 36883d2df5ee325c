"""What a monitor sees of a run: figures that were measured, not filled in."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.channel import Subscriber, open_context
from neuronpipe.protocol.errors import NotRunning
from neuronpipe.protocol.links import EVENTS
from neuronpipe.protocol.messages.event import StepEvent
from neuronpipe.protocol.messages.snapshot import Snapshot
from neuronpipe.protocol.run_directory import RunDirectory
from neuronpipe.services.monitor.observer import Observer

from tests.pipeline import Shell, eventually


def test_step_events_tell_of_tokens_misses_and_bytes_read(shell: Shell, converted: Callable[..., Package]) -> None:
    with (
        shell.up(converted("awkward", "q8").path, "--ffn-resident", "30%") as run,
        open_context() as context,
    ):
        monitor = Subscriber(context, EVENTS, RunDirectory(run.path).endpoint(EVENTS))
        events: list[StepEvent] = []

        def asked_and_heard() -> bool:
            said = run.ask([1, 2, 3, 4, 5], max_tokens=4)
            assert said["flash"]["bytes"] > 0
            until = time.monotonic() + 0.5  # beats of all the processes never leave a silence to wait for
            while time.monotonic() < until and (event := monitor.receive(200)) is not None:
                events.extend([event] if isinstance(event, StepEvent) else [])
            return bool(events)

        assert eventually(asked_and_heard)  # a subscription takes a moment to arrive
    decodes = [event for event in events if not event.prefill]
    assert decodes
    assert all(event.batch == event.steps == event.tokens == len(event.gaps_ms) for event in decodes)
    assert all(event.misses > 0 and event.read_bytes > 0 for event in decodes)
    assert all(event.looked_up >= event.misses and event.reads > 0 and event.rows > 0 for event in decodes)
    assert all(event.tbt_ms > 0 and event.ms > event.flash_ms for event in decodes)
    # Time between tokens is between their being told, and a step may be under way when the token before it is told.
    assert sum(event.tbt_ms for event in decodes) > sum(event.ms for event in decodes) / 2
    assert {event.batch for event in events if event.prefill} <= {5}


def test_an_observer_sees_processes_regions_traffic_and_the_last_steps(
    shell: Shell, converted: Callable[..., Package]
) -> None:
    package = converted("awkward", "q8")
    model = package.manifest.model
    with shell.up(package.path, "--ffn-resident", "30%") as run, Observer(run.path) as observer:

        def seen() -> Snapshot:
            run.ask([1, 2, 3, 4, 5], max_tokens=8)
            observer.poll()
            observer.snapshot()  # asks for the status that the next one shows
            time.sleep(0.3)
            observer.poll()
            return observer.snapshot()

        assert eventually(lambda: seen().hit_rate is not None)  # a subscription takes a moment to arrive
        shot = seen()
        status = run.status()
        pids = {f"{one.role}.{one.index}": one.pid for one in status.processes}
        assert {f"{one.role}.{one.index}": one.pid for one in shot.processes} == pids
        assert (shot.ready, shot.tokens, shot.steps) == (True, status.tokens, status.steps)
        assert all((one.memory_bytes or 0) > 1 << 20 and one.cpu is not None for one in shot.processes)
        assert 0 < (shot.hit_rate or 0) < 1
        assert min(shot.flash_bytes_per_token or 0, shot.dram_bytes_per_token or 0, shot.tbt_ms["p50"]) > 0
        assert [one.name for one in shot.regions] == ["fixed", "kv", "hot", "cold"]
        assert 0 < shot.slots_free < shot.slots
        assert len(shot.resident) == len(shot.fired) == model.layers
        assert 0 < sum(shot.fired) < model.layers
        assert {"coordinator.0", "loader.0", "decode.0"} <= {row.name for row in shot.strip}
        assert len(shot.strip_steps) == 3
        killed = run.pid("coordinator")
        os.kill(killed, signal.SIGKILL)
        assert eventually(
            lambda: observer.poll() is not None and observer.snapshot().processes[0].pid not in (0, killed)
        )
        assert eventually(lambda: seen().processes[0].state == "ready")  # it is asked like the one before
        run.down()
        with pytest.raises(NotRunning):
            observer.poll()
