"""Sending an answer, whole or as a stream, for as long as the client is connected.

When the client closes the connection its texts are cancelled at once: the next step is made without them. A stream
waits for its reader, and what arrives meanwhile is sent as one piece.

A stream's headers are sent when its texts are accepted, before anything is computed; until then a refusal has a status
of its own. Where nothing comes for a while, a comment shows that the connection lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence

from neuronpipe.protocol.messages.client import Accepted, Finished, Token
from neuronpipe.protocol.messages.request import Generate
from neuronpipe.services.gateway.coordinator import MAX_SENT, Coordinator, Hold, Mailbox
from neuronpipe.services.gateway.forms import Form, usage
from neuronpipe.services.gateway.metrics import Metrics
from neuronpipe.services.gateway.problems import Problem, too_long
from starlette.types import Receive, Scope, Send

COMMENT_S = 5.0
COMMENT = b": waiting\n\n"  # server-sent events: clients pass over it


class Mean:
    """Of the logarithms of a text's probabilities, token by token; those without one do not count."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, logprob: float | None) -> None:
        """One more token."""
        if logprob is not None:
            self._sum, self._count = self._sum + logprob, self._count + 1

    @property
    def value(self) -> float:
        """Zero of a text without rated tokens."""
        return self._sum / max(1, self._count)


async def while_there(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Do the work; leave it when the client goes away. Raises what the work raises."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Answer:
    """The response to one request for texts: an ASGI application. A refusal is raised before anything is sent."""

    def __init__(
        self,
        hold: Hold,
        metrics: Metrics,
        form: Form,
        asks: Sequence[Generate],
        *,
        context_tokens: int,
        texts_per_prompt: int,
        sent_per_prompt: int,
        stream: bool,
        client: str = "",
    ) -> None:
        self._hold, self._metrics, self._form = hold, metrics, form
        self._asks, self._texts_per_prompt, self._stream = asks, texts_per_prompt, stream
        self._context_tokens = context_tokens
        self._sent_per_prompt, self._client = sent_per_prompt, client
        self._ratings = [Mean() for _ in asks]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer while the client is there."""
        await while_there(receive, self._with_a_run(send))

    async def _with_a_run(self, send: Send) -> None:
        async with self._hold() as coordinator:
            await self._answer(coordinator, send)

    async def _answer(self, coordinator: Coordinator, send: Send) -> None:
        """Ask, and send what comes."""
        mailbox, names = await coordinator.generate(self._asks, self._client)
        try:
            await (self._in_pieces if self._stream else self._in_one)(mailbox, send)
        finally:
            coordinator.give_up(names)

    async def _in_one(self, mailbox: Mailbox, send: Send) -> None:
        finished = await self._all(mailbox, None)
        sent = [(number, finished[number]) for number in self._best()]
        await self._send_whole(self._form.whole(sent, usage(finished, self._texts_per_prompt)), send)

    async def _send_whole(self, body: bytes, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _best(self) -> list[int]:
        """Which texts are sent: of each prompt those whose tokens are likeliest on the average, the likeliest first,
        where more were made than are sent."""
        made, sent = self._texts_per_prompt, self._sent_per_prompt
        prompts = [range(first, first + made) for first in range(0, len(self._asks), made)]
        if made == sent:
            return [number for texts in prompts for number in texts]
        return [
            number
            for texts in prompts
            for number in sorted(texts, key=lambda text: self._ratings[text].value, reverse=True)[:sent]
        ]

    async def _in_pieces(self, mailbox: Mailbox, send: Send) -> None:
        begun = False

        async def pass_on(events: bytes) -> None:
            nonlocal begun
            if not begun:
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                begun = True
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})

        try:
            finished = await self._all(mailbox, pass_on)
        except Problem as problem:
            if not begun:
                raise
            await pass_on(self._form.failed(problem))
        else:
            await pass_on(self._form.counted(usage(finished, self._texts_per_prompt)) + self._form.done)
        await send({"type": "http.response.body", "body": b""})

    async def _all(self, mailbox: Mailbox, pass_on: Callable[[bytes], Awaitable[None]] | None) -> list[Finished]:
        """Wait for all texts, and pass on their pieces as they come, once those that are sent first are accepted: none
        of these can be refused any more. After a long wait the headers are sent without them."""
        finished: dict[int, Finished] = {}
        form, begun = self._form, set[int]()
        unaccepted, events = min(len(self._asks), MAX_SENT), b""
        while len(finished) < len(self._asks):
            taken = await mailbox.take(None if pass_on is None else COMMENT_S)
            for number, message in taken:
                if isinstance(message, Accepted):
                    if message.prompt_tokens >= self._context_tokens:
                        raise too_long(self._context_tokens, message.prompt_tokens)
                    unaccepted -= 1
                    continue
                if isinstance(message, Finished):
                    finished[number] = message
                    self._metrics.finished(message)
                elif not isinstance(message, Token):
                    continue
                elif pass_on is None:
                    form.keep(number, message)
                    self._ratings[number].add(message.logprob)
                if pass_on is not None:
                    if number not in begun:
                        begun.add(number)
                        events += form.first(number)
                    events += form.piece(number, message) if isinstance(message, Token) else form.last(number, message)
            if pass_on is None:
                continue
            if not taken:
                events, unaccepted = events + COMMENT, 0
            if unaccepted <= 0:
                await pass_on(events)
                events = b""
        return [finished[number] for number in range(len(self._asks))]
