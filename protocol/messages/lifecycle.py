"""The life of a process: between every service and the coordinator."""

from __future__ import annotations

from typing import Literal

from neuronpipe.protocol.codec import Message, message

State = Literal["starting", "ready", "busy", "draining", "stopped", "failed", "silent", "stuck", "gone"]

FailureCode = Literal["damaged", "io", "memory", "mismatch", "timeout", "internal"]


@message
class Hello(Message):
    """The first message of a service. Until `Welcome` arrives nothing else is sent.

    role: "prefill", "decode", "accelerator", "loader", "cache", or a name of its own
    index: number among the processes of this role, from 0
    pid: process id
    incarnation: how many processes the supervisor had started before for this role and index
    protocol: version of the wire it speaks, "major.minor"
    slots: how many pieces of work it takes before it has answered the first; 0 if it takes none
    core: the processor it is pinned to
    numerics: the name of its arithmetic, for who computes steps: two processes with the same name compute the same bits
        of the same step. "cpu:" and the instruction set for our native engine. An accelerator's is that of the decode
        workers, or ends with "+" and that one: then a step in which it takes part has its name. Empty for who computes
        none
    """

    role: str
    index: int
    pid: int
    incarnation: int
    protocol: str
    slots: int
    core: int | None = None
    numerics: str = ""


@message
class Welcome(Message):
    """The service belongs to the run: the answer to `Hello`. A restarted coordinator also sends it when it gets a
    `Beat` from a service that it does not know yet.

    run: id of the run
    coordinator_pid: process id of the coordinator
    protocol: version of the wire the coordinator speaks
    """

    run: str
    coordinator_pid: int
    protocol: str


@message
class Reject(Message):
    """The peer is refused: it speaks another major version, or the plan has no such role and index.

    reason: one line for a person
    """

    reason: str


@message
class Ready(Message):
    """The service has loaded what it needs and takes work: the answer to every `Welcome`.

    role: as in `Hello`
    index: as in `Hello`
    """

    role: str
    index: int


@message
class AskBeat(Message):
    """Send a `Beat`. The coordinator sends it every 250 ms while requests are under way or a monitor is attached, and
    not while the last one is unanswered; a run without either sleeps. A service that was not welcomed yet ignores it.
    """


@message
class Beat(Message):
    """A sign of life: the answer to `AskBeat`. A service may send it at other times as well, as those did that speak
    2.4 or less, every 250 ms. A process without work that does not answer for 5 s is silent, and so is one that a
    signal has stopped. A process with work whose `step` stays the same for too long is stuck.

    role: as in `Hello`
    index: as in `Hello`
    state: the process's own view
    step: the step under way, or the last one done; any number that grows with the work where there are no steps
    busy_ms: how long the work under way has taken so far; 0 when idle
    counters: figures of this role, for monitors; a loader's: reads in_flight, trigger_waiting and value_waiting
        cluster parts, trigger_free and value_free slots
    """

    role: str
    index: int
    state: State
    step: int = 0
    busy_ms: float = 0.0
    counters: dict[str, float]


@message
class Drain(Message):
    """Finish the work under way, take no new work, answer `Drained` and exit with status 0."""


@message
class Drained(Message):
    """No work is left; the process exits.

    role: as in `Hello`
    index: as in `Hello`
    """

    role: str
    index: int


@message
class Failed(Message):
    """The last message of a process that cannot go on.

    code: kind of failure; "damaged": data with a wrong checksum; "mismatch": a plan, package or segment that does not
        belong to this run
    message: one line for a person
    detail: the traceback, or another explanation
    """

    code: FailureCode
    message: str
    detail: str = ""
