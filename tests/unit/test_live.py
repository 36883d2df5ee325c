"""`/live`: what a viewer is told when there is nothing to see."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from neuronpipe.protocol.errors import NotRunning
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.runs import live_view as live
from neuronpipe.services.gateway.runs.live_view import LiveFeed


def refused(error: Exception, monkeypatch: pytest.MonkeyPatch) -> ApiError:
    """What a viewer of a run is told whose observer raises this."""

    def observer(path: Path) -> None:
        raise error

    async def scene() -> ApiError:
        one = LiveFeed(Path("/run"))
        view = one.view()
        await one.enter(view)
        with pytest.raises(ApiError) as first:
            await one.next()
        with pytest.raises(ApiError) as second:
            await one.next()
        assert str(first.value) == str(second.value)
        return first.value

    monkeypatch.setattr(live, "Observer", observer)
    return asyncio.run(scene())


def test_a_run_that_has_ended_is_told_from_a_mistake_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = refused(NotRunning("/run: no run here"), monkeypatch)
    assert (ended.status, str(ended)) == (503, "/run: no run here")
    assert capsys.readouterr().err == ""
    mistake = refused(ValueError("odd"), monkeypatch)
    assert (mistake.status, "ValueError" in str(mistake)) == (500, True)
    assert "odd" in capsys.readouterr().err
