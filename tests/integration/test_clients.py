"""Other people's clients, unchanged and by their defaults, against a run of the demo: each file of tests/clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from neuronpipe.launch.planning import DEMO

from tests.clients import environments
from tests.http_client import Server, served
from tests.pipeline import PATIENCE_S, Shell

MODEL = "neuronpipe-demo"
AT_NIGHT = ("langchain", "pydantic_ai", "litellm")
NODE = ("ai", "ollama")


@pytest.fixture(scope="module")
def server(long_shell: Shell) -> Iterator[Server]:
    with served(long_shell, "--sequences", "2") as one:
        yield one


def report(server: Server, *program: str | Path) -> dict[str, str | None]:
    """What a client's file tried, and the errors."""
    words = [*map(str, program), f"http://127.0.0.1:{server.port}/v1", MODEL, str(DEMO)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"what"')]
    return {line["what"]: line["error"] for line in lines}


def skipped_unless_ci(why: environments.Missing) -> None:
    """Without a network there are no clients; a build machine has one."""
    if os.environ.get("CI") == "true":
        raise why
    pytest.skip(f"the clients are not installed: {why}")


@pytest.mark.parametrize("name", ["openai", *(pytest.param(name, marks=pytest.mark.nightly) for name in AT_NIGHT)])
def test_a_client_in_python_does_all_that_it_is_asked(server: Server, name: str) -> None:
    try:
        python = environments.python("pinned") if name in AT_NIGHT else Path(sys.executable)
    except environments.Missing as why:
        skipped_unless_ci(why)
    errors = report(server, python, environments.HERE / f"use_{name}.py")
    assert errors
    assert {what: error for what, error in errors.items() if error is not None} == {}


@pytest.mark.parametrize("name", NODE)
def test_a_client_on_node_does_all_that_it_is_asked(server: Server, name: str) -> None:
    try:
        node, folder = environments.node()
    except environments.Missing as why:
        skipped_unless_ci(why)
    errors = report(server, node, folder / f"use_{name}.mjs")
    assert errors
    assert {what: error for what, error in errors.items() if error is not None} == {}
