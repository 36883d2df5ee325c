"""The addresses at which other devices reach a server that listens on all addresses. No packet is sent to find them."""

from __future__ import annotations

import ipaddress
import socket

EVERYWHERE = ("0.0.0.0", "::")
LOOPBACK = "127.0.0.1"
_FAMILIES = {"0.0.0.0": (socket.AF_INET,), "::": (socket.AF_INET, socket.AF_INET6)}


def reached_at(host: str) -> list[str]:
    """Return the addresses by which another device reaches a server that listens at `host`.

    For "all addresses" these are the machine's own, that of the default route first; loopback if there is no other.
    """
    if host not in EVERYWHERE:
        return [host]
    addresses = [_default_route_address(), *_interface_addresses(_FAMILIES[host])]
    return list(dict.fromkeys(address for address in addresses if address is not None)) or [LOOPBACK]


def _default_route_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of a datagram socket: looks up the route, and sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _interface_addresses(families: tuple[socket.AddressFamily, ...]) -> list[str]:
    """Return the addresses of the interfaces without loopback and link-local ones; none where Android forbids it."""
    import psutil  # lazily: only servers that listen on all addresses pay for the import

    try:
        entries = [entry for interface in psutil.net_if_addrs().values() for entry in interface]
    except OSError:
        return []
    texts = [entry.address for family in families for entry in entries if entry.family == family]
    addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in texts]
    return [str(address) for address in addresses if not (address.is_loopback or address.is_link_local)]
