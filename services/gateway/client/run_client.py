"""The gateway's client of a coordinator: many requests over one ZeroMQ connection, on the event loop's thread.

ZeroMQ's descriptor becomes readable once when messages may have arrived, and a send may consume that signal. All
messages are therefore read whenever it becomes readable, and again after every send.

Restarts of the coordinator: a restarted coordinator does not know the requests of its predecessor. When a request has
had no reply for QUIET_S, the client asks for the coordinator's status. If its process id differs from the one that
accepted the request, the request is sent again. The coordinator generates the same tokens again, and those that were
delivered already are dropped; a request that was sent twice does no harm.

Queueing: at most MAX_SENT sequences are at the coordinator; the others wait in a fair queue. When other clients have
filled the coordinator's queue, an HTTP request of which no sequence was accepted yet is refused; others wait.

Lost messages: whatever was sent to a coordinator that died may be lost. Status questions are repeated. When
MAX_UNANSWERED messages stay unanswered, the connection is replaced by a new one. A coordinator that was only slow then
still computes sequences under the old connection's name; it drops each with its first token, which nobody receives.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence

from neuronpipe.protocol.channel import Connection, Poller, open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import Full, UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.messages.client import (
    Accepted,
    Finished,
    ProcessStatus,
    Refused,
    ScoreFinished,
    Status,
    Token,
    Tokenized,
)
from neuronpipe.protocol.messages.request import AskStatus, Cancel, Generate, Score, Tokenize
from neuronpipe.services.gateway.client.fair_queue import FairQueue
from neuronpipe.services.gateway.client.mailbox import Mailbox
from neuronpipe.services.gateway.http.api_errors import ApiError, from_refusal, unavailable

QUIET_S = 0.5
TICK_S = 0.25
# How often to check whether a run that another command started still exists; less often if the kernel reports its end.
RUN_LOOK_S, REPORTED_LOOK_S = 1.0, 30.0
FRESH_S = 1.0
READY_S = 2.0
POLL_S = 0.02
ASK_AGAIN_S = 0.25
LOST_S = 1.0
CANCEL_AGAIN_TOKENS = 16
BUSY_AGAIN_S = 1.0
MAX_SENT = 64  # sequences at the coordinator; every run accepts this many
EXTRA_SENT = 4  # beyond MAX_SENT, for clients that have no sequence at the coordinator
MAX_CLIENT_REQUESTS = 1024  # sequences of one client, running or waiting; from there on its requests are refused
MAX_REQUESTS = 4096  # sequences of all clients
MAX_UNANSWERED = 200  # messages sent since the last reply; below the link's limit, so that a send never blocks
log = logging.getLogger(__name__)
_ids = itertools.count(1)


def new_request_id() -> str:
    return f"r{next(_ids)}"


RunRequest = Generate | Score | Tokenize
"""A request to the coordinator: one sequence, one score or one call of the tokenizer."""
FINAL_MESSAGES = Finished | ScoreFinished | Tokenized | Refused


class PendingRequest:
    """A request that waits here or is at the coordinator.

    number: its number among the requests of its HTTP request
    last_reply_at: seconds of the event loop's clock
    coordinator_pid: process id of the coordinator that accepted it on the present connection; None before that
    tokens: number of tokens delivered to the mailbox
    """

    def __init__(self, request: RunRequest, mailbox: Mailbox, number: int, client: str, now: float) -> None:
        self.request, self.mailbox, self.number, self.client, self.last_reply_at = request, mailbox, number, client, now
        self.coordinator_pid: int | None = None
        self.sent = self.accepted = False
        self.tokens = 0


class CoordinatorClient:
    """The connection to one coordinator.

    run_ended: polled every run_look_s seconds; returns the reason once the run has ended. None if the caller reports
        the end with `end`
    active: number of requests that wait here or are at the coordinator
    over: set when the run has ended
    """

    def __init__(self, endpoint: str, run_ended: Callable[[], str | None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = open_context()
        self._endpoint = endpoint
        self._run_ended = run_ended
        self._pending: dict[str, PendingRequest] = {}  # by request id, those in the queue included
        self._queue: FairQueue[Mailbox, PendingRequest] = FairQueue()
        self._busy: Refused | None = None  # the last refusal because other clients had filled the run's queue
        self._busy_until = -math.inf
        self._unanswered_since = -math.inf
        self._connect()
        self._pid: int | None = None
        self._status_arrived = asyncio.Event()
        self._status: Status | None = None
        self._status_at = 0.0
        self._status_requested_at = -math.inf  # time of the last unanswered AskStatus
        self._ended: tuple[str, str] | None = None  # code and reason
        self._closed = False
        self.over = asyncio.Event()
        self._ticking: asyncio.TimerHandle | None = None
        self._run_look: asyncio.TimerHandle | None = None
        self.run_look_s = RUN_LOOK_S
        self.look_at_run()

    def _connect(self) -> None:
        self._channel = Connection(self._context, CONTROL, self._endpoint, f"client-{os.urandom(6).hex()}")
        self._poller = Poller()
        self._poller.add(self._channel)
        self._poller.wait(0)
        (self._descriptor,) = self._poller.descriptors
        self._loop.add_reader(self._descriptor, self._receive)
        self._unanswered = 0

    def _connect_again(self) -> None:
        """Replace the connection by one with a new identity.

        With the same identity the old connection, if it is established late, would displace the new one.
        """
        old_channel, descriptor = self._channel, self._descriptor
        try:
            self._connect()
        except UserError as error:
            log.warning("no second connection to the coordinator: %s", error)
            return
        self._loop.remove_reader(descriptor)
        old_channel.close()
        for pending in self._pending.values():
            pending.coordinator_pid = None

    @property
    def active(self) -> int:
        return len(self._pending)

    @property
    def waiting(self) -> int:
        """Number of requests that wait here to be sent."""
        return len(self._queue)

    async def close(self) -> None:
        """Cancel all requests and close the connection."""
        self.cancel(list(self._pending))
        for timer in (self._ticking, self._run_look):
            if timer is not None:
                timer.cancel()
        self._ticking = self._run_look = None
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        self._context.close()

    # ---- requests --------------------------------------------------------------------------------------------
    async def generate(self, requests: Iterable[RunRequest], client: str = "") -> tuple[Mailbox, list[str]]:
        """Queue requests, numbered from 0 in this order, and return the mailbox of their replies and their ids.

        Raises ApiError if the run is not ready or too many requests are under way.

        client: the client to which the fair queue counts them
        """
        await self._require_ready()
        self._require_room(client)  # no await from here on: others that waited for the same status must see ours
        mailbox, now = Mailbox(), self._loop.time()
        pending_requests = {
            request.request: PendingRequest(request, mailbox, number, client, now)
            for number, request in enumerate(requests)
        }
        self._pending |= pending_requests
        self._queue.add(mailbox, pending_requests.values(), client)
        self._send_waiting()
        mailbox.can_wait = mailbox in self._queue
        self._tick_later()
        self._loop.call_soon(self._receive)
        return mailbox, list(pending_requests)

    def cancel(self, names: Iterable[str]) -> None:
        """Cancel requests by their ids; those that have finished are ignored."""
        for name in names:
            pending = self._pending.pop(name, None)
            if pending is None:
                continue
            self._queue.drop(pending.mailbox)
            if pending.sent:
                self._queue.release(pending.client)
            if pending.sent and self._unanswered < MAX_UNANSWERED:
                self._send(Cancel(request=name))
        self._loop.call_soon(self._receive)

    def end(self, code: str, reason: str) -> None:
        """Refuse all pending and further requests with this code and reason, because the run or the server ends."""
        self._ended = code, reason
        self._status_arrived.set()
        for name, pending in self._pending.items():
            pending.mailbox.put(pending.number, Refused(request=name, code="draining", message=reason))
        self.cancel(list(self._pending))  # the run may continue without this gateway

    async def fresh_status(self, within_s: float) -> Status:
        """Return the next status that arrives. Raises ApiError if none arrives in time or the run ends or drains."""
        self._require_live()
        self._status_arrived.clear()
        try:
            async with asyncio.timeout(within_s):
                while not await self._await_status():
                    pass
        except TimeoutError:
            raise unavailable("starting", "the run does not answer; try again") from None
        self._require_live()
        assert self._status is not None
        if _coordinator(self._status).state == "draining":
            raise unavailable("draining", "the run is ending")
        return self._status

    async def _await_status(self) -> bool:
        self._ask_status()
        self._loop.call_soon(self._receive)
        try:
            async with asyncio.timeout(ASK_AGAIN_S):
                await self._status_arrived.wait()
        except TimeoutError:
            return False
        return True

    def _require_live(self) -> None:
        if self._ended is not None:
            raise unavailable(*self._ended)

    async def _require_ready(self) -> None:
        """Wait up to READY_S for a process that is being restarted. Raises ApiError if the run is not ready then."""
        self._require_live()
        deadline = self._loop.time() + READY_S
        status = self._status
        while status is None or not status.ready or self._loop.time() - self._status_at > FRESH_S:
            status = await self.fresh_status(max(POLL_S, deadline - self._loop.time()))
            if not status.ready:
                if self._loop.time() > deadline:
                    why = status.notes() or "not all processes of the run are ready"
                    raise unavailable("starting", f"{why}; try again")
                await asyncio.sleep(POLL_S)

    def _require_room(self, client: str) -> None:
        client_requests = sum(pending.client == client for pending in self._pending.values())
        if client_requests >= MAX_CLIENT_REQUESTS or len(self._pending) >= MAX_REQUESTS:
            count = f"{len(self._pending)} sequences of all clients"
            if client_requests >= MAX_CLIENT_REQUESTS:
                count = f"{client_requests} of your sequences"
            raise ApiError(
                429,
                "rate_limit_exceeded",
                f"{count} are running or waiting; try again later",
                kind="rate_limit_error",
                retry_after_s=1,
            )
        if self._busy is not None and self._loop.time() < self._busy_until:
            raise from_refusal(self._busy)
        if self._unanswered >= MAX_UNANSWERED:
            raise unavailable("starting", "the run's coordinator is being restarted; try again")

    def _send_waiting(self) -> bool:
        """Send waiting requests while the coordinator has room. Returns True if any request was sent."""
        sent = False
        while (
            self._has_room()
            and self._unanswered < MAX_UNANSWERED
            and self._loop.time() >= self._busy_until
            and (pending := self._queue.take()) is not None
        ):
            pending.sent, pending.last_reply_at = True, self._loop.time()
            self._send(pending.request)
            sent = True
        return sent

    def _has_room(self) -> bool:
        """Return True if the next request may be sent: below MAX_SENT any, up to EXTRA_SENT more of idle clients."""
        sent = len(self._pending) - len(self._queue)
        return sent < MAX_SENT or (sent < MAX_SENT + EXTRA_SENT and self._queue.next_client_is_idle)

    def _ask_status(self) -> None:
        """Send AskStatus, unless one was sent within POLL_S and is unanswered; a reply serves all waiting callers.

        A connection on which MAX_UNANSWERED messages had no reply for LOST_S is replaced before.
        """
        now = self._loop.time()
        if self._unanswered >= MAX_UNANSWERED:
            self._receive()
        if self._unanswered >= MAX_UNANSWERED and now - self._unanswered_since >= LOST_S:
            self._connect_again()
        if self._unanswered < MAX_UNANSWERED and now - self._status_requested_at >= POLL_S:
            self._status_requested_at = now
            self._send(AskStatus())

    def _send(self, message: Message) -> None:
        if self._unanswered == 0:
            self._unanswered_since = self._loop.time()
        self._unanswered += 1
        try:
            self._channel.send(message)
        except Full:
            raise unavailable("starting", "the run does not accept requests; try again") from None

    # ---- replies ---------------------------------------------------------------------------------------------
    def _receive(self) -> None:
        """Handle all messages that have arrived, and send waiting requests for which there is room now."""
        while not self._closed:
            while (message := self._channel.receive()) is not None:
                self._unanswered = 0
                if isinstance(message, Status):
                    self._handle_status(message)
                elif (pending := self._pending.get(getattr(message, "request", ""))) is not None:
                    self._handle(pending, message)
                elif isinstance(message, Token) and message.index % CANCEL_AGAIN_TOKENS == 0:
                    self._send(Cancel(request=message.request))  # the coordinator missed the first Cancel
            if not self._send_waiting():
                return

    def _handle(self, pending: PendingRequest, message: Message) -> None:
        pending.last_reply_at = self._loop.time()
        if isinstance(message, Token):
            if message.index != pending.tokens:
                return  # delivered before the coordinator was restarted
            pending.tokens += 1
        elif isinstance(message, Accepted):
            pending.coordinator_pid = self._pid
            if pending.accepted:
                return
            pending.accepted = pending.mailbox.can_wait = True
        elif isinstance(message, Refused) and message.code == "busy" and pending.mailbox.can_wait:
            self._busy, self._busy_until = message, self._loop.time() + BUSY_AGAIN_S
            pending.sent = False
            self._queue.put_back(pending.mailbox, pending, pending.client)
            return
        elif isinstance(message, FINAL_MESSAGES):
            del self._pending[pending.request.request]
            self._queue.release(pending.client)
        pending.mailbox.put(pending.number, message)

    def _handle_status(self, status: Status) -> None:
        now = self._loop.time()
        pid = _coordinator(status).pid
        self._pid, self._status, self._status_at, self._status_requested_at = pid, status, now, -math.inf
        self._status_arrived.set()
        for pending in self._pending.values():
            if pending.sent and pending.coordinator_pid != pid and now - pending.last_reply_at > QUIET_S:
                pending.coordinator_pid, pending.last_reply_at = pid, now
                self._send(pending.request)

    def _tick_later(self) -> None:
        """Schedule a tick if requests are pending; an idle gateway has no timer."""
        if self._ticking is None and self._pending and not self._closed:
            self._ticking = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        """Ask for the status if a request had no reply for QUIET_S."""
        self._ticking = None
        with contextlib.suppress(ApiError):  # there is no request to answer here; the next one fails with the error
            self._receive()
            now = self._loop.time()
            if any(pending.sent and now - pending.last_reply_at > QUIET_S for pending in self._pending.values()):
                self._ask_status()
        self._tick_later()

    def look_at_run(self) -> None:
        """Check whether the run has ended, and check again every run_look_s seconds."""
        if self._run_look is not None:
            self._run_look.cancel()
        if self._run_ended is None or self._ended is not None:
            return
        if (reason := self._run_ended()) is None:
            self._run_look = self._loop.call_later(self.run_look_s, self.look_at_run)
            return
        self.end("ended", reason)
        self.over.set()


def _coordinator(status: Status) -> ProcessStatus:
    return next(process for process in status.processes if process.role == "coordinator")


async def tokenize_all(coordinator: CoordinatorClient, requests: Sequence[Tokenize], client: str) -> list[Tokenized]:
    """Return the replies to calls of the tokenizer, in order. Raises ApiError as `CoordinatorClient.generate`."""
    mailbox, names = await coordinator.generate(requests, client)
    answers = dict[int, Tokenized]()
    try:
        while len(answers) < len(requests):
            for number, answer in await mailbox.take():
                assert isinstance(answer, Tokenized)
                answers[number] = answer
    finally:
        coordinator.cancel(names)
    return [answers[number] for number in range(len(requests))]


AcquireRun = Callable[[], contextlib.AbstractAsyncContextManager[CoordinatorClient]]
"""A function that opens a context with the run's client. It waits for a run, which lasts at least that long."""
