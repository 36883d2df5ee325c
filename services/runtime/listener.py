"""Where the gateway listens, decided and bound before any of its processes exists: a gateway that is started again
takes the same socket, in whose queue new connections have waited."""

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
"""What the gateway of several packages calls itself; that of a run has a number, `np-gateway.0`."""
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@frozen(kw_only=True)
class Listener:
    """A bound socket, and the key that is asked for; None on loopback: any user of this machine may connect. origins:
    of pages of other sites that may use the server; "*" is all, "localhost" those of this machine at any port."""

    descriptor: int
    host: str
    port: int
    key: str | None
    origins: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """What a browser on this machine is given."""
        return self._url({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host))

    @property
    def addresses(self) -> list[str]:
        """What a browser on another device is given, the likeliest first; on loopback, one on this machine."""
        return [self._url(host) for host in reached_at(self.host)]

    def _url(self, host: str) -> str:
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def chosen_key(given: str | None) -> str | None:
    """The key of the command line, else that of the environment. Raises UserError for one that is easily guessed, or
    that no header could carry."""
    key = os.environ.get(KEY_VARIABLE) if given is None else given
    if key is None:
        return None
    if len(key) < MIN_KEY_CHARACTERS or not all("!" <= c <= "~" for c in key):
        raise UserError(
            f"the key: expected {MIN_KEY_CHARACTERS} or more visible ASCII characters without blanks; "
            "make one with `openssl rand -hex 16`"
        )
    return key


def checked_origins(given: Sequence[str]) -> tuple[str, ...]:
    """The origins of --cors, as browsers write them. Raises UserError for what no browser sends."""
    for origin in given:
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
    return tuple(given)


def bind(host: str, port: int, key: str | None, origins: tuple[str, ...] = ()) -> Listener:
    """Take the port; 0 takes any that is free. Raises UserError when it cannot be had, or would let strangers in."""
    if not 0 <= port < 1 << 16:
        raise UserError(f"--port {port}: between 0 and 65535")
    if key is None and not is_loopback(host):
        raise UserError(
            f"--host {host}: other machines can reach it, so a key is needed; "
            f"set {KEY_VARIABLE} or --key, for instance to what `openssl rand -hex 16` prints"
        )
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(place)
            made.listen(BACKLOG)
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port}: cannot be listened on: {error.strerror}; name another, or --port 0 for any"
        ) from None
    address, bound = made.getsockname()[:2]
    host = address if address in EVERYWHERE else host  # `0` and the like
    return Listener(descriptor=made.detach(), host=host, port=bound, key=key, origins=origins)
