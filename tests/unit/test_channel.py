"""Channels: delivery, bounds, and what happens with garbage, strangers and peers that vanish."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import pytest
from neuronpipe.protocol.channel import (
    Connection,
    Context,
    Listener,
    Poller,
    Publisher,
    Subscriber,
    open_context,
)
from neuronpipe.protocol.codec import MAGIC, Message, Vocabulary, encode
from neuronpipe.protocol.credits import Credits
from neuronpipe.protocol.errors import Full, Lost, UserError
from neuronpipe.protocol.links import CACHE, CONTROL, EVENTS, LINKS, Direction, Link
from neuronpipe.protocol.messages.client import Token
from neuronpipe.protocol.messages.event import Life
from neuronpipe.protocol.messages.lifecycle import Beat, Drain, Reject
from neuronpipe.protocol.messages.loader import Grant

from tests.pipeline import SLOWER

DRAIN = encode(Drain())


@pytest.fixture
def context() -> Iterator[Context]:
    with open_context() as context:
        yield context


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{os.path.relpath(tmp_path)}/link"


@contextmanager
def pair(context: Context, endpoint: str, link: Link = CONTROL) -> Iterator[tuple[Listener, Connection]]:
    listener = Listener(context, link, endpoint)
    connection = Connection(context, link, endpoint, "decode-0")
    yield listener, connection
    connection.close()
    listener.close()


def send_until_refused(listener: Listener, content: Message, pause_s: float = 0.0) -> None:
    until = monotonic() + 5 * SLOWER
    while monotonic() < until:
        listener.send("decode-0", content)
        sleep(pause_s)


def beat(step: int = 0) -> Beat:
    return Beat(role="decode", index=0, state="busy", step=step, counters={"bytes": 1.0})


def test_messages_travel_both_ways_and_the_listener_knows_who_speaks(context: Context, endpoint: str) -> None:
    with pair(context, endpoint) as (listener, connection):
        connection.send(beat(7))
        assert listener.receive(1000) == ("decode-0", beat(7))
        listener.send("decode-0", Drain())
        assert connection.receive(1000) == Drain()
        assert connection.receive() is None


def test_a_connection_may_be_opened_before_the_other_end_exists(context: Context, endpoint: str) -> None:
    connection = Connection(context, CONTROL, endpoint, "decode-0")
    connection.send(beat())
    sleep(0.05)
    listener = Listener(context, CONTROL, endpoint)
    assert listener.receive(2000) == ("decode-0", beat())


def test_a_connection_outlives_a_restart_of_the_listener(context: Context, endpoint: str) -> None:
    with pair(context, endpoint) as (listener, connection):
        connection.send(beat(1))
        assert listener.receive(1000)
        listener.close()
        sleep(0.05)
        again = Listener(context, CONTROL, endpoint)
        connection.send(beat(2))
        assert again.receive(2000) == ("decode-0", beat(2))


def test_a_peer_that_comes_back_under_its_name_takes_its_place(context: Context, endpoint: str) -> None:
    with pair(context, endpoint) as (listener, former):
        former.send(beat(1))
        assert listener.receive(1000)
        latter = Connection(context, CONTROL, endpoint, "decode-0")
        latter.send(beat(2))
        assert listener.receive(1000) == ("decode-0", beat(2))
        listener.send("decode-0", Drain())
        assert latter.receive(1000) == Drain()
        assert former.receive() is None


def test_a_peer_that_vanished_is_lost(context: Context, endpoint: str) -> None:
    with pair(context, endpoint) as (listener, connection):
        with pytest.raises(Lost, match="decode-1 is gone"):
            listener.send("decode-1", Drain())
        connection.send(beat())
        assert listener.receive(1000)
        connection.close()
        with pytest.raises(Lost, match="decode-0 is gone"):
            send_until_refused(listener, Drain(), pause_s=0.01)


def test_a_full_queue_is_an_error_and_not_a_stuck_loop(context: Context, endpoint: str) -> None:
    token = Token(request="a", index=0, token=1, text="x" * 50_000, ms=1.0)
    with pair(context, endpoint) as (listener, connection):
        connection.send(beat())
        assert listener.receive(1000)
        started = monotonic()
        with pytest.raises(Full, match="control link"):
            send_until_refused(listener, token)
        assert monotonic() - started < 5 * SLOWER


def test_a_sender_waits_no_longer_than_the_link_says(
    context: Context, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronpipe.protocol.channel.WAIT_MS", 50)
    connection = Connection(context, CACHE, endpoint, "cache-0")
    grant = Grant(generation=1, part=0, slots=b"\0" * 8)
    for _ in range(CACHE.inward.limit_messages):
        connection.send(grant)
    started = monotonic()
    with pytest.raises(Full):
        connection.send(grant)
    assert 0.04 < monotonic() - started < SLOWER


def test_only_what_the_link_carries_is_sent(context: Context, endpoint: str) -> None:
    with pair(context, endpoint) as (_, connection), pytest.raises(TypeError, match="Token does not travel this way"):
        connection.send(Token(request="a", index=0, token=1, text="", ms=1.0))


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [MAGIC],
        [MAGIC, b""],
        [MAGIC, b"\xc1"],
        [MAGIC, b"\x80"],
        [MAGIC, DRAIN, DRAIN],
        [b"GET / HTTP/1.1", DRAIN],
        [b"NPx", DRAIN],
        [b"NP999999999", DRAIN],
    ],
)
def test_garbage_is_counted_and_dropped(context: Context, endpoint: str, frames: list[bytes]) -> None:
    with pair(context, endpoint) as (listener, connection):
        connection._socket.send_multipart(frames or [b""])
        connection.send(beat(3))
        until = monotonic() + 5 * SLOWER
        while (received := listener.receive(100)) is None and monotonic() < until:
            pass
        assert received == ("decode-0", beat(3))
        assert (listener.traffic.garbage, listener.traffic.received) == (1, 1)


def test_a_type_of_another_link_is_counted_and_dropped(context: Context, endpoint: str) -> None:
    with pair(context, endpoint) as (listener, connection):
        connection._socket.send_multipart([MAGIC, encode(Life(role="decode", index=0, state="ready"))])
        connection.send(beat(3))
        until = monotonic() + 5 * SLOWER
        while (received := listener.receive(100)) is None and monotonic() < until:
            pass
        assert received == ("decode-0", beat(3))
        assert (listener.traffic.unknown, listener.traffic.garbage) == (1, 0)


def test_another_major_version_is_answered_with_a_reject(context: Context, endpoint: str) -> None:
    with pair(context, endpoint) as (listener, connection):
        connection._socket.send_multipart([b"NP3", b"whatever version 3 is like"])
        assert listener.receive(200) is None
        assert listener.traffic.foreign == 1
        answer = connection.receive(1000)
        assert isinstance(answer, Reject)
        assert "protocol 3 is not spoken here" in answer.reason


def test_a_flood_of_garbage_does_not_hold_the_reader(context: Context, endpoint: str) -> None:
    link = Link(
        name="flood",
        bound_by="a",
        connected_by=("b",),
        inward=Direction(carries=Vocabulary(Beat), limit_messages=1000, when_full="wait"),
        outward=Direction(carries=Vocabulary()),
    )
    with pair(context, endpoint, link) as (listener, connection):
        for number in range(200):
            connection._socket.send_multipart([MAGIC, b"%d" % number])
        connection.send(beat(9))
        received = None
        until = monotonic() + 5 * SLOWER
        while received is None and monotonic() < until:
            received = listener.receive(100)
        assert received == ("decode-0", beat(9))
        assert listener.traffic.garbage == 200


def test_events_reach_those_who_watch_and_cost_the_others_nothing(context: Context, endpoint: str) -> None:
    life: Message = Life(role="decode", index=0, state="ready")
    publisher = Publisher(context, EVENTS, endpoint)
    publisher.send(life)
    assert publisher.traffic.sent == 0
    subscriber = Subscriber(context, EVENTS, endpoint)
    until = monotonic() + 5 * SLOWER
    while not publisher.watched and monotonic() < until:
        sleep(0.01)
    publisher.send(life)
    assert subscriber.receive(1000) == life
    subscriber.close()
    while publisher.watched and monotonic() < until:
        sleep(0.01)
    assert not publisher.watched


def test_a_slow_subscriber_misses_events_and_delays_nobody(context: Context, endpoint: str) -> None:
    publisher = Publisher(context, EVENTS, endpoint)
    subscriber = Subscriber(context, EVENTS, endpoint)
    until = monotonic() + 5 * SLOWER
    while not publisher.watched and monotonic() < until:
        sleep(0.01)
    started = monotonic()
    for number in range(20_000):
        publisher.send(Life(role="decode", index=number, state="ready", detail="x" * 200))
    assert monotonic() - started < 5 * SLOWER
    received = 0
    while subscriber.receive(100) is not None:
        received += 1
    assert 0 < received < 20_000


def test_a_poller_waits_for_channels_and_descriptors(context: Context, endpoint: str) -> None:
    with pair(context, endpoint) as (listener, connection):
        reader, writer = os.pipe()
        poller = Poller()
        poller.add(listener)
        poller.add(reader)
        assert poller.wait(0) == []
        os.write(writer, b"x")
        assert poller.wait(1000) == [reader]
        poller.remove(reader)
        connection.send(beat())
        assert poller.wait(1000) == [listener]
        os.close(reader)
        os.close(writer)


def test_a_context_is_of_no_use_after_a_fork(context: Context, endpoint: str) -> None:
    child = os.fork()
    if child == 0:
        try:
            Connection(context, CONTROL, endpoint, "decode-0")
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_context_ends_although_messages_wait_for_nobody(endpoint: str) -> None:
    started = monotonic()
    with open_context() as context:
        Connection(context, CONTROL, endpoint, "decode-0").send(beat())
    assert monotonic() - started < 3 * SLOWER


def test_an_endpoint_that_cannot_be_bound_is_a_persons_error(context: Context) -> None:
    with pytest.raises(UserError, match="cannot bind the control link"):
        Listener(context, CONTROL, "ipc:///nowhere/at/all/control")


def test_every_link_has_a_bound() -> None:
    for link in LINKS:
        for direction in (link.inward, link.outward):
            assert direction.limit_messages > 0


def test_credits_run_out_and_come_back() -> None:
    credits = Credits()
    assert not credits.take("decode-0")
    credits.announce("decode-0", 2)
    assert credits.take("decode-0")
    assert credits.take("decode-0")
    assert not credits.take("decode-0")
    assert (credits.outstanding("decode-0"), credits.free("decode-0")) == (2, 0)
    credits.give_back("decode-0")
    assert credits.free("decode-0") == 1
    credits.announce("decode-0", 2)
    assert credits.outstanding("decode-0") == 0
    credits.give_back("decode-0")
    assert credits.free("decode-0") == 2
    credits.forget("decode-0")
    assert credits.free("decode-0") == 0
