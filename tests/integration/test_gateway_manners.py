"""Clients without manners, keys and crowds: what the gateway refuses, and that it goes on serving the others."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator

import psutil
import pytest
from neuronpipe.plans.plan.memory_budget import REQUESTS_BYTES
from neuronpipe.services.gateway.application import PAGE_FOLDER
from neuronpipe.services.gateway.http.http_server import MAX_CONNECTIONS

from tests.http_client import Server, read_reply, request, served
from tests.pipeline import PATIENCE_S, Shell, eventually

KEY = "correct-horse-battery"
ASK = {"prompt": "def f(", "max_tokens": 2}


@pytest.fixture(scope="module")
def server(long_shell: Shell) -> Iterator[Server]:
    with served(long_shell, "--sequences", "1") as one:
        yield one


@pytest.fixture(autouse=True)
def serves_afterwards(server: Server) -> Iterator[None]:
    yield
    assert server.post("/v1/completions", **ASK).status == 200


def exchange(server: Server, data: bytes) -> bytes:
    """What comes back before the connection ends, politely or not."""
    answer = b""
    with server.connect() as line, contextlib.suppress(ConnectionError):
        line.sendall(data)
        while piece := line.recv(1 << 16):
            answer += piece
    return answer


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 100 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\nConnection: close\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /health?" + b"z" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"Y: z\r\n" * 100_000,
    ],
    ids=["zeros", "version", "path", "length", "chunk", "header", "target", "headers"],
)
def test_garbage_is_answered_with_an_error_and_the_end(server: Server, data: bytes) -> None:
    answer = exchange(server, data)
    assert answer.startswith(b"HTTP/1.1 4") or not answer
    if answer:
        assert set(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}
        assert b"\r\nx-request-id: req_" in answer


TWO_LINES = b'{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "js\\n_schema"}}'


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "code", "said"),
    [
        ("POST", "/v1/completions", {}, b'{"prompt": ', 400, "invalid_json", "EOF while parsing"),
        ("POST", "/v1/completions", {}, b'{"prompt": "\xe9"}', 400, "invalid_json", "invalid unicode"),
        ("POST", "/v1/chat/completions", {}, TWO_LINES, 400, "invalid_value", r"not 'js\n_schema'"),
        ("POST", "/v1/completions", {}, b"[1]", 400, "invalid_value", "should be an object"),
        ("POST", "/v1/completions", {"Content_Type": "text/plain"}, b"{}", 415, "unsupported_media_type", "expected"),
        ("POST", "/v1/completions", {"Content_Type": ""}, b"{}", 415, "unsupported_media_type", "expected"),
        (
            "POST",
            "/v1/completions",
            {"Content_Encoding": "gzip"},
            b"\x1f\x8b",
            415,
            "unsupported_encoding",
            "compressed bodies are not supported",
        ),
        ("POST", "/v1/completions", {}, b" " * (5 << 20), 413, "body_too_large", "more than 4194304 bytes"),
        ("GET", "/v1/models/gpt-4", {}, None, 404, "model_not_found", "this server has 'neuronpipe-demo'"),
        ("GET", "/v1/nothing", {}, None, 404, "not_found", "the API is below /v1"),
        ("GET", "/page/nothing.js", {}, None, 404, "not_found", "the API is below /v1"),
        ("GET", "/v1/chat/completions", {}, None, 405, "method_not_allowed", "this path accepts only POST"),
        ("DELETE", "/v1/models", {}, None, 405, "method_not_allowed", "this path accepts only GET or HEAD"),
    ],
)
def test_what_is_wrong_is_said_as_openai_says_it(
    server: Server,
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes | None,
    status: int,
    code: str,
    said: str,
) -> None:
    reply = server.call(method, path, body, **headers)
    error = reply.json()["error"]
    assert (reply.status, error["code"], set(error)) == (status, code, {"message", "type", "param", "code"})
    assert said in error["message"]
    assert "\n" not in error["message"]
    assert reply.headers["x-request-id"].startswith("req_")
    assert reply.headers["content-type"] == "application/json"


UNFINISHED = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
)


def test_idle_connections_make_room_for_a_new_one(server: Server) -> None:
    with contextlib.ExitStack() as lines:
        idle = [lines.enter_context(server.connect()) for _ in range(MAX_CONNECTIONS)]
        assert server.post("/v1/completions", **ASK).status == 200
        with contextlib.suppress(ConnectionError):
            assert idle[0].recv(1) == b""  # the oldest was ended


def test_where_all_connections_are_busy_one_more_is_told_so(server: Server) -> None:
    with contextlib.ExitStack() as lines:
        for _ in range(MAX_CONNECTIONS):
            lines.enter_context(server.connect()).sendall(UNFINISHED.format(9).encode() + b"{")
        time.sleep(0.5)  # until the last ones are no idle connections any more
        reply = read_reply(lines.enter_context(server.connect()))
    assert (reply.status, reply.json()["error"]["code"]) == (503, "too_many_connections")
    assert reply.headers["x-request-id"].startswith("req_")
    assert int(reply.headers["retry-after"]) >= 1


def send_unfinished_bodies(server: Server, lines: contextlib.ExitStack) -> None:
    """Send 3 MiB of a body of 4 MiB on each of 60 connections, which `lines` closes."""
    for _ in range(60):
        line = lines.enter_context(server.connect())
        with contextlib.suppress(ConnectionError, TimeoutError):
            line.settimeout(2)
            line.sendall(UNFINISHED.format(4 << 20).encode() + b" " * (3 << 20))


def test_bodies_that_never_end_take_no_more_memory_than_is_planned_and_keep_nobody_out(server: Server) -> None:
    gateway = psutil.Process(server.run.pid("gateway"))
    before = gateway.memory_info().rss
    with contextlib.ExitStack() as lines:
        send_unfinished_bodies(server, lines)
        assert server.post("/v1/completions", **ASK).status == 200
        assert gateway.memory_info().rss - before < 2 * REQUESTS_BYTES


def test_bodies_of_clients_that_have_left_keep_no_request_out(server: Server) -> None:
    """What they sent is read for a second or more before their end is."""
    with contextlib.ExitStack() as lines:
        send_unfinished_bodies(server, lines)
    for _ in range(20):
        reply = server.call("POST", "/v1/completions", b"[" * 20_000)  # as objects a third of all memory for requests
        assert (reply.status, reply.json()["error"]["code"]) == (400, "invalid_json")


def test_a_body_in_chunks_of_a_byte_is_ended_and_one_in_sensible_chunks_is_read(server: Server) -> None:
    head = request("POST", "/v1/completions", {}, Transfer_Encoding="chunked", Content_Length="").removesuffix(b"{}")
    with server.connect() as line, contextlib.suppress(ConnectionError):
        line.sendall(head)
        sent = 0
        while sent < 32 << 20:
            sent += line.send(b"1\r\n \r\n" * 1000)
    assert sent < 32 << 20
    body = json.dumps(ASK | {"prompt": "x" * 20_000}).encode()
    for size in (20, 5000):
        chunks = [body[at : at + size] for at in range(0, len(body), size)]
        data = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        assert exchange(server, head + data + b"0\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_a_body_with_two_ends_is_refused(server: Server) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = exchange(server, head.encode() + b"0\r\n\r\n" + request("GET", "/v1/models"))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"Transfer-Encoding" in answer
    assert answer.count(b"HTTP/1.1") == 1  # what a proxy might take for the body is no second request


def test_a_head_of_many_headers_is_refused_and_a_long_path_is_cut(server: Server) -> None:
    headers = {f"X-{number}": "y" for number in range(1000)}
    assert server.call("GET", "/v1/models", **headers).status == 431
    for method, path in (("GET", "/v1/" + "x" * 9000), ("Y" * 9000, "/v1/models")):
        message = server.call(method, path).json()["error"]["message"]
        assert len(message) < 250


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 415, "unsupported_media_type"),
        (b"{", 400, "invalid_json"),
        (b"\xff\xfe", 400, "invalid_json"),
        (b"[" * 20_000, 400, "invalid_json"),
        (b"[" * 200_000, 413, "request_too_large"),
        (b'{"prompt": "\\ud800"}', 400, "invalid_json"),
        (b"[]", 400, "invalid_value"),
        (b'{"prompt": "x", "temperature": NaN}', 400, "invalid_value"),
        (b'{"prompt": "x", "temperature": 1e999}', 400, "invalid_value"),
        (b'{"prompt": [0, 99999999999999999999]}', 400, "invalid_value"),
        (b'{"prompt": [4096]}', 400, "invalid_value"),
        (b'{"prompt": ""}', 400, "invalid_value"),
        (b'{"prompt": "x", "logit_bias": {"4096": 1}}', 400, "invalid_value"),
        (b'{"prompt": "' + b"x" * (5 << 20) + b'"}', 413, "body_too_large"),
    ],
)
def test_bodies_that_say_nothing_sensible(server: Server, body: bytes, status: int, code: str) -> None:
    reply = server.call("POST", "/v1/completions", body)
    assert (reply.status, reply.json()["error"]["code"]) == (status, code)


def test_only_json_is_a_body_so_that_no_page_from_elsewhere_can_ask(server: Server) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        reply = server.call("POST", "/v1/completions", json.dumps(ASK).encode(), Content_Type=kind)
        assert reply.status == 415
    for origin in ("http://evil.example", "http://["):
        reply = server.call("POST", "/v1/completions", ASK, Origin=origin)
        assert (reply.status, reply.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert server.call("POST", "/v1/completions", ASK, Origin="http://localhost").status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost:1@evil.example", "[", ""])
def test_a_name_that_is_not_loopback_is_refused(server: Server, host: str) -> None:
    reply = server.call("GET", "/v1/models", Host=host)
    assert reply.status in (400, 403)
    assert b"neuronpipe-demo" not in reply.body


def test_a_key_lifts_the_refusal_of_other_names_as_it_says(server: Server, shell: Shell) -> None:
    error = server.call("GET", "/v1/models", Host="phone.lan:8080").json()["error"]
    assert error["code"] == "host_not_allowed"
    assert "'phone.lan:8080'" in error["message"]
    assert "--key or NEURONPIPE_KEY" in error["message"]
    with served(shell, "--run", server.run.path, "--key", KEY) as one:  # on loopback as well
        for name in ("phone.lan:8080", "localhost"):
            assert one.call("GET", "/v1/models", Host=name).status == 401
            assert one.call("GET", "/v1/models", Host=name, Authorization=f"Bearer {KEY}").status == 200


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8080", "[::1]:1", "LOCALHOST"])
def test_loopback_by_any_of_its_names_is_served(server: Server, host: str) -> None:
    assert server.call("GET", "/v1/models", Host=host).status == 200


def test_a_request_that_does_not_end_and_one_that_is_cut_off_hold_nobody_up(server: Server) -> None:
    with server.connect() as silent, server.connect() as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        with server.connect() as cut:
            cut.sendall(request("POST", "/v1/completions", ASK)[:-5])
        assert server.post("/v1/completions", **ASK).status == 200
        assert silent.fileno() > 0


def test_a_reader_who_takes_nothing_holds_little_memory_and_nobody_up(server: Server) -> None:
    gateway = psutil.Process(server.run.pid("gateway"))
    before = gateway.memory_info().rss
    with contextlib.ExitStack() as lines:
        for _ in range(6):
            line = lines.enter_context(socket.socket())
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect(("127.0.0.1", server.port))
            body = {**ASK, "max_tokens": 200, "stream": True, "logprobs": 20}
            line.sendall(request("POST", "/v1/completions", body))
        assert server.post("/v1/completions", **ASK).status == 200
        assert gateway.memory_info().rss - before < 40 << 20
    assert eventually(
        lambda: server.run.status().sequences_active + server.run.status().sequences_waiting == 0, PATIENCE_S
    )


def test_a_stream_that_nobody_reads_is_ended_and_makes_room(server: Server) -> None:
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.settimeout(PATIENCE_S)
        line.connect(("127.0.0.1", server.port))
        many = {"prompt": ["x"] * 64, "n": 8, "max_tokens": 400, "ignore_eos": True, "logprobs": 20, "stream": True}
        line.sendall(request("POST", "/v1/completions", many))
        assert eventually(lambda: server.run.status().sequences_waiting > 50)
        assert server.post("/v1/completions", **ASK).status == 200
        assert eventually(
            lambda: server.run.status().sequences_active + server.run.status().sequences_waiting == 0, PATIENCE_S
        ), "not even a tenth of its 200,000 tokens are computed meanwhile"
        received = b""
        with contextlib.suppress(ConnectionError):
            while piece := line.recv(1 << 16):
                received += piece
    assert received.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in received


def test_too_many_at_once_are_told_to_come_again(server: Server) -> None:
    with server.connect() as line:
        # All that may be under way; so long that none of them ends, and makes room, meanwhile.
        many = {"prompt": ["x"] * 64, "n": 16, "max_tokens": 400, "ignore_eos": True}
        line.sendall(request("POST", "/v1/completions", many))
        assert eventually(lambda: server.run.status().sequences_waiting > 50)
        waiting = r'^neuronpipe_texts_waiting{model="neuronpipe-demo"} 9\d\d\.0$'
        assert re.search(waiting, server.call("GET", "/metrics").body.decode(), re.MULTILINE)
        reply = server.post("/v1/completions", **ASK)
        assert (reply.status, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert reply.headers["retry-after"] == "1"
    assert eventually(lambda: server.run.status().sequences_waiting == 0)


def test_one_text_is_served_between_those_of_a_large_request(server: Server) -> None:
    with server.connect() as line:
        many = {"prompt": ["x"] * 64, "n": 15, "max_tokens": 8, "ignore_eos": True}
        line.sendall(request("POST", "/v1/completions", many))
        assert eventually(lambda: server.run.status().sequences_waiting > 50)
        assert server.post("/v1/completions", **ASK).status == 200
        assert server.run.status().sequences_waiting > 50  # and the others go on


def test_a_thousand_connections_leave_nothing_behind(server: Server) -> None:
    gateway = psutil.Process(server.run.pid("gateway"))
    before = gateway.num_fds()
    for number in range(1000):
        with server.connect() as line:
            if number % 2:
                line.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
    assert eventually(lambda: gateway.num_fds() <= before)


def test_the_first_view_of_a_ready_run_shows_it_ready_and_what_it_holds(server: Server) -> None:
    with server.connect() as line:
        line.sendall(request("GET", "/live"))
        data = b""
        while (event := data.partition(b"data: ")[2].partition(b"\n\n"))[1] == b"":
            data += line.recv(1 << 16)
    shown = json.loads(event[0])
    assert shown["ready"]
    assert 0 < sum(region["used_bytes"] for region in shown["regions"]) < shown["memory_bytes"]
    assert shown["memory_bytes"] <= shown["memory_peak_bytes"] <= shown["memory_limit_bytes"]


def test_pages_opened_again_and_again_keep_the_gateway_alive(server: Server) -> None:
    """Threads for each file of the page and for each view once took all the address space that it allowed itself."""
    pid = server.run.pid("gateway")
    names = re.findall(r'"/page/([a-z]+\.js)"', "".join(path.read_text() for path in PAGE_FOLDER.glob("*.js")))
    for _ in range(6):
        with contextlib.ExitStack() as opened:
            lines = []
            for path in ("/", "/live", *(f"/page/{name}" for name in sorted(set(names)))):
                lines.append(opened.enter_context(server.connect()))
                lines[-1].sendall(request("GET", path))
            for line in lines:
                assert line.recv(15) == b"HTTP/1.1 200 OK"
        time.sleep(0.1)  # the next page comes while this one's view ends
    assert server.run.pid("gateway") == pid


def test_a_key_is_asked_for_everywhere_but_where_it_is_typed_in(shell: Shell) -> None:
    line = shell.refused("serve", "--host", "0.0.0.0", "--port", "0")
    assert "NEURONPIPE_KEY" in line
    assert "16 or more" in shell.refused("serve", "--key", "short", "--port", "0")
    with served(shell, "--host", "0.0.0.0", "--key", KEY) as one:
        assert one.call("GET", "/health", Host="phone.lan:8080").status == 200
        for wrong in ("", f"Bearer {KEY}x", f"Basic {KEY}", "Bearer", f"Bearer {KEY[:-1]}", "Bearer \xe9" + KEY):
            for path in ("/v1/models", "/metrics", "/v1/nothing", "/openapi.json"):
                reply = one.call("GET", path, Authorization=wrong)
                assert (reply.status, reply.json()["error"]["code"]) == (401, "invalid_api_key"), (wrong, path)
        assert one.call("GET", "/v1/models", Host="phone.lan", Authorization=f"Bearer {KEY}").status == 200


def test_a_port_in_use_is_one_line(server: Server, shell: Shell) -> None:
    assert "--port 0" in shell.refused("serve", "--port", str(server.port), beside=True)


@pytest.mark.nightly
def test_a_head_that_does_not_come_is_given_up_in_time(server: Server) -> None:
    began = time.monotonic()
    with server.connect() as line:
        line.sendall(b"GET /health HTTP/1.1\r\n")
        assert line.recv(1) == b""
    assert 4 < time.monotonic() - began < 15


def test_an_answer_ends_where_its_connection_is_kept(server: Server) -> None:
    with server.connect() as line:
        for close in ("keep-alive", "close"):
            line.sendall(request("GET", "/v1/models", Connection=close))
            if close == "keep-alive":
                answer = b""
                while not answer.endswith(b"}"):
                    answer += line.recv(1 << 16)
        assert read_reply(line).status == 200
