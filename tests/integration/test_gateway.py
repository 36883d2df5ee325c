"""The gateway as its clients see it: OpenAI's own client, and sockets that keep to no manners."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.convert import convert
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer

from tests.conformance.checkpoints import TINY, write_checkpoint
from tests.http_client import Server, read_reply, request, served
from tests.pipeline import PATIENCE_S, Shell, eventually

MODEL = "neuronpipe-demo"
PROMPT = "def fibonacci(n):"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]}
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 400, "stop": None}


@pytest.fixture(scope="module")
def server(long_shell: Shell) -> Iterator[Server]:
    with served(long_shell, "--sequences", "2") as one:
        yield one


def test_a_completion_is_what_the_command_line_gives(server: Server, client: openai.OpenAI) -> None:
    asked = server.run.ask(PROMPT, 40)
    answer = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=40)
    assert answer.choices[0].text == asked["text"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (asked["prompt_tokens"], 40)


def test_usage_says_how_much_of_the_prompt_was_there_already(client: openai.OpenAI) -> None:
    prompt = "# a beginning that no other test has\nclass Orchard:"
    first, again = (
        client.completions.create(**GREEDY, prompt=prompt, max_tokens=2).model_dump()["usage"] for _ in range(2)
    )
    assert first["prompt_tokens_details"]["cached_tokens"] < first["prompt_tokens"] - 1
    # All but the last token, whose logits are wanted.
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1


def test_a_stream_gives_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**GREEDY, **CHAT, "max_tokens": 30}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[0].choices[0].delta.role == "assistant"
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")  # what was there already differs the second time
    assert [getattr(chunks[-1].usage, name) for name in counts] == [getattr(whole.usage, name) for name in counts]
    assert len(chunks) > 20


def test_several_texts_of_several_prompts_are_each_what_they_are_alone(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "import os"]
    both = client.completions.create(model=MODEL, prompt=prompts, n=2, seed=7, max_tokens=12)
    alone = [
        client.completions.create(model=MODEL, prompt=prompt, seed=7 + number, max_tokens=12).choices[0].text
        for prompt in prompts
        for number in range(2)
    ]
    assert [choice.text for choice in both.choices] == alone
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert len(set(alone)) == 4


@pytest.mark.parametrize("stream", [True, False])
def test_more_texts_than_a_run_takes_on_at_once_are_served_in_turns(server: Server, stream: bool) -> None:
    prompts = [f"def f{number}(" for number in range(64)]
    body = {**GREEDY, "prompt": prompts, "n": 3, "max_tokens": 2, "stream": stream}
    reply = server.call("POST", "/v1/completions", body)
    assert reply.status == 200, reply.body
    choices = [choice for event in reply.events() for choice in event["choices"]] if stream else reply.json()["choices"]
    texts = [""] * 192
    for choice in choices:
        texts[choice["index"]] += choice["text"]
    assert texts[::3] == texts[1::3] == texts[2::3]  # the likeliest
    assert sum(choice["finish_reason"] is not None for choice in choices) == 192
    last = server.post("/v1/completions", **GREEDY, prompt=prompts[-1], max_tokens=2).json()
    assert last["choices"][0]["text"] == texts[-1]


def test_the_best_of_several_candidates_are_those_whose_tokens_are_likeliest(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": [PROMPT, "import "], "max_tokens": 12, "temperature": 1.5, "seed": 5}
    every = client.completions.create(**asked, n=4, logprobs=0)  # type: ignore[call-overload]
    expected = []
    for first in (0, 4):
        rated = every.choices[first : first + 4]
        means = {choice.text: statistics.fmean(choice.logprobs.token_logprobs) for choice in rated}
        assert len(means) == 4
        expected += sorted(means, key=means.__getitem__, reverse=True)[:2]
    best = client.completions.create(**asked, n=2, best_of=4)  # type: ignore[call-overload]
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage.completion_tokens == every.usage.completion_tokens  # all candidates were made


def test_more_texts_than_a_request_may_ask_for_are_refused_by_the_limit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="n: 17 completions for each of 64 prompts exceed the limit"):
        client.completions.create(model=MODEL, prompt=["x"] * 64, n=17)
    with pytest.raises(openai.BadRequestError, match="at most 128 items, not 129"):
        client.completions.create(model=MODEL, prompt=["x"] * 129)


def test_any_integer_is_a_seed(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        return client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, seed=seed).choices[0].text

    seeds = [-1, -(1 << 62), (1 << 64) - 1, 10**30]
    texts = [text(seed) for seed in seeds]
    assert texts == [text(seed) for seed in seeds]
    assert len(set(texts)) > 1


def test_what_clients_send_to_every_server_changes_nothing(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**GREEDY, **CHAT, max_tokens=8)
    more: dict[str, Any] = {
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "user": "u",
        "safety_identifier": "u",
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "none",
        "reasoning_effort": "low",
        "verbosity": "low",
        "modalities": ["text"],
        "extra_body": {"top_k": -1},
    }
    answer = client.chat.completions.create(**GREEDY, **CHAT, max_tokens=8, **more)
    assert answer.choices[0].message.content == plain.choices[0].message.content


def test_prompt_and_answer_together_never_exceed_the_context(server: Server) -> None:
    (model,) = server.call("GET", "/v1/models").json()["data"]
    most = model["context_tokens"]
    for prompt_tokens in (most - 20, most - 1):
        body = {**GREEDY, "prompt": [5] * prompt_tokens, "max_tokens": -1, "ignore_eos": True}
        reply = server.call("POST", "/v1/completions", body).json()
        assert reply["usage"]["total_tokens"] == most
        assert reply["choices"][0]["finish_reason"] == "length"
    for prompt_tokens in (most, most + 1):
        for stream in (True, False):
            refused = server.post("/v1/completions", **GREEDY, prompt=[5] * prompt_tokens, stream=stream)
            error = refused.json()["error"]
            assert (refused.status, error["code"]) == (400, "context_length_exceeded")
            assert error["message"].startswith(f"This model's maximum context length is {most} tokens; the prompt has ")


def test_the_token_that_was_drawn_is_rated_among_the_likely_ones(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "temperature": 1, "seed": 5, "max_tokens": 40}
    plain = client.completions.create(**options, prompt=PROMPT, logprobs=2).choices[0].logprobs
    assert plain is not None
    tokens, ratings, tops = plain.tokens or [], plain.token_logprobs or [], plain.top_logprobs or []
    assert [top[token] for token, top in zip(tokens, tops, strict=True)] == ratings
    assert {len(top) for top in tops} == {2, 3}
    chat = client.chat.completions.create(**options, **CHAT, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert chat is not None
    for entry in chat.content or []:
        assert (entry.token, entry.logprob) in [(likely.token, likely.logprob) for likely in entry.top_logprobs]


def test_a_stream_has_its_headers_while_it_waits_for_its_turn(server: Server) -> None:
    with contextlib.ExitStack() as lines:
        for _ in range(2):  # both KV slots are taken for a while
            line = lines.enter_context(server.connect())
            line.sendall(request("POST", "/v1/completions", {**LONG, "ignore_eos": True, "stream": True}))
        assert eventually(lambda: server.run.status().sequences_active == 2)
        third = lines.enter_context(server.connect())
        third.sendall(request("POST", "/v1/completions", {**LONG, "max_tokens": 1, "stream": True}))
        head = third.recv(1 << 16)
        assert server.run.status().sequences_waiting == 1
        assert head.startswith(b"HTTP/1.1 200")
        assert b"data:" not in head


def test_a_request_has_the_id_that_its_client_gave_it_or_one_of_ours(server: Server, client: openai.OpenAI) -> None:
    answer = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=1)
    assert (answer._request_id or "").startswith("req_")
    assert server.call("GET", "/v1/models", X_Request_Id="trace-7/8").headers["x-request-id"] == "trace-7/8"
    for strange in ("a b", "x" * 129, "\xe9"):
        assert server.call("GET", "/v1/models", X_Request_Id=strange).headers["x-request-id"].startswith("req_")


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(client: openai.OpenAI) -> None:
    whole = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=40).choices[0].text
    stop = whole[20:24]
    stream = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=40, stop=[stop], stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_token_ids_are_a_prompt(server: Server, client: openai.OpenAI) -> None:
    answer = client.completions.create(**GREEDY, prompt=[5, 6, 7], max_tokens=5)
    assert answer.choices[0].text == server.run.ask([5, 6, 7], 5)["text"]


def test_the_model_is_listed_and_no_other_is_served(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="below /v1"):
        client.with_options(base_url=str(client.base_url).removesuffix("v1/") + "v9/").models.list()
    with pytest.raises(openai.NotFoundError, match="neuronpipe-demo"):
        client.completions.create(model="gpt-4", prompt=PROMPT)


@pytest.mark.parametrize(
    ("wrong", "param", "code"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function", "missing_required_parameter"),
        ({"audio": {"voice": "v"}}, "audio", "unsupported_parameter"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "invalid_value"),
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"stop": ["x", 3]}, "stop.1", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, None, "context_length_exceeded"),
    ],
)
def test_what_is_not_understood_is_refused_by_its_name(
    server: Server, wrong: dict[str, Any], param: str | None, code: str
) -> None:
    reply = server.post("/v1/chat/completions", **{**CHAT, **wrong})
    assert reply.status == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert set(error) == {"message", "type", "param", "code"}


def test_a_client_that_leaves_stops_its_generation(server: Server) -> None:
    for stream in (True, False):
        with server.connect() as line:
            line.sendall(request("POST", "/v1/completions", {**LONG, "stream": stream}))
            assert eventually(lambda: server.run.status().sequences_active == 1)
            if stream:
                assert line.recv(1 << 16)
            before = server.run.status().tokens
        assert eventually(lambda: server.run.status().sequences_active == 0)
        assert server.run.status().tokens - before < 300  # of 400


def test_a_run_can_be_served_by_a_gateway_of_its_own_command(server: Server, shell: Shell) -> None:
    with served(shell, "--run", server.run.path) as second:
        answers = [one.post("/v1/completions", prompt=PROMPT, temperature=0).json() for one in (server, second)]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert second.call("GET", "/health").json() == {"status": "ok"}
    assert server.call("GET", "/health").status == 200


def test_figures_are_counted(server: Server) -> None:
    server.post("/v1/completions", prompt=PROMPT, max_tokens=3)
    page = server.call("GET", "/metrics").body.decode()
    figures = {name: float(value) for name, value in (line.split() for line in page.splitlines() if line[0] != "#")}
    assert figures['neuronpipe_http_responses_total{path="/v1/completions",status="200"}'] >= 1
    assert figures["neuronpipe_generated_tokens_total"] >= 3
    assert figures['neuronpipe_run_memory_bytes{model="neuronpipe-demo"}'] > 0


def test_a_gateway_that_dies_is_started_again_on_the_same_port(server: Server) -> None:
    os.kill(server.run.pid("gateway"), signal.SIGKILL)
    assert server.call("GET", "/health").status == 200  # it waited for the new one
    assert eventually(lambda: server.run.status().processes[-1].restarts == 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stream_goes_on_with_the_same_tokens_when_the_coordinator_dies(server: Server, number: int) -> None:
    body = {**LONG, "temperature": 0, "stream": True}
    whole = server.call("POST", "/v1/completions", body).events()
    with server.connect() as line:
        line.settimeout(PATIENCE_S)
        line.sendall(request("POST", "/v1/completions", body))
        assert eventually(lambda: server.run.status().sequences_active == 1)
        os.kill(server.run.pid("coordinator"), number)
        again = read_reply(line).events()
    assert [chunk["choices"] for chunk in again] == [chunk["choices"] for chunk in whole]
    assert json.dumps(whole[-1]).count("length") == 1


def test_tokens_are_rated_in_chat_and_in_plain_completions_alike(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**GREEDY, **CHAT, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    chat = client.chat.completions.create(**options).choices[0]
    assert chat.logprobs is not None
    entries = chat.logprobs.content or []
    assert len(entries) == 12
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode() == chat.message.content
    for entry in entries:
        assert [likely.logprob for likely in entry.top_logprobs] == sorted(
            (likely.logprob for likely in entry.top_logprobs), reverse=True
        )
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy
    streamed = [
        entry
        for chunk in client.chat.completions.create(**options, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == entries
    plain = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=12, logprobs=3).choices[0]
    assert plain.logprobs is not None
    assert plain.logprobs.tokens == [entry.token for entry in entries]
    assert plain.logprobs.token_logprobs == [entry.logprob for entry in entries]
    assert [plain.text[at:] for at in plain.logprobs.text_offset or []][3].startswith(entries[3].token)


def test_an_answer_follows_its_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, **CHAT, seed=3, response_format=form, max_tokens=120)
    assert answer.choices[0].finish_reason == "stop"
    made = json.loads(answer.choices[0].message.content or "")
    assert set(made) == {"name", "age"}
    assert isinstance(made["age"], int)
    form["json_schema"]["schema"] = {"type": "unheard-of"}
    with pytest.raises(openai.BadRequestError, match="grammar"):
        client.chat.completions.create(model=MODEL, **CHAT, response_format=form)


def test_biases_and_penalties_change_what_is_drawn(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**GREEDY, "prompt": PROMPT, "max_tokens": 60}
    plain = client.completions.create(**options, logprobs=0).choices[0]
    assert plain.logprobs is not None
    first = client.completions.create(**options, logit_bias={"5": 100}).choices[0].text
    assert len(set(first)) < 4  # one token, again and again
    held = client.completions.create(**options, frequency_penalty=2.0, presence_penalty=2.0, logprobs=0).choices[0]
    assert held.logprobs is not None
    assert len(set(held.logprobs.tokens or ())) > len(set(plain.logprobs.tokens or ()))
    beyond = {"repetition_penalty": 1.5, "min_p": 0.1, "top_k": 5, "ignore_eos": True}
    assert client.completions.create(**options, extra_body=beyond).choices[0].text != plain.text


def test_a_conversation_is_written_by_the_packages_template(shell: Shell, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", TINY)
    template = "{% for m in messages %}{% if m.role == 'tool' %}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    refusing = "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}"
    (source / "chat_template.jinja").write_text(refusing + template)
    package = convert(source, tmp_path / "package", quantization="q8")
    talk = [{"role": "developer", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    with served(shell, package.path) as one:
        answer = one.post("/v1/chat/completions", messages=talk, max_tokens=5, temperature=0).json()
        ids = FileTokenizer(package.tokenizer()).encode("[system]a[user]b", frame=False)
        plain = one.post("/v1/completions", prompt=ids, max_tokens=5, temperature=0).json()
        assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert answer["usage"][name] == plain["usage"][name]
        assert one.post("/apply-template", messages=talk).json() == {"prompt": "[system]a[user]b"}
        both = {"continue_final_message": True, "add_generation_prompt": True}
        said = one.post("/apply-template", messages=[*talk, {"role": "assistant", "content": "c"}], **both)
        assert (said.status, said.json()["error"]["param"]) == (400, "add_generation_prompt")
        refused = one.post("/v1/chat/completions", messages=talk * 2)
        assert (refused.status, refused.json()["error"]["code"]) == (400, "messages_refused")


def test_a_gateway_ends_with_the_run_that_it_was_put_onto(shell: Shell) -> None:
    with shell.up(DEMO) as run:
        process = shell.start("serve", "--port", "0", "--json", "--run", run.path)
        assert process.stdout is not None
        port = int(json.loads(process.stdout.readline())["address"].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as line:
            line.sendall(request("POST", "/v1/completions", {**LONG, "temperature": 0, "stream": True}))
            assert line.recv(1 << 16).startswith(b"HTTP/1.1 200")
            run.down()
            answer = b""
            while piece := line.recv(1 << 16):
                answer += piece
    assert b"[DONE]" not in answer or b"length" in answer
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert errors == f"neuronpipe: {run.path}: the run has ended\n"
