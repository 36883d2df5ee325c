"""A request that ends processes is found and refused, whatever its means; everybody else's text goes on."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from neuronpipe.launch.planning import DEMO

from tests.http_client import Server, read_reply, request, served
from tests.pipeline import PATIENCE_S, Shell, beside_progress

DEADLY_TOKEN = 4000
KILLERS = """
import os, signal
from neuronpipe.services.coordinator.coordinator_service import CoordinatorService
from neuronpipe.services.worker.decode import DecodeService
from neuronpipe.services.worker.prefill import PrefillService

MAGIC, DEADLY_TOKEN = "kill you", 4000

class ExitsAtAdmission(CoordinatorService):
    def __init__(self, job):
        super().__init__(job)
        admission = self._scheduler.requests._admission
        check = admission.check
        admission.check = lambda ask, queued: os._exit(1) if MAGIC in (ask.prompt or "") else check(ask, queued)

class DiesAtTheFifthToken(CoordinatorService):
    number = signal.SIGSEGV
    def _sample(self, action):
        for text in self._scheduler.requests.active:
            if MAGIC in (text.ask.prompt or "") and text.generated_tokens == 5:
                os.kill(os.getpid(), self.number)
        return super()._sample(action)

class IsKilledAtTheFifthToken(DiesAtTheFifthToken):
    number = signal.SIGKILL

class DecodeDies(DecodeService):
    def compute(self, step):
        if DEADLY_TOKEN in step.tokens:
            os._exit(1)
        return super().compute(step)
"""
BYSTANDER = {"prompt": "def main(arguments):\n    for name in", "max_tokens": 400, "temperature": 0, "stream": True}
MAGIC = {"prompt": "this will kill you", "max_tokens": 20, "temperature": 0}
DEADLY = {"prompt": "import os", "max_tokens": 20, "logit_bias": {str(DEADLY_TOKEN): 100}}


def text_of(server: Server, begun: threading.Event | None = None) -> str:
    """The bystander's text, streamed. begun: set when a good part of it is there."""
    with server.connect() as line:
        line.sendall(request("POST", "/v1/completions", BYSTANDER))
        data = b""
        while begun is not None and data.count(b"data: ") < 40:
            data += line.recv(1 << 16)
        if begun is not None:
            begun.set()
        events = read_reply(line, data).events()
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(event["choices"][0]["text"] for event in events)


def restarts(server: Server) -> dict[str, int]:
    return {one.role: one.restarts for one in server.run.status().processes if one.restarts}


@pytest.mark.parametrize(
    ("use", "body", "deaths"),
    [
        ("coordinator=killers:ExitsAtAdmission", MAGIC, {"coordinator": 2}),
        pytest.param("coordinator=killers:DiesAtTheFifthToken", MAGIC, {"coordinator": 2}, marks=pytest.mark.nightly),
        pytest.param(
            "coordinator=killers:IsKilledAtTheFifthToken", MAGIC, {"coordinator": 3}, marks=pytest.mark.nightly
        ),
        ("decode=killers:DecodeDies", DEADLY, None),
    ],
)
def test_what_ends_a_process_twice_is_refused_and_a_bystanders_text_is_whole(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, use: str, body: dict[str, Any], deaths: dict[str, int] | None
) -> None:
    (shell.folder / "killers.py").write_text(KILLERS)
    monkeypatch.setenv("PYTHONPATH", str(shell.folder))
    options = ("--use", use, "--workers", "2", "--sequences", "4")
    with served(shell, DEMO, *options) as server:
        alone = text_of(server)
        texts: list[str] = []
        begun = threading.Event()
        bystander = threading.Thread(target=lambda: texts.append(text_of(server, begun)))
        bystander.start()
        assert begun.wait(PATIENCE_S)
        reply = server.post("/v1/completions", **body)
        assert (reply.status, reply.json()["error"]["code"]) == (500, "request_ended_a_process"), reply
        bystander.join()
        assert texts == [alone]
        counted = restarts(server)
        assert deaths in (None, counted)
        assert sum(counted.values()) <= 3
        # The same request again costs no process.
        again = server.post("/v1/completions", **body)
        assert again.json()["error"]["code"] == "request_ended_a_process"
        assert restarts(server) == counted
        assert text_of(server) == alone


@pytest.mark.nightly
def test_one_killer_after_the_other_does_not_end_the_run(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The restart budget of five deaths within half a minute is for causes that stay."""
    (shell.folder / "killers.py").write_text(KILLERS)
    monkeypatch.setenv("PYTHONPATH", str(shell.folder))
    with served(shell, DEMO, "--use", "coordinator=killers:ExitsAtAdmission", "--workers", "1") as server:
        for number in range(4):
            reply = server.post("/v1/completions", **MAGIC | {"prompt": f"{MAGIC['prompt']} {number}"})
            assert reply.json()["error"]["code"] == "request_ended_a_process"
        assert restarts(server) == {"coordinator": 8}
        done = shell.call("ask", MAGIC["prompt"], "--run", server.run.path)
        assert done.code != 0
        (line,) = beside_progress(done.errors).splitlines()
        assert "ended a process" in line
        assert text_of(server)
