"""A package's chat template that never comes back costs its own requests, and nobody else's."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

from neuronpipe.plans.convert import convert
from neuronpipe.plans.package.reader import Package
from neuronpipe.services.gateway.templates.single_job import examine_template
from neuronpipe.services.gateway.templates.template_jobs import JOB_S

from tests.conformance.checkpoints import TINY, write_checkpoint
from tests.http_client import PATIENCE_S, Reply, Server
from tests.integration.test_hosted import hosted
from tests.pipeline import Shell

GOOD = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
HOSTILE = (
    "{% if messages[0].content == 'hang' %}{{ 7 ** (7 ** (8 + messages | length)) }}{% endif %}"
    "{% if messages[0].content == 'grow' %}{{ messages[0].role * 10 ** 9 }}{% endif %}"
    "{% if tools %}{{ tools.a.b }}{% endif %}"
)


def package(folder: Path, name: str, template: str) -> Package:
    source = write_checkpoint(folder / f"{name}-source", replace(TINY, context_tokens=512))
    (source / "chat_template.jinja").write_text(template)
    return convert(source, folder / name, name=name, quantization="q8", examine_template=examine_template)


def chat(server: Server, model: str, content: str) -> Reply:
    messages = [{"role": "user", "content": content}]
    return server.post("/v1/chat/completions", model=model, messages=messages, max_tokens=2, temperature=0)


def test_a_template_that_hangs_ends_its_own_request_and_the_model_beside_it_answers(
    shell: Shell, tmp_path: Path
) -> None:
    good, hostile = package(tmp_path, "good", GOOD), package(tmp_path, "hostile", HOSTILE + GOOD)
    server, _ = hosted(shell, good.path, hostile.path)
    try:
        first = {name: chat(server, name, "hello") for name in ("good", "hostile")}
        assert {reply.status for reply in first.values()} == {200}, [reply.body for reply in first.values()]
        expected = {name: reply.json()["choices"] for name, reply in first.items()}
        props = server.call("GET", "/props?model=hostile").json()
        assert props["chat_template_error"] is None
        assert props["chat_template_tools"]["format"] == "stated"
        assert "it fails with functions: line 1: " in props["chat_template_tools"]["reason"]
        replies: list[Reply] = []
        hanging = [threading.Thread(target=lambda: replies.append(chat(server, "hostile", "hang"))) for _ in range(2)]
        began = time.monotonic()
        for thread in hanging:
            thread.start()
        time.sleep(0.2)
        answered = 0
        while time.monotonic() < began + JOB_S - 0.5:
            assert server.call("GET", "/health").status == 200
            assert chat(server, "good", "hello").json()["choices"] == expected["good"]
            answered += 1
        assert not replies
        assert answered > 3
        for thread in hanging:
            thread.join()
        for reply in replies:
            assert (reply.status, reply.json()["error"]["code"]) == (500, "chat_template_failed")
            assert f"it takes longer than {JOB_S:g} s" in reply.json()["error"]["message"]
        grown = chat(server, "hostile", "grow")
        assert (grown.status, grown.json()["error"]["code"]) == (500, "chat_template_failed")
        assert "64 MiB of memory" in grown.json()["error"]["message"]
        assert chat(server, "hostile", "hello").json()["choices"] == expected["hostile"]
    finally:
        server.process.send_signal(signal.SIGINT)
        _, log = server.process.communicate(timeout=PATIENCE_S)
    assert log.count("hostile: the chat template: it fails with functions: line 1") == 1, log
