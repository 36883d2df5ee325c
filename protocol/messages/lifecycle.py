"""The life of a process: between every service and the coordinator."""

from __future__ import annotations

from typing import Literal

from neuronpipe.protocol.codec import Message, message

State = Literal["starting", "ready", "busy", "draining", "stopped", "failed", "silent", "stuck"]

FailureCode = Literal["damaged", "io", "memory", "mismatch", "timeout", "internal"]


@message
class Hello(Message):
    """The first message of a service. Until `Welcome` arrives nothing else is sent.

    role: what the process does: "prefill", "decode", "loader", "cache", or a name of its own
    index: number among the processes of this role, from 0
    pid: process id
    incarnation: how often the supervisor had started this role and index before
    protocol: version of the wire it speaks, "major.minor"
    slots: how many requests it takes before it has answered the first; 0 for one that takes no work
    core: the processor it is pinned to
    """

    role: str
    index: int
    pid: int
    incarnation: int
    protocol: str
    slots: int
    core: int | None = None


@message
class Welcome(Message):
    """The service belongs to the run: the answer to `Hello`. A coordinator that was restarted also sends it to a
    service whose `Beat` it cannot place.

    run: id of the run
    coordinator_pid: process id of the coordinator
    protocol: version of the wire the coordinator speaks
    """

    run: str
    coordinator_pid: int
    protocol: str


@message
class Reject(Message):
    """The peer is not taken: it speaks another major version, or the plan has no such role and index.

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
class Beat(Message):
    """A sign of life, every 250 ms while there is nothing to do, and between two pieces of work. A process that is not
    at work and is not heard for 5 s is silent, as is one that a signal has stopped; one that is at work while `step`
    stays the same for too long is stuck.

    role: as in `Hello`
    index: as in `Hello`
    state: what the process says of itself
    step: the step under way, or the last one done; any number that grows with the work where there are no steps
    busy_ms: for how long it has been at it; 0 when idle
    counters: figures of this role, for monitors; of a loader: reads in_flight, trigger_waiting and value_waiting
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
    """Finish what is under way, take nothing new, answer `Drained` and exit with status 0."""


@message
class Drained(Message):
    """Nothing is left to do; the process exits.

    role: as in `Hello`
    index: as in `Hello`
    """

    role: str
    index: int


@message
class Failed(Message):
    """The last message of a process that cannot go on.

    code: what kind of trouble; "damaged" is data whose checksum is wrong, "mismatch" a plan, package or segment that
        does not belong here
    message: one line for a person
    detail: the traceback, or what else explains it
    """

    code: FailureCode
    message: str
    detail: str = ""
