"""When `serve` starts another run, and what clients hear until then."""

from __future__ import annotations

import http.client
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from neuronpipe.launch.serving.restarting import MAX_WAIT_S, MIN_WAIT_S, STEADY_S, Backoff, refuse_for
from neuronpipe.services.runtime.listener import Listener, bind


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = bind("127.0.0.1", 0, None)
    yield made
    os.close(made.descriptor)


def test_each_wait_is_twice_the_one_before_up_to_a_limit() -> None:
    backoff = Backoff()
    waits = [backoff.after(duration_s=1.0) for _ in range(10)]
    assert waits[:4] == [MIN_WAIT_S, 2 * MIN_WAIT_S, 4 * MIN_WAIT_S, 8 * MIN_WAIT_S]
    assert waits[-1] == MAX_WAIT_S


def test_a_run_that_lasted_begins_anew() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.after(duration_s=1.0)
    assert backoff.after(duration_s=STEADY_S) == MIN_WAIT_S


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS"])
def test_who_comes_between_two_runs_is_told_why_and_when(listener: Listener, method: str) -> None:
    refusing = threading.Thread(target=refuse_for, args=(listener, 0.5, "decode.0 died 6 times"))
    refusing.start()
    connection = http.client.HTTPConnection("127.0.0.1", listener.port, timeout=5)
    connection.request(method, "/health", body=b"{}" if method == "POST" else None)
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    assert (b"decode.0 died 6 times" in body) is (method != "HEAD")
    refusing.join()


def test_a_client_that_says_nothing_does_not_keep_the_next_run_waiting(listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)):
        refusing = threading.Thread(target=refuse_for, args=(listener, 0.1, "why"))
        refusing.start()
        refusing.join(timeout=10)
        assert not refusing.is_alive()


def test_the_socket_stays_for_the_next_run(listener: Listener) -> None:
    refuse_for(listener, 0.01, "why")
    kept = socket.socket(fileno=os.dup(listener.descriptor))
    with kept, socket.create_connection(("127.0.0.1", listener.port)):
        kept.settimeout(5)
        kept.accept()[0].close()
