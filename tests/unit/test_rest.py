"""Pauses between steps: as long as asked for, and for no longer than asked for."""

from __future__ import annotations

import pytest
from neuronpipe.protocol.codec import from_map
from neuronpipe.protocol.errors import WireError
from neuronpipe.protocol.messages.request import Ease
from neuronpipe.services.coordinator.rest import Rest


def paused_s(rest: Rest, took_s: float, now: float) -> float:
    rest.step_begins(now - took_s)
    rest.step_ends(now)
    return max(0.0, rest.resume_at - now)


@pytest.mark.parametrize(("share", "pause_s"), [(0.0, 0.0), (0.5, 0.1), (0.75, 0.3), (0.2, 0.025)])
def test_the_pause_is_the_share_of_the_time(share: float, pause_s: float) -> None:
    rest = Rest()
    rest.ask(share, until=100.0)
    assert paused_s(rest, 0.1, now=10.0) == pytest.approx(pause_s)
    assert rest.share(10.0) == share


def test_nobody_rests_before_being_asked_or_after_the_time_asked_for() -> None:
    rest = Rest()
    assert paused_s(rest, 1.0, now=5.0) == 0
    rest.ask(0.5, until=20.0)
    assert paused_s(rest, 1.0, now=19.0) == 1.0
    assert paused_s(rest, 1.0, now=20.0) == 0
    assert rest.share(20.0) == 0


def test_asking_for_none_ends_the_pause_under_way() -> None:
    rest = Rest()
    rest.ask(0.5, until=100.0)
    assert paused_s(rest, 4.0, now=10.0) == 4.0
    rest.ask(0.0, until=100.0)
    assert rest.resume_at <= 10.0


@pytest.mark.parametrize(
    "fields", [{"share": 1.0}, {"share": -0.1}, {"share": 0.5, "for_s": 0.0}, {"share": float("nan")}]
)
def test_a_run_cannot_be_asked_to_rest_for_ever(fields: dict[str, float]) -> None:
    with pytest.raises(WireError):
        from_map(Ease, fields)
