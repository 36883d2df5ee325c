"""Grammars and schemas of strangers: each is refused or followed, and a bystander's stream goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from neuronpipe.services.monitor.process_usage import helpers_of

from tests.http_client import Server, served
from tests.pipeline import Shell, eventually

PROMPT = "def fibonacci(n):"
PATTERNS = {"type": "string", "allOf": [{"pattern": f".*a.{{{n + 5}}}b{n}"} for n in range(20)]}
LIMIT = "200MiB"  # of the run, whose plan has a sixteenth of what it may use for grammars
LIMITS = "takes more than 12 MiB of memory|takes longer than 2 s"
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"grammar": "root ::= nope"}, "nope"),
    ({"grammar": "# nothing"}, "root"),
    ({"structured_outputs": {"grammar": "root ::= nope"}}, "nope"),
    ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, LIMITS),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PATTERNS}}}, LIMITS),
    ({"structured_outputs": {"json": {"type": "object", "properties": {"a": PATTERNS}}}}, LIMITS),
]


@pytest.fixture(scope="module")
def server(long_shell: Shell) -> Iterator[Server]:
    with served(long_shell, "--sequences", "2", "--memory", LIMIT) as one:
        yield one


def test_hostile_grammars_are_refused_and_a_bystander_goes_on(server: Server) -> None:
    coordinator = server.run.pid("coordinator")
    asked = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "stream": True}
    with server.connect() as bystander:
        body = json.dumps(asked).encode()
        head = [
            "POST /v1/completions HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            "Connection: close",
        ]
        bystander.sendall("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
        for hostile, reason in HOSTILE:
            reply = server.post("/v1/completions", prompt=PROMPT, max_tokens=8, **hostile)
            assert reply.status == 400, reply.body
            message = reply.json()["error"]["message"]
            assert message.startswith("grammar: ")
            assert "\n" not in message
            assert any(part in message for part in reason.split("|")), message
        received = b""
        while data := bystander.recv(1 << 16):
            received += data
    assert b"data: [DONE]" in received
    assert server.run.pid("coordinator") == coordinator
    reply = server.post("/v1/completions", prompt=PROMPT, max_tokens=8, structured_outputs={"choice": ["yes", "no"]})
    assert reply.json()["choices"][0]["text"] in ("yes", "no")


def test_a_killed_helper_process_is_replaced_and_leaves_no_zombie(server: Server) -> None:
    server.post("/v1/completions", prompt=PROMPT, max_tokens=2, structured_outputs={"choice": ["yes", "no"]})
    coordinator = server.run.pid("coordinator")
    (helper,) = helpers_of([coordinator])
    os.kill(helper, signal.SIGKILL)
    reply = server.post("/v1/completions", prompt=PROMPT, max_tokens=8, structured_outputs={"choice": ["yes", "no"]})
    assert reply.json()["choices"][0]["text"] in ("yes", "no")
    assert eventually(lambda: not os.path.exists(f"/proc/{helper}")), "no zombie is left"
