"""The gateway's end of the control link, with a coordinator played by the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from neuronpipe.protocol.channel import Listener, open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import Lost
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.messages.client import Accepted, Finished, ProcessStatus, Refused, Status, Token
from neuronpipe.protocol.messages.lifecycle import State
from neuronpipe.protocol.messages.request import AskStatus, Cancel, Generate
from neuronpipe.services.gateway.client.mailbox import Mailbox
from neuronpipe.services.gateway.client.run_client import (
    MAX_CLIENT_REQUESTS,
    MAX_SENT,
    CoordinatorClient,
    new_request_id,
)
from neuronpipe.services.gateway.http.api_errors import ApiError

from tests.pipeline import SLOWER

PATIENCE_S = 10 * SLOWER


def status(state: State = "ready") -> Status:
    coordinator = ProcessStatus(role="coordinator", index=0, pid=1, state=state)
    return Status(
        run="run",
        ready=state == "ready",
        plan="plan",
        mode="exact",
        processes=(coordinator,),
        memory_bytes=0,
        memory_peak_bytes=0,
        memory_limit_bytes=0,
        sequences_active=0,
        max_sequences=1,
        sequences_waiting=0,
        steps=0,
        tokens=0,
        uptime_s=0.0,
    )


def finished(request: str) -> Finished:
    return Finished(
        request=request,
        reason="length",
        text="",
        tokens=1,
        prompt_tokens=1,
        ttft_ms=0.0,
        tokens_per_s=0.0,
        tbt_ms={},
        memory={},
        flash={},
        prefill={},
        decode={},
        plan="plan",
        mode="exact",
    )


class Played:
    """The coordinator: it answers what is asked about the run, and keeps all that came."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.state: State = "ready"
        self.lost = 0  # of the next messages, so many are
        self.stopped = False  # as by a signal: it takes nothing, and nothing is lost
        self.tokens = 0  # of each text
        self.room: int | None = None  # for so many texts more; None: for any number
        self.texts: list[str] = []  # by their prompts, as they came
        self.most_held = 0
        self._held: list[tuple[str, str]] = []  # texts that are not finished: peer and name
        self.peers: set[str] = set()
        self._messages: list[Message] = []

    async def answer(self) -> None:
        while True:
            while not self.stopped and (received := self._listener.receive()) is not None:
                peer, message = received
                self.peers.add(peer)
                if self.lost:
                    self.lost -= 1
                    continue
                self._messages.append(message)
                with contextlib.suppress(Lost):  # of a connection that was left behind
                    self._reply(peer, message)
            await asyncio.sleep(0.001)

    def _reply(self, peer: str, message: Message) -> None:
        if isinstance(message, AskStatus):
            self._listener.send(peer, status(self.state))
        if isinstance(message, Generate) and self.room == 0:
            self._listener.send(peer, Refused(request=message.request, code="busy", message="busy", retry_after_s=7))
        elif isinstance(message, Generate):
            self._listener.send(peer, Accepted(request=message.request, prompt_tokens=1))
            for index in range(self.tokens):
                self._listener.send(peer, Token(request=message.request, index=index, token=7, text="", ms=0.0))
            self.room = None if self.room is None else self.room - 1
            self.texts.append(message.prompt or "")
            self._held.append((peer, message.request))
            self.most_held = max(self.most_held, len(self._held))

    def finish(self, texts: int) -> None:
        """The texts that came first are done."""
        for _ in range(texts):
            peer, name = self._held.pop(0)
            self._listener.send(peer, finished(name))

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self._messages)

    async def received(self, kind: type[Message], count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.count(kind) < count:
                await asyncio.sleep(0.001)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{os.path.relpath(tmp_path)}/link"


@asynccontextmanager
async def connected(endpoint: str) -> AsyncIterator[tuple[CoordinatorClient, Played]]:
    with open_context() as context:
        played = Played(Listener(context, CONTROL, endpoint))
        answering = asyncio.create_task(played.answer())
        coordinator = CoordinatorClient(endpoint)
        try:
            yield coordinator, played
        finally:
            await coordinator.close()
            answering.cancel()


async def ask(coordinator: CoordinatorClient, texts: int, prompt: str = "x") -> Mailbox:
    asks = (Generate(request=new_request_id(), prompt=prompt) for _ in range(texts))  # made when all may be sent
    return (await coordinator.generate(asks))[0]


async def all_finished(mailbox: Mailbox, texts: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while texts:
            texts -= sum(isinstance(message, Finished) for _, message in await mailbox.take())


def test_of_a_burst_after_silence_no_more_is_taken_on_than_there_is_room_for(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a loaded machine the burst may take longer than the usual time after which the status is requested again.
    monkeypatch.setattr("neuronpipe.services.gateway.client.run_client.POLL_S", 2.0)

    async def scene() -> None:
        async with connected(endpoint) as (coordinator, played):
            done = await asyncio.gather(
                *(ask(coordinator, MAX_CLIENT_REQUESTS // 8) for _ in range(12)), return_exceptions=True
            )
            refused = [one for one in done if isinstance(one, ApiError)]
            assert [one.code for one in refused] == ["rate_limit_exceeded"] * 4
            assert coordinator.active == MAX_CLIENT_REQUESTS
            await played.received(Generate, MAX_SENT)
            assert played.count(AskStatus) == 1  # for all of them

    asyncio.run(scene())


def test_a_request_of_many_texts_is_served_in_turns_of_what_the_coordinator_takes_on(endpoint: str) -> None:
    async def scene() -> None:
        async with connected(endpoint) as (coordinator, played):
            mailbox = await ask(coordinator, MAX_CLIENT_REQUESTS)
            for turn in range(MAX_CLIENT_REQUESTS // MAX_SENT):
                await played.received(Generate, (turn + 1) * MAX_SENT)
                played.finish(MAX_SENT)
            await all_finished(mailbox, MAX_CLIENT_REQUESTS)
            assert played.most_held == MAX_SENT
            assert coordinator.active == 0

    asyncio.run(scene())


def test_one_text_does_not_wait_for_all_texts_of_a_large_request(endpoint: str) -> None:
    async def scene() -> None:
        async with connected(endpoint) as (coordinator, played):
            await ask(coordinator, 5 * MAX_SENT, "large")
            await ask(coordinator, 1, "small")
            await played.received(Generate, MAX_SENT)
            played.finish(2)
            await played.received(Generate, MAX_SENT + 2)
            assert played.texts[MAX_SENT:] == ["large", "small"]

    asyncio.run(scene())


def test_texts_that_are_given_up_while_they_wait_are_never_sent(endpoint: str) -> None:
    async def scene() -> None:
        async with connected(endpoint) as (coordinator, played):
            asks = [Generate(request=new_request_id(), prompt="gone") for _ in range(2 * MAX_SENT)]
            _, names = await coordinator.generate(asks)
            coordinator.cancel(names)
            await ask(coordinator, 1, "here")
            await played.received(Generate, MAX_SENT + 1)
            assert played.texts[MAX_SENT:] == ["here"]
            assert played.count(Cancel) == MAX_SENT

    asyncio.run(scene())


def test_a_request_that_has_begun_waits_where_others_fill_the_run(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronpipe.services.gateway.client.run_client.BUSY_AGAIN_S", 0.05)

    async def scene() -> None:
        async with connected(endpoint) as (coordinator, played):
            played.room = 2
            mailbox = await ask(coordinator, 4)
            await played.received(Generate, 4)
            for _ in range(3):  # others may be known to have filled it, or not yet
                with pytest.raises(ApiError) as refused:
                    await (await ask(coordinator, 1)).take(PATIENCE_S)
                assert (refused.value.status, dict(refused.value.headers)) == (429, {"retry-after": "7"})
                await asyncio.sleep(0.03)
            asked = played.count(Generate)
            played.room = None
            await played.received(Generate, asked + 1)
            async with asyncio.timeout(PATIENCE_S):
                while len(played.texts) < 4:
                    await asyncio.sleep(0.001)
            played.finish(4)
            await all_finished(mailbox, 4)

    asyncio.run(scene())


def test_requests_that_wait_share_their_questions(endpoint: str) -> None:
    async def scene() -> None:
        async with connected(endpoint) as (coordinator, played):
            played.state = "starting"
            waiting = [asyncio.create_task(ask(coordinator, 1)) for _ in range(20)]
            await played.received(AskStatus, 5)
            played.state = "ready"
            await asyncio.gather(*waiting)
            assert played.count(AskStatus) < 20

    asyncio.run(scene())


def test_a_question_that_was_lost_is_asked_again(endpoint: str) -> None:
    async def scene() -> None:
        async with connected(endpoint) as (coordinator, played):
            played.lost = 1
            await coordinator.fresh_status(PATIENCE_S)
            assert played.lost == 0

    asyncio.run(scene())


def test_a_gateway_whose_words_were_all_lost_connects_again_and_asks_for_its_texts(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with connected(endpoint) as (coordinator, played):
            mailbox, accepted = await ask(coordinator, 2), 0
            while accepted < 2:
                accepted += len(await mailbox.take())
            monkeypatch.setattr("neuronpipe.services.gateway.client.run_client.MAX_UNANSWERED", 3)
            played.lost = 3
            await coordinator.fresh_status(PATIENCE_S)
            assert played.lost == 0
            await played.received(Generate, 4)
            assert len(played.peers) == 2

    asyncio.run(scene())


def test_a_coordinator_that_was_only_slow_gives_every_token_once(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with connected(endpoint) as (coordinator, played):
            played.tokens = 3
            mailbox = await ask(coordinator, 2)
            seen: list[list[int]] = [[], []]

            async def take(tokens: int) -> None:
                async with asyncio.timeout(PATIENCE_S):
                    while any(len(one) < tokens for one in seen):
                        for number, message in await mailbox.take():
                            seen[number] += [message.index] if isinstance(message, Token) else []

            await take(3)
            for name, value in (("MAX_UNANSWERED", 3), ("LOST_S", 0.1)):
                monkeypatch.setattr(f"neuronpipe.services.gateway.client.run_client.{name}", value)
            played.stopped = True
            for _ in range(8):
                with pytest.raises(ApiError, match="does not answer"):
                    await coordinator.fresh_status(0.1)
            played.stopped, played.tokens = False, 6
            await take(6)
            assert seen == [[0, 1, 2, 3, 4, 5]] * 2
            assert len(played.peers) > 1

    asyncio.run(scene())


def test_a_gateway_that_ends_cancels_its_texts_and_tells_who_waits(endpoint: str) -> None:
    async def scene() -> None:
        async with connected(endpoint) as (coordinator, played):
            mailbox = await ask(coordinator, 2)
            coordinator.end("draining", "the server is ending")
            with pytest.raises(ApiError, match="the server is ending"):
                await mailbox.take()
            await played.received(Cancel, 2)
            assert coordinator.active == 0

    asyncio.run(scene())


def test_after_the_end_nobody_is_asked_and_nothing_is_waited_for(endpoint: str) -> None:
    async def scene() -> None:
        async with connected(endpoint) as (coordinator, played):
            await coordinator.fresh_status(PATIENCE_S)
            coordinator.end("ended", "the run has ended")
            asked = played.count(AskStatus)
            with pytest.raises(ApiError, match="the run has ended"):
                await coordinator.fresh_status(PATIENCE_S)
            with pytest.raises(ApiError, match="the run has ended"):
                await ask(coordinator, 1)
            await asyncio.sleep(0.01)
            assert played.count(AskStatus) == asked

    asyncio.run(scene())


def test_a_run_that_ends_is_told_from_one_whose_coordinator_comes_again(endpoint: str) -> None:
    async def scene() -> None:
        async with connected(endpoint) as (coordinator, played):
            played.state = "draining"
            with pytest.raises(ApiError, match="the run is ending"):
                await ask(coordinator, 1)
            played.state = "ready"
            await ask(coordinator, 1)

    asyncio.run(scene())
