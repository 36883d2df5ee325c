"""Sending a response, whole or as a stream, for as long as the client is connected.

When the client closes the connection, its sequences are cancelled at once and are not part of the next step. A stream
waits for its client to read; tokens that arrive meanwhile are sent together.

The headers of a stream are sent when its sequences are accepted, before anything is computed; a request that is refused
before that gets an error status. While there is nothing to send, what the encoder sends for that keeps the connection
alive. A stream whose run must be started first gets its headers at once; an error after that is its last event.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager

from neuronpipe.protocol.messages.client import Accepted, Finished, Token
from neuronpipe.protocol.messages.request import Generate
from neuronpipe.services.gateway.client.mailbox import Mailbox
from neuronpipe.services.gateway.client.run_client import MAX_SENT, AcquireRun, CoordinatorClient, RunRequest
from neuronpipe.services.gateway.http.api_errors import ApiError, prompt_too_long
from neuronpipe.services.gateway.http.http_server import ABORT_KEY
from neuronpipe.services.gateway.http.memory_account import charge_of
from neuronpipe.services.gateway.http.metrics import Metrics
from neuronpipe.services.gateway.openai.response_encoding import ResponseEncoder, usage
from starlette.types import Receive, Scope, Send

COMMENT_S = 5.0
COPIES = 4  # copies of a whole response in memory: stored, joined, encoded and sent
RUN_READY_S = 0.25  # a live run is acquired, and one that cannot start is refused, within this time


class MeanLogprob:
    """The mean log-probability of a sequence's tokens; tokens without one do not count."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, logprob: float | None) -> None:
        if logprob is not None:
            self._sum, self._count = self._sum + logprob, self._count + 1

    @property
    def value(self) -> float:
        """Return the mean; 0 if no token has a log-probability."""
        return self._sum / max(1, self._count)


async def run_while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run a coroutine; cancel it when the client disconnects. Raises what the coroutine raises."""
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
    """The response of a stream. Its headers are sent with the first events."""

    def __init__(self, send: Send, media_type: bytes) -> None:
        self._send, self._media_type = send, media_type
        self.headers_sent, self.mailbox = False, Mailbox()

    async def send_events(self, events: bytes) -> None:
        """Send events; the headers alone if there are none."""
        if not self.headers_sent:
            headers = [(b"content-type", self._media_type), (b"cache-control", b"no-store")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.headers_sent = True
        if events:
            self.mailbox.blocked = True  # until the connection has room
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
            self.mailbox.blocked = False

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})


class GenerationResponse:
    """The response to an HTTP request that generates sequences: an ASGI application.

    Raises ApiError if the request is refused before anything was sent.

    requests: one for each sequence to generate, `sequences_per_prompt` for each prompt, in the order of the prompts
    sent_per_prompt: the number of a prompt's sequences to send: those with the highest mean log-probability
    stream: send events while sequences are generated, else one JSON object at the end
    client: the client in the coordinator's fair queue to which the requests belong
    """

    def __init__(
        self,
        acquire: AcquireRun,
        metrics: Metrics,
        encoder: ResponseEncoder,
        requests: Sequence[Generate],
        *,
        context_tokens: int,
        sequences_per_prompt: int,
        sent_per_prompt: int,
        stream: bool,
        client: str = "",
    ) -> None:
        self._acquire, self._metrics, self._encoder = acquire, metrics, encoder
        self._requests, self._sequences_per_prompt, self._stream = requests, sequences_per_prompt, stream
        self._context_tokens = context_tokens
        self._sent_per_prompt, self._client = sent_per_prompt, client
        self._mean_logprobs = [MeanLogprob() for _ in requests]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._charge, self._abort = charge_of(scope), scope.get(ABORT_KEY, lambda: None)
        stream = EventStream(send, self._encoder.media_type)
        await run_while_connected(receive, self._send_stream(stream) if self._stream else self._send_at_once(send))

    async def _send_at_once(self, send: Send) -> None:
        async with self._acquire() as coordinator:
            self._encoder.acquired()
            await self._send_whole(await self._complete_body(coordinator), send)

    async def _send_stream(self, stream: EventStream) -> None:
        try:
            async with self._acquired(stream) as coordinator:
                self._encoder.acquired()
                last = await self._stream_body(coordinator, stream)
        except ApiError as problem:
            if not stream.headers_sent:
                raise
            last = self._encoder.error_chunk(problem)
        await stream.send_events(last)
        await stream.end()

    @asynccontextmanager
    async def _acquired(self, stream: EventStream) -> AsyncIterator[CoordinatorClient]:
        """Acquire the run; keep the stream alive while it is being started."""
        async with contextlib.AsyncExitStack() as stack:
            entering = asyncio.ensure_future(stack.enter_async_context(self._acquire()))
            patience_s = RUN_READY_S
            try:
                while not (await asyncio.wait((entering,), timeout=patience_s))[0]:
                    await stream.send_events(self._encoder.keep_alive)
                    patience_s = COMMENT_S
            finally:
                entering.cancel()
                await asyncio.gather(entering, return_exceptions=True)
            yield entering.result()

    @asynccontextmanager
    async def _submitted(
        self, coordinator: CoordinatorClient, requests: Sequence[RunRequest], stream: EventStream | None = None
    ) -> AsyncIterator[Mailbox]:
        """Send requests to the run and yield the mailbox of their replies; cancel them at the end of the context.

        The connection of a client that does not read is aborted when too much waits for it.
        """
        mailbox, names = await coordinator.generate(requests, self._client)
        mailbox.charge, mailbox.overflow = self._charge, self._abort
        if stream is not None:
            stream.mailbox = mailbox
        try:
            yield mailbox
        finally:
            coordinator.cancel(names)

    async def _complete_body(self, coordinator: CoordinatorClient) -> bytes:
        """Generate all sequences and return the body of the response."""
        async with self._submitted(coordinator, self._requests) as mailbox:
            finished = await self._collect(mailbox, None)
        sent = [(number, finished[number]) for number in self._sent_numbers()]
        return self._encoder.whole(sent, usage(finished, self._sequences_per_prompt))

    async def _stream_body(self, coordinator: CoordinatorClient, stream: EventStream) -> bytes:
        """Generate all sequences and send their tokens as they arrive; return the last events."""
        async with self._submitted(coordinator, self._requests, stream) as mailbox:
            finished = await self._collect(mailbox, stream)
        return self._encoder.usage_chunk(usage(finished, self._sequences_per_prompt)) + self._encoder.done

    async def _send_whole(self, body: bytes, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _sent_numbers(self) -> list[int]:
        """Return the numbers of the sequences that are sent.

        If more were generated than are sent, those of each prompt with the highest mean log-probability, best first.
        """
        generated, sent = self._sequences_per_prompt, self._sent_per_prompt
        prompts = [range(first, first + generated) for first in range(0, len(self._requests), generated)]
        if generated == sent:
            return [number for numbers in prompts for number in numbers]
        return [
            number
            for numbers in prompts
            for number in sorted(numbers, key=lambda number: self._mean_logprobs[number].value, reverse=True)[:sent]
        ]

    async def _collect(self, mailbox: Mailbox, stream: EventStream | None) -> list[Finished]:
        """Wait for all sequences and return their results; send their tokens to the stream as they arrive.

        Nothing is sent before the first MAX_SENT sequences are accepted, because a refusal before that has an error
        status. After COMMENT_S without a message the headers are sent nevertheless.
        """
        finished: dict[int, Finished] = {}
        encoder, begun = self._encoder, set[int]()
        unaccepted, events = min(len(self._requests), MAX_SENT), b""
        while len(finished) < len(self._requests):
            messages = await mailbox.take(None if stream is None else COMMENT_S)
            for number, message in messages:
                if isinstance(message, Accepted):
                    if message.prompt_tokens >= self._context_tokens:
                        raise prompt_too_long(self._context_tokens, message.prompt_tokens)
                    unaccepted -= 1
                    events += b"" if stream is None else encoder.accepted(number, message)
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
                    encoder.take(number, message)
                    self._charge.grow(COPIES * (encoder.logprob_characters - before))
                    self._mean_logprobs[number].add(message.logprob)
                if stream is not None:
                    if number not in begun:
                        begun.add(number)
                        events += encoder.first(number)
                    events += (
                        encoder.piece(number, message) if isinstance(message, Token) else encoder.last(number, message)
                    )
            if stream is None:
                continue
            if not messages:
                events, unaccepted = events + encoder.keep_alive, 0
            if unaccepted <= 0:
                await stream.send_events(events)
                events = b""
        return [finished[number] for number in range(len(self._requests))]
