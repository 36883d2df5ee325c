"""The ends of the watch link over TCP, protected by keys (CurveZMQ): a client without them is refused before any
message.

An invitation consists of the server's public key and the guest's secret key, 64 bytes together, in base64 that fits
into an address. The server accepts only the public key that belongs to this secret key.
"""

from __future__ import annotations

import base64
import binascii
from typing import Literal, Self
from urllib.parse import parse_qs, urlsplit

import zmq
from neuronpipe.protocol.channel import Context, Publisher, Subscriber
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.links import WATCH
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

KEY_BYTES = 32
RECONNECT_MS = 200  # ZeroMQ keeps reconnecting to a server with another key
MAX_RECONNECT_MS = 2000
Standing = Literal["alone", "stranger", "refused", "let in"]
"""State of a guest's connection: nobody answers; the peer that answers is not the server of the invitation; the server
refuses the guest's key, which is final; the server accepts the guest."""
STANDINGS: dict[int, Standing] = {
    zmq.EVENT_CLOSED: "alone",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "stranger",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "stranger",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused",
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "let in",
}
"""The state after each event of the socket."""


@frozen
class WatchKeys:
    """Keys of a watch server and of its guests, in Z85, 40 characters each."""

    public: bytes
    secret: bytes
    guest_public: bytes
    guest_secret: bytes

    @classmethod
    def fresh(cls) -> Self:
        """Return new keys. Raises UserError if ZeroMQ was built without CURVE."""
        if not zmq.has("curve"):
            raise UserError("this ZeroMQ was built without CURVE; install pyzmq from its wheels")
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    @property
    def invitation(self) -> str:
        """The keys that a guest needs, in base64."""
        return base64.urlsafe_b64encode(z85.decode(self.public) + z85.decode(self.guest_secret)).decode().rstrip("=")


def read_address(address: str) -> tuple[str, bytes, bytes]:
    """Parse `tcp://host:port?key=...`. Return the endpoint, the server's public key and the guest's secret key. Raises
    UserError."""
    try:
        parts = urlsplit(address)
        port, keys = parts.port, parse_qs(parts.query, strict_parsing=True).get("key", [""])
        raw = base64.b64decode(keys[0].rstrip("=") + "==", altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        parts, port, raw = urlsplit(""), None, b""
    if parts.scheme != "tcp" or not parts.hostname or not port or len(raw) != 2 * KEY_BYTES:
        raise UserError(
            "not a whole invitation: expected tcp://HOST:PORT?key=KEY as `neuronpipe watch --invite` prints it; "
            "put it in quotes"
        )
    return endpoint(parts.hostname, port), z85.encode(raw[:KEY_BYTES]), z85.encode(raw[KEY_BYTES:])


def endpoint(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class GuardedPublisher(Publisher):
    """The bound end of the watch link. Raises UserError if the address cannot be bound.

    port: 0 for any free port; the attribute `port` is the actual one
    """

    def __init__(self, context: Context, host: str, port: int, keys: WatchKeys) -> None:
        from zmq.auth.thread import ThreadAuthenticator  # imports asyncio, which only a watch server needs

        self._guard = ThreadAuthenticator(context._zmq)
        self._guard.start()
        self._guard.configure_curve_callback(domain="*", credentials_provider=_Only(keys.guest_public))

        def prepare(socket: zmq.Socket[bytes]) -> None:
            socket.ipv6 = ":" in host
            socket.curve_server = True
            socket.curve_secretkey = keys.secret

        try:
            super().__init__(context, WATCH, endpoint(host, port or "*"), prepare)
        except BaseException:
            self._guard.stop()
            raise
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(bound.strip("\0").rpartition(":")[2])

    def close(self) -> None:
        """Close the socket and end the check of keys."""
        super().close()
        self._guard.stop()


class GuardedSubscriber(Subscriber):
    """The connected end of the watch link. Raises UserError if `address` is no valid invitation.

    address: as in `read_address`
    """

    def __init__(self, context: Context, address: str) -> None:
        place, public, secret = read_address(address)
        self._standing: Standing = "alone"
        self._socket_events = context.socket(zmq.PAIR)
        events = f"inproc://standing-{id(self)}"

        def prepare(socket: zmq.Socket[bytes]) -> None:
            socket.ipv6 = "[" in place
            socket.curve_serverkey = public
            socket.curve_secretkey = secret
            socket.curve_publickey = zmq.curve_public(secret)
            socket.reconnect_ivl = RECONNECT_MS
            socket.reconnect_ivl_max = MAX_RECONNECT_MS

            socket.monitor(events, sum(STANDINGS))
            self._socket_events.connect(events)

        super().__init__(context, WATCH, place, prepare)

    @property
    def standing(self) -> Standing:
        while self._socket_events.poll(0):
            event = parse_monitor_message(self._socket_events.recv_multipart())["event"]
            self._standing = STANDINGS[event]
        return self._standing


class _Only:
    """ZeroMQ's check of client keys: accepts one key."""

    def __init__(self, guest_public: bytes) -> None:
        self._guest_public = guest_public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._guest_public
