"""All links between processes, in one table: who binds, which messages travel in each direction, how many may wait, and
what happens when the queue is full.

A link has a ROUTER at its bound end and DEALERs that connect to it, or an XPUB and SUBs. A ROUTER identifies a peer by
its routing id: "decode-0" for a service, "client-" and random characters for a client.
"""

from __future__ import annotations

from typing import Literal

from neuronpipe.protocol.codec import Message, Vocabulary
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.messages import cache, client, event, lifecycle, loader, outcome, request, snapshot, worker

WhenFull = Literal["wait", "refuse", "drop"]
WAIT_MS = 2000


@frozen(kw_only=True, slots=True)
class Direction:
    """One direction of a link.

    limit_messages: how many messages may wait per peer
    when_full: what happens to a further message. "wait": the sender waits up to WAIT_MS and then gets Full; "refuse":
        it gets Full at once; "drop": the message is dropped and counted
    """

    carries: Vocabulary
    limit_messages: int = 1
    when_full: WhenFull = "refuse"


@frozen(kw_only=True, slots=True)
class Link:
    """A link between the process that binds its socket and the processes that connect to it.

    name: also the file name of the socket in the run directory
    inward: messages to the process that binds
    """

    name: str
    bound_by: str
    connected_by: tuple[str, ...]
    inward: Direction
    outward: Direction


def _direction(limit_messages: int, when_full: WhenFull, *carries: type[Message]) -> Direction:
    return Direction(carries=Vocabulary(*carries), limit_messages=limit_messages, when_full=when_full)


_LIFE_OF_A_SERVICE = (lifecycle.Hello, lifecycle.Ready, lifecycle.Beat, lifecycle.Drained, lifecycle.Failed)
_FROM_WORKERS = (
    outcome.StepDone,
    outcome.Prefilled,
    outcome.StepAbandoned,
    outcome.StepFailed,
    outcome.Reserved,
    outcome.Released,
    outcome.Saved,
    outcome.Restored,
)
_FROM_CLIENTS = (
    request.Generate,
    request.Cancel,
    request.Score,
    request.Next,
    request.Tokenize,
    request.AskStatus,
    request.Throttle,
)
_TO_SERVICES = (
    lifecycle.Welcome,
    lifecycle.Reject,
    lifecycle.AskBeat,
    lifecycle.Drain,
    worker.Step,
    worker.Prefill,
    worker.Release,
    cache.Reserve,
    loader.Save,
    loader.Hasten,
    loader.Restore,
)
_TO_CLIENTS = (
    client.Accepted,
    client.Refused,
    client.Token,
    client.Finished,
    client.Scored,
    client.ScoreFinished,
    client.Tokenized,
    client.Status,
)

CONTROL = Link(
    name="control",
    bound_by="coordinator",
    connected_by=("prefill", "decode", "accelerator", "loader", "cache", "client"),
    inward=_direction(256, "wait", *_LIFE_OF_A_SERVICE, *_FROM_WORKERS, *_FROM_CLIENTS),
    outward=_direction(1024, "refuse", *_TO_SERVICES, *_TO_CLIENTS),
)
CACHE = Link(
    name="cache",
    bound_by="loader",
    connected_by=("cache",),
    inward=_direction(64, "wait", loader.Reset, loader.Grant, loader.Warm, loader.Trim),
    outward=_direction(64, "refuse", cache.SlotCounts, cache.ResetDone, cache.Trimmed),
)
EVENTS = Link(
    name="events",
    bound_by="coordinator",
    connected_by=("monitor",),
    inward=_direction(1, "refuse"),
    outward=_direction(1024, "drop", event.Life, event.StepEvent, lifecycle.Beat),
)
LINKS = (CONTROL, CACHE, EVENTS)
"""The links with a socket in the run directory."""

WATCH = Link(
    name="watch",
    bound_by="monitor",
    connected_by=("watcher",),
    inward=_direction(16, "refuse"),  # subscriptions; with a limit of 1, peers whose keys are being checked block it
    outward=_direction(256, "drop", snapshot.Snapshot, event.Life, event.StepEvent),
)
"""Over TCP, to subscribers that have the keys. Nothing can be sent towards the run."""
