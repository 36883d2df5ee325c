"""The gateway's end of the control link: many requests on one connection, on the event loop's own thread.

ZeroMQ's descriptor becomes readable when messages may have arrived; then all of them are taken. It does so only once,
and sending may use that up, so the channel is read after every send too.

A coordinator that was restarted does not know our requests. Once one has heard nothing for a while we ask who the
coordinator is; if it is not the one that was last known when the request was accepted, the request is made again. The
same tokens come again, and those that were passed on already are left out; asking twice is harmless.

No more texts are sent than a coordinator takes on for sure; the others wait here, and requests take turns. Where other
clients have filled the coordinator's queue, a request of which nothing was accepted yet is refused; others wait.

What was sent to a coordinator that died may be lost. Questions about the run are asked again, and a queue that stays as
full as it may be is left behind with its connection. If the coordinator was only slow, it finds the texts of the old
connection's name and drops each of them with its first token, which nobody takes.
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
from neuronpipe.services.gateway.http.api_errors import ApiError, from_refusal, unavailable
from neuronpipe.services.gateway.http.memory_account import MemoryCharge, message_bytes

QUIET_S = 0.5
TICK_S = 0.25
RUN_LOOK_S, REPORTED_LOOK_S = 1.0, 30.0  # at a run that another command started; where the kernel reports its end
FRESH_S = 1.0
READY_S = 2.0
POLL_S = 0.02
ASK_AGAIN_S = 0.25
LOST_S = 1.0
CANCEL_AGAIN_TOKENS = 16
BUSY_AGAIN_S = 1.0
MAX_SENT = 64  # texts at the coordinator: so many may wait there in any run,
MAX_IDLE_CLIENT_SLOTS = 4  # and so many more for each KV slot: for clients that have no text there
MAX_CLIENT_REQUESTS = 1024  # of one client, under way or waiting: with so many no further request of it is taken on
MAX_REQUESTS = 4096  # of all
MAX_WAITING_BYTES = 512 << 10  # of a stream whose reader does not take what there is
MAX_UNANSWERED = 200  # messages sent since one came: below the link's limit, so that a send never waits
log = logging.getLogger(__name__)
_names = itertools.count(1)


def new_request_id() -> str:
    """A name for the next request: no two of this process are alike."""
    return f"r{next(_names)}"


class Mailbox:
    """What has arrived for one HTTP request, whose texts are numbered. What waits counts in the request's charge.

    overflow: called when a reader that is `blocked` has more than MAX_WAITING_BYTES waiting, or when there is no memory
    left for more
    """

    def __init__(self) -> None:
        self.can_wait = False  # its texts wait when the run is busy; until then they are refused
        self.charge: MemoryCharge | None = None
        self.blocked = False
        self.overflow: Callable[[], object] = lambda: None
        self._messages: list[tuple[int, Message]] = []
        self._waiting_bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    def put(self, number: int, message: Message) -> None:
        """Add one, and wake who waits."""
        self._messages.append((number, message))
        if self.charge is not None:
            self._count(message_bytes(message), self.charge)
        self._wake()

    def _count(self, more_bytes: int, charge: MemoryCharge) -> None:
        fits = charge.account.has_room(more_bytes, charge)
        self._waiting_bytes += more_bytes
        charge.set(charge.held_bytes + more_bytes)
        if self.blocked and (not fits or self._waiting_bytes > MAX_WAITING_BYTES):
            self.overflow()

    async def take(self, within_s: float | None = None) -> list[tuple[int, Message]]:
        """All that is there; waits for the first, so long at most. Raises Problem when a text was refused."""
        if not self._messages:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if within_s is None else loop.call_later(within_s, self._wake)
            try:
                await self._waiter
            finally:
                if timer is not None:
                    timer.cancel()
        taken, self._messages = self._messages, []
        if self.charge is not None:
            self.charge.set(self.charge.held_bytes - self._waiting_bytes)
        self._waiting_bytes = 0
        for _, message in taken:
            if isinstance(message, Refused):
                raise from_refusal(message)
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


RunRequest = Generate | Score | Tokenize
"""What is asked of the coordinator about one text."""
FINAL_MESSAGES = Finished | ScoreFinished | Tokenized | Refused


class PendingRequest:
    """One text being generated, scored or turned into tokens. `home`: process id of the coordinator that was last known
    when it was accepted; None when it was not accepted yet under the present name."""

    def __init__(self, request: RunRequest, mailbox: Mailbox, number: int, client: str, now: float) -> None:
        self.request, self.mailbox, self.number, self.client, self.last_reply_at = request, mailbox, number, client, now
        self.coordinator_pid: int | None = None
        self.sent = self.accepted = False
        self.tokens = 0


class CoordinatorClient:
    """The connection. run_ended: asked now and then, for the reason when the run is over; None where somebody else says
    so."""

    def __init__(self, endpoint: str, run_ended: Callable[[], str | None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = open_context()
        self._endpoint = endpoint
        self._run_ended = run_ended
        self._pending: dict[str, PendingRequest] = {}  # those that wait here too
        self._queue: FairQueue[Mailbox, PendingRequest] = FairQueue()
        self._busy: Refused | None = None  # what the run said last when others had filled it
        self._busy_until = -math.inf
        self._unanswered_since = -math.inf
        self._connect()
        self._pid: int | None = None
        self._status_arrived = asyncio.Event()
        self._status: Status | None = None
        self._status_at = 0.0
        self._status_requested_at = -math.inf  # when the last question for it was sent that has no answer yet
        self._ended: tuple[str, str] | None = None  # code and reason
        self._closed = False
        self.over = asyncio.Event()  # the run has ended
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
        """Under another name: the old connection may yet be made, later than the new one, and would take its place."""
        before, descriptor = self._channel, self._descriptor
        try:
            self._connect()
        except UserError as error:
            log.warning("no second connection to the coordinator: %s", error)
            return
        self._loop.remove_reader(descriptor)
        before.close()
        for pending in self._pending.values():
            pending.coordinator_pid = None

    @property
    def active(self) -> int:
        """Texts under way or waiting."""
        return len(self._pending)

    @property
    def waiting(self) -> int:
        """Texts that wait for their turn."""
        return len(self._queue)

    async def close(self) -> None:
        """Give the texts up and close the connection."""
        self.cancel(list(self._pending))
        for timer in (self._ticking, self._run_look):
            if timer is not None:
                timer.cancel()
        self._ticking = self._run_look = None
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        self._context.close()

    # ---- asking ----------------------------------------------------------------------------------------------
    async def generate(self, requests: Iterable[RunRequest], client: str = "") -> tuple[Mailbox, list[str]]:
        """Ask for these texts, numbered in this order; returns where their answers arrive, and their names. client:
        for whom, as texts wait in turns. Raises Problem when there is no run to ask, or too much is under way."""
        await self._require_ready()
        self._require_room(client)  # and take it at once: many may have waited for the same answer
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
        """Cancel these texts; those that have ended are ignored."""
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
        """The run is gone: requests that wait are refused, and so are all further ones."""
        self._ended = code, reason
        self._status_arrived.set()
        for name, pending in self._pending.items():
            pending.mailbox.put(pending.number, Refused(request=name, code="draining", message=reason))
        self.cancel(list(self._pending))  # the run may go on without this gateway

    async def fresh_status(self, within_s: float) -> Status:
        """How the run is now. Raises Problem without an answer in time, or it is ending."""
        self._require_live()
        self._status_arrived.clear()
        try:
            async with asyncio.timeout(within_s):
                while not await self._await_status():
                    pass
        except TimeoutError:
            raise unavailable("starting", "the run does not answer at the moment; try again") from None
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
        """A process that was lost is soon restarted; requests wait for it, but not for long."""
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
        own = sum(pending.client == client for pending in self._pending.values())
        if own >= MAX_CLIENT_REQUESTS or len(self._pending) >= MAX_REQUESTS:
            count = f"{own} of your texts" if own >= MAX_CLIENT_REQUESTS else f"{len(self._pending)} texts"
            raise ApiError(
                429,
                "rate_limit_exceeded",
                f"{count} are being generated or wait; try again later",
                kind="rate_limit_error",
                retry_after_s=1,
            )
        if self._busy is not None and self._loop.time() < self._busy_until:
            raise from_refusal(self._busy)
        if self._unanswered >= MAX_UNANSWERED:
            raise unavailable("starting", "the run's coordinator is being restarted; try again")

    def _send_waiting(self) -> bool:
        """Send texts that wait, as many as the coordinator has room for; whether there were any."""
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
        """Whether the coordinator takes on another text; when it has many, of a client that has none there."""
        sent = len(self._pending) - len(self._queue)
        return sent < MAX_SENT or (sent < MAX_SENT + MAX_IDLE_CLIENT_SLOTS and self._queue.next_client_is_idle)

    def _ask_status(self) -> None:
        """One question serves all that wait."""
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
            raise unavailable("starting", "the run does not take requests at the moment; try again") from None

    # ---- answers ---------------------------------------------------------------------------------------------
    def _receive(self) -> None:
        """Take everything there is, and send what there is room for now."""
        while not self._closed:
            while (message := self._channel.receive()) is not None:
                self._unanswered = 0
                if isinstance(message, Status):
                    self._handle_status(message)
                elif (pending := self._pending.get(getattr(message, "request", ""))) is not None:
                    self._handle(pending, message)
                elif isinstance(message, Token) and message.index % CANCEL_AGAIN_TOKENS == 0:
                    self._send(Cancel(request=message.request))  # it missed the first Cancel
            if not self._send_waiting():
                return

    def _handle(self, pending: PendingRequest, message: Message) -> None:
        pending.last_reply_at = self._loop.time()
        if isinstance(message, Token):
            if message.index != pending.tokens:
                return  # it came before the coordinator was restarted
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
        """Look again in a while, if anything is under way: an idle gateway has no timer."""
        if self._ticking is None and self._pending and not self._closed:
            self._ticking = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        """Notice silence."""
        self._ticking = None
        with contextlib.suppress(ApiError):  # no request to answer here; the next one gets the Problem
            self._receive()
            now = self._loop.time()
            if any(pending.sent and now - pending.last_reply_at > QUIET_S for pending in self._pending.values()):
                self._ask_status()
        self._tick_later()

    def look_at_run(self) -> None:
        """Notice the run's end; look again every run_look_s."""
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
    """What is asked of the tokenizer, in order. Raises Problem."""
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
"""What a request waits for before it asks: makes sure that there is a run, for as long as the context lasts."""
