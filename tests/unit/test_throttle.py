"""Pauses between steps: as long as asked for, and for no longer than asked for."""

from __future__ import annotations

import pytest
from neuronpipe.protocol.codec import from_map
from neuronpipe.protocol.errors import WireError
from neuronpipe.protocol.messages.request import Throttle as ThrottleMessage
from neuronpipe.services.coordinator.scheduling.scheduler import Throttle


def paused_s(throttle: Throttle, took_s: float, now: float) -> float:
    throttle.step_begins(now - took_s)
    throttle.step_ends(now)
    return max(0.0, throttle.resume_at - now)


@pytest.mark.parametrize(("share", "pause_s"), [(0.0, 0.0), (0.5, 0.1), (0.75, 0.3), (0.2, 0.025)])
def test_the_pause_is_the_share_of_the_time(share: float, pause_s: float) -> None:
    throttle = Throttle()
    throttle.set(share, until=100.0)
    assert paused_s(throttle, 0.1, now=10.0) == pytest.approx(pause_s)
    assert throttle.share(10.0) == share


def test_nobody_pauses_before_being_asked_or_after_the_time_asked_for() -> None:
    throttle = Throttle()
    assert paused_s(throttle, 1.0, now=5.0) == 0
    throttle.set(0.5, until=20.0)
    assert paused_s(throttle, 1.0, now=19.0) == 1.0
    assert paused_s(throttle, 1.0, now=20.0) == 0
    assert throttle.share(20.0) == 0


def test_asking_for_none_ends_the_pause_under_way() -> None:
    throttle = Throttle()
    throttle.set(0.5, until=100.0)
    assert paused_s(throttle, 4.0, now=10.0) == 4.0
    throttle.set(0.0, until=100.0)
    assert throttle.resume_at <= 10.0


@pytest.mark.parametrize(
    "fields", [{"share": 1.0}, {"share": -0.1}, {"share": 0.5, "for_s": 0.0}, {"share": float("nan")}]
)
def test_a_run_cannot_be_asked_to_pause_for_ever(fields: dict[str, float]) -> None:
    with pytest.raises(WireError):
        from_map(ThrottleMessage, fields)
