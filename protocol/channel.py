"""Ends of links over ZeroMQ, which check the type and limit the number of messages.

    Listener    the bound end of a link with a ROUTER; sends to a named peer
    Connection  its connected end, a DEALER
    Publisher   the bound end of a link with an XPUB; a subscriber that does not keep up misses messages
    Subscriber  its connected end, a SUB
    Poller      waits for several channels and plain file descriptors at once

A message is two frames: the magic with the major version, and one msgpack map. A message that cannot be decoded is
counted and dropped, and each reason is logged once. A channel belongs to one thread. Only this module and guarded.py
use ZeroMQ.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
from neuronpipe.protocol.codec import MAGIC, MAX_FRAME_BYTES, VERSION, Message, encode
from neuronpipe.protocol.errors import Full, Lost, UnknownType, UserError, WireError
from neuronpipe.protocol.links import WAIT_MS, Direction, Link
from neuronpipe.protocol.memory.segments import Closing
from neuronpipe.protocol.messages.lifecycle import Reject

LINGER_MS = 500
RECONNECT_MS = 20
MAX_RECONNECT_MS = 500
BAD_FRAMES_PER_CALL = 64
MAX_LOGGED = 16
MORE_FRAMES = int(zmq.SNDMORE)  # a plain int: combining enumeration flags would take a third of the time of sending

Prepare = Callable[["zmq.Socket[bytes]"], None]
"""A function that sets options of a socket before it is bound or connected."""

log = logging.getLogger(__name__)


class Context(Closing):
    """The ZeroMQ context of one process. Threads do not survive a fork, so every process opens its own."""

    def __init__(self) -> None:
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._pid = os.getpid()

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        """Return a new socket. Raises UserError if no further one can be opened, RuntimeError in a fork of the process
        that opened this context."""
        if os.getpid() != self._pid:
            raise RuntimeError("this context was opened before a fork; open another one in this process")
        try:
            socket = self._zmq.socket(kind)
        except zmq.ZMQError as error:
            raise UserError(f"cannot open a socket: {error}") from error
        socket.linger = LINGER_MS
        socket.maxmsgsize = MAX_FRAME_BYTES
        self._sockets = [open_socket for open_socket in self._sockets if not open_socket.closed] + [socket]
        return socket

    def close(self) -> None:
        """Close all sockets, wait at most LINGER_MS until pending messages are sent, and end ZeroMQ's threads. Do
        nothing in a fork. No thread may use a channel of this context afterwards."""
        if os.getpid() == self._pid:
            for socket in self._sockets:
                socket.close()
            self._zmq.term()


def open_context() -> Context:
    """Return a context for this process. Call it after the last fork."""
    return Context()


@dataclass(slots=True)
class Traffic:
    """Message counts of a channel.

    dropped: not sent, because the queue was full
    garbage: could not be decoded
    unknown: had a type that this link does not carry
    foreign: had another major version
    """

    sent: int = 0
    received: int = 0
    dropped: int = 0
    garbage: int = 0
    unknown: int = 0
    foreign: int = 0


class Channel:
    """Base of the ends of all links."""

    def __init__(self, socket: zmq.Socket[bytes], link: Link, incoming: Direction, outgoing: Direction) -> None:
        self.link = link
        self.traffic = Traffic()
        self._socket = socket
        self._incoming = incoming
        self._outgoing = outgoing
        self._logged: set[str] = set()
        self.last_dropped: dict[str, str] = {}
        """Why the last undecodable message of each peer was dropped, for at most MAX_LOGGED peers."""
        socket.rcvhwm = incoming.limit_messages
        socket.sndhwm = outgoing.limit_messages
        socket.sndtimeo = WAIT_MS if outgoing.when_full == "wait" else 0
        socket.rcvtimeo = 0

    def close(self) -> None:
        """Close the socket. ZeroMQ goes on sending pending messages for at most LINGER_MS."""
        self._socket.close()

    def _bind(self, endpoint: str) -> None:
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise UserError(f"{endpoint}: cannot bind the {self.link.name} link: {error}") from error

    def _send(self, route: Sequence[bytes], content: Message) -> None:
        if type(content) not in self._outgoing.carries:
            raise TypeError(f"{type(content).__name__} does not travel this way on the {self.link.name} link")
        self._send_frames([*route, MAGIC, encode(content)])

    def _send_frames(self, frames: Sequence[bytes]) -> None:
        try:
            for frame in frames[:-1]:
                self._socket.send(frame, MORE_FRAMES)
            self._socket.send(frames[-1])
        except zmq.Again:
            if self._outgoing.when_full != "drop":
                raise Full(f"{self.link.name} link: the queue is full") from None
            self.traffic.dropped += 1
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                raise Lost(f"{self.link.name} link: {_name(frames[0])} is gone") from None
            raise
        else:
            self.traffic.sent += 1

    def _receive(self, timeout_ms: int, route_frames: int) -> tuple[list[bytes], Message] | None:
        """Return the next legal message and the frames before it. Many undecodable messages in a row end the call, so
        that a process that polls several channels can serve the others."""
        if timeout_ms > 0 and not self._socket.poll(timeout_ms):
            return None
        for _ in range(BAD_FRAMES_PER_CALL):
            try:
                frames = self._receive_frames()
            except zmq.Again:
                return None
            route, content_frames = frames[:route_frames], frames[route_frames:]
            if (content := self._accept(route, content_frames)) is not None:
                self.traffic.received += 1
                return route, content
        return None

    def _receive_frames(self) -> list[bytes]:
        # A Frame knows whether more frames follow; asking the socket would look up a flag of an enumeration.
        frame = self._socket.recv(copy=False)
        frames = [frame.bytes]
        while frame.more:
            frame = self._socket.recv(copy=False)
            frames.append(frame.bytes)
        return frames

    def _accept(self, route: Sequence[bytes], frames: Sequence[bytes]) -> Message | None:
        try:
            if len(frames) != 2:
                raise WireError(f"{len(frames)} frames, expected 2")
            if frames[0] != MAGIC:
                self._refuse_foreign(route, frames[0])
                return None
            return self._incoming.carries.decode(frames[1])
        except UnknownType as error:
            self.traffic.unknown += 1
            self._log_dropped(route, error)
        except WireError as error:
            self.traffic.garbage += 1
            self._log_dropped(route, error)
        return None

    def _refuse_foreign(self, route: Sequence[bytes], magic: bytes) -> None:
        if not (len(magic) <= 8 and magic[:2] == MAGIC[:2] and magic[2:].isdigit()):
            raise WireError("the first frame is not the magic")
        self.traffic.foreign += 1
        if route and Reject in self._outgoing.carries:
            version = magic[2:].decode()
            try:
                self._send(route, Reject(reason=f"protocol {version} is not spoken here; this run speaks {VERSION}"))
            except (Full, Lost) as error:
                log.debug("%s", error)

    def _log_dropped(self, route: Sequence[bytes], error: WireError) -> None:
        text, peer = str(error), _name(*route)
        if peer in self.last_dropped or len(self.last_dropped) < MAX_LOGGED:
            self.last_dropped[peer] = text
        if text not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(text)
            log.warning("%s link: dropped a message from %s: %s", self.link.name, peer or "the peer", text)


def _name(*route: bytes) -> str:
    return ", ".join(part.decode("latin-1") for part in route)


class Listener(Channel):
    """The bound end of a link with a ROUTER. A peer that connects with another one's routing id replaces it."""

    def __init__(self, context: Context, link: Link, endpoint: str) -> None:
        socket = context.socket(zmq.ROUTER)
        super().__init__(socket, link, link.inward, link.outward)
        socket.router_mandatory = True
        socket.router_handover = True
        self._bind(endpoint)

    def send(self, peer: str, content: Message) -> None:
        """Send a message to a peer. Raises Lost if there is no such peer, Full if its queue is full."""
        self._send([peer.encode("latin-1")], content)

    def send_frames(self, peer: str, *frames: bytes) -> None:
        """Send raw frames to a peer, to test how it handles illegal ones. Raises like `send`."""
        self._send_frames([peer.encode("latin-1"), *frames])

    def receive(self, timeout_ms: int = 0) -> tuple[str, Message] | None:
        """Return the next message and its sender; None if none arrives within the time, or sooner after undecodable
        messages."""
        received = self._receive(timeout_ms, 1)
        return None if received is None else (_name(received[0][0]), received[1])


class Connection(Channel):
    """The connected end of a link with a ROUTER. It may be opened before the bound end exists, and reconnects when that
    end is restarted.

    name: routing id
    """

    def __init__(self, context: Context, link: Link, endpoint: str, name: str) -> None:
        socket = context.socket(zmq.DEALER)
        super().__init__(socket, link, link.outward, link.inward)
        socket.routing_id = name.encode("latin-1")
        socket.reconnect_ivl = RECONNECT_MS
        socket.reconnect_ivl_max = MAX_RECONNECT_MS
        socket.connect(endpoint)

    def send(self, content: Message) -> None:
        """Send a message. Raises Full if the link's limit is reached and stays so."""
        self._send([], content)

    def send_frames(self, *frames: bytes) -> None:
        """Send raw frames, to test how the peer handles illegal ones. Raises like `send`."""
        self._send_frames(frames)

    def receive(self, timeout_ms: int = 0) -> Message | None:
        """Return the next message; None if none arrives within the time, or sooner after undecodable messages."""
        received = self._receive(timeout_ms, 0)
        return None if received is None else received[1]


class Publisher(Channel):
    """The bound end of a link with an XPUB. Without a subscriber, messages are not even encoded."""

    def __init__(self, context: Context, link: Link, endpoint: str, prepare: Prepare = lambda socket: None) -> None:
        super().__init__(context.socket(zmq.XPUB), link, link.inward, link.outward)
        prepare(self._socket)
        self._watched = False
        self._bind(endpoint)

    @property
    def watched(self) -> bool:
        while True:
            try:
                # The first subscription to this major version and the end of the last one: b"\1NP2", b"\0NP2".
                frame = self._socket.recv()
            except zmq.Again:
                return self._watched
            if frame[1:] in (b"", MAGIC):
                self._watched = frame[:1] == b"\1"

    def send(self, content: Message) -> None:
        """Send to all subscribers without waiting. A subscriber that does not keep up misses the message."""
        if self.watched:
            self._send([], content)


class Subscriber(Channel):
    """The connected end of a link with an XPUB."""

    def __init__(self, context: Context, link: Link, endpoint: str, prepare: Prepare = lambda socket: None) -> None:
        socket = context.socket(zmq.SUB)
        super().__init__(socket, link, link.outward, link.inward)
        socket.subscribe(MAGIC)
        socket.reconnect_ivl = RECONNECT_MS
        socket.reconnect_ivl_max = MAX_RECONNECT_MS
        prepare(socket)
        socket.connect(endpoint)

    def receive(self, timeout_ms: int = 0) -> Message | None:
        """Return the next message; None if none arrives within the time, or sooner after undecodable messages."""
        received = self._receive(timeout_ms, 0)
        return None if received is None else received[1]


class Poller:
    """Waits until one of several channels or file descriptors is readable."""

    def __init__(self) -> None:
        self._zmq = zmq.Poller()
        self._sources: dict[object, Channel | int] = {}

    def add(self, source: Channel | int) -> None:
        handle = source if isinstance(source, int) else source._socket
        self._zmq.register(handle, zmq.POLLIN)
        self._sources[handle] = source

    def remove(self, source: Channel | int) -> None:
        """Stop waiting for this source. Call it before the source is closed."""
        handle = source if isinstance(source, int) else source._socket
        self._zmq.unregister(handle)
        del self._sources[handle]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors to watch after `wait(0)` has returned nothing. When one becomes readable, call `wait(0)`
        again, which may return nothing."""
        return tuple(s if isinstance(s, int) else s._socket.fileno() for s in self._sources.values())

    def wait(self, timeout_ms: int | None = None) -> list[Channel | int]:
        """Return the readable sources; none after `timeout_ms` (None: no limit). Read a channel until it returns None:
        several messages may have arrived as one event."""
        return [self._sources[handle] for handle, _ in self._zmq.poll(timeout_ms)]
