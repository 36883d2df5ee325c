"""Serve several packages: this command starts a gateway, and starts and ends runs as the gateway requests.

The messages between the two are described in services/gateway/runs/hosted_packages.py.

    neuronpipe serve A B ──forks── gateway
         │  ▲                        │   ▲
         │  └── start B, end A ──────┘   │ ZeroMQ, to the coordinator of each run
         └──forks── supervisor of A ── its processes

A gateway that dies or does not answer is started again, and learns which runs are live. A run that ended by itself is
started again for the next request, after a growing delay if it has ended often.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from neuronpipe.launch.serving.offers import Offer
from neuronpipe.launch.supervisor.deaths import WITHIN_S, RestartBudget
from neuronpipe.launch.supervisor.logs import close_descriptors
from neuronpipe.launch.supervisor.replacement import ProcessKey
from neuronpipe.launch.supervisor.start import handle_signals, started_run
from neuronpipe.launch.supervisor.supervisor import STOPPING
from neuronpipe.launch.supervisor.watchdog import Watchdog, observe
from neuronpipe.native import lib
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.gateway.gateway_service import HostedPackages, serve_hosted
from neuronpipe.services.runtime.listener import HOSTED_NAME, Listener
from neuronpipe.services.runtime.pulse import Pulse, shared_words

GATEWAY_END_S = 3.0  # for the gateway to tell its clients that the server ends
MAX_READ_BYTES = 1 << 16
GATEWAY: ProcessKey = ("gateway", 0)


class Host:
    """The gateway and the runs of several packages.

    offers: the packages, by the names of their models
    notify: called with a line when a run starts or ends
    """

    def __init__(
        self, offers: Mapping[str, Offer], hosted: HostedPackages, listener: Listener, notify: Callable[[str], None]
    ):
        self._offers, self._hosted, self._listener, self._notify = offers, hosted, listener, notify
        self._link: socket.socket | None = None
        self._wake_read, self._wake_write = -1, -1
        self._gateway_pid = 0
        self._gateway_budget, self._gateway_died = RestartBudget([GATEWAY]), False
        self._watchdog, self._pulses = Watchdog(), shared_words(1)
        self._partial_line = b""

    def serve(self, serving: Callable[[], None]) -> None:
        """Serve until a signal, which is raised again at the end.

        serving: called once, when requests are first accepted

        Raises UserError if the gateway dies again and again.
        """
        received: list[int] = []
        try:
            with handle_signals(STOPPING, received.append), self._signals_wake():
                try:
                    self._start_gateway()
                    while not received:
                        self._look(serving)
                finally:
                    self._end_gateway()
            if received:
                signal.raise_signal(received[0])
        finally:
            for offer in self._offers.values():  # all at once, because each takes a while
                if offer.live is not None:
                    offer.live.begin_to_stop()
            for offer in self._offers.values():
                offer.contexts.close()

    @contextlib.contextmanager
    def _signals_wake(self) -> Iterator[None]:
        """Make signals write to a descriptor, so that one that comes just before `select` wakes it."""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        child_handler = signal.signal(signal.SIGCHLD, lambda *_: None)  # only for the wake-up
        try:
            yield
        finally:
            signal.signal(signal.SIGCHLD, child_handler)
            signal.set_wakeup_fd(before)
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _look(self, serving: Callable[[], None]) -> None:
        assert self._link is not None
        reports = {offer.live.report: name for name, offer in self._offers.items() if offer.live is not None}
        link = self._link.fileno()
        timeout_s = max(0.0, self._watchdog.due_at - time.monotonic())
        ready = select.select([self._wake_read, link, *reports], [], [], timeout_s)[0]
        for report in reports.keys() & set(ready):
            self._run_ended(reports[report])
        if link in ready:
            self._read_gateway(serving)
        if self._wake_read in ready:
            os.read(self._wake_read, MAX_READ_BYTES)
        if self._wake_read in ready or time.monotonic() >= self._watchdog.due_at:
            self._watch_gateway()

    # ---- the gateway -----------------------------------------------------------------------------------------
    def _start_gateway(self) -> None:
        for offer in self._offers.values():
            if offer.is_ending:  # the new gateway does not know of this run, and counts its memory as free
                self._close(offer)
        self._link, gateway_link = socket.socketpair()
        command = os.getpid()
        sys.stdout.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until the child has its own handlers
        try:
            self._pulses[0] = 0
            self._gateway_pid = os.fork()
            if self._gateway_pid == 0:
                self._be_gateway(command, gateway_link)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        gateway_link.close()
        self._partial_line = b""
        for name, offer in self._offers.items():
            if offer.live is not None:
                self._tell({"started": name, "directory": str(offer.live.directory.path)})

    def _be_gateway(self, command: int, link: socket.socket) -> None:
        code = 1
        try:
            os.setsid()  # Ctrl-C is for the command
            lib.np_process_die_with(command)
            lib.np_process_name(HOSTED_NAME)
            signal.set_wakeup_fd(-1)
            for number in (*STOPPING, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            descriptors = {0, 1, 2, link.fileno(), self._listener.descriptor}
            close_descriptors(
                lambda number, target: number not in descriptors and target.startswith(("pipe:", "socket:"))
            )
            serve_hosted(self._hosted, self._listener, link, Pulse(self._pulses, 0))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os._exit(code)

    def _watch_gateway(self) -> None:
        """Kill a gateway that does not answer. Its link closes then, as after a crash."""
        observations = {self._gateway_pid: observe(self._gateway_pid, self._pulses[0])}
        for overdue in self._watchdog.look(observations, time.monotonic()):
            self._notify(f"the gateway does not answer: {overdue.why}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(overdue.pid, signal.SIGABRT if overdue.aborts else signal.SIGKILL)

    def _read_gateway(self, serving: Callable[[], None]) -> None:
        assert self._link is not None
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = self._link.recv(MAX_READ_BYTES)
        if not data:
            self._gateway_ended()
            return
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "serving" in message:
                if not self._gateway_died:
                    serving()
            elif "start" in message:
                self._start(message["start"])
            elif "end" in message:
                self._end(message["end"])

    def _gateway_ended(self) -> None:
        """Start another gateway. Raises UserError if it dies again and again."""
        _, status = os.waitpid(self._gateway_pid, 0)
        self._gateway_pid = 0
        assert self._link is not None
        self._link.close()
        self._gateway_died = True
        code = os.waitstatus_to_exitcode(status)
        if (deaths := self._gateway_budget.count(GATEWAY, time.monotonic())) is not None:
            raise UserError(f"the gateway died {deaths} times within {WITHIN_S:.0f} s, the last time with {code}")
        self._notify(f"the gateway has ended with {code}; another one is started")
        self._start_gateway()

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._link is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: the next gateway is told which runs are live
            self._link.sendall(json.dumps(message).encode() + b"\n")

    def _end_gateway(self) -> None:
        """Let the gateway tell its clients that the server ends; kill it if that takes too long."""
        os.close(self._listener.descriptor)  # no client may wait at a port that nobody serves
        deadline, number = time.monotonic() + GATEWAY_END_S, signal.SIGTERM
        while self._gateway_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._gateway_pid, number)
            while os.waitpid(self._gateway_pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    deadline, number = deadline + GATEWAY_END_S, signal.SIGKILL
                    break
                time.sleep(0.01)
            else:
                self._gateway_pid = 0
        if self._link is not None:
            self._link.close()

    # ---- runs ------------------------------------------------------------------------------------------------
    def _start(self, name: str) -> None:
        offer = self._offers[name]
        if offer.live is not None:
            return  # a new gateway requests a run before it reads that the run is live
        again_in_s = offer.refused_until - time.monotonic()
        if again_in_s > 0:
            self._tell({"ended": name, "why": offer.reason, "again_in_s": again_in_s})
            return
        try:
            run = started_run(
                offer.package,
                offer.plan,
                None,
                stays=False,
                uses=offer.uses,
                keeps_history=offer.keeps_history,
            )
            offer.live = offer.contexts.enter_context(run)
        except UserError as error:
            self._refuse(name, str(error), 0.0)
            return
        offer.began = time.monotonic()
        self._notify(f"{name} is started: {offer.live.directory.path}")
        self._tell({"started": name, "directory": str(offer.live.directory.path)})

    def _end(self, name: str) -> None:
        """Begin to end a run. It takes a while, in which other runs may be started."""
        offer = self._offers[name]
        if offer.live is None:
            return  # it has ended by itself, which the gateway has not read yet
        offer.is_ending = True
        offer.live.begin_to_stop()

    def _run_ended(self, name: str) -> None:
        offer = self._offers[name]
        assert offer.live is not None
        reason, was_requested = offer.live.failed() or "the run has ended", offer.is_ending
        self._close(offer)
        if not was_requested:
            self._refuse(name, reason, time.monotonic() - offer.began)
            return
        self._notify(f"{name} has ended: its memory is free")
        self._tell({"ended": name, "why": "it was ended", "again_in_s": 0.0})

    def _close(self, offer: Offer) -> None:
        offer.live, offer.is_ending = None, False
        offer.contexts.close()

    def _refuse(self, name: str, reason: str, duration_s: float) -> None:
        """Refuse requests for a while after a run has ended by itself.

        duration_s: how long the run was live
        """
        offer = self._offers[name]
        wait_s = offer.backoff.after(duration_s)
        offer.refused_until, offer.reason = time.monotonic() + wait_s, reason
        self._notify(f"{name} has ended: {reason}; the next request starts it again, in {wait_s:.0f} s at the earliest")
        self._tell({"ended": name, "why": reason, "again_in_s": wait_s})
