"""Messages about the life of a process, between every service and the coordinator."""

from __future__ import annotations

from typing import Literal

from neuronpipe.protocol.codec import Message, message

State = Literal["starting", "ready", "busy", "draining", "stopped", "failed", "silent", "stuck", "gone"]

FailureCode = Literal["damaged", "io", "memory", "mismatch", "timeout", "internal"]


@message
class Hello(Message):
    """The first message of a service. The service sends nothing else until `Welcome` arrives.

    role: "prefill", "decode", "accelerator", "loader", "cache", or a name of its own
    index: number among the processes of this role, from 0
    pid: process id
    incarnation: how many processes the supervisor had started before for this role and index
    protocol: version of the protocol that the service speaks, "major.minor"
    slots: how many pieces of work it accepts before it has answered the first; 0 if it accepts none
    core: the processor to which it is pinned
    numerics: the name of its arithmetic, if it computes steps; otherwise empty. Two processes with the same name
        compute the same bits of the same step. Our native engine uses "cpu:" and the instruction set. An accelerator
        uses the name of the decode workers, or a name that ends with "+" and theirs; in the second case, a step in
        which it takes part has the accelerator's name
    prompt_cache: true if a loader answers `Save` and `Restore`
    drafts: true if a worker stores the state, keys and values of a model's draft layer in each step, and predicts
        tokens with it in a `Step`
    """

    role: str
    index: int
    pid: int
    incarnation: int
    protocol: str
    slots: int
    core: int | None = None
    numerics: str = ""
    prompt_cache: bool = False
    drafts: bool = False


@message
class Welcome(Message):
    """The answer to `Hello`: the service belongs to the run. A restarted coordinator also sends it when a `Beat`
    arrives from a service that it does not know yet.

    run: id of the run
    coordinator_pid: process id of the coordinator
    protocol: version of the protocol that the coordinator speaks
    """

    run: str
    coordinator_pid: int
    protocol: str


@message
class Reject(Message):
    """The peer is refused: it speaks another major version, the plan has no such role and index, or its `Hello` lacks
    something that its role needs.

    reason: one line for a person
    """

    reason: str


@message
class Ready(Message):
    """The answer to every `Welcome`: the service has loaded what it needs and accepts work.

    role: as in `Hello`
    index: as in `Hello`
    """

    role: str
    index: int


@message
class AskBeat(Message):
    """A request for a `Beat`. The coordinator sends it every 250 ms while requests are under way or a monitor is
    attached, but not to a service that has not answered the last one. Otherwise it sends none, so that the run sleeps.
    A service that has received no `Welcome` yet ignores it."""


@message
class Beat(Message):
    """A heartbeat: the answer to `AskBeat`. A service may also send it unasked. The coordinator reports a service that
    was ready as "silent" if it has no work and does not answer for 5 s, or if a signal has stopped it.

    role: as in `Hello`
    index: as in `Hello`
    state: the state of the process in its own view
    step: the step under way, or the last one done; in a process without steps, any number that grows with its work
    busy_ms: how long the work under way has taken so far; 0 when idle
    counters: figures of this role. Those of a loader tell the coordinator who keeps the run waiting: `in_flight`
        (reads), `trigger_waiting` and `value_waiting` (cluster parts), `trigger_free` and `value_free` (slots)
    """

    role: str
    index: int
    state: State
    step: int = 0
    busy_ms: float = 0.0
    counters: dict[str, float]


@message
class Drain(Message):
    """A request to end: the service accepts no new work, finishes the work under way, answers `Drained`, and exits with
    status 0."""


@message
class Drained(Message):
    """The answer to `Drain`: no work is left, and the service exits.

    role: as in `Hello`
    index: as in `Hello`
    """

    role: str
    index: int


@message
class Failed(Message):
    """The last message of a process that cannot go on.

    code: kind of failure. "damaged": data with a wrong checksum; "io": a read or write failed; "memory": memory could
        not be allocated; "mismatch": a plan, package or segment does not belong to this run; "timeout": something did
        not happen in time; "internal": anything else
    message: one line for a person
    detail: the traceback, or another explanation
    """

    code: FailureCode
    message: str
    detail: str = ""
