"""Ollama's API with its own client. The demo knows only Python; its calls are valid still."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from neuronpipe.services.gateway.http.request_body import MAX_BODY_BYTES

from tests.http_client import Server, served
from tests.pipeline import Shell, eventually

MODEL = "neuronpipe-demo"
KEY = "a-key-of-many-letters"
CODE = "def fibonacci(n):"
# The client leaves out minimum and maximum of the arguments of tools.
SIZES = {"type": "integer", "enum": [5, 8]}
FIBONACCI = {"type": "object", "properties": {"n": SIZES, "how": {"enum": ["loop", "call"]}}, "required": ["n", "how"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "fibonacci", "description": "A number.", "parameters": FIBONACCI}}
]
OPTIONS = {"temperature": 0.5, "seed": 1, "num_predict": 24}
MESSAGES: list[Any] = [{"role": "user", "content": CODE}]
ASKED: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "options": OPTIONS}
SEEDS = 40


@pytest.fixture(scope="module")
def server(long_shell: Shell) -> Iterator[Server]:
    with served(long_shell, "--sequences", "2") as one:
        yield one


@pytest.fixture
def client(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(host=f"http://127.0.0.1:{server.port}") as one:
        yield one


def measured(last: Any) -> None:
    """The measurements of a response are those of its own parts."""
    assert last.done
    durations = [last.load_duration, last.prompt_eval_duration, last.eval_duration]
    assert all(duration > 0 for duration in durations)
    assert sum(durations) <= last.total_duration


def test_a_chat_is_the_answer_of_openais_api_and_a_stream_builds_it_up(server: Server, client: ollama.Client) -> None:
    messages = [{"role": "system", "content": "You write Python."}, *MESSAGES]
    whole = client.chat(**ASKED | {"messages": messages})
    same = {"temperature": 0.5, "top_k": 40, "top_p": 0.9, "seed": 1, "max_tokens": 24}
    chat = server.post("/v1/chat/completions", messages=messages, **same).json()
    assert whole.message.role == "assistant"
    assert whole.message.content == chat["choices"][0]["message"]["content"] != ""
    assert (whole.model, whole.done_reason, whole.eval_count) == (MODEL, "length", 24)
    assert whole.prompt_eval_count == chat["usage"]["prompt_tokens"]
    measured(whole)
    pieces = list(client.chat(**ASKED | {"messages": messages}, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert len(pieces) > 5
    assert not any(piece.done for piece in pieces[:-1])
    assert (pieces[-1].done_reason, pieces[-1].eval_count) == ("length", 24)
    measured(pieces[-1])


def test_a_stream_is_sent_line_by_line_unless_it_is_not_wanted(server: Server) -> None:
    reply = server.post("/api/chat", **ASKED)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/x-ndjson")
    assert [json.loads(line)["done"] for line in reply.body.splitlines()][-2:] == [False, True]
    reply = server.post("/api/chat", **ASKED, stream=False)
    assert (reply.headers["content-type"], reply.json()["done"]) == ("application/json", True)


def test_a_prompt_is_answered_or_continued_as_it_is(server: Server, client: ollama.Client) -> None:
    answered = client.generate(model=MODEL, prompt=CODE, options=OPTIONS)
    assert answered.response == client.chat(**ASKED).message.content
    measured(answered)
    raw = client.generate(model=MODEL, prompt=CODE, raw=True, options=OPTIONS | {"temperature": 0})
    plain = server.post("/v1/completions", prompt=CODE, temperature=0, max_tokens=24).json()
    assert raw.response == plain["choices"][0]["text"]
    pieces = list(
        client.generate(model=MODEL, prompt=CODE, raw=True, options=OPTIONS | {"temperature": 0}, stream=True)
    )
    assert "".join(piece.response or "" for piece in pieces) == raw.response
    measured(pieces[-1])
    with pytest.raises(ollama.ResponseError, match="suffix: the model that is served has no tokens"):
        client.generate(model=MODEL, prompt=CODE, suffix="\n")


def test_a_stop_string_ends_the_text(client: ollama.Client) -> None:
    plain = client.chat(**ASKED).message.content
    assert plain is not None
    stop = plain[len(plain) // 2 :][:3]
    asked = ASKED | {"options": OPTIONS | {"stop": ["never generated", stop]}}
    whole = client.chat(**asked)
    assert (whole.message.content, whole.done_reason) == (plain[: plain.index(stop)], "stop")
    assert "".join(piece.message.content or "" for piece in client.chat(**asked, stream=True)) == whole.message.content


def test_an_answer_follows_a_schema_or_is_any_object(client: ollama.Client) -> None:
    asked = ASKED | {"options": OPTIONS | {"num_predict": 60}}
    for response in (
        client.chat(**asked, format=FIBONACCI),
        client.generate(model=MODEL, prompt="x", format=FIBONACCI),
    ):
        text = response.message.content if isinstance(response, ollama.ChatResponse) else response.response
        answer = json.loads(text or "")
        assert answer["n"] in (5, 8)
        assert answer["how"] in ("loop", "call")
    any_object = client.chat(**ASKED | {"options": OPTIONS | {"num_predict": 4}}, format="json")
    assert (any_object.message.content or "").startswith("{")


def test_log_probabilities_are_beside_the_text(server: Server, client: ollama.Client) -> None:
    for response in (
        client.chat(**ASKED, logprobs=True, top_logprobs=2),
        client.generate(model=MODEL, prompt=CODE, raw=True, options=OPTIONS, logprobs=True, top_logprobs=2),
    ):
        text = response.message.content if isinstance(response, ollama.ChatResponse) else response.response
        logprobs = response.logprobs or []
        assert "".join(entry.token for entry in logprobs) == text
        assert all(entry.logprob <= 0 and len(entry.top_logprobs or []) >= 2 for entry in logprobs)


def test_a_tool_is_called_with_valid_arguments_and_its_result_is_read(client: ollama.Client) -> None:
    """Text may only be one object here, and what is sampled is almost any token that may come."""
    asked = ASKED | {"tools": TOOLS, "format": {"const": {}}}
    for seed in range(SEEDS):
        options = {"temperature": 100, "top_p": 1, "top_k": 0, "seed": seed, "num_predict": 200}
        whole = client.chat(**asked | {"options": options})
        if whole.message.tool_calls:
            break
    (call, *_) = whole.message.tool_calls or []
    assert call.function.name == "fibonacci"
    assert call.function.arguments["n"] in (5, 8)
    assert call.function.arguments["how"] in ("loop", "call")
    assert whole.message.content == ""
    pieces = list(client.chat(**asked | {"options": options}, stream=True))
    streamed = [call for piece in pieces for call in piece.message.tool_calls or []]
    assert streamed == list(whole.message.tool_calls or [])
    result = {"role": "tool", "tool_name": "fibonacci", "content": "13"}
    more = client.chat(**ASKED | {"messages": [*MESSAGES, whole.message, result], "tools": TOOLS})
    assert (more.prompt_eval_count or 0) > (whole.prompt_eval_count or 0)


def test_the_model_is_listed_described_and_running(server: Server, client: ollama.Client) -> None:
    (entry,) = client.list().models
    assert entry.model == f"{MODEL}:latest"
    (run,) = client.ps().models
    assert (run.model, run.context_length) == (f"{MODEL}:latest", 512)
    for name in (MODEL, f"{MODEL}:latest"):
        facts = client.show(name)
        assert (facts.modelinfo or {})["llama.context_length"] == 512
        assert facts.capabilities == ["completion", "tools"]
        assert client.chat(**ASKED | {"model": name}).model == name
        assert server.post("/v1/completions", model=name, prompt="x", max_tokens=1).status == 200
    version = server.call("GET", "/api/version").json()["version"]
    assert all(part.isdigit() for part in version.split("."))


def test_the_server_is_alive_as_clients_look(server: Server, shell: Shell) -> None:
    for path in ("/", "/api/tags", "/api/version"):
        reply = server.call("HEAD", path)
        assert (reply.status, reply.body) == (200, b"")
    with served(shell, "--run", server.run.path, "--key", KEY) as one:
        assert one.call("HEAD", "/").status == 200
        refused = one.call("GET", "/api/tags")
        assert (refused.status, set(refused.json())) == (401, {"error"})
        headers = {"Authorization": f"Bearer {KEY}"}
        with ollama.Client(host=f"http://127.0.0.1:{one.port}", headers=headers) as client:
            assert len(client.list().models) == 1


def test_a_request_without_a_prompt_finds_the_model_loaded(client: ollama.Client) -> None:
    for response in (client.chat(model=MODEL), client.generate(model=MODEL, keep_alive="10m")):
        assert (response.done, response.done_reason) == (True, "load")
    with pytest.raises(ollama.ResponseError, match="keep_alive"):
        client.generate(model=MODEL, keep_alive=0)


@pytest.mark.parametrize(
    ("call", "status", "words"),
    [
        (lambda client: client.chat(model="other", messages=MESSAGES), 404, "not found"),
        (lambda client: client.generate(model="other:latest", prompt="x"), 404, "not found"),
        (lambda client: client.show("other"), 404, "not found"),
        (lambda client: client.chat(**ASKED | {"options": {"top_k": "x"}}), 400, "options.top_k: "),
        (lambda client: client.chat(model=MODEL, messages=[{"role": "user", "content": "x", "images": ["aGk="]}]),
         400, "messages.0.images: the models of this server read only text"),
        (lambda client: client.generate(model=MODEL, prompt="x", context=[1]), 400, "context: "),
        (lambda client: client.chat(model=MODEL, messages=[{"role": "user", "content": "x" * 100_000}]),
         400, "maximum context length"),
        (lambda client: client.embed(MODEL, "x"), 400, "embeddings are not supported"),
        (lambda client: client.embeddings(MODEL, "x"), 400, "embeddings are not supported"),
        (lambda client: client.pull(MODEL), 400, "`neuronpipe pull NAME`"),
        (lambda client: client.create(MODEL, from_="x"), 400, "`neuronpipe convert SOURCE`"),
        (lambda client: client.delete(MODEL), 400, "`neuronpipe rm NAME`"),
        (lambda client: client.copy(MODEL, "x"), 400, "`cp -r`"),
        (lambda client: client.push(MODEL), 400, "not published"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field_or_what_to_do(
    client: ollama.Client, call: Any, status: int, words: str
) -> None:
    with pytest.raises(ollama.ResponseError) as refused:
        call(client)
    assert refused.value.status_code == status
    assert words in refused.value.error


def test_errors_have_the_form_of_the_api(server: Server) -> None:
    for method, path, body, status in (
        ("GET", "/api/chat", None, 405),
        ("GET", "/api/other", None, 404),
        ("POST", "/api/chat", b"{", 400),
        ("POST", "/api/chat", b" " * (MAX_BODY_BYTES + 1), 413),
        ("POST", "/api/blobs/sha256:1", b"x", 400),
    ):
        reply = server.call(method, path, body)
        assert (reply.status, set(reply.json())) == (status, {"error"}), path
    reply = server.call("POST", "/api/chat", b"{}", Content_Type="text/plain")
    assert (reply.status, set(reply.json())) == (415, {"error"})


def test_curl_without_a_content_type_is_answered_and_a_browser_is_not(server: Server) -> None:
    body = json.dumps({"model": MODEL, "prompt": CODE, "stream": False, "options": {"num_predict": 4}}).encode()
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    assert server.call("POST", "/api/generate", body, **form).json()["done"] is True
    for headers in ({"Sec_Fetch_Site": "cross-site"}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
        assert server.call("POST", "/api/generate", body, **form, **headers).status in (403, 415), headers
    assert server.call("POST", "/v1/completions", body, **form).status == 415


def test_a_client_that_leaves_a_stream_ends_its_generation(server: Server) -> None:
    body = {"model": MODEL, "prompt": CODE, "raw": True, "options": {"num_predict": 400}}
    before = server.run.status().tokens
    with httpx.stream("POST", f"http://127.0.0.1:{server.port}/api/generate", json=body) as response:
        next(response.iter_lines())
    assert eventually(lambda: server.run.status().sequences_active == 0)
    assert server.run.status().tokens - before < 300  # of 400
