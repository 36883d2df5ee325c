"""A live run as commands see it: finding it, speaking with its coordinator, following its warm-up."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from neuronpipe.launch.formats import show_bytes, show_left
from neuronpipe.launch.progress import Elapsed, Progress, passes
from neuronpipe.protocol.channel import Connection, open_context
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.messages.client import Accepted, Finished, Refused, ScoreFinished, Status, WarmUp
from neuronpipe.protocol.messages.request import AskStatus, Cancel, Generate, Score
from neuronpipe.protocol.run_directory import RunDirectory, RunFile
from neuronpipe.protocol.segments import Closing

POLL_MS = 50
QUIET_MS = 500
WARM_UP_POLL_S = 0.1
READY_POLL_S = 0.02
STARTING = "starting"
MAX_UNKNOWN_S = 1.0  # a run that has not begun within this time has nothing to warm up, or a loader that does not tell


class Declined(UserError):
    """The run lives, and does not take this request on."""


class Client(Closing):
    """One client connection. `failed` is asked while waiting: the reason when the run is over."""

    def __init__(self, endpoint: str, failed: Callable[[], str | None]) -> None:
        self._context = open_context()
        self._channel = Connection(self._context, CONTROL, endpoint, f"client-{os.urandom(6).hex()}")
        self._failed = failed

    def close(self) -> None:
        self._context.close()

    def send(self, message: Message) -> None:
        self._channel.send(message)

    def replies(self) -> Iterator[Message | None]:
        """Messages from the coordinator, as they come; None when there was none for a while. Raises UserError when
        the run ends."""
        quiet_ms = 0
        while True:
            passes()
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
        ask: Generate | Score,
        quiet: Callable[[Status | None], None] = lambda status: None,
        seen_before: Callable[[Status], None] = lambda status: None,
    ) -> Iterator[Message]:
        """Send a request and yield its answers up to the last. Interrupted, it is cancelled. quiet: called again and
        again while nothing comes, with how the run is, once that is known. seen_before: told once how it was before the
        request. Raises Declined when it is refused, UserError when the run ends.

        A coordinator that was restarted does not know the request: a text is asked for again (the same tokens come
        again, `Token.index` tells which), a score has to be started again by the person. Asking twice is harmless.
        """
        self.send(AskStatus())  # so that it is known which coordinator accepts: its process answers in this order
        self.send(ask)
        seen: int | None = None
        home: int | None = None
        asked = False
        status: Status | None = None
        answers = 0  # the first one was on its way before the request: it says nothing about it
        try:
            for message in self.replies():
                if message is None:
                    quiet(status)
                    asked = True
                    self.send(AskStatus())
                elif isinstance(message, Status):
                    if status is None:
                        seen_before(message)
                    status = message
                    seen = next(process.pid for process in message.processes if process.role == "coordinator")
                    answers += 1
                    if asked and answers > 1 and seen != home:
                        if home is not None and isinstance(ask, Score):
                            raise UserError("the coordinator was restarted and has forgotten this text; start again")
                        home = None
                        self.send(ask)
                    asked = False
                if getattr(message, "request", None) != ask.request:
                    continue
                assert message is not None
                if isinstance(message, Refused):
                    if message.code == "draining":
                        continue  # why the run ends is known when it has ended
                    raise Declined(message.message)
                if isinstance(message, Accepted):
                    home = seen
                yield message
                if isinstance(message, Finished | ScoreFinished):
                    return
        except KeyboardInterrupt:
            self.send(Cancel(request=ask.request))
            raise

    def status(self, quiet: Callable[[], None] = lambda: None) -> Status:
        """How the run is. quiet: called again and again while there is no answer."""
        self.send(AskStatus())
        for message in self.replies():
            if isinstance(message, Status):
                return message
            if message is None:
                quiet()
                self.send(AskStatus())  # a coordinator that was restarted has lost the question
        raise AssertionError


def attach(path: Path | None) -> Client:
    """A client of the run at `path`, or of the only live one. Raises NotRunning when there is none."""
    directory, run_file = RunDirectory.find(path)
    return Client(run_file.endpoints[CONTROL.name], run_ended(directory))


def described(directory: RunDirectory, run_file: RunFile) -> dict[str, Any]:
    """Which run it is, by the names that every verb's --json has for it. run: what --run takes."""
    return {
        "run": str(directory.path),
        "id": run_file.run,
        "model": "" if run_file.summary is None else run_file.summary.model,
        "package": run_file.package,
        "plan": run_file.plan,
        "supervisor_pid": run_file.supervisor_pid,
    }


def run_ended(directory: RunDirectory) -> Callable[[], str | None]:
    """What tells whether a run is over: the reason, None while it lives."""

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
    """`43 %, 1.8 GiB of 4.2 GiB, 1.2 GiB/s, 2 s left`; without speed and time where the loader does not tell."""
    if warm_up is None:
        return "not begun"
    share = 100 * warm_up.loaded_bytes // max(1, warm_up.total_bytes)
    said = f"{share} %, {show_bytes(warm_up.loaded_bytes)} of {show_bytes(warm_up.total_bytes)}"
    if warm_up.left_s is None:
        return said
    return f"{said}, {show_bytes(warm_up.bytes_per_s)}/s, {show_left(warm_up.left_s)}"


def starting(status: Status | None) -> str:
    """What a run that starts is said to do, and who keeps it waiting. None: it has not told yet."""
    notes = "" if status is None else status.notes()
    return f"{STARTING}: {notes}" if notes else STARTING


def await_ready(client: Client, *, plain: bool) -> None:
    """Until a run that was just started takes requests; stderr says that it starts. Raises UserError when the run ends
    first. plain: lines, not one that changes."""
    with Elapsed(plain=plain) as elapsed:
        while not (status := client.status(lambda: elapsed.say(starting(None)))).ready:
            elapsed.say(starting(status))
            time.sleep(READY_POLL_S)


def follow_warm_up(client: Client, *, plain: bool) -> None:
    """Show progress until all of it is there; then, if that took long enough to be shown, say so. Raises UserError when
    the run ends first. plain: lines, not a bar."""
    unknown_until = time.monotonic() + MAX_UNKNOWN_S
    with Progress("warming up", "bytes", plain=plain) as progress:
        while True:
            warm_up = client.status().warm_up
            if warm_up.done if warm_up is not None else time.monotonic() > unknown_until:
                break
            if warm_up is not None:
                progress(warm_up.loaded_bytes, warm_up.total_bytes)
            time.sleep(WARM_UP_POLL_S)
    if warm_up is not None and progress.was_shown:
        speed = f", {show_bytes(warm_up.bytes_per_s)}/s" if warm_up.bytes_per_s else ""
        print(f"neuronpipe: memory is warm: {show_bytes(warm_up.total_bytes)}{speed}", file=sys.stderr, flush=True)
