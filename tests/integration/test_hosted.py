"""`serve` with several packages: runs come and go as requests name them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.memory_budget import GATEWAY_BYTES

from tests.http_client import PATIENCE_S, Reply, Server, read_reply, request
from tests.pipeline import Run, Shell, eventually

Converted = Callable[..., Package]


@pytest.fixture(scope="module")
def packages(converted: Converted) -> list[Package]:
    return [converted("relu2", "f16"), converted("qwen2", "f16")]


def hosted(shell: Shell, *options: str | Path) -> tuple[Server, dict[str, Any]]:
    """A server, and what it says when it takes requests."""
    process = shell.start("serve", "--port", "0", "--json", *options)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    ready = json.loads(line)
    return Server(process, int(ready["address"].rpartition(":")[2]), Run(shell, Path())), ready


@pytest.fixture(scope="module")
def server(long_shell: Shell, packages: list[Package]) -> Iterator[Server]:
    """One with room for both runs."""
    one, _ = hosted(long_shell, *(package.path for package in packages))
    yield one
    ended(one)


def ended(server: Server) -> list[str]:
    """What it has said of its runs, now that it is ended."""
    server.process.send_signal(signal.SIGINT)
    _, errors = server.process.communicate(timeout=PATIENCE_S)
    assert server.process.returncode == 0
    return [line for line in errors.splitlines() if line.startswith("neuronpipe:")]


def asked(server: Server, package: Package | None = None, tokens: int = 4) -> Reply:
    named = {} if package is None else {"model": package.manifest.name}
    return server.post("/v1/completions", prompt="one two", max_tokens=tokens, temperature=0, **named)


def states(server: Server) -> dict[str, str]:
    models: dict[str, str] = server.call("GET", "/health").json()["models"]
    return models


def test_each_model_answers_by_its_name_and_the_first_without_one(server: Server, packages: list[Package]) -> None:
    names = [package.manifest.name for package in packages]
    listed = server.call("GET", "/v1/models").json()["data"]
    assert [one["id"] for one in listed] == names
    for package in packages:
        assert asked(server, package).json()["model"] == package.manifest.name
    assert asked(server).json()["model"] == names[0]
    assert states(server) == dict.fromkeys(names, "ready")
    tokens = {str(server.post("/tokenize", content="one two", model=name).json()["tokens"]) for name in names}
    assert tokens != {"[]"}
    figures = server.call("GET", "/metrics").body.decode()
    assert all(f'neuronpipe_run_tokens{{model="{name}"}}' in figures for name in names)


def test_ollamas_clients_see_all_models_and_those_that_are_loaded(shell: Shell, packages: list[Package]) -> None:
    server, _ = hosted(shell, *(package.path for package in packages))
    names = [f"{package.manifest.name}:latest" for package in packages]

    def models(path: str) -> dict[str, Any]:
        return {model["name"]: model for model in server.call("GET", path).json()["models"]}

    assert (list(models("/api/tags")), list(models("/api/ps"))) == (names, [])
    described = server.post("/api/show", model=names[1]).json()
    assert (described["capabilities"], list(models("/api/ps"))) == (["completion", "tools"], [])
    loaded = server.post("/api/generate", model=names[1]).json()
    assert (loaded["model"], loaded["done_reason"]) == (names[1], "load")
    (run,) = models("/api/ps").values()
    left = datetime.fromisoformat(run["expires_at"]) - datetime.now(UTC)
    assert (run["name"], run["size_vram"]) == (names[1], 0)
    assert timedelta(minutes=4) < left <= timedelta(minutes=5)
    answer = server.post("/api/generate", model=names[0], prompt="one", raw=True, options={"num_predict": 2})
    *_, last = [json.loads(line) for line in answer.body.splitlines()]
    assert last["load_duration"] > last["eval_duration"] > 0  # its run was started
    assert list(models("/api/ps")) == names
    ended(server)


def test_a_name_that_is_not_served_is_refused_with_those_that_are(server: Server, packages: list[Package]) -> None:
    refused = server.post("/v1/completions", model="another", prompt="x")
    assert refused.status == 404
    assert all(package.manifest.name in refused.json()["error"]["message"] for package in packages)


def test_ps_shows_where_the_server_is_and_what_it_serves(server: Server, packages: list[Package]) -> None:
    first, second = (package.manifest.name for package in packages)
    for package in packages:
        assert asked(server, package).status == 200
    said = server.run.shell.json("ps")
    address = f"http://127.0.0.1:{server.port}"
    assert {run["model"]: run["addresses"] for run in said["runs"]} == {first: [address], second: [address]}
    (found,) = (one for one in said["servers"] if one["addresses"] == [address])  # tests beside this have theirs
    assert found == {"addresses": [address], "answers": True, "models": {first: "ready", second: "ready"}}
    shown = server.run.shell.call("ps").out
    assert f"{address}\n  each model has a run while requests name it\n  {first}: ready\n  {second}: ready" in shown


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_gateway_that_dies_or_is_stopped_is_started_again_and_finds_the_runs(
    server: Server, packages: list[Package], number: signal.Signals
) -> None:
    before = [asked(server, package).json()["choices"] for package in packages]
    runs = {run["run"] for run in server.run.shell.json("ps", "--json")["runs"]}
    (gateway,) = (
        int(status.parent.name)
        for status in Path("/proc").glob("[0-9]*/status")
        if f"PPid:\t{server.process.pid}\n" in (text := status.read_text()) and "Name:\tnp-gateway\n" in text
    )
    os.kill(gateway, number)
    assert [asked(server, package).json()["choices"] for package in packages] == before
    assert {run["run"] for run in server.run.shell.json("ps", "--json")["runs"]} == runs


def test_a_run_that_dies_is_started_again_by_the_next_request(server: Server, packages: list[Package]) -> None:
    package = packages[1]
    before = asked(server, package).json()["choices"]
    runs = server.run.shell.json("ps", "--json")["runs"]
    (pid,) = (run["supervisor_pid"] for run in runs if run["model"] == package.manifest.name)
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: states(server)[package.manifest.name] == "no run")
    assert eventually(lambda: (reply := asked(server, package)).status == 200 and reply.json()["choices"] == before)
    assert states(server)[packages[0].manifest.name] == "ready"


@pytest.mark.nightly
def test_runs_that_come_and_go_leave_no_descriptor_behind(shell: Shell, packages: list[Package]) -> None:
    """A pipe for each run once took all descriptors, and then every request was refused."""
    server, _ = hosted(shell, packages[0].path, "--keep-alive", "0s")
    command = psutil.Process(server.process.pid)
    gateway = next(one for one in command.children() if one.name() == "np-gateway")

    def after_runs(count: int) -> list[int]:
        for _ in range(count):
            assert asked(server).status == 200
            assert eventually(lambda: set(states(server).values()) == {"no run"})
        return [command.num_fds(), gateway.num_fds()]

    before = after_runs(2)
    assert after_runs(4) == before
    assert sum("has ended: its memory is free" in line for line in ended(server)) == 6


def test_within_a_limit_for_one_runs_take_turns_and_no_text_is_broken_off(
    shell: Shell, packages: list[Package]
) -> None:
    demo, other = Package.open(DEMO), packages[0]
    limit_bytes = "1GiB"
    for _ in range(2):  # what a run takes for programs of strangers is a share of the limit
        roomy, ready = hosted(shell, DEMO, other.path, "--memory", limit_bytes)
        ended(roomy)
        takes = [one["bytes"] for one in ready["models"]]
        limit_bytes = str(max(takes) + min(takes) // 2 + GATEWAY_BYTES)
    server, ready = hosted(shell, DEMO, other.path, "--memory", limit_bytes)
    assert sum(one["bytes"] for one in ready["models"]) > ready["memory_bytes"]
    replies: list[Reply] = []

    def many() -> None:
        replies.append(server.post("/v1/completions", prompt="import os", n=12, max_tokens=450, temperature=1))

    long = threading.Thread(target=many)
    long.start()
    assert eventually(lambda: states(server)[demo.manifest.name] == "ready")
    assert asked(server, other).status == 200
    assert states(server) == {demo.manifest.name: "no run", other.manifest.name: "ready"}
    long.join(PATIENCE_S)
    assert len(replies[0].json()["choices"]) == 12
    freed = [line.split()[1] for line in ended(server) if "memory is free" in line]
    assert freed == [demo.manifest.name]


def test_a_run_that_nobody_uses_is_ended_and_comes_again(shell: Shell, packages: list[Package]) -> None:
    server, _ = hosted(shell, packages[0].path, "--keep-alive", "1s")
    first = asked(server).json()["choices"]
    assert eventually(lambda: states(server)[packages[0].manifest.name] == "no run")
    assert asked(server).json()["choices"] == first
    assert len([line for line in ended(server) if "is started" in line]) == 2


def begun_stream(server: Server, package: Package) -> tuple[socket.socket, bytes]:
    """A stream from a model without a run, and what comes of it while no run can be started: its head and a comment."""
    server.process.send_signal(signal.SIGSTOP)  # the command, which starts runs
    line = server.connect()
    body = {"model": package.manifest.name, "prompt": "one two", "max_tokens": 4, "temperature": 0, "stream": True}
    line.sendall(request("POST", "/v1/completions", body))
    came = b""
    while b": waiting\n\n" not in came:
        piece = line.recv(1 << 16)
        assert piece, came
        came += piece
    return line, came


def test_a_stream_has_its_head_and_a_comment_before_its_run_is_there(shell: Shell, packages: list[Package]) -> None:
    first, second = packages
    server, _ = hosted(shell, first.path, second.path)
    expected = asked(server, first).json()["choices"][0]["text"]
    try:
        line, came = begun_stream(server, second)
        assert came.startswith(b"HTTP/1.1 200 ")
        assert states(server)[second.manifest.name] == "starting"
        assert asked(server, first).json()["choices"][0]["text"] == expected
    finally:
        server.process.send_signal(signal.SIGCONT)
    with line:
        reply = read_reply(line, came)
    text = "".join(event["choices"][0]["text"] for event in reply.events())
    assert text == asked(server, second).json()["choices"][0]["text"]
    ended(server)


def test_a_run_that_cannot_be_started_is_the_last_event_of_a_stream_that_waits(
    shell: Shell, packages: list[Package], tmp_path: Path
) -> None:
    place = tmp_path / "package"
    shutil.copytree(packages[0].path, place)
    server, _ = hosted(shell, place, "--keep-alive", "1s")
    try:
        line, came = begun_stream(server, packages[0])
        shutil.rmtree(place)
    finally:
        server.process.send_signal(signal.SIGCONT)
    with line:
        reply = read_reply(line, came)
    *comments, last, nothing = reply.body.decode().split("\n\n")
    assert (set(comments), nothing) == ({": waiting"}, "")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "restarting"
    ended(server)


def test_two_packages_of_one_name_and_options_of_one_run_are_refused(shell: Shell, packages: list[Package]) -> None:
    path = packages[0].path
    assert "both models are called" in shell.refused("serve", path, path)
    assert "--run /tmp/x: applies to one run" in shell.refused("serve", path, packages[1].path, "--run", "/tmp/x")
    too_little = shell.refused("serve", path, packages[1].path, "--memory", "60MiB")
    assert f"{path.name}: --memory" in too_little
    assert "of 60MiB the gateway takes" in too_little
    least = too_little.split("so that --memory ")[1].split(" is the least")[0]
    assert least.endswith("MiB")
    assert "--memory" not in shell.refused("serve", path, packages[1].path, "--memory", least, "--port", "99999")
    assert shell.refused("serve", path, "nosuch").startswith("neuronpipe: nosuch: no such package")
    assert "no package with a name" in shell.refused("serve", "--all")
