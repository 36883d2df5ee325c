"""What `serve` says of the run it serves, and a gateway of somebody else's in place of ours."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

from tests.http_client import PATIENCE_S, Server, served
from tests.pipeline import Run, Shell, beside_progress, eventually

Converted = Callable[..., Package]
PROGRESS = re.compile(r"neuronpipe: .*, \d+ s\n")
KEY = "correct-horse-battery"
GATEWAY = """
import http.server, os, socket, sys

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = ("key " + os.environ["NEURONPIPE_KEY"]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

server = http.server.HTTPServer(("", 0), Answer, bind_and_activate=False)
server.socket = socket.socket(fileno=int(sys.argv[1]))
server.serve_forever()
"""


@pytest.fixture(scope="module")
def run(long_shell: Shell) -> Iterator[Run]:
    with long_shell.up(DEMO) as one:
        yield one


def said(shell: Shell, *options: str | Path) -> list[str]:
    """The lines that `serve` prints when it is ready."""
    process = shell.start("serve", "--port", "0", *options)
    assert process.stdout is not None
    lines = [process.stdout.readline().strip() for _ in range(5)]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    return lines


@pytest.mark.parametrize("words", [(), ("--keep-alive", "5m")])
def test_the_address_comes_before_what_was_measured(shell: Shell, tmp_path: Path, words: tuple[str, ...]) -> None:
    cache = Path(shutil.copytree(os.environ["XDG_CACHE_HOME"], tmp_path / "cache"))
    for file in cache.glob("neuronpipe/*.json"):  # what makes a start measure again
        record = json.loads(file.read_text())
        record |= {"taken_at": record["taken_at"] - 3600, "tries": 0, "tried_at": 0.0}  # earlier tests may have tried
        record["measured"]["busy"] = 0.9
        file.write_text(json.dumps(record))
    environment = {"XDG_CACHE_HOME": str(cache)}
    server = shell.start("serve", "--port", "0", *words, environment=environment, stderr=subprocess.STDOUT)
    assert server.stdout is not None
    lines = []
    patience = threading.Timer(PATIENCE_S, server.kill)
    patience.start()
    while "measured flash again" not in "".join(lines[-1:]):
        lines.append(server.stdout.readline())
        assert lines[-1], lines
    patience.cancel()
    server.send_signal(signal.SIGINT)
    server.communicate(timeout=PATIENCE_S)
    assert next(line for line in lines if not PROGRESS.fullmatch(line)).startswith("serving ")


def test_a_place_where_no_run_is_live_gets_a_new_one_and_serve_says_so(shell: Shell) -> None:
    place = shell.folder / "mistyped"
    assert said(shell, "--run", place)[1] == f"run:             a new one, {place}"


def test_a_live_run_is_joined_and_serve_says_so(shell: Shell, run: Run) -> None:
    assert said(shell, "--run", run.path)[1] == f"run:             a live one, {run.path}"


def test_what_a_live_run_cannot_give_any_more_is_refused(shell: Shell, run: Run, converted: Converted) -> None:
    another = converted("relu2", "f16").path
    line = shell.refused("serve", another, "--run", run.path)
    assert f"{another}: the run at {run.path} has another package, {DEMO}" in line
    for option, value in (("--memory", "1GiB"), ("--context", "64"), ("--use", "decode=a:B")):
        line = shell.refused("serve", "--run", run.path, option, value)
        assert f"{option}: the run at {run.path} is live and keeps its plan" in line


def test_a_program_in_the_gateways_process_gets_the_socket_and_the_key(shell: Shell) -> None:
    program = shell.folder / "gateway.py"
    program.write_text(GATEWAY)
    command = shlex.join([sys.executable, str(program)])  # a script's first line holds no interpreter below a blank
    with served(shell, "--key", KEY, "--use", f"gateway=argv:{command} {{listen}}") as server:
        assert server.call("GET", "/").body == f"key {KEY}".encode()
        os.kill(server.run.pid("gateway"), signal.SIGKILL)
        assert server.call("GET", "/").status == 200  # it waited for the new one
        assert eventually(lambda: server.run.status().processes[-1].restarts == 1)


def test_a_storm_of_kills_ends_a_run_and_serve_starts_another(shell: Shell) -> None:
    process = shell.start("serve", DEMO, "--port", "0", "--json", "--workers", "2")
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    run = Run(shell, Path(ready["run"]))
    server = Server(process, int(ready["address"].rpartition(":")[2]), run)
    before = server.post("/v1/completions", prompt="def f(x):", max_tokens=8, temperature=0).json()["choices"]
    killed: set[int] = set()

    def restarts() -> bool:
        try:
            return server.call("GET", "/health").json().get("error", {}).get("code") == "restarting"
        except ConnectionResetError:  # the run's own gateway had this connection when the run ended
            return False

    while not restarts():
        with contextlib.suppress(StopIteration, UserError, OSError):
            if (worker := run.pid("decode")) not in killed:
                os.kill(worker, signal.SIGKILL)
                killed.add(worker)
    refused = server.post("/v1/completions", prompt="def f(x):", max_tokens=8)
    assert (refused.status, refused.json()["error"]["code"]) == (503, "restarting")
    assert "died 6 times within 30 s" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 2
    assert eventually(lambda: server.call("GET", "/health").status == 200)
    assert server.post("/v1/completions", prompt="def f(x):", max_tokens=8, temperature=0).json()["choices"] == before
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    ended, again = beside_progress(errors).splitlines()
    assert "another one is started in 1 s" in ended
    assert "serving again" in again
    assert process.returncode == 0
