"""The shell of every service: it greets the coordinator, sends heartbeats, drains, and notices a new coordinator.

A service has one thread, which waits for messages, does the work and answers. It sends a heartbeat when the coordinator
asks for one, which happens only while the run is in use, so that an idle service has no timer.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from neuronpipe.protocol.channel import Channel, Connection, Context, Poller
from neuronpipe.protocol.codec import VERSION, Message
from neuronpipe.protocol.errors import Full
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.messages.lifecycle import (
    AskBeat,
    Beat,
    Drain,
    Drained,
    Hello,
    Ready,
    Reject,
    Welcome,
)
from neuronpipe.services.runtime.job import Job

HELLO_AGAIN_MS = 1000
FOREVER_MS = 3_600_000  # native waits take no "for ever"
log = logging.getLogger(__name__)


class Service:
    """The shell of one service.

    slots, numerics, prompt_cache, drafts: fields of `Hello`
    available: False delays `Ready` until `become_available`
    step: number of the current step, for heartbeats
    counters: returns the counters of heartbeats; the service sets it
    coordinator_lost: is called before a new coordinator is greeted; the service sets it
    """

    def __init__(
        self,
        context: Context,
        job: Job,
        slots: int,
        *,
        available: bool = True,
        numerics: str = "",
        prompt_cache: bool = False,
        drafts: bool = False,
    ) -> None:
        process = job.process
        self.role, self.index = process.role, process.index
        self._hello = Hello(
            role=process.role,
            index=process.index,
            pid=os.getpid(),
            incarnation=job.incarnation,
            protocol=VERSION,
            slots=slots,
            core=process.core,
            numerics=numerics,
            prompt_cache=prompt_cache,
            drafts=drafts,
        )
        self.control = Connection(context, CONTROL, job.endpoints["control"], f"{process.role}-{process.index}")
        self._poller = Poller()
        self._poller.add(self.control)
        self._sources: list[tuple[Channel | int, Callable[[], None]]] = []
        self._coordinator_pid: int | None = None
        self._welcomed = False
        self._available = available
        self._draining = False
        self._pulse = job.pulse
        self._hello_due = 0.0
        self.step = 0
        self.counters: Callable[[], dict[str, float]] = dict
        self.coordinator_lost: Callable[[], None] = lambda: None

    def add(self, source: Channel | int, readable: Callable[[], None]) -> None:
        """Call `readable` whenever the channel or descriptor can be read."""
        self._poller.add(source)
        self._sources.append((source, readable))

    def answer(self, content: Message) -> None:
        """Send a message to the coordinator. If the coordinator does not read for seconds, the message is dropped with
        a warning, since the coordinator is then being restarted and asks again."""
        try:
            self.control.send(content)
        except Full as error:
            log.warning("%s.%d: %s", self.role, self.index, error)

    def become_available(self) -> None:
        """Let the service send `Ready`, now or after `Welcome`."""
        if not self._available and self._welcomed:
            self.answer(Ready(role=self.role, index=self.index))
        self._available = True

    def serve(
        self,
        handle: Callable[[Message], None],
        idle: Callable[[], int | None] = lambda: None,
        sleep: Callable[[tuple[int, ...], int], None] | None = None,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve until drained.

        handle: gets the messages that do not concern the process's life
        idle: runs before each wait, and returns the longest wait in milliseconds, or None for no limit
        sleep: waits in place of the poller, until one of the descriptors is readable or the milliseconds have passed;
            for a service that has work between messages
        finish: ends the work under way, before `Drained` is sent
        """
        while not self._draining:
            self._greet()
            limit_ms = idle()
            max_wait_ms = FOREVER_MS if self._welcomed else HELLO_AGAIN_MS
            wait_ms = max_wait_ms if limit_ms is None else min(limit_ms, max_wait_ms)
            self._pulse.waits()
            readable = self._poller.wait(0 if sleep else wait_ms)
            if sleep and not readable:
                sleep(self._poller.descriptors, wait_ms)
                readable = self._poller.wait(0)
            self._pulse.works()
            for source, react in self._sources:
                if source in readable:
                    react()
            while (message := self.control.receive()) is not None:
                self._take(message, handle)
        finish()
        self.answer(Drained(role=self.role, index=self.index))

    def _greet(self) -> None:
        """Send `Hello` from time to time until welcomed."""
        now = time.monotonic()
        if not self._welcomed and now >= self._hello_due:
            self.answer(self._hello)
            self._hello_due = now + HELLO_AGAIN_MS / 1000

    def _beat(self) -> None:
        self.answer(Beat(role=self.role, index=self.index, state="ready", step=self.step, counters=self.counters()))

    def _take(self, message: Message, handle: Callable[[Message], None]) -> None:
        match message:
            case Welcome(coordinator_pid=pid) if self._coordinator_pid not in (None, pid):
                self._coordinator_pid = pid  # it was restarted and knows nothing of this service
                self.coordinator_lost()
                self.answer(self._hello)
            case Welcome(coordinator_pid=pid):
                self._welcomed, self._coordinator_pid = True, pid
                if self._available:
                    self.answer(Ready(role=self.role, index=self.index))
            case AskBeat():
                if self._welcomed:
                    self._beat()
            case Reject(reason=reason):
                log.error("%s.%d was rejected: %s", self.role, self.index, reason)
                self._draining = True
            case Drain():
                self._draining = True
            case _:
                handle(message)
