"""Requests that wait for runs which come and go; the command that starts and ends runs is played."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.runs import hosted_packages as hosted
from neuronpipe.services.gateway.runs.hosted_packages import HostedModels
from neuronpipe.services.gateway.runs.run_pool import RunPool
from neuronpipe.services.gateway.runs.served_models import Run, ServedModel

from tests.pipeline import SLOWER

PATIENCE_S = 10 * SLOWER


class PlayedRun:
    """A run that is ready at once; it is its own coordinator."""

    def __init__(self) -> None:
        self.ended: tuple[str, str] | None = None
        self.coordinator = self

    async def fresh_status(self, within_s: float) -> Any:
        return SimpleNamespace(ready=True)

    def end(self, code: str, reason: str) -> None:
        self.ended = code, reason

    async def close(self) -> None:
        pass


class Command:
    """The other end of the link."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def heard(self) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            said: dict[str, Any] = json.loads(await self._reader.readline())
        return said

    def say(self, **message: Any) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def leave(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@pytest.fixture(autouse=True)
def _played_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "Run", SimpleNamespace(of=lambda *_: cast(Run, PlayedRun())))


@asynccontextmanager
async def serving(keep_alive_s: float = math.inf, **takes_bytes: int) -> AsyncIterator[tuple[HostedModels, Command]]:
    ours, theirs = socket.socketpair()
    models = [
        cast(ServedModel, SimpleNamespace(name=name, run=None, facts=dict, chat=SimpleNamespace()))
        for name in takes_bytes
    ]
    over = asyncio.Event()
    made = HostedModels(models, RunPool(takes_bytes, 100, keep_alive_s), 1 << 20, over.set)
    await made.attach(ours)
    command = Command(*await asyncio.open_connection(sock=theirs))
    assert await command.heard() == {"serving": True}
    try:
        yield made, command
    finally:
        await command.leave()
        await made.close()


def played(scene: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(scene())


async def use(models: HostedModels, name: str, until: asyncio.Event | None = None) -> None:
    """A request for a model, answered at once or when it may."""
    async with models.run_acquirer(models.find(name))():
        if until is not None:
            await until.wait()


def begun(models: HostedModels, name: str, until: asyncio.Event | None = None) -> asyncio.Task[None]:
    return asyncio.ensure_future(use(models, name, until))


def test_a_request_waits_for_its_run_and_a_second_one_needs_no_other() -> None:
    async def scene() -> None:
        async with serving(a=10) as (models, command):
            requests = [begun(models, "a"), begun(models, "a")]
            assert await command.heard() == {"start": "a"}
            assert (await models.health())["models"] == {"a": "starting"}
            command.say(started="a", directory="/run")
            await asyncio.gather(*requests)
            await use(models, "a")
            assert (await models.health())["models"] == {"a": "ready"}

    played(scene)


def test_a_client_that_leaves_while_a_run_begins_holds_nothing() -> None:
    async def scene() -> None:
        async with serving(a=100, b=100) as (models, command):
            request = begun(models, "a")
            assert await command.heard() == {"start": "a"}
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            command.say(started="a", directory="/run")
            other = begun(models, "b")
            assert await command.heard() == {"end": "a"}  # which nobody holds
            command.say(ended="a", why="it was ended", again_in_s=0)
            assert await command.heard() == {"start": "b"}
            command.say(started="b", directory="/run")
            await other

    played(scene)


def test_a_client_that_leaves_as_its_run_becomes_live_holds_nothing() -> None:
    async def scene() -> None:
        async with serving(a=100, b=100) as (models, command):
            request = begun(models, "a")
            assert await command.heard() == {"start": "a"}
            models._wake = leaving(models._wake, request)  # type: ignore[method-assign]
            command.say(started="a", directory="/run")
            await asyncio.gather(request, return_exceptions=True)
            assert request.cancelled()
            begun(models, "b")
            assert await command.heard() == {"end": "a"}

    def leaving(wake: Callable[..., None], request: asyncio.Task[None]) -> Callable[..., None]:
        def woken(*arguments: Any) -> None:
            wake(*arguments)
            request.cancel()

        return woken

    played(scene)


def test_a_run_that_cannot_begin_is_told_to_all_who_wait() -> None:
    async def scene() -> None:
        async with serving(a=10) as (models, command):
            requests = [begun(models, "a"), begun(models, "a")]
            assert await command.heard() == {"start": "a"}
            command.say(ended="a", why="the package is damaged", again_in_s=4.0)
            for outcome in await asyncio.gather(*requests, return_exceptions=True):
                assert isinstance(outcome, ApiError)
                assert (outcome.status, outcome.code, outcome.headers) == (503, "restarting", (("retry-after", "4"),))
                assert "the package is damaged" in outcome.message
            begun(models, "a")
            assert await command.heard() == {"start": "a"}

    played(scene)


def test_whoever_comes_for_a_run_that_leaves_waits_until_it_is_back() -> None:
    async def scene() -> None:
        async with serving(a=100, b=100) as (models, command):
            done = asyncio.Event()
            long = begun(models, "a", done)
            assert await command.heard() == {"start": "a"}
            command.say(started="a", directory="/run")
            other = begun(models, "b")
            await asyncio.sleep(0.05)
            late = begun(models, "a")
            await asyncio.sleep(0.05)
            assert not late.done()
            done.set()
            for said, name in (("end", "a"), ("start", "b"), ("end", "b"), ("start", "a")):
                assert await command.heard() == {said: name}
                if said == "end":
                    command.say(ended=name, why="it was ended", again_in_s=0)
                else:
                    command.say(started=name, directory="/run")
            await asyncio.gather(long, other, late)

    played(scene)


def test_a_model_is_unloaded_unless_another_request_uses_it() -> None:
    async def scene() -> None:
        async with serving(a=10) as (models, command):
            used = begun(models, "a")
            assert await command.heard() == {"start": "a"}
            command.say(started="a", directory="/run")
            await used
            async with models.run_acquirer(models.find("a"))():
                with pytest.raises(ApiError) as caught:
                    models.unload(models.find("a"))
                assert (caught.value.status, caught.value.code) == (409, "in_use")
            models.unload(models.find("a"))
            assert await command.heard() == {"end": "a"}

    played(scene)


def test_a_run_that_nobody_uses_is_ended_in_time() -> None:
    async def scene() -> None:
        async with serving(keep_alive_s=0.05, a=10) as (models, command):
            request = begun(models, "a")
            assert await command.heard() == {"start": "a"}
            command.say(started="a", directory="/run")
            await request
            assert await command.heard() == {"end": "a"}

    played(scene)


def test_the_end_of_the_server_is_told_to_who_waits_and_to_who_comes() -> None:
    async def scene() -> None:
        async with serving(a=10) as (models, command):
            request = begun(models, "a")
            assert await command.heard() == {"start": "a"}
            models.end("draining", "the server is ending")
            for waiting in (request, begun(models, "a")):
                with pytest.raises(ApiError, match="the server is ending"):
                    await waiting

    played(scene)
