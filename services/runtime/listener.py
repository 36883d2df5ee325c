"""The gateway's listening socket, which is bound before the first gateway process starts.

A restarted gateway inherits the same socket, so that connections which arrived in between wait in its queue.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.runtime.reachable_addresses import EVERYWHERE, reached_at

BACKLOG = 128
KEY_VARIABLE = "NEURONPIPE_KEY"
MIN_KEY_CHARACTERS = 16
ALL_ORIGINS = "*"
LOCAL_ORIGINS = "localhost"
HOSTED_NAME = b"np-gateway"
"""The process name of a gateway that serves several packages. The gateway of one run is `np-gateway.0`."""
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@frozen(kw_only=True)
class Listener:
    """A bound socket and its access rules.

    key: what clients must send; None on loopback, where any user of this machine may connect
    origins: the sites whose pages may use the server; "*" allows all, "localhost" this machine's at any port
    """

    descriptor: int
    host: str
    port: int
    key: str | None
    origins: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """The URL for a browser on this machine."""
        return self._url({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host))

    @property
    def addresses(self) -> list[str]:
        """The URLs for a browser on another device, the most likely first. On loopback, the URL for this machine."""
        return [self._url(host) for host in reached_at(self.host)]

    def _url(self, host: str) -> str:
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a server that is bound to `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def chosen_key(option: str | None) -> str | None:
    """Return the key of the command line, otherwise that of the environment. Raises UserError for a key that is easily
    guessed, or that no header can carry."""
    key = os.environ.get(KEY_VARIABLE) if option is None else option
    if key is None:
        return None
    if len(key) < MIN_KEY_CHARACTERS or not all("!" <= c <= "~" for c in key):
        raise UserError(
            f"the key: expected {MIN_KEY_CHARACTERS} or more visible ASCII characters without blanks; "
            "make one with `openssl rand -hex 16`"
        )
    return key


def checked_origins(origins: Sequence[str]) -> tuple[str, ...]:
    """Check the origins of --cors. Raises UserError for one that no browser sends."""
    for origin in origins:
        try:
            parts = urlsplit(origin)
            sent = f"{parts.scheme}://{parts.netloc}"
        except ValueError:
            sent = ""
        if origin in (ALL_ORIGINS, LOCAL_ORIGINS):
            continue
        if origin != sent.lower() or not parts.scheme or not parts.netloc or "@" in origin:
            raise UserError(
                f"--cors {origin}: expected an origin like https://chat.example.org, localhost for pages at any port "
                "of this machine, or * for any page"
            )
    return tuple(origins)


def bind(host: str, port: int, key: str | None, origins: tuple[str, ...] = ()) -> Listener:
    """Bind the port; 0 takes any free one. Raises UserError if it is taken, or if other machines could connect without
    a key."""
    if not 0 <= port < 1 << 16:
        raise UserError(f"--port {port}: between 0 and 65535")
    if key is None and not is_loopback(host):
        raise UserError(
            f"--host {host}: other machines can reach it, so a key is needed; "
            f"set {KEY_VARIABLE} or --key, for instance to what `openssl rand -hex 16` prints"
        )
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        server = socket.socket(family, socket.SOCK_STREAM)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(place)
            server.listen(BACKLOG)
        except OSError:
            server.close()
            raise
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port}: cannot be listened on: {error.strerror}; name another, or --port 0 for any"
        ) from None
    address, bound_port = server.getsockname()[:2]
    host = address if address in EVERYWHERE else host  # `0` is another spelling of 0.0.0.0
    return Listener(descriptor=server.detach(), host=host, port=bound_port, key=key, origins=origins)
