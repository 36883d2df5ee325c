"""What a monitor sees of a run: figures that were measured, not filled in."""

from __future__ import annotations

import time
from collections.abc import Callable

from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.channel import Subscriber, open_context
from neuronpipe.protocol.links import EVENTS
from neuronpipe.protocol.messages.event import StepEvent
from neuronpipe.protocol.run_directory import RunDirectory

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
    assert all(event.batch == 1 and event.ms > 0 for event in decodes)
    assert all(event.misses > 0 and event.read_bytes > 0 for event in decodes)
    assert {event.batch for event in events if event.prefill} <= {5}
