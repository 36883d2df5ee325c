"""What a server that listens everywhere says it is reached at."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import psutil
import pytest
from neuronpipe.services.runtime import reachable_addresses as reach
from neuronpipe.services.runtime.listener import bind
from neuronpipe.services.runtime.reachable_addresses import reached_at

KEY = "0123456789abcdef"


def entry(family: int, address: str) -> SimpleNamespace:
    return SimpleNamespace(family=family, address=address)


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a bridge and Wi-Fi, which is the way out."""
    monkeypatch.setattr(reach, "_default_route_address", lambda: "192.168.1.20")
    found = {
        "lo": [entry(socket.AF_INET, "127.0.0.1"), entry(socket.AF_INET6, "::1")],
        "bridge": [entry(socket.AF_INET, "172.17.0.1")],
        "wifi": [
            entry(socket.AF_INET, "192.168.1.20"),
            entry(socket.AF_INET6, "fd00::2"),
            entry(socket.AF_INET6, "fe80::1%wifi"),
            entry(socket.AF_PACKET, "00:11:22:33:44:55"),
        ],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


@pytest.mark.usefixtures("interfaces")
def test_everywhere_is_the_addresses_that_others_can_type() -> None:
    assert reached_at("0.0.0.0") == ["192.168.1.20", "172.17.0.1"]
    assert reached_at("::") == ["192.168.1.20", "172.17.0.1", "fd00::2"]


def test_one_address_is_itself() -> None:
    assert reached_at("10.0.0.7") == ["10.0.0.7"]
    assert reached_at("127.0.0.1") == ["127.0.0.1"]


def test_a_machine_that_does_not_tell_is_reached_at_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied() -> None:
        raise PermissionError

    monkeypatch.setattr(reach, "_default_route_address", lambda: None)
    monkeypatch.setattr(psutil, "net_if_addrs", denied)
    assert reached_at("0.0.0.0") == ["127.0.0.1"]


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize("host", ["0.0.0.0", "0"])
def test_a_gateway_that_listens_everywhere_is_given_to_other_devices(host: str) -> None:
    listener = bind(host, 0, KEY)
    os.close(listener.descriptor)
    assert listener.addresses == [f"http://192.168.1.20:{listener.port}", f"http://172.17.0.1:{listener.port}"]
    assert listener.address == f"http://127.0.0.1:{listener.port}"
