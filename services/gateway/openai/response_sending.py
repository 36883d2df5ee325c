"""Sending an answer, whole or as a stream, for as long as the client is connected.

When the client closes the connection its texts are cancelled at once: the next step is made without them. A stream
waits for its reader, and what arrives meanwhile is sent as one piece.

A stream's headers are sent when its texts are accepted, before anything is computed; until then a refusal has a status
of its own. Where nothing comes for a while, a comment shows that the connection lives. A stream whose run is yet to be
started has its headers and a comment at once: what goes wrong from then on is its last event.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager

from neuronpipe.protocol.messages.client import Accepted, Finished, Token
from neuronpipe.protocol.messages.request import Generate
from neuronpipe.services.gateway.client.run_client import MAX_SENT, AcquireRun, CoordinatorClient, Mailbox, RunRequest
from neuronpipe.services.gateway.http.api_errors import ApiError, prompt_too_long
from neuronpipe.services.gateway.http.http_server import ABORT_KEY
from neuronpipe.services.gateway.http.memory_account import charge_of
from neuronpipe.services.gateway.http.metrics import Metrics
from neuronpipe.services.gateway.openai.response_encoding import ResponseEncoder, usage
from starlette.types import Receive, Scope, Send

COMMENT_S = 5.0
COPIES = 4  # of the characters of an answer that is sent whole: kept, joined, encoded, and sent
RUN_READY_S = 0.25  # a run that is there is held within this time, and one that cannot begin may be refused
COMMENT = b": waiting\n\n"  # server-sent events: clients pass over it


class MeanLogprob:
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


async def run_while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Do the work; leave it when the client goes away. Raises what the work raises."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """The response of a stream, whose headers go with what is passed on first."""

    def __init__(self, send: Send) -> None:
        self._send, self.headers_sent, self.mailbox = send, False, Mailbox()

    async def send_events(self, events: bytes) -> None:
        """Send events; without any, the headers alone."""
        if not self.headers_sent:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.headers_sent = True
        if events:
            self.mailbox.blocked = True  # until the connection takes it
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
            self.mailbox.blocked = False

    async def end(self) -> None:
        """Nothing more comes."""
        await self._send({"type": "http.response.body", "body": b""})


class GenerationResponse:
    """The response to one request for texts: an ASGI application. A refusal is raised before anything is sent."""

    def __init__(
        self,
        acquire: AcquireRun,
        metrics: Metrics,
        encoder: ResponseEncoder,
        requests: Sequence[Generate],
        *,
        context_tokens: int,
        texts_per_prompt: int,
        sent_per_prompt: int,
        stream: bool,
        client: str = "",
    ) -> None:
        self._acquire, self._metrics, self._encoder = acquire, metrics, encoder
        self._requests, self._texts_per_prompt, self._stream = requests, texts_per_prompt, stream
        self._context_tokens = context_tokens
        self._sent_per_prompt, self._client = sent_per_prompt, client
        self._ratings = [MeanLogprob() for _ in requests]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer while the client is there."""
        self._charge, self._abort = charge_of(scope), scope.get(ABORT_KEY, lambda: None)
        await run_while_connected(
            receive, self._send_stream(EventStream(send)) if self._stream else self._send_at_once(send)
        )

    async def _send_at_once(self, send: Send) -> None:
        async with self._acquire() as coordinator:
            await self._send_whole(await self._complete_body(coordinator), send)

    async def _send_stream(self, stream: EventStream) -> None:
        try:
            async with self._acquired(stream) as coordinator:
                last = await self._stream_body(coordinator, stream)
        except ApiError as problem:
            if not stream.headers_sent:
                raise
            last = self._encoder.error_chunk(problem)
        await stream.send_events(last)
        await stream.end()

    @asynccontextmanager
    async def _acquired(self, stream: EventStream) -> AsyncIterator[CoordinatorClient]:
        """The run; comments while it is started."""
        async with contextlib.AsyncExitStack() as stack:
            entering = asyncio.ensure_future(stack.enter_async_context(self._acquire()))
            patience_s = RUN_READY_S
            try:
                while not (await asyncio.wait((entering,), timeout=patience_s))[0]:
                    await stream.send_events(COMMENT)
                    patience_s = COMMENT_S
            finally:
                entering.cancel()
                await asyncio.gather(entering, return_exceptions=True)
            yield entering.result()

    @asynccontextmanager
    async def _submitted(
        self, coordinator: CoordinatorClient, requests: Sequence[RunRequest], stream: EventStream | None = None
    ) -> AsyncIterator[Mailbox]:
        """Where the answers arrive. A stream whose reader takes nothing is ended when too much waits."""
        mailbox, names = await coordinator.generate(requests, self._client)
        mailbox.charge, mailbox.overflow = self._charge, self._abort
        if stream is not None:
            stream.mailbox = mailbox
        try:
            yield mailbox
        finally:
            coordinator.cancel(names)

    async def _complete_body(self, coordinator: CoordinatorClient) -> bytes:
        """Ask, and make the answer of what comes."""
        async with self._submitted(coordinator, self._requests) as mailbox:
            finished = await self._collect(mailbox, None)
        sent = [(number, finished[number]) for number in self._sent_numbers()]
        return self._encoder.whole(sent, usage(finished, self._texts_per_prompt))

    async def _stream_body(self, coordinator: CoordinatorClient, stream: EventStream) -> bytes:
        """Ask, and pass on what comes; returns the last events."""
        async with self._submitted(coordinator, self._requests, stream) as mailbox:
            finished = await self._collect(mailbox, stream)
        return self._encoder.usage_chunk(usage(finished, self._texts_per_prompt)) + self._encoder.done

    async def _send_whole(self, body: bytes, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _sent_numbers(self) -> list[int]:
        """Which texts are sent: of each prompt those whose tokens are likeliest on the average, the likeliest first,
        where more were made than are sent."""
        made, sent = self._texts_per_prompt, self._sent_per_prompt
        prompts = [range(first, first + made) for first in range(0, len(self._requests), made)]
        if made == sent:
            return [number for texts in prompts for number in texts]
        return [
            number
            for texts in prompts
            for number in sorted(texts, key=lambda text: self._ratings[text].value, reverse=True)[:sent]
        ]

    async def _collect(self, mailbox: Mailbox, stream: EventStream | None) -> list[Finished]:
        """Wait for all texts, and pass on their pieces as they come, once those that are sent first are accepted: none
        of these can be refused any more. After a long wait the headers are sent without them."""
        finished: dict[int, Finished] = {}
        encoder, begun = self._encoder, set[int]()
        unaccepted, events = min(len(self._requests), MAX_SENT), b""
        while len(finished) < len(self._requests):
            taken = await mailbox.take(None if stream is None else COMMENT_S)
            for number, message in taken:
                if isinstance(message, Accepted):
                    if message.prompt_tokens >= self._context_tokens:
                        raise prompt_too_long(self._context_tokens, message.prompt_tokens)
                    unaccepted -= 1
                    continue
                if isinstance(message, Finished):
                    finished[number] = message
                    self._metrics.finished(message)
                    if stream is None:
                        self._charge.grow(COPIES * len(message.text))
                elif not isinstance(message, Token):
                    continue
                elif stream is None:
                    before = encoder.logprob_characters
                    encoder.keep_logprobs(number, message)
                    self._charge.grow(COPIES * (encoder.logprob_characters - before))
                    self._ratings[number].add(message.logprob)
                if stream is not None:
                    if number not in begun:
                        begun.add(number)
                        events += encoder.first(number)
                    events += (
                        encoder.piece(number, message) if isinstance(message, Token) else encoder.last(number, message)
                    )
            if stream is None:
                continue
            if not taken:
                events, unaccepted = events + COMMENT, 0
            if unaccepted <= 0:
                await stream.send_events(events)
                events = b""
        return [finished[number] for number in range(len(self._requests))]
