"""The addresses at which others reach a server that listens at every address of this machine. Found without sending a
packet."""

from __future__ import annotations

import ipaddress
import socket

EVERYWHERE = ("0.0.0.0", "::")
LOOPBACK = "127.0.0.1"
_FAMILIES = {"0.0.0.0": (socket.AF_INET,), "::": (socket.AF_INET, socket.AF_INET6)}


def reached_at(host: str) -> list[str]:
    """What another device has to type for a server that listens at `host`: the address itself, or of those of this
    machine first the one by which it would speak to others. Loopback where it has no other."""
    if host not in EVERYWHERE:
        return [host]
    found = [_speaks_from(), *_of_interfaces(_FAMILIES[host])]
    return list(dict.fromkeys(address for address in found if address is not None)) or [LOOPBACK]


def _speaks_from() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of a datagram socket: looks up the route, and sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _of_interfaces(families: tuple[socket.AddressFamily, ...]) -> list[str]:
    """Without those that no other device can use. Android does not let everybody look: none, then."""
    import psutil  # only who listens everywhere pays for it

    try:
        entries = [entry for interface in psutil.net_if_addrs().values() for entry in interface]
    except OSError:
        return []
    found = [entry.address for family in families for entry in entries if entry.family == family]
    addresses = [ipaddress.ip_address(address.partition("%")[0]) for address in found]
    return [str(address) for address in addresses if not (address.is_loopback or address.is_link_local)]
