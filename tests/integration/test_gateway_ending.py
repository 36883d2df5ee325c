"""What clients are told while a run starts, while its coordinator is away, and while it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest
from neuronpipe.launch.planning import DEMO

from tests.http_client import PATIENCE_S, Reply, Server, request, served
from tests.pipeline import Run, Shell, eventually

LONG = {"prompt": "def f(", "max_tokens": 480, "ignore_eos": True}
WORKERS = """
import os, time
from neuronpipe.services.worker.decode import DecodeService

class Slow(DecodeService):
    def __init__(self, job):
        while not os.path.exists(os.path.join(os.path.dirname(__file__), "begin")):
            time.sleep(0.02)
        super().__init__(job)

class Reluctant(DecodeService):
    def serve(self):
        super().serve()
        time.sleep(10)  # longer than the supervisor waits
"""


@contextlib.contextmanager
def serving(shell: Shell, worker: str) -> Iterator[Server]:
    """A server that need not be ready, with one of these workers in decode.0; who uses it ends it."""
    (shell.folder / "workers.py").write_text(WORKERS)
    place = shell.folder / "run"
    options = ("--port", "0", "--run", place, "--use", f"decode.0=workers:{worker}")
    process = shell.start("serve", "--json", *options, cwd=shell.folder)
    try:
        assert eventually(lambda: listening_ports(shell))
        yield Server(process, listening_ports(shell).pop(), Run(shell, place))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)


def listening_ports(shell: Shell) -> set[int]:
    """Where its processes listen; they say it themselves only when they are ready."""
    ports = set()
    for pid in shell.processes():
        with contextlib.suppress(psutil.Error):
            lines = psutil.Process(pid).net_connections("tcp")
            ports |= {line.laddr.port for line in lines if line.status == psutil.CONN_LISTEN}
    return ports


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline()


def require_unavailable(reply: Reply, code: str) -> None:
    error = reply.json()["error"]
    assert (reply.status, error["code"], error["type"]) == (503, code, "server_error"), reply
    assert int(reply.headers["retry-after"]) >= 1


def test_a_run_that_starts_says_so_and_serves_when_it_is_ready(shell: Shell) -> None:
    with serving(shell, "Slow") as server:
        require_unavailable(server.call("GET", "/health"), "starting")
        require_unavailable(server.post("/v1/completions", **LONG), "starting")
        (shell.folder / "begin").touch()
        ready(server.process)
        assert server.call("GET", "/health").status == 200
        assert server.post("/v1/completions", **{**LONG, "max_tokens": 2}).status == 200


@pytest.mark.nightly
def test_a_coordinator_that_does_not_answer_is_not_waited_for_without_end(shell: Shell) -> None:
    with served(shell) as server:
        coordinator = server.run.pid("coordinator")
        os.kill(coordinator, signal.SIGSTOP)
        try:
            require_unavailable(server.call("GET", "/health"), "starting")
            require_unavailable(server.post("/v1/completions", **LONG), "starting")
        finally:
            os.kill(coordinator, signal.SIGCONT)
        assert server.post("/v1/completions", **{**LONG, "max_tokens": 2}).status == 200


def test_who_asks_while_the_coordinator_is_started_again_waits_for_it(shell: Shell) -> None:
    with served(shell) as server:
        os.kill(server.run.pid("coordinator"), signal.SIGKILL)
        assert server.post("/v1/completions", **{**LONG, "max_tokens": 2}).status == 200


def health_once_it_ends(server: Server) -> Reply:
    while (reply := server.call("GET", "/health")).status == 200:
        pass
    return reply


def test_a_run_that_ends_tells_whoever_waits_and_whoever_comes(shell: Shell) -> None:
    with serving(shell, "Reluctant") as server, contextlib.ExitStack() as lines:
        ready(server.process)
        line, looking = lines.enter_context(server.connect()), lines.enter_context(server.connect())
        looking.sendall(request("GET", "/live"))
        assert looking.recv(1 << 10).startswith(b"HTTP/1.1 200")
        line.sendall(request("POST", "/v1/completions", {**LONG, "stream": True}))
        assert line.recv(1 << 10).startswith(b"HTTP/1.1 200")
        server.process.send_signal(signal.SIGINT)
        require_unavailable(health_once_it_ends(server), "draining")  # first: the supervisor does not wait for long
        require_unavailable(server.post("/v1/completions", **LONG), "draining")
        rest = b""
        while piece := line.recv(1 << 16):
            rest += piece
        assert b"[DONE]" not in rest
        (event,) = [event for event in rest.decode().split("\n\n") if "error" in event]
        assert json.loads(event.partition("data: ")[2])["error"]["code"] == "draining"
        told = b""
        while piece := looking.recv(1 << 16):
            told += piece
        assert told.rpartition(b"data: ")[2].startswith(b'{"error": {"message": "the server is ending"')
        assert server.process.wait(PATIENCE_S) == 0


def test_a_client_of_the_coordinator_is_told_that_the_run_has_ended(shell: Shell) -> None:
    with shell.up(DEMO, "--ffn-resident", "30%", "--workers", "2") as run:
        asking = shell.start("ask", "--run", run.path, "-p", "def f(", "-n", "480", "--ignore-end")
        assert eventually(lambda: run.status().sequences_active == 1)
        run.down()
        _, errors = asking.communicate(timeout=PATIENCE_S)
    assert (asking.returncode, errors) == (2, f"neuronpipe: {run.path}: the run has ended\n")
