"""Serving several packages: the command starts a gateway, and then starts and ends runs as that asks. What they say to
each other is in services/gateway/runs/hosted_packages.py.

    neuronpipe serve A B ──forks── gateway
         │  ▲                        │   ▲
         │  └── start B, end A ──────┘   │ ZeroMQ, to the coordinator of each run
         └──forks── supervisor of A ── its processes

The gateway is started again when it dies or does not answer, and finds the runs that are live. A run that ended by
itself is started again when a request comes for it, not before its time where it has ended often.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neuronpipe.launch.formats import AUTO, show_bytes
from neuronpipe.launch.planning import implementations, open_package, planned_here, refuse_contradictions
from neuronpipe.launch.searching import FOLLOWED_LIMIT
from neuronpipe.launch.serving.restarting import Backoff
from neuronpipe.launch.supervisor.deaths import WITHIN_S, RestartBudget
from neuronpipe.launch.supervisor.logs import close_descriptors
from neuronpipe.launch.supervisor.replacement import ProcessKey
from neuronpipe.launch.supervisor.start import LiveRun, answered, started_run
from neuronpipe.launch.supervisor.supervisor import STOPPING
from neuronpipe.launch.supervisor.watchdog import Watchdog, sight_of
from neuronpipe.native import lib
from neuronpipe.plans.measure.probe import probe
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan
from neuronpipe.plans.plan.memory_budget import gateway_bytes, templates_bytes
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.gateway.gateway_service import HostedPackages, serve_hosted
from neuronpipe.services.runtime.implementations import Implementations
from neuronpipe.services.runtime.listener import HOSTED_NAME, Listener
from neuronpipe.services.runtime.pulse import Pulse, shared_words

LAST_WORDS_S = 3.0
MAX_BYTES = 1 << 16
GATEWAY: ProcessKey = ("gateway", 0)


@dataclass
class Offer:
    """A package, and how it is run. told_to_end: its run, of which something may be left. refused_until: after runs
    that ended by themselves."""

    package: Package
    plan: Plan
    uses: Implementations
    live: LiveRun | None = None
    told_to_end: bool = False
    ends: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    began: float = 0.0
    backoff: Backoff = field(default_factory=Backoff)
    refused_until: float = 0.0
    why: str = ""


def offered(
    arguments: argparse.Namespace, paths: Sequence[Path], measured: Callable[[str], None] | None = None
) -> dict[str, Offer]:
    """These packages by their models' names, each with the plan that it has whenever it runs: as the arguments ask,
    within what the gateway leaves of the limit. measured: as `planned_here` has it. Raises UserError, naming the
    package where there are several."""
    refuse_contradictions(arguments)
    offers: dict[str, Offer] = {}
    packages = _by_name(arguments, paths)
    limited = arguments.memory not in (None, AUTO)
    gateway = _gateway_bytes((package for _, package in packages.values()), arguments.memory) if limited else 0
    for name, (path, package) in packages.items():
        asked = argparse.Namespace(**{**vars(arguments), "package": path})
        if limited:
            asked.memory = max(1, asked.memory - gateway)
        with _naming(path, arguments, gateway):
            plan = planned_here(asked, package, several=True, gateway=False, measured=measured).plan
            offers[name] = Offer(package, plan, implementations(arguments.use, plan))
    return offers


def _by_name(arguments: argparse.Namespace, paths: Sequence[Path]) -> dict[str, tuple[Path, Package]]:
    """The packages that were named, open: two of one name are refused before the device is measured for any."""
    found: dict[str, tuple[Path, Package]] = {}
    for path in paths:
        with _naming(path, arguments):
            package = open_package(path, plain=arguments.json)
        name = package.manifest.name
        if name in found:
            raise UserError(f"{path} and {found[name][0]}: both models are called {name}; serve one of them")
        found[name] = path, package
    return found


def _gateway_bytes(packages: Iterable[Package], limit_bytes: int) -> int:
    """What a gateway of these packages takes of a limit for it and all runs."""
    chat_models = sum(package.manifest.chat is not None for package in packages)
    return gateway_bytes(chat_models, templates_bytes(limit_bytes))


@contextlib.contextmanager
def _naming(path: Path, arguments: argparse.Namespace, gateway: int = 0) -> Iterator[None]:
    """An error says which package it is of. gateway: the bytes that the gateway takes."""
    try:
        yield
    except UserError as error:
        raise UserError(_of_package(str(error), path, arguments, gateway)) from None


def _of_package(said: str, path: Path, arguments: argparse.Namespace, gateway: int) -> str:
    """What is wrong with one of several packages: which, and what it cannot have."""
    if not said.startswith(str(path)):
        said = f"{path.name}: {said}"
    if arguments.memory in (None, AUTO) or "--memory" not in said:
        return said
    return f"{said}; of {show_bytes(arguments.memory)} the gateway takes {show_bytes(gateway)}"


def whole_limit_bytes(arguments: argparse.Namespace, path: Path) -> int:
    """What the gateway and all runs together may take: --memory, else what is available now."""
    if arguments.memory not in (None, AUTO):
        return int(arguments.memory)
    device = probe(path)
    if arguments.memory == AUTO:
        return int(FOLLOWED_LIMIT * device.memory_total_bytes)
    return device.memory_available_bytes


def shared_limit_bytes(arguments: argparse.Namespace, whole_bytes: int, offers: Iterable[Offer]) -> int:
    """What all runs together may take of `whole_limit_bytes`. One that follows what is available leaves room for the
    gateway already."""
    if arguments.memory == AUTO:
        return whole_bytes
    return max(1, whole_bytes - _gateway_bytes((offer.package for offer in offers), whole_bytes))


class Host:
    """The packages by name. said: told in a line what begins and what ends."""

    def __init__(
        self, offers: Mapping[str, Offer], hosted: HostedPackages, listener: Listener, said: Callable[[str], None]
    ):
        self._offers, self._hosted, self._listener, self._said = offers, hosted, listener, said
        self._link: socket.socket | None = None
        self._woken, self._waking = -1, -1
        self._gateway_pid = 0
        self._gateway_budget, self._gateway_died = RestartBudget([GATEWAY]), False
        self._watchdog, self._pulses = Watchdog(), shared_words(1)
        self._rest = b""

    def serve(self, serving: Callable[[], None]) -> None:
        """Serve until a signal. serving: called when requests are first taken. Raises what the signal is for, and
        UserError when the gateway dies again and again."""
        told: list[int] = []
        try:
            with answered(STOPPING, told.append), self._woken_by_signals():
                try:
                    self._start_gateway()
                    while not told:
                        self._look(serving)
                finally:
                    self._end_gateway()
            if told:
                signal.raise_signal(told[0])
        finally:
            for offer in self._offers.values():  # all at once: each takes a while
                if offer.live is not None:
                    offer.live.begin_to_stop()
            for offer in self._offers.values():
                offer.ends.close()

    @contextlib.contextmanager
    def _woken_by_signals(self) -> Iterator[None]:
        """A signal makes a descriptor readable, so that none is overslept that comes just before the sleep."""
        self._woken, self._waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)
        child_handler = signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up is all: the gateway may be stopped
        try:
            yield
        finally:
            signal.signal(signal.SIGCHLD, child_handler)
            signal.set_wakeup_fd(before)
            os.close(self._woken)
            os.close(self._waking)

    def _look(self, serving: Callable[[], None]) -> None:
        """Wait until something is to be done, and do it."""
        assert self._link is not None
        reports = {offer.live.report: name for name, offer in self._offers.items() if offer.live is not None}
        link = self._link.fileno()
        patience_s = max(0.0, self._watchdog.due_at - time.monotonic())
        ready = select.select([self._woken, link, *reports], [], [], patience_s)[0]
        for report in reports.keys() & set(ready):
            self._run_ended(reports[report])
        if link in ready:
            self._hear(serving)
        if self._woken in ready:
            os.read(self._woken, MAX_BYTES)
        if self._woken in ready or time.monotonic() >= self._watchdog.due_at:
            self._watch_gateway()

    # ---- the gateway -----------------------------------------------------------------------------------------
    def _start_gateway(self) -> None:
        for offer in self._offers.values():
            if offer.told_to_end:  # of which the new gateway will not know: its memory must be free
                self._close(offer)
        self._link, theirs = socket.socketpair()
        command = os.getpid()
        sys.stdout.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until the child has handlers of its own
        try:
            self._pulses[0] = 0
            self._gateway_pid = os.fork()
            if self._gateway_pid == 0:
                self._be_gateway(command, theirs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._rest = b""
        for name, offer in self._offers.items():
            if offer.live is not None:
                self._tell({"started": name, "directory": str(offer.live.directory.path)})

    def _be_gateway(self, command: int, link: socket.socket) -> None:
        """In the child; never returns."""
        code = 1
        try:
            os.setsid()  # Ctrl-C is for the command
            lib.np_process_die_with(command)
            lib.np_process_name(HOSTED_NAME)
            signal.set_wakeup_fd(-1)
            for number in (*STOPPING, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            kept = {0, 1, 2, link.fileno(), self._listener.descriptor}
            close_descriptors(lambda number, target: number not in kept and target.startswith(("pipe:", "socket:")))
            serve_hosted(self._hosted, self._listener, link, Pulse(self._pulses, 0))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os._exit(code)

    def _watch_gateway(self) -> None:
        """Kill a gateway that does not answer. Its link closes then, as that of one that died."""
        sights = {self._gateway_pid: sight_of(self._gateway_pid, self._pulses[0])}
        for overdue in self._watchdog.look(sights, time.monotonic()):
            self._said(f"the gateway does not answer: {overdue.why}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(overdue.pid, signal.SIGABRT if overdue.aborts else signal.SIGKILL)

    def _hear(self, serving: Callable[[], None]) -> None:
        assert self._link is not None
        came = b""
        with contextlib.suppress(ConnectionResetError):
            came = self._link.recv(MAX_BYTES)
        if not came:
            self._gateway_ended()
            return
        *lines, self._rest = (self._rest + came).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "serving" in said:
                if not self._gateway_died:
                    serving()
            elif "start" in said:
                self._start(said["start"])
            elif "end" in said:
                self._end(said["end"])

    def _gateway_ended(self) -> None:
        """Start another one, unless it dies again and again."""
        _, status = os.waitpid(self._gateway_pid, 0)
        self._gateway_pid = 0
        assert self._link is not None
        self._link.close()
        self._gateway_died = True
        code = os.waitstatus_to_exitcode(status)
        if (deaths := self._gateway_budget.count(GATEWAY, time.monotonic())) is not None:
            raise UserError(f"the gateway died {deaths} times within {WITHIN_S:.0f} s, the last time with {code}")
        self._said(f"the gateway has ended with {code}; another one is started")
        self._start_gateway()

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._link is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: the next one is told what is live
            self._link.sendall(json.dumps(message).encode() + b"\n")

    def _end_gateway(self) -> None:
        """It says to its clients that the server is ending; then it is killed."""
        os.close(self._listener.descriptor)  # no client must wait at a socket that nobody serves
        deadline, number = time.monotonic() + LAST_WORDS_S, signal.SIGTERM
        while self._gateway_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._gateway_pid, number)
            while os.waitpid(self._gateway_pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    deadline, number = deadline + LAST_WORDS_S, signal.SIGKILL
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
            return  # which a gateway that has just been started is told, but had not heard yet
        again_in_s = offer.refused_until - time.monotonic()
        if again_in_s > 0:
            self._tell({"ended": name, "why": offer.why, "again_in_s": again_in_s})
            return
        try:
            run = started_run(offer.package, offer.plan, None, stays=False, uses=offer.uses)
            offer.live = offer.ends.enter_context(run)
        except UserError as error:
            self._refuse(name, str(error), 0.0)
            return
        offer.began = time.monotonic()
        self._said(f"{name} is started: {offer.live.directory.path}")
        self._tell({"started": name, "directory": str(offer.live.directory.path)})

    def _end(self, name: str) -> None:
        """As the gateway asks. It takes a while, in which others may be started."""
        offer = self._offers[name]
        if offer.live is None:
            return  # it has ended by itself, which the gateway is told
        offer.told_to_end = True
        offer.live.begin_to_stop()

    def _run_ended(self, name: str) -> None:
        """As it was told, or by itself."""
        offer = self._offers[name]
        assert offer.live is not None
        why, told = offer.live.failed() or "the run has ended", offer.told_to_end
        self._close(offer)
        if not told:
            self._refuse(name, why, time.monotonic() - offer.began)
            return
        self._said(f"{name} is ended: its memory is free")
        self._tell({"ended": name, "why": "it was ended", "again_in_s": 0.0})

    def _close(self, offer: Offer) -> None:
        """Wait until nothing of its run is left."""
        offer.live, offer.told_to_end = None, False
        offer.ends.close()

    def _refuse(self, name: str, why: str, lasted_s: float) -> None:
        """For a while, whose length the runs before it tell."""
        offer = self._offers[name]
        wait_s = offer.backoff.after(lasted_s)
        offer.refused_until, offer.why = time.monotonic() + wait_s, why
        self._said(
            f"{name} has ended: {why}; the next request starts it again, {wait_s:.0f} s from now at the earliest"
        )
        self._tell({"ended": name, "why": why, "again_in_s": wait_s})
