"""A client of a live run: finding the run, talking to its coordinator, following its warm-up."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from neuronpipe.launch.formats import show_bytes, show_left
from neuronpipe.launch.progress import Elapsed, Progress, refresh
from neuronpipe.protocol.channel import Connection, open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.memory.segments import Closing
from neuronpipe.protocol.messages.client import Accepted, Finished, Refused, ScoreFinished, Status, WarmUp
from neuronpipe.protocol.messages.request import AskStatus, Cancel, Generate, Score
from neuronpipe.protocol.run_directory import RunDirectory, RunFile

POLL_MS = 50
QUIET_MS = 500
WARM_UP_POLL_S = 0.1
READY_POLL_S = 0.02
STARTING = "starting"
MAX_UNKNOWN_S = 1.0  # if no warm-up was reported by then, there is none, or the loader does not report it


class Declined(UserError):
    """Raised when a request is refused, and the run goes on."""


class Client(Closing):
    """One connection to the coordinator of a run.

    failed: polled while waiting; returns the reason once the run has ended, None before
    """

    def __init__(self, endpoint: str, failed: Callable[[], str | None]) -> None:
        self._context = open_context()
        self._channel = Connection(self._context, CONTROL, endpoint, f"client-{os.urandom(6).hex()}")
        self._failed = failed

    def close(self) -> None:
        self._context.close()

    def send(self, message: Message) -> None:
        self._channel.send(message)

    def replies(self) -> Iterator[Message | None]:
        """Yield the coordinator's messages as they come, and None after each QUIET_MS without one.

        Raises UserError with the reason when the run ends.
        """
        quiet_ms = 0
        while True:
            refresh()
            message = self._channel.receive(POLL_MS)
            if message is not None:
                quiet_ms = 0
                yield message
                continue
            if (reason := self._failed()) is not None:
                raise UserError(reason)
            quiet_ms += POLL_MS
            if quiet_ms >= QUIET_MS:
                quiet_ms = 0
                yield None

    def request(
        self,
        request: Generate | Score,
        on_wait: Callable[[Status | None], None] = lambda status: None,
        first_status: Callable[[Status], None] = lambda status: None,
    ) -> Iterator[Message]:
        """Send a request and yield its answers up to the last one. KeyboardInterrupt cancels the request.

        on_wait: called after each QUIET_MS without a message, with the last status of the run; None before the first
        first_status: called once, with the status before the request

        Raises Declined if the run refuses the request, UserError if the run ends.

        A restarted coordinator does not know the request. A `Generate` is then sent again, and its tokens come again,
        from `Token.index` 0 on. For a `Score`, UserError is raised.
        """
        # The coordinator answers in order, so the status tells the process that accepts the request.
        self.send(AskStatus())
        self.send(request)
        coordinator_pid: int | None = None  # of the last status
        accepted_by: int | None = None
        awaits_status = False
        status: Status | None = None
        statuses = 0  # received; the first one was sent before the request arrived, and does not show that it is lost
        try:
            for message in self.replies():
                if message is None:
                    on_wait(status)
                    awaits_status = True
                    self.send(AskStatus())
                elif isinstance(message, Status):
                    if status is None:
                        first_status(message)
                    status = message
                    coordinator_pid = next(
                        process.pid for process in message.processes if process.role == "coordinator"
                    )
                    statuses += 1
                    if awaits_status and statuses > 1 and coordinator_pid != accepted_by:
                        if accepted_by is not None and isinstance(request, Score):
                            raise UserError("the coordinator was restarted and has lost this request; start again")
                        accepted_by = None
                        self.send(request)
                    awaits_status = False
                if getattr(message, "request", None) != request.request:
                    continue
                assert message is not None
                if isinstance(message, Refused):
                    if message.code == "draining":
                        continue  # the reason is known once the run has ended
                    raise Declined(message.message)
                if isinstance(message, Accepted):
                    accepted_by = coordinator_pid
                yield message
                if isinstance(message, Finished | ScoreFinished):
                    return
        except KeyboardInterrupt:
            self.send(Cancel(request=request.request))
            raise

    def status(self, on_wait: Callable[[], None] = lambda: None) -> Status:
        """Return the run's status.

        on_wait: called after each QUIET_MS without an answer
        """
        self.send(AskStatus())
        for message in self.replies():
            if isinstance(message, Status):
                return message
            if message is None:
                on_wait()
                self.send(AskStatus())  # a restarted coordinator has lost the question
        raise AssertionError


def attach(path: Path | None) -> Client:
    """Return a client of the run at `path`, or of the only live run. Raises NotRunning if there is none."""
    directory, run_file = RunDirectory.find(path)
    return Client(run_file.endpoints[CONTROL.name], run_ended(directory))


def run_facts(directory: RunDirectory, run_file: RunFile) -> dict[str, Any]:
    """Return the fields by which the JSON output of every verb identifies a run; `run` is the value for --run."""
    return {
        "run": str(directory.path),
        "id": run_file.run,
        "model": "" if run_file.summary is None else run_file.summary.model,
        "package": run_file.package,
        "plan": run_file.plan,
        "supervisor_pid": run_file.supervisor_pid,
    }


def run_ended(directory: RunDirectory) -> Callable[[], str | None]:
    """Return a function that returns the reason once a run has ended, and None while it is live."""

    def reason() -> str | None:
        try:
            directory.read()
        except NotRunning:
            return f"{directory.path}: the run has ended"
        except UserError as error:
            return str(error)
        return None

    return reason


def show_warm_up(warm_up: WarmUp | None) -> str:
    """Return e.g. `43 %, 1.8 GiB of 4.2 GiB, 1.2 GiB/s, 2 s left`; speed and time left only if they are known."""
    if warm_up is None:
        return "not begun"
    percent = 100 * warm_up.loaded_bytes // max(1, warm_up.total_bytes)
    loaded = f"{percent} %, {show_bytes(warm_up.loaded_bytes)} of {show_bytes(warm_up.total_bytes)}"
    if warm_up.left_s is None:
        return loaded
    return f"{loaded}, {show_bytes(warm_up.bytes_per_s)}/s, {show_left(warm_up.left_s)}"


def starting(status: Status | None) -> str:
    """Return the line about a run that starts, with what it waits for.

    status: None before the run has answered
    """
    notes = "" if status is None else status.notes()
    return f"{STARTING}: {notes}" if notes else STARTING


def await_ready(client: Client, *, plain: bool) -> None:
    """Wait until a run that was just started takes requests, and show that on stderr.

    plain: show lines, not one line that changes

    Raises UserError if the run ends first.
    """
    with Elapsed(plain=plain) as elapsed:
        while not (status := client.status(lambda: elapsed.say(starting(None)))).ready:
            elapsed.say(starting(status))
            time.sleep(READY_POLL_S)


def follow_warm_up(client: Client, *, plain: bool) -> None:
    """Show progress on stderr until memory is warm; if that took long enough to be shown, print a last line.

    plain: show lines, not a bar

    Raises UserError if the run ends first.
    """
    report_due = time.monotonic() + MAX_UNKNOWN_S
    with Progress("warming up", "bytes", plain=plain) as progress:
        while True:
            warm_up = client.status().warm_up
            if warm_up.done if warm_up is not None else time.monotonic() > report_due:
                break
            if warm_up is not None:
                progress(warm_up.loaded_bytes, warm_up.total_bytes)
            time.sleep(WARM_UP_POLL_S)
    if warm_up is not None and progress.was_shown:
        speed = f", {show_bytes(warm_up.bytes_per_s)}/s" if warm_up.bytes_per_s else ""
        print(f"neuronpipe: memory is warm: {show_bytes(warm_up.total_bytes)}{speed}", file=sys.stderr, flush=True)
